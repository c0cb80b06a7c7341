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


def _segments(segment_ids: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(places of the real tokens in the flat batch, where each segment begins among them, its length).

    The real tokens of a segment stand together; padding between them does not count.
    """
    length = segment_ids.shape[1]
    real = torch.ones_like(segment_ids, dtype=torch.bool) if key_mask is None else key_mask
    places = real.flatten().nonzero().squeeze(-1)
    rows, ids = places // max(length, 1), segment_ids.flatten()[places].long()
    first = torch.ones_like(ids, dtype=torch.bool)
    first[1:] = (ids[1:] != ids[:-1]) | (rows[1:] != rows[:-1])
    begin = first.nonzero().squeeze(-1)
    named = torch.stack([rows[begin], ids[begin]])
    _, place, count = named.unique(dim=1, return_inverse=True, return_counts=True)
    again = (count[place] > 1).nonzero()
    if len(again):
        raise ValueError(
            f"segment_ids: in row {int(named[0, again[0]])} a number appears again after another one; the tokens of a "
            "segment must stand together, and each segment of a row needs a number of its own"
        )
    return places, begin, torch.diff(begin, append=begin.new_tensor([len(places)]))


def run_packed(
    run: Callable[[Tensor, Tensor], Tensor], x: Tensor, segment_ids: Tensor, key_mask: Tensor | None
) -> Tensor:
    """`run(tokens (N, M, ...), mask (N, M))` on the segments of x (B, L, ...), put back to (B, L, ...); 0 at padding.

    >>> ids = torch.tensor([[0, 0, 1, 1, 1]])
    >>> run_packed(lambda x, mask: (x * mask).cumsum(1), torch.ones(1, 5, dtype=torch.int64), ids, None).tolist()
    [[1, 2, 1, 2, 3]]
    """
    _check(segment_ids, x)
    places, begin, length = _segments(segment_ids, key_mask)
    flat = x.flatten(0, 1)
    # Lengths in (2^(i-1), 2^i] share a batch.
    size_class = torch.ceil(torch.log2(length.double())).long()
    out: Tensor | None = None
    for one in size_class.unique().tolist():
        chosen = size_class == one
        starts, lengths = begin[chosen], length[chosen]
        place = torch.arange(int(lengths.max()), device=x.device)
        mask = place < lengths[:, None]
        index = places[torch.where(mask, starts[:, None] + place, starts[:, None])]
        done = run(flat[index], mask)
        if out is None:
            out = done.new_zeros(flat.shape[0], *done.shape[2:])
        out = out.index_put((index[mask],), done[mask])
    if out is None:  # nothing but padding, and only `run` knows the shape of an output
        return torch.zeros_like(run(x, torch.zeros_like(segment_ids, dtype=torch.bool)))
    unpacked: Tensor = out.unflatten(0, x.shape[:2])
    return unpacked
