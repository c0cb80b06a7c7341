"""Local attention: exact softmax over a sliding window, and over a few tokens that everyone sees.

    out_i = sum_{j in N(i)} e^{scale q_i.k_j} v_j / sum_{j in N(i)} e^{scale q_i.k_j}

    N(i) = {|i - j| <= window}  or j among the first `global_tokens`  or i among them
    causal: j <= i as well, so that N(i) = the last `window` tokens, i itself, and the global tokens before i

Beltagy et al., "Longformer: The Long-Document Transformer", 2020. O(L window), in blocks of matmuls. A position is the
rank of a token among the real tokens of its sequence: padding takes no place in the window, wherever it stands. With a
window as long as the sequence this is softmax attention.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype, full_precision
from ..kernels.operator import Call
from ..state import check_continues, check_fits
from .base import Mechanism, check_call, real_keys
from .softmax import dense_softmax
from .window_state import WindowState
from .windows import Order, Shared, dense_partial, sliding

__all__ = ["Local"]


@final
class Local(Mechanism):
    """Sliding-window attention with global tokens; exact inside its window.

    window:        tokens on each side (causal: the last `window` tokens, besides the token itself); more than there are
                   tokens is allowed and gives softmax attention
    global_tokens: the first tokens of each sequence see all and are seen by all (causal: by every later token)

    A token whose key is masked is no part of its sequence: it takes no place in any window, and its own output is 0.
    `scan` keeps the last `window` and the first `global_tokens` tokens, so its memory does not grow. `read(q, state)`
    lets every query stand where the next token would: it sees the whole window and the global tokens.

    >>> import torch, subquad as sq
    >>> attn = sq.create("local", head_dim=8, window=4, global_tokens=1)
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> out = attn(q, k, v, is_causal=True)
    >>> first, state = attn.scan(q[:, :, :60], k[:, :, :60], v[:, :, :60])
    >>> rest, state = attn.scan(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], state)
    >>> torch.allclose(torch.cat([first, rest], 2), out, atol=1e-6), state.k.shape
    (True, torch.Size([1, 2, 4, 8]))
    """

    name = "local"
    equation = "softmax over |i - j| <= window and over the first global_tokens"
    paper = 'Beltagy et al., "Longformer: The Long-Document Transformer", 2020'
    complexity = "O(L (window + global_tokens) (D + E)); state O((window + global_tokens) (D + E))"
    recurrent = True
    constant_memory = True
    cross = False
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"window": 5},
        {"window": 3, "global_tokens": 2},
        {"window": 0, "global_tokens": 1},
        {"window": 64},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        window: int = 128,
        global_tokens: int = 0,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("window", window, least=0)
        checks.check_positive("global_tokens", global_tokens, least=0)
        self.window, self.global_tokens = window, global_tokens

    # -- one call ---------------------------------------------------------------------------------------------------

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"local needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}: in cross attention a query "
                "has no place among the keys, so there is no window around it. Use 'softmax', 'performer' or 'nystrom'"
            )
        with full_precision(q):
            if call.backend == "reference":
                return self._dense(q, k, v, call.key_mask, is_causal, call.scale)
            dtype = compute_dtype(v)
            order = Order(call.key_mask, k.shape[2], k.device)
            q, k, wide = (order.front(x.to(dtype)) for x in (q, k, v))
            out = (
                self._causal(q, k, wide, None, order, call.scale, call.chunk_size)
                if is_causal
                else self._full(q, k, wide, order, call.scale, call.chunk_size)
            )
            return order.back(out).to(v.dtype)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        """The definition: softmax under an L x L mask."""
        real = real_keys(k, mask)
        rank = real.cumsum(-1) - 1
        row, column = rank[:, :, None], rank[:, None, :]
        visible = ((row - column).abs() <= self.window) | (column < self.global_tokens) | (row < self.global_tokens)
        if is_causal:
            visible = visible & (column <= row)
        visible = visible & real[:, :, None] & real[:, None, :]
        return dense_softmax(q, k, v, visible[:, None], scale)

    def _full(self, q: Tensor, k: Tensor, v: Tensor, order: Order, scale: float, chunk_size: int | None) -> Tensor:
        """Not causal: a window on each side, and rows of global tokens over everything."""
        length, rows = q.shape[2], min(self.global_tokens, q.shape[2])
        window = min(self.window, max(length - 1, 0))
        both = (0, 0, window, window)
        place = torch.arange(length, device=q.device)
        near = (order.real & (place >= self.global_tokens))[:, None, :, None]
        shared = None
        if rows:
            limit = (order.count - 1)[:, None, :, None].expand(-1, -1, length, -1)
            shared = Shared(k[:, :, :rows], v[:, :, :rows], limit)
        out = sliding(q, F.pad(k, both), F.pad(v, both), F.pad(near, both), scale, shared=shared, chunk_size=chunk_size)
        if not rows:
            return out
        everywhere = dense_partial(q[:, :, :rows], k, v, order.real[:, None], scale).finish()
        return torch.cat([everywhere, out[:, :, rows:]], 2)

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        states: tuple[WindowState, WindowState] | None,
        order: Order,
        scale: float,
        chunk_size: int | None,
    ) -> Tensor:
        """Tokens between two states, or a whole sequence; what is not real stands at the end and gives anything."""
        length = k.shape[2]
        if states is None:
            window, seen = min(self.window, max(length - 1, 0)), order.count.new_zeros(order.count.shape)
            keys, values = F.pad(k, (0, 0, window, 0)), F.pad(v, (0, 0, window, 0))
            first_k, first_v = k[:, :, : self.global_tokens], v[:, :, : self.global_tokens]
        else:
            before, after = states
            window, seen = self.window, before.count[:, None]
            keys, values = torch.cat([before.k, k], 2), torch.cat([before.v, v], 2)
            first_k, first_v = after.first_k, after.first_v
        rank = seen - window + torch.arange(window + length, device=k.device)
        near = (rank >= self.global_tokens) & (rank < seen + order.count)
        shared = None
        if self.global_tokens and length:
            shared = Shared(first_k, first_v, rank[:, None, window:, None])
        return sliding(q, keys, values, near[:, None, :, None], scale, shared=shared, chunk_size=chunk_size)

    # -- the recurrent form -----------------------------------------------------------------------------------------

    def _origin(self, scale: float) -> str:
        return f"local(window={self.window}, global_tokens={self.global_tokens}) scale {scale:.9g}"

    def _empty(self, k: Tensor, v: Tensor, scale: float) -> WindowState:
        dtype, (batch, heads) = compute_dtype(v), k.shape[:2]

        def slots(count: int, width: int) -> Tensor:
            return k.new_zeros((batch, heads, count, width), dtype=dtype)

        return WindowState(
            slots(self.window, k.shape[-1]),
            slots(self.window, v.shape[-1]),
            slots(self.global_tokens, k.shape[-1]),
            slots(self.global_tokens, v.shape[-1]),
            k.new_zeros((batch,), dtype=torch.int64),
            self._origin(scale),
        )

    def _checked(self, state: Any, scale: float, tokens: Tensor, heads: int | None, width: int | None) -> WindowState:
        check_continues(state, WindowState, self._origin(scale), "local's scan() or absorb()")
        assert isinstance(state, WindowState)
        check_fits(state.v, tokens, heads, width)
        return state

    def _before(self, k: Tensor, v: Tensor, state: Any, scale: float) -> WindowState:
        if state is None:
            return self._empty(k, v, scale)
        return self._checked(state, scale, k, k.shape[1], v.shape[-1])

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, WindowState]:
        check_call(call)
        before = self._before(k, v, state, call.scale)
        with full_precision(q):
            dtype = before.k.dtype
            order = Order(call.key_mask, k.shape[2], k.device)
            q, k, wide = (order.front(x.to(dtype)) for x in (q, k, v))
            after = before.extend(k, wide, order)
            if call.backend == "reference":
                out = self._dense_scan(q, k, wide, before, order, call.scale)
            else:
                out = self._causal(q, k, wide, (before, after), order, call.scale, call.chunk_size)
            return order.back(out).to(v.dtype), after

    def _dense_scan(self, q: Tensor, k: Tensor, v: Tensor, before: WindowState, order: Order, scale: float) -> Tensor:
        """The definition: every remembered and every new key under one mask, by rank."""
        seen = before.count[:, None]

        def places(count: int, start: int) -> Tensor:
            return torch.arange(start, start + count, device=k.device)

        first = places(self.global_tokens, 0).expand(k.shape[0], -1)
        near, new = seen + places(self.window, -self.window), seen + places(k.shape[2], 0)
        real = order.real.expand(k.shape[0], -1)
        exists = torch.cat([first < seen, near >= self.global_tokens, real], 1)
        column, row = torch.cat([first, near, new], 1)[:, None, :], new[:, :, None]
        visible = (column <= row) & ((row - column <= self.window) | (column < self.global_tokens)) & exists[:, None, :]
        keys, values = torch.cat([before.first_k, before.k, k], 2), torch.cat([before.first_v, before.v, v], 2)
        return dense_softmax(q, keys, values, visible[:, None], scale)

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> WindowState:
        check_call(call)
        before = self._before(k, v, state, call.scale)
        order = Order(call.key_mask, k.shape[2], k.device)
        keys, values = (order.front(x.to(before.k.dtype)) for x in (k, v))
        return before.extend(keys, values, order)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        check_call(call)
        state = self._checked(state, call.scale, q, None, None)
        near = state.count[:, None] + torch.arange(-self.window, 0, device=q.device) >= self.global_tokens
        first = torch.arange(self.global_tokens, device=q.device) < state.count[:, None]
        keys, values = torch.cat([state.first_k, state.k], 2), torch.cat([state.first_v, state.v], 2)
        visible = torch.cat([first, near], 1)[:, None]
        with full_precision(q):
            if call.backend == "reference":
                return dense_softmax(q.to(keys.dtype), keys, values, visible[:, None], call.scale).to(q.dtype)
            if keys.shape[2] == 0:
                return q.new_zeros((*q.shape[:3], values.shape[-1]))
            return dense_partial(q.to(keys.dtype), keys, values, visible, call.scale).finish().to(q.dtype)
