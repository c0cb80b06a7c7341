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
from ..kernels.chunked.windows import fused_attention
from ..kernels.operator import Call
from ..kernels.padding import real_keys
from ..kernels.reference import dense_softmax
from ..state import Movable, check_continues, check_crop, check_fits, check_same, check_tokens_join, register_state
from .base import Mechanism, check_call

__all__ = ["KVState", "Softmax", "dense_softmax", "fused_softmax"]


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


def decided(truth: bool) -> bool:
    """`truth` as a plain bool: with dynamic shapes torch.compile has a symbolic one, which torch's attention refuses.

    A branch makes the tracer decide; bool() would not.
    """
    if truth:  # noqa: SIM103
        return True
    return False


def fused_softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """`dense_softmax` by torch's fused attention; `visible` None: every key, or every earlier one."""
    grouped = decided(q.shape[1] != k.shape[1])
    if visible is None:
        return fused_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    # A row without a visible key would be 0/0: let it see everything, then make it 0.
    empty = ~visible.any(-1, keepdim=True)
    out = fused_attention(q, k, v, attn_mask=visible | empty, scale=scale, enable_gqa=grouped)
    return out.masked_fill(empty, 0.0)


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
        check_call(call)
        return self._masked(q, k, v, is_causal, 0, call.scale, call.key_mask, call.backend)

    def _masked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        past: int,
        scale: float,
        key_mask: Tensor | None,
        backend: str | None,
    ) -> Tensor:
        """Query i stands at position past + i."""
        length, keys = q.shape[2], k.shape[2]
        if keys == 0 or length == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        visible = None
        if key_mask is not None or backend is not None or (is_causal and past and length > 1):
            visible = torch.ones(length, keys, dtype=torch.bool, device=q.device)
            if is_causal:
                visible = visible.tril(past)
            visible = visible[None, None]
            if key_mask is not None:
                visible = visible & key_mask[:, None, None, :]
        if backend is not None:
            assert visible is not None
            return dense_softmax(q, k, v, visible, scale)
        # autocast would give it its own dtype
        return fused_softmax(q, k, v, visible, is_causal and decided(past == 0), scale).to(v.dtype)

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
        return self._masked(q, after.k, after.v, True, past, call.scale, mask, call.backend), after

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> KVState:
        check_call(call)
        new = KVState(k, v, real_keys(k, call.key_mask), self._origin(call.scale))
        if state is None:
            # Copies: the caller may use the memory again.
            return KVState(k.clone(), v.clone(), new.mask.clone(), new.origin)
        return self._checked(state, call.scale, k, k.shape[1], v.shape[-1]).merge(new)

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        check_call(call)
        state = self._checked(state, call.scale, q)
        return self._masked(q, state.k, state.v, False, 0, call.scale, state.mask, call.backend)
