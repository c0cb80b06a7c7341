"""Sparse attention: exact softmax over a fixed pattern of about sqrt(L) keys per query.

    out_i = sum_{j in N(i)} e^{scale q_i.k_j} v_j / sum_{j in N(i)} e^{scale q_i.k_j}

    strided   N(i) = {|i - j| <= stride}  or  {(i - j) mod stride = 0}
    fixed     N(i) = {j in the block of i}  or  {j among the last `summary` tokens of a block},  blocks of `stride`
    causal    j <= i as well

Child et al., "Generating Long Sequences with Sparse Transformers", 2019. The paper gives the two halves of a pattern
to separate heads or merges them; here they are merged into one softmax over the union, in which no key counts twice. A
row has 2 stride + L / stride keys (strided) or stride + summary L / stride (fixed): O(L sqrt(L)) in all where stride
is about sqrt(L).

The stride belongs to the model and is never derived from the input: from the padded length it would change a sequence
with its batch, and from the true length it would let a causal row feel how many tokens come after it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype, full_precision
from ..kernels.checkpointing import Carry, scan_chunks
from ..kernels.chunked.windowed import CHUNK_BYTES, sweep
from ..kernels.chunked.windows import dense_partial, packed, unpacked, weighted_sum
from ..kernels.operator import Call
from ..kernels.padding import Order, real_keys
from ..state import Partial, join
from .base import Mechanism, check_call
from .softmax import dense_softmax

__all__ = ["Sparse"]


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


@final
class Sparse(Mechanism):
    """Strided and fixed sparse attention; exact inside its pattern.

    pattern: strided (neighbours, and every stride-th token) | fixed (own block, and the summary tokens of all blocks)
    stride:  about the square root of the usual length; longer than the sequence is allowed (strided is then softmax
             attention, as fixed is)
    summary: fixed only: how many tokens at the end of each block are seen by everyone (the paper's c), at most stride

    A token whose key is masked is no part of its sequence: positions count real tokens only, and its own output is 0.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> sq.create("sparse", head_dim=8, stride=10)(q, k, v, is_causal=True).shape
    torch.Size([1, 2, 100, 8])
    """

    name = "sparse"
    equation = "softmax over |i - j| <= stride or (i - j) mod stride = 0 (strided); own block or summary tokens (fixed)"
    paper = 'Child et al., "Generating Long Sequences with Sparse Transformers", 2019'
    complexity = "O(L (stride + L / stride) (D + E)), O(L sqrt(L)) at stride = sqrt(L)"
    cross = False
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"stride": 6},
        {"stride": 1},
        {"pattern": "fixed", "stride": 8, "summary": 2},
        {"pattern": "fixed", "stride": 5, "summary": 5},
        {"pattern": "fixed", "stride": 128},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        pattern: str = "strided",
        stride: int = 128,
        summary: int = 8,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_option("pattern", pattern, ("strided", "fixed"))
        checks.check_positive("stride", stride)
        checks.check_positive("summary", summary)
        if pattern == "fixed" and summary > stride:
            raise ValueError(
                f"summary={summary} must be at most stride={stride}: a block of {stride} tokens has no more to show"
            )
        self.pattern, self.stride, self.summary = pattern, stride, summary

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"sparse needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}: in cross attention a query "
                "has no place among the keys, so no pattern is around it. Use 'softmax', 'performer' or 'nystrom'"
            )
        if q.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        with full_precision(q):
            if call.backend == "reference":
                return self._dense(q, k, v, call.key_mask, is_causal, call.scale)
            dtype = compute_dtype(v)
            order = Order(call.key_mask, k.shape[2], k.device)
            q, k, wide = (order.front(x.to(dtype)) for x in (q, k, v))
            attend = self._strided if self.pattern == "strided" else self._fixed
            return order.back(attend(q, k, wide, order.real, is_causal, call.scale, call.chunk_size)).to(v.dtype)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        """The definition: softmax under an L x L mask."""
        real = real_keys(k, mask)
        rank = real.cumsum(-1) - 1
        row, column = rank[:, :, None], rank[:, None, :]
        if self.pattern == "strided":
            visible = ((row - column).abs() <= self.stride) | ((row - column) % self.stride == 0)
        else:
            shown = column % self.stride >= self.stride - self.summary
            visible = (row // self.stride == column // self.stride) | shown
        if is_causal:
            visible = visible & (column <= row)
        visible = visible & real[:, :, None] & real[:, None, :]
        return dense_softmax(q, k, v, visible[:, None], scale)

    def _strided(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, is_causal: bool, scale: float, chunk_size: int | None
    ) -> Tensor:
        """A window of stride - 1 tokens, and the column of every stride-th token without the token itself.

        Tokens at distance stride are in the column already: so no key is counted twice.
        """
        length = q.shape[2]
        window = min(self.stride, length) - 1
        far = self._columns(q, k, v, real, is_causal, scale, chunk_size) if length > self.stride else None
        ends = (0, 0, window, 0 if is_causal else window)
        near = F.pad(real[:, None, :, None], ends)
        return sweep(q, F.pad(k, ends), F.pad(v, ends), near, scale, other=far, chunk_size=chunk_size)[0]

    def _columns(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, is_causal: bool, scale: float, chunk_size: int | None
    ) -> Partial:
        """Laid out in rows of `stride` tokens, a token sees its column: stride attentions of L / stride tokens each."""
        length, stride = q.shape[2], self.stride
        rows = -(-length // stride)

        def columns(x: Tensor) -> Tensor:  # (B, H, L, C) -> (B, H, stride, rows C): the loop goes over columns
            return _rows_of(x, stride).transpose(2, 3).flatten(3, 4)

        place = torch.arange(rows, device=q.device)
        others = place[:, None] > place if is_causal else place[:, None] != place

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

    def _fixed(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor, is_causal: bool, scale: float, chunk_size: int | None
    ) -> Tensor:
        """The own block, and the summary tokens of the other blocks: those of the own block are in it already."""
        length, stride = q.shape[2], min(self.stride, q.shape[2])
        blocks = -(-length // stride)
        # A sequence of one block shows its tokens to nobody else.
        summary = self.summary if blocks > 1 else 0
        parts = [_rows_of(x, stride) for x in (q, k, v, real[:, None, :, None])]
        shown_k, shown_v, shown = (x[:, :, :, stride - summary :].flatten(2, 3) for x in parts[1:])
        place = torch.arange(stride, device=q.device)
        inside = place[:, None] >= place if is_causal else place.new_ones((stride, stride), dtype=torch.bool)
        number = torch.arange(blocks, device=q.device)
        home = number.repeat_interleave(summary)
        inputs = [*(x.flatten(3, 4) for x in parts), number.view(1, 1, blocks, 1)]

        def attend(start: int, end: int) -> Tensor:
            """Blocks start .. end - 1, (B, Hq, end - start, stride E); causal ones need no summary from `end` on."""
            seen = (end if is_causal else blocks) * summary
            keys, values, exist, of = shown_k[:, :, :seen], shown_v[:, :, :seen], shown[:, 0, :seen, 0], home[:seen]

            def step(
                carry: Carry, q: Tensor, k: Tensor, v: Tensor, real: Tensor, block: Tensor
            ) -> tuple[Carry, Tensor]:
                q, k, v, real = (x.unflatten(3, (stride, x.shape[3] // stride)) for x in (q, k, v, real))
                hidden = ~(inside & real.mT).unsqueeze(2)  # (B or 1, 1, 1, blocks, stride, stride)
                scores = _grouped_scores(q, k, scale).masked_fill_(hidden, float("-inf"))
                part = Partial(*(x.flatten(1, 2) for x in weighted_sum(scores, v.unsqueeze(2))))
                if seen:
                    others = of < block[:, 0] if is_causal else of != block[:, 0]  # (1, blocks, seen)
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
        piece = -(-blocks // 8) if is_causal else blocks
        pieces = [attend(start, min(start + piece, blocks)) for start in range(0, blocks, piece)]
        out: Tensor = torch.cat(pieces, 2).unflatten(3, (stride, v.shape[-1])).flatten(2, 3)
        return out[:, :, :length]
