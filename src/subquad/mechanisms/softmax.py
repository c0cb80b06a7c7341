"""Exact softmax attention, the standard that the others are measured against.

    out_i = sum_j e^{scale q_i.k_j} v_j / sum_j e^{scale q_i.k_j}

Vaswani et al., "Attention Is All You Need", 2017; computed by torch's scaled_dot_product_attention, O(L S). Its state
is the list of all keys and values: `scan` works, with memory that grows with the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from ..features.precision import full_precision
from ..kernels.operator import Call
from ..kernels.padding import real_keys
from ..kernels.softmax import softmax_attention
from ..state import Movable, check_continues, check_crop, check_fits, check_same, check_tokens_join, register_state
from .base import Mechanism, check_call

__all__ = ["KVState", "Softmax"]


@dataclass(frozen=True)
class KVState(Movable):
    """All keys (B, H, S, D), values (B, H, S, E) and which of them are real (B, S) so far."""

    crops: ClassVar[bool] = True

    k: Tensor
    v: Tensor
    mask: Tensor
    origin: str = ""

    def merge(self, later: KVState) -> KVState:
        """This context followed by `later`'s."""
        check_same(self, later)
        check_tokens_join(self, later)
        with full_precision(self.k):  # autocast to one half precision refuses to join tensors of the other
            return KVState(
                torch.cat([self.k, later.k], -2),
                torch.cat([self.v, later.v], -2),
                torch.cat([self.mask, later.mask], -1),
                self.origin,
            )

    def crop(self, length: int) -> KVState:
        """The state after its first `length` tokens, padding included.

        >>> import subquad as sq
        >>> attn = sq.create("softmax", head_dim=8)
        >>> attn.absorb(*torch.randn(2, 1, 2, 10, 8)).crop(7).k.shape
        torch.Size([1, 2, 7, 8])
        """
        check_crop(length, self.k.shape[2])
        return KVState(self.k[:, :, :length], self.v[:, :, :length], self.mask[:, :length], self.origin)


register_state(KVState)


@final
class Softmax(Mechanism):
    """Exact attention through torch's scaled_dot_product_attention; accepts everything the other mechanisms accept.

    >>> import torch, subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
    >>> out = sq.create("softmax", head_dim=8)(q, k, v)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v), atol=1e-6)
    True
    """

    name = "softmax"
    equation = "softmax(q k^T / sqrt(D)) v"
    paper = 'Vaswani et al., "Attention Is All You Need", 2017'
    complexity = "O(L S (D + E)); state O(S (D + E))"
    recurrent = True
    crops = True
    exact = True
    each_query_alone = True
    quadratic = True
    follows_autocast = True  # as torch's own attention does

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        return self._exact(q, k, v, call, is_causal)

    def _exact(self, q: Tensor, k: Tensor, v: Tensor, call: Call, is_causal: bool, past: int = 0) -> Tensor:
        check_call(call)
        if k.shape[2] == 0 or q.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        # autocast would give it its own dtype
        return softmax_attention(q, k, v, call, is_causal=is_causal, past=past).to(v.dtype)

    def _origin(self, scale: float) -> str:
        return f"softmax scale {scale:.9g}"

    def _checked(
        self, state: Any, scale: float, tokens: Tensor, heads: int | None = None, width: int | None = None
    ) -> KVState:
        check_continues(state, KVState, self._origin(scale), "softmax's scan() or absorb()")
        assert isinstance(state, KVState)
        check_fits(state.v, tokens, heads, width, exactly=True)
        return state

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, KVState]:
        after = self._absorb(k, v, state, call)
        past = after.k.shape[2] - k.shape[2]
        # Without padding so far there is nothing to mask, and SDPA's fast path applies.
        mask = after.mask if call.key_mask is not None or state is not None else None
        return self._exact(q, after.k, after.v, call._replace(key_mask=mask), True, past), after

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> KVState:
        check_call(call)
        new = KVState(k, v, real_keys(k, call.key_mask), self._origin(call.scale))
        if state is None:
            # Copies: the caller may use the memory again.
            return KVState(k.clone(), v.clone(), new.mask.clone(), new.origin)
        return self._checked(state, call.scale, k, k.shape[1], v.shape[-1]).merge(new)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        state = self._checked(state, call.scale, q)
        return self._exact(q, state.k, state.v, call._replace(key_mask=state.mask), False)
