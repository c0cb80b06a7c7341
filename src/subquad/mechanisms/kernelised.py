"""A mechanism that is a feature map plus one state update.

    out = phi(q)^T S / phi(q)^T z,     S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j)

Katharopoulos et al., "Transformers are RNNs", 2020. A subclass only sets `self.feature_map`; the parallel, chunked and
recurrent forms, padding, grouped heads, precision and gradients come from the kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from ..features.base import FeatureMap
from ..kernels import dispatch
from ..state import LinearState, check_continues, check_fits
from .base import Mechanism, without_padding

__all__ = ["Kernelised"]


class Kernelised(Mechanism):
    """A feature map plus one state update: out = phi(q)^T S / phi(q)^T z. Subclasses set `self.feature_map`."""

    recurrent = True
    kernelised = True
    feature_map: FeatureMap
    # Whether the output is divided by phi(q)^T z.
    normalise: bool = True

    def resolve_scale(self, scale: float | None) -> float:
        if scale is None:
            return self.feature_map.default_scale(self.head_dim)
        return super().resolve_scale(scale)

    def _origin(self, scale: float) -> str:
        draw = self.feature_map.draw_key()
        return f"{self.name}({self.extra_repr()}) draw {draw} scale {scale:.9g}"

    def _empty(self, k: Tensor, v: Tensor, scale: float) -> LinearState:
        return LinearState.empty(
            k.shape[0],
            k.shape[1],
            self.feature_map.num_features,
            v.shape[-1],
            k,
            per_key_scale=self.feature_map.per_key_scale,
            origin=self._origin(scale),
        )

    def _checked(self, state: Any, tokens: Tensor, heads: int | None, width: int | None, scale: float) -> LinearState:
        check_continues(state, LinearState, self._origin(scale), f"{self.name}'s scan() or absorb()")
        assert isinstance(state, LinearState)
        check_fits(state.weighted, tokens, heads, width)
        return state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, **call: Any) -> Tensor:
        call.pop("query_mask")
        state = self._empty(k, v, call["scale"])
        if is_causal:
            return dispatch.causal(self.feature_map, q, k, v, state, normalise=self.normalise, **call)[0]
        return dispatch.full(self.feature_map, q, k, v, state, normalise=self.normalise, **call)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, **call: Any) -> tuple[Tensor, LinearState]:
        scale = call["scale"]
        state = self._empty(k, v, scale) if state is None else self._checked(state, k, k.shape[1], v.shape[-1], scale)
        return dispatch.causal(self.feature_map, q, k, v, state, normalise=self.normalise, **call)

    def absorb(
        self,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        *,
        scale: float | None = None,
        key_mask: Tensor | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> LinearState:
        checks.check_keys(k, v, self.head_dim, self.kv_heads)
        checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
        number = self.resolve_scale(scale)
        state = self._empty(k, v, number) if state is None else self._checked(state, k, k.shape[1], v.shape[-1], number)
        k, v = without_padding(k, v, key_mask)
        return dispatch.absorb(
            self.feature_map, k, v, state, scale=number, key_mask=key_mask, backend=backend, chunk_size=chunk_size
        )

    def read(
        self,
        q: Tensor,
        state: Any,
        *,
        scale: float | None = None,
        backend: str | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        checks.check_queries(q, self.head_dim, self.heads)
        number = self.resolve_scale(scale)
        state = self._checked(state, q, None, None, number)
        if q.shape[1] % state.weighted.shape[1]:
            raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the state's {state.weighted.shape[1]}")
        return dispatch.read(
            self.feature_map,
            q,
            state,
            scale=number,
            normalise=self.normalise,
            backend=backend,
            chunk_size=chunk_size,
        )
