"""What every mechanism shares that windowed linear attention computes: it is described by a `WindowedLinear`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels import windowed_linear
from ..kernels.operator import Call
from ..kernels.windowed_linear import WindowedLinear
from ..state import State, check_continues, check_fits
from .base import Mechanism

__all__ = ["WindowedLinearMechanism"]


class WindowedLinearMechanism(Mechanism):
    """Attention and `scan` of what `_spec` describes; `_origin` names what a state belongs to."""

    recurrent = True
    constant_memory = True
    each_query_alone = True

    def _spec(self, is_causal: bool) -> WindowedLinear:
        raise NotImplementedError

    def _origin(self, scale: float) -> str:
        raise NotImplementedError

    def _continued(
        self, state: Any, origin: str, tokens: Tensor, heads: int | None = None, width: int | None = None
    ) -> State:
        """The state, if tokens (B, ., L, D) with so many KV heads and this value width can go on from it."""
        check_continues(state, State, origin, f"{self.name}'s scan() or absorb()")
        assert isinstance(state, State)
        check_fits(state.example(), tokens, heads, width)
        return state

    def _before(self, k: Tensor, v: Tensor, state: Any, scale: float) -> State:
        """The state that keys k and values v follow; None: an empty one."""
        origin = self._origin(scale)
        if state is None:
            return self._spec(True).empty(k, v, scale, origin)
        return self._continued(state, origin, k, k.shape[1], v.shape[-1])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        return windowed_linear.attend(self._spec(is_causal), call, q, k, v)

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Call) -> tuple[Tensor, State]:
        return windowed_linear.scan(self._spec(True), call, q, k, v, self._before(k, v, state, call.scale))
