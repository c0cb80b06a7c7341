"""Exact softmax attention inside a sliding window, in blocks of matmuls: O(L w) time and memory, never L x S.

    query i sees the key slots i .. i + span,        span = (number of keys) - (number of queries)

A causal window of w tokens is this with the w earlier keys (or w empty slots) put in front, a window of w tokens on
each side with w slots put at both ends. Parts of one softmax are kept as `Partial` until they are joined: numerator,
normaliser and the log shift both were divided by, so that windows, single keys and a far field can share one
normaliser.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....features.base import exp_
from ....state import Partial, finite
from ...padding import all_finite
from ...softmax import fused_attention

__all__ = [
    "banded",
    "block_size",
    "dense_partial",
    "packed",
    "unpacked",
    "weighted_sum",
    "window_attention",
    "window_partial",
]

# Rows per block: a block sees block + span keys of which each row uses span + 1, so small blocks waste little and large
# ones make better matmuls.
LEAST_BLOCK, MOST_BLOCK = 64, 128


def banded(rows: int, columns: int, span: int, device: torch.device) -> Tensor:
    """(rows, columns) bool: column t is inside the window of row r, r <= t <= r + span."""
    offset = torch.arange(columns, device=device) - torch.arange(rows, device=device)[:, None]
    return (offset >= 0) & (offset <= span)


def weighted_sum(scores: Tensor, v: Tensor) -> Partial:
    """scores (..., L, S), -inf at hidden keys, and v (..., S, E); `scores` is overwritten.

    A hidden key has weight 0, but 0 times a value that is not finite would be NaN: such values count as 0 in the
    product and make exactly those rows NaN that give them a weight.
    """
    shift = scores.detach().amax(-1)
    weights = exp_(scores.sub_(finite(shift).unsqueeze(-1)))
    if all_finite(v):
        return Partial(weights @ v, weights.sum(-1), shift)
    broken = ~v.isfinite().all(-1, keepdim=True)
    touched = (weights @ broken.to(weights.dtype)) > 0
    numerator = (weights @ v.masked_fill(broken, 0.0)).masked_fill(touched, float("nan"))
    return Partial(numerator, weights.sum(-1), shift)


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """(B, H G, L, D) -> (B, H, G, L, D): the query heads of each key head."""
    grouped: Tensor = q.unflatten(1, (kv_heads, q.shape[1] // kv_heads))
    return grouped


def dense_partial(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Partial:
    """Rows q (B, Hq, L, D) over few keys k (B, H, S, D), v (B, H, S, E); visible (B or 1, L or 1, S), None = all."""
    batch, heads, length, _ = q.shape
    # The rows of all query heads of one key head in one product: broadcasting would copy the keys for each.
    rows = _grouped(scale * q, k.shape[1]).flatten(2, 3)
    scores = rows @ k.mT
    if visible is not None:
        grouped = scores.view(batch, k.shape[1], heads // k.shape[1], length, k.shape[2])
        grouped.masked_fill_(~visible[:, None, None], float("-inf"))
    part = weighted_sum(scores, v)
    return Partial(*(x.reshape(batch, heads, length, *x.shape[3:]) for x in part))


def block_size(length: int, span: int) -> int:
    block = min(MOST_BLOCK, max(LEAST_BLOCK, -(-span // 2)))
    return min(length, -(-block // 16) * 16)


def _neighbours(x: Tensor, block: int, blocks: int, span: int) -> Tensor:
    """(B, H, blocks * block + span, C) -> (B, H, blocks, block + span, C): the slots each block of rows may see."""
    if blocks == 1:
        return x.unsqueeze(2)
    reach = -(-span // block)
    spare = (blocks + reach) * block - x.shape[2]
    parts = (F.pad(x, (0, 0, 0, spare)) if spare else x).unflatten(2, (blocks + reach, block))
    last = block + span - reach * block
    pieces = [parts[:, :, i : i + blocks] for i in range(reach)]
    return torch.cat([*pieces, parts[:, :, reach : reach + blocks, :last]], 3)


class _Blocks(NamedTuple):
    """Queries in blocks, each with the slots it may see; R = G block rows, K = block + span slots."""

    rows: Tensor  # (B, H, blocks, R, D)
    keys: Tensor  # (B, H, blocks, K, D)
    values: Tensor  # (B, H, blocks, K, E)
    allowed: Tensor  # (B or 1, 1, blocks, R, K)
    groups: int

    def unblocked(self, x: Tensor, length: int) -> Tensor:
        """(B, H, blocks, R, ..) -> (B, H G, length, ..)."""
        x = x.unflatten(3, (self.groups, x.shape[3] // self.groups)).transpose(2, 3).flatten(3, 4)
        return x[:, :, :, :length].flatten(1, 2)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> _Blocks:
    length, span = q.shape[2], k.shape[2] - q.shape[2]
    block = block_size(length, span)
    blocks = -(-length // block)
    spare = blocks * block - length
    rows = _grouped(q, k.shape[1])  # (B, H, G, L, D)
    groups = rows.shape[2]
    if spare:
        rows = F.pad(rows, (0, 0, 0, spare))
        k, v, visible = (F.pad(x, (0, 0, 0, spare)) for x in (k, v, visible))
    rows = rows.unflatten(3, (blocks, block)).transpose(2, 3).flatten(3, 4)
    keys, values, seen = (_neighbours(x, block, blocks, span) for x in (k, v, visible))
    band = banded(block, block + span, span, q.device).repeat(groups, 1)
    return _Blocks(rows, keys, values, seen.mT & band, groups)


def window_partial(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Partial:
    """Query i of q (B, Hq, L, D) over the slots i .. i + span of k (B, H, span + L, D), v (B, H, span + L, E).

    visible (B or 1, 1, span + L, 1) bool says which slots hold a key. O(L (span + block)) time and memory; for long
    inputs see `sweep`, which keeps O(L) for the backward.

    >>> q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    >>> window_partial(q, k, v, torch.ones(1, 1, 7, 1, dtype=torch.bool), 0.5).finish().shape
    torch.Size([1, 2, 5, 4])
    """
    cut = _in_blocks(scale * q, k, v, visible)
    scores = (cut.rows @ cut.keys.mT).masked_fill_(~cut.allowed, float("-inf"))
    return Partial(*(cut.unblocked(x, q.shape[2]) for x in weighted_sum(scores, cut.values)))


def window_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """`window_partial(...).finish()`, by torch's fused attention where it may be used: out (B, Hq, L, E)."""
    if not all_finite(v):
        return window_partial(q, k, v, visible, scale).finish()
    cut = _in_blocks(q, k, v, visible)
    # A row without a visible key would be 0/0: let it see everything, then make it 0.
    empty = ~cut.allowed.any(-1, keepdim=True)
    mask = cut.allowed | empty
    if mask.shape[0] == 1:  # (B, H) as torch's batch, blocks as its heads: one mask for all
        rows, keys, values = (x.flatten(0, 1) for x in cut[:3])
        out = fused_attention(rows, keys, values, attn_mask=mask.squeeze(1), scale=scale)
        out = out.unflatten(0, (q.shape[0], k.shape[1]))
    else:
        rows, keys, values, mask = (x.transpose(1, 2).flatten(0, 1) for x in (*cut[:3], mask))
        out = fused_attention(rows, keys, values, attn_mask=mask, scale=scale)
        out = out.unflatten(0, (q.shape[0], cut.rows.shape[2])).transpose(1, 2)
    return cut.unblocked(out.masked_fill(empty, 0.0), q.shape[2])


def packed(part: Partial) -> Tensor:
    """A partial as one tensor (..., L, E + 2), for loops that carry one tensor per token."""
    return torch.cat([part.numerator, part.normaliser.unsqueeze(-1), part.shift.unsqueeze(-1)], -1)


def unpacked(x: Tensor) -> Partial:
    """What `packed` packed. The shift is a constant for gradients."""
    return Partial(x[..., :-2], x[..., -2], x[..., -1].detach())
