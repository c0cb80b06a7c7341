"""The kernelised operator: out = phi(q)^T S / phi(q)^T z. Its spec, its backends, and one call for each form.

`triton` and `fla` have not been timed on a GPU: they are used where they are named and nowhere else.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from ..features.base import FeatureMap
from ..features.precision import full_precision
from ..state import LinearState
from . import chunked, fla, native, reference, triton
from .operator import Backend, Call, by_name, choose

__all__ = ["BACKENDS", "Linear", "absorb", "causal", "full", "read"]


class Linear(NamedTuple):
    """What is computed: the map phi, and whether the output is divided by phi(q)^T z."""

    feature_map: FeatureMap
    normalise: bool = True


class _Module(Backend[Linear]):
    """A backend that is a module of functions."""

    def __init__(self, name: str, module: ModuleType) -> None:
        self.name, self.module = name, module  # type: ignore[misc]

    def refusal(self, spec: Linear, call: Call, *tensors: Tensor) -> str:
        if self.module in (reference, chunked):
            return ""
        return str(self.module.refusal(spec.feature_map, *tensors, normalise=spec.normalise))

    def automatic(self, spec: Linear, call: Call, *tensors: Tensor) -> bool:
        if self.module is native:
            # Who asks for chunks of a size gets the backend that has them: the native kernels choose their own.
            return call.chunk_size is None and (native.fused(spec.feature_map) or native.multiplied(spec.feature_map))
        return self.module is chunked

    def full(self, spec: Linear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> Tensor:
        """out (B, Hq, L, E): every query sees the state and every key."""
        out: Tensor = self.module.full(
            spec.feature_map, q, k, v, state, **_named(call), key_mask=call.key_mask, normalise=spec.normalise
        )
        return out

    def scan(
        self, spec: Linear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: LinearState
    ) -> tuple[Tensor, LinearState]:
        out: tuple[Tensor, LinearState] = self.module.causal(
            spec.feature_map, q, k, v, state, **_named(call), key_mask=call.key_mask, normalise=spec.normalise
        )
        return out

    def absorb(self, spec: Linear, call: Call, k: Tensor, v: Tensor, state: LinearState) -> LinearState:
        after: LinearState = self.module.absorb(spec.feature_map, k, v, state, **_named(call), key_mask=call.key_mask)
        return after

    def read(self, spec: Linear, call: Call, q: Tensor, state: LinearState) -> Tensor:
        out: Tensor = self.module.read(spec.feature_map, q, state, **_named(call), normalise=spec.normalise)
        return out


def _named(call: Call) -> dict[str, Any]:
    return {"scale": call.scale, "chunk_size": call.chunk_size}


BACKENDS = by_name(
    _Module("native", native),
    _Module("chunked", chunked),
    _Module("reference", reference),
    _Module("triton", triton),
    _Module("fla", fla),
)


def full(spec: Linear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> Tensor:
    """out (B, Hq, L, E): every query sees the state and every key."""
    spec.feature_map.check_ready()
    backend = choose(BACKENDS, spec, call, q, k, v)
    with full_precision(q):
        return backend.full(spec, call, q, k, v, state).to(v.dtype)


def causal(spec: Linear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: LinearState) -> tuple[Tensor, LinearState]:
    """out (B, Hq, L, E) and the state after the last token; token i sees the state and tokens 0..i."""
    spec.feature_map.check_ready()
    backend = choose(BACKENDS, spec, call, q, k, v)
    with full_precision(q):
        out, after = backend.scan(spec, call, q, k, v, state)
    return out.to(v.dtype), after


def absorb(spec: Linear, call: Call, k: Tensor, v: Tensor, state: LinearState) -> LinearState:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E)."""
    spec.feature_map.check_ready()
    backend = choose(BACKENDS, spec, call, k, v)
    with full_precision(k):
        return backend.absorb(spec, call, k, v, state)


def read(spec: Linear, call: Call, q: Tensor, state: LinearState) -> Tensor:
    """out (B, Hq, L, E) in q's dtype: every absorbed key is visible to every query."""
    spec.feature_map.check_ready()
    backend = choose(BACKENDS, spec, call, q)
    with full_precision(q):
        return backend.read(spec, call, q, state).to(q.dtype)
