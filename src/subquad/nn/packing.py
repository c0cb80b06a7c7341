"""Packed batches: several sequences in one row, each on its own.

Segments are cut out, run as padded batches with masks, and put back where they were. Segments of similar length (up to
a factor of 2) share a batch, so that padding at most doubles the work however uneven they are, and every mechanism
works, causal or not, recurrent or not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks

__all__ = ["run_packed"]


def _check(segment_ids: object, like: Tensor) -> None:
    shape = tuple(like.shape[:2])
    if not isinstance(segment_ids, Tensor) or segment_ids.dtype not in (torch.int32, torch.int64):
        kind = segment_ids.dtype if isinstance(segment_ids, Tensor) else type(segment_ids).__name__
        raise TypeError(f"segment_ids must be an integer tensor of shape (batch, length) = {shape}, got {kind}")
    if tuple(segment_ids.shape) != shape:
        raise ValueError(
            f"segment_ids must have shape (batch, length) = {shape}, got {checks.describe_shape(segment_ids)}"
        )


def _starts(segment_ids: Tensor, key_mask: Tensor | None) -> Tensor:
    """(B, L) bool: where a segment begins; padding is as a segment of its own. A segment is in one piece."""
    ids = segment_ids.long()
    if key_mask is not None:
        # A number that no segment has.
        ids = ids.masked_fill(~key_mask, int(ids.min()) - 1)
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    real = first if key_mask is None else first & key_mask
    for row, (numbers, begins) in enumerate(zip(ids, real, strict=True)):
        if numbers[begins].unique().numel() != int(begins.sum()):
            raise ValueError(
                f"segment_ids: in row {row} a number appears again after another one; the tokens of a segment must "
                "stand together, and each segment of a row needs a number of its own"
            )
    return first


def run_packed(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, segment_ids: Tensor, key_mask: Tensor | None
) -> Tensor:
    """`run(tokens (N, M, ...), mask (N, M))` on the segments of x (B, L, ...), put back to (B, L, ...); 0 at padding.

    >>> ids = torch.tensor([[0, 0, 1, 1, 1]])
    >>> run_packed(lambda x, mask: (x * mask).cumsum(1), torch.ones(1, 5, dtype=torch.int64), ids, None).tolist()
    [[1, 2, 1, 2, 3]]
    """
    _check(segment_ids, x)
    first = _starts(segment_ids, key_mask).flatten()
    flat = x.flatten(0, 1)
    begin = first.nonzero().squeeze(-1)  # (N,)
    length = torch.diff(begin, append=begin.new_tensor([flat.shape[0]]))
    if key_mask is not None:
        kept = key_mask.flatten()[begin]
        begin, length = begin[kept], length[kept]
    # Lengths in (2^(i-1), 2^i] share a batch.
    size_class = torch.ceil(torch.log2(length.double())).long()
    out: Tensor | None = None
    for one in size_class.unique().tolist():
        chosen = size_class == one
        starts, lengths = begin[chosen], length[chosen]
        place = torch.arange(int(lengths.max()), device=x.device)
        mask = place < lengths[:, None]
        index = torch.where(mask, starts[:, None] + place, starts[:, None])
        done = run(flat[index], mask)
        if out is None:
            out = done.new_zeros(flat.shape[0], *done.shape[2:])
        out = out.index_put((index[mask],), done[mask])
    if out is None:  # nothing but padding, and only `run` knows the shape of an output
        return torch.zeros_like(run(x, torch.zeros_like(segment_ids, dtype=torch.bool)))
    unpacked: Tensor = out.unflatten(0, x.shape[:2])
    return unpacked
