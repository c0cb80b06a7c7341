"""Windowed linear attention in torch matmuls, chunk by chunk: any device, O(L) time and memory, no host sync.

`linear.py` has everything far, `windowed.py` a window beside it, `windows.py` the exact part in blocks.
"""

from __future__ import annotations

from torch import Tensor

from ....state import State
from ...operator import Backend, Call
from ..definition import WindowedLinear
from . import linear, windowed

__all__ = ["Chunked"]


class Chunked(Backend[WindowedLinear]):
    """Takes every call: any map, device and dtype, second derivatives, tracing."""

    name = "chunked"

    def attend(self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if spec.window is not None:
            return windowed.attend(spec, call, q, k, v)
        state = spec.empty(k, v, call.scale, "")
        if spec.causal:
            return linear.causal(spec, call, q, k, v, state)[0]
        return linear.read(spec, call, q, linear.absorb(spec, call, k, v, state))

    def scan(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State
    ) -> tuple[Tensor, State]:
        return (linear.causal if spec.window is None else windowed.scan)(spec, call, q, k, v, state)

    def absorb(self, spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
        return linear.absorb(spec, call, k, v, state)

    def read(self, spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
        return linear.read(spec, call, q, state)
