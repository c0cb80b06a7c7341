"""Local attention: exact softmax over a sliding window, and over a few tokens that everyone sees.

    out_i = sum_{j in N(i)} e^{scale q_i.k_j} v_j / sum_{j in N(i)} e^{scale q_i.k_j}

    N(i) = {|i - j| <= window}  or j among the first `sinks`  or i among them
    causal: j <= i as well, so that N(i) = the last `window` tokens, i itself, and the sinks before i

Beltagy et al., "Longformer: The Long-Document Transformer", 2020. O(L window). A position is the rank of a token among
the real tokens of its sequence: padding takes no place in the window, wherever it stands. With a window as long as the
sequence this is softmax attention.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..kernels.operator import Call
from ..kernels.padding import Order
from ..kernels.softmax import dense_softmax
from ..kernels.windowed_linear import BACKENDS, WindowedLinear
from ..state import State
from .windowed import Windowed, first_rows_everywhere

__all__ = ["Local"]


@final
class Local(Windowed):
    """Sliding-window attention with sinks; exact inside its window.

    window: tokens on each side (causal: the last `window` tokens, besides the token itself); more than there are tokens
            is allowed and gives softmax attention
    sinks:  the first tokens of each sequence see all and are seen by all (causal: by every later token); Longformer's
            global tokens, and `global_tokens` is accepted as another name

    A token whose key is masked is no part of its sequence: it takes no place in any window, and its own output is 0.
    `scan` keeps the last `window` and the first `sinks` tokens, so its memory does not grow. `read(q, state)` lets
    every query stand where the next token would: it sees the whole window and the sinks.

    >>> import torch, subquad as sq
    >>> attn = sq.create("local", head_dim=8, window=4, sinks=1)
    >>> q, k, v = torch.randn(3, 1, 2, 100, 8)
    >>> out = attn(q, k, v, is_causal=True)
    >>> first, state = attn.scan(q[:, :, :60], k[:, :, :60], v[:, :, :60])
    >>> rest, state = attn.scan(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], state)
    >>> torch.allclose(torch.cat([first, rest], 2), out, atol=1e-6), state.window.k.shape
    (True, torch.Size([1, 2, 4, 8]))
    """

    name = "local"
    equation = "softmax over |i - j| <= window and over the first `sinks`"
    paper = 'Beltagy et al., "Longformer: The Long-Document Transformer", 2020'
    complexity = "O(L (window + sinks) (D + E)); state O((window + sinks) (D + E))"
    instead_of_cross = "'softmax', 'multipole' or 'performer'"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"window": 5},
        {"window": 3, "sinks": 2},
        {"window": 0, "sinks": 1},
        {"window": 64},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        window: int = 128,
        sinks: int = 0,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        self._set_window(window, sinks)

    def _spec(self, is_causal: bool) -> WindowedLinear:
        return WindowedLinear(None, self.window, self.sinks, causal=is_causal)

    def _origin(self, scale: float) -> str:
        return f"local(window={self.window}, sinks={self.sinks}) scale {scale:.9g}"

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        if is_causal or not self.sinks or q.shape[2] != k.shape[2] or q.shape[2] == 0:
            return super()._attend(q, k, v, call, is_causal=is_causal)
        return first_rows_everywhere(self._spec(False), call, q, k, v)

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> State:
        self._check_backend(call)
        before = self._before(k, v, state, call.scale)
        order = Order(call.key_mask, k.shape[2], k.device)
        return before.extend(order.front(k), order.front(v), k.shape[2] if order.mask is None else order.count[:, 0])

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        self._check_backend(call)
        state = self._continued(state, self._origin(call.scale), q)
        assert state.sinks is not None and state.window is not None
        near = state.ranks(0) >= self.sinks
        first = torch.arange(self.sinks, device=q.device) < state.count[:, None]
        known = state.sinks.followed_by(*state.window)
        visible = torch.cat([first, near], 1)[:, None, None]
        return dense_softmax(q.to(known.k.dtype), known.k, known.v, visible, call.scale).to(q.dtype)

    def _check_backend(self, call: Call) -> None:
        # All of them remember and look up the same few tokens.
        if call.backend is not None:
            checks.check_option("backend", call.backend, BACKENDS)
