"""A mechanism that is a feature map plus one state update.

    out = phi(q)^T S / phi(q)^T z,     S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j)

Katharopoulos et al., "Transformers are RNNs", 2020. A subclass only sets `self.feature_map`; the parallel, chunked and
recurrent forms, padding, grouped heads, precision and gradients come from the kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..features.base import FeatureMap
from ..kernels import dispatch
from ..kernels.dispatch import Linear
from ..kernels.operator import Call
from ..state import LinearState, check_continues, check_fits
from .base import Mechanism

__all__ = ["Kernelised"]


class Kernelised(Mechanism):
    """A feature map plus one state update: out = phi(q)^T S / phi(q)^T z. Subclasses set `self.feature_map`."""

    recurrent = True
    constant_memory = True
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

    @property
    def _spec(self) -> Linear:
        return Linear(self.feature_map, self.normalise)

    def _before(self, k: Tensor, v: Tensor, state: Any, scale: float) -> LinearState:
        if state is None:
            return self._empty(k, v, scale)
        return self._checked(state, k, k.shape[1], v.shape[-1], scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        state = self._empty(k, v, call.scale)
        if is_causal:
            return dispatch.causal(self._spec, call, q, k, v, state)[0]
        return dispatch.full(self._spec, call, q, k, v, state)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, LinearState]:
        return dispatch.causal(self._spec, call, q, k, v, self._before(k, v, state, call.scale))

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> LinearState:
        return dispatch.absorb(self._spec, call, k, v, self._before(k, v, state, call.scale))

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        state = self._checked(state, q, None, None, call.scale)
        if q.shape[1] % state.weighted.shape[1]:
            raise ValueError(f"q has {q.shape[1]} heads, not a multiple of the state's {state.weighted.shape[1]}")
        return dispatch.read(self._spec, call, q, state)
