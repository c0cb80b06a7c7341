"""Sparse attention in torch operations: a window and columns, or blocks and what all blocks show. Any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...features.precision import compute_dtype
from ...state import Partial, join
from ..checkpointing import Carry, scan_chunks
from ..operator import Backend, Call
from ..padding import Order
from ..windowed_linear.chunked.windowed import CHUNK_BYTES, sweep
from ..windowed_linear.chunked.windows import dense_partial, packed, unpacked, weighted_sum
from .definition import Spec

__all__ = ["Chunked"]


class Chunked(Backend[Spec]):
    """Real tokens moved to the front, then products over blocks of them."""

    name = "chunked"

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        order, dtype = Order(call.key_mask, k.shape[2], k.device), compute_dtype(v)
        q, k, v = (order.front(x.to(dtype)) for x in (q, k, v))
        attend = _fixed if spec.summary else _strided
        return order.back(attend(spec, q, k, v, order.real, call.scale, call.chunk_size))


def _rows_of(x: Tensor, stride: int) -> Tensor:
    """(B, H, L, C) -> (B, H, ceil(L / stride), stride, C), filled up with zeros."""
    count = -(-x.shape[2] // stride)
    spare = count * stride - x.shape[2]
    rows: Tensor = (F.pad(x, (0, 0, 0, spare)) if spare else x).unflatten(2, (count, stride))
    return rows


def _grouped_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q (B, H G, N, R, D) by k (B, H, N, S, D) -> (B, H, G, N, R, S)."""
    grouped: Tensor = (scale * q).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    return grouped @ k.unsqueeze(2).mT


def _chunk(chunk_size: int | None, tokens: int, row_bytes: int) -> int:
    """How many groups of `tokens` tokens, each with `row_bytes` of scores, one step takes."""
    return max(1, CHUNK_BYTES // max(1, row_bytes) if chunk_size is None else chunk_size // tokens)


def _strided(spec: Spec, q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float, chunk_size: int | None) -> Tensor:
    """A window of stride - 1 tokens, and the column of every stride-th token without the token itself.

    Tokens at distance stride are in the column already: so no key is counted twice.
    """
    length = q.shape[2]
    window = min(spec.stride, length) - 1
    far = _columns(spec, q, k, v, real, scale, chunk_size) if length > spec.stride else None
    ends = (0, 0, window, 0 if spec.causal else window)
    near = F.pad(real[:, None, :, None], ends)
    return sweep(q, F.pad(k, ends), F.pad(v, ends), near, scale, other=far, chunk_size=chunk_size)[0]


def _columns(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float, chunk_size: int | None
) -> Partial:
    """Laid out in rows of `stride` tokens, a token sees its column: stride attentions of L / stride tokens each."""
    length, stride = q.shape[2], spec.stride
    rows = -(-length // stride)

    def columns(x: Tensor) -> Tensor:  # (B, H, L, C) -> (B, H, stride, rows C): the loop goes over columns
        return _rows_of(x, stride).transpose(2, 3).flatten(3, 4)

    place = torch.arange(rows, device=q.device)
    others = place[:, None] > place if spec.causal else place[:, None] != place

    def step(carry: Carry, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> tuple[Carry, Tensor]:
        q, k, v, real = (x.unflatten(3, (rows, -1)) for x in (q, k, v, real))
        hidden = ~(others & real.mT)  # (B, 1, columns, rows, rows)
        scores = _grouped_scores(q, k, scale).masked_fill_(hidden.unsqueeze(2), float("-inf"))
        return carry, packed(weighted_sum(scores, v.unsqueeze(2))).flatten(1, 2).flatten(3, 4)

    size = _chunk(chunk_size, rows, q.shape[0] * q.shape[1] * rows * rows * q.element_size())
    inputs = [columns(x) for x in (q, k, v, real[:, None, :, None])]
    _, out = scan_chunks(step, (), inputs, [], size)
    assert out is not None
    return unpacked(out.unflatten(3, (rows, -1)).transpose(2, 3).flatten(2, 3)[:, :, :length])


def _fixed(spec: Spec, q: Tensor, k: Tensor, v: Tensor, real: Tensor, scale: float, chunk_size: int | None) -> Tensor:
    """The own block, and the summary tokens of the other blocks: those of the own block are in it already."""
    length, stride = q.shape[2], min(spec.stride, q.shape[2])
    blocks = -(-length // stride)
    # A sequence of one block shows its tokens to nobody else.
    summary = spec.summary if blocks > 1 else 0
    parts = [_rows_of(x, stride) for x in (q, k, v, real[:, None, :, None])]
    shown_k, shown_v, shown = (x[:, :, :, stride - summary :].flatten(2, 3) for x in parts[1:])
    place = torch.arange(stride, device=q.device)
    inside = place[:, None] >= place if spec.causal else place.new_ones((stride, stride), dtype=torch.bool)
    number = torch.arange(blocks, device=q.device)
    home = number.repeat_interleave(summary)
    inputs = [*(x.flatten(3, 4) for x in parts), number.view(1, 1, blocks, 1)]

    def attend(start: int, end: int) -> Tensor:
        """Blocks start .. end - 1, (B, Hq, end - start, stride E); causal ones need no summary from `end` on."""
        seen = (end if spec.causal else blocks) * summary
        keys, values, exist, of = shown_k[:, :, :seen], shown_v[:, :, :seen], shown[:, 0, :seen, 0], home[:seen]

        def step(carry: Carry, q: Tensor, k: Tensor, v: Tensor, real: Tensor, block: Tensor) -> tuple[Carry, Tensor]:
            q, k, v, real = (x.unflatten(3, (stride, x.shape[3] // stride)) for x in (q, k, v, real))
            hidden = ~(inside & real.mT).unsqueeze(2)  # (B or 1, 1, 1, blocks, stride, stride)
            scores = _grouped_scores(q, k, scale).masked_fill_(hidden, float("-inf"))
            part = Partial(*(x.flatten(1, 2) for x in weighted_sum(scores, v.unsqueeze(2))))
            if seen:
                others = of < block[:, 0] if spec.causal else of != block[:, 0]  # (1, blocks, seen)
                visible = (others & exist.unsqueeze(1)).repeat_interleave(stride, 1)
                far = dense_partial(q.flatten(2, 3), keys, values, visible, scale)
                part = join(part, Partial(*(x.unflatten(2, q.shape[2:4]) for x in far)))
            return carry, part.finish().flatten(3, 4)

        row_bytes = q.shape[0] * q.shape[1] * stride * (stride + seen) * q.element_size()
        size = _chunk(chunk_size, stride, row_bytes)
        _, out = scan_chunks(step, (), [x[:, :, start:end] for x in inputs], [keys, values], size)
        assert out is not None
        return out

    # A causal block sees half of the summaries on average: in eight pieces little more than that half is computed.
    piece = -(-blocks // 8) if spec.causal else blocks
    pieces = [attend(start, min(start + piece, blocks)) for start in range(0, blocks, piece)]
    out: Tensor = torch.cat(pieces, 2).unflatten(3, (stride, v.shape[-1])).flatten(2, 3)
    return out[:, :, :length]
