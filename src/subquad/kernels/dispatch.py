"""Who computes: one operator, several backends, one meaning.

`backend=None` takes the fastest backend that supports the call. A backend named by the caller is used or the call is
refused with the reason; it never falls back to another one silently. `triton` and `fla` have not been timed on a GPU:
they are used where they are named and nowhere else.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from .. import checks
from ..features.base import FeatureMap
from ..features.precision import full_precision
from ..state import LinearState
from . import chunked, fla, native, reference, triton

__all__ = ["BACKENDS", "absorb", "causal", "check_backend", "choose_backend", "full", "read"]

BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "chunked": chunked,
    "native": native,
    "triton": triton,
    "fla": fla,
}


def check_backend(backend: str, feature_map: FeatureMap, *tensors: Tensor, normalise: bool = True) -> None:
    """Refuse an unknown name, and a backend by its reason where it cannot take these tensors."""
    checks.check_option("backend", backend, BACKENDS)
    module = BACKENDS[backend]
    if module not in (reference, chunked):
        reason = module.refusal(feature_map, *tensors, normalise=normalise)
        if reason:
            raise ValueError(f"backend={backend!r} cannot take this call: {reason}. Use backend=None or 'chunked'")


def choose_backend(
    backend: str | None,
    feature_map: FeatureMap,
    *tensors: Tensor,
    normalise: bool = True,
    chunk_size: int | None = None,
) -> ModuleType:
    """The module that will compute: the named one, or the fastest that supports these tensors."""
    if backend is None:
        # Who asks for chunks of a size gets the backend that has them: the native kernels choose their own.
        if (
            chunk_size is None
            and (native.fused(feature_map) or native.multiplied(feature_map))
            and not native.refusal(feature_map, *tensors, normalise=normalise)
        ):
            return native
        return chunked
    check_backend(backend, feature_map, *tensors, normalise=normalise)
    return BACKENDS[backend]


def _prepare(feature_map: FeatureMap, chunk_size: int | None) -> None:
    feature_map.check_ready()
    checks.check_chunk_size(chunk_size)


def full(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
    normalise: bool = True,
    backend: str | None = None,
) -> Tensor:
    """out (B, Hq, L, E): every query sees the state and every key."""
    _prepare(feature_map, chunk_size)
    module = choose_backend(backend, feature_map, q, k, v, normalise=normalise, chunk_size=chunk_size)
    with full_precision(q):
        out: Tensor = module.full(
            feature_map,
            q,
            k,
            v,
            state,
            scale=scale,
            key_mask=key_mask,
            chunk_size=chunk_size,
            normalise=normalise,
        )
    return out.to(v.dtype)


def causal(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
    normalise: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, LinearState]:
    """out (B, Hq, L, E) and the state after the last token; token i sees the state and tokens 0..i."""
    _prepare(feature_map, chunk_size)
    module = choose_backend(backend, feature_map, q, k, v, normalise=normalise, chunk_size=chunk_size)
    with full_precision(q):
        out, after = module.causal(
            feature_map,
            q,
            k,
            v,
            state,
            scale=scale,
            key_mask=key_mask,
            chunk_size=chunk_size,
            normalise=normalise,
        )
    return out.to(v.dtype), after


def absorb(
    feature_map: FeatureMap,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str | None = None,
) -> LinearState:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E)."""
    _prepare(feature_map, chunk_size)
    module = choose_backend(backend, feature_map, k, v, chunk_size=chunk_size)
    with full_precision(k):
        after: LinearState = module.absorb(
            feature_map, k, v, state, scale=scale, key_mask=key_mask, chunk_size=chunk_size
        )
    return after


def read(
    feature_map: FeatureMap,
    q: Tensor,
    state: LinearState,
    *,
    scale: float,
    chunk_size: int | None = None,
    normalise: bool = True,
    backend: str | None = None,
) -> Tensor:
    """out (B, Hq, L, E) in q's dtype: every absorbed key is visible to every query."""
    _prepare(feature_map, chunk_size)
    module = choose_backend(backend, feature_map, q, normalise=normalise, chunk_size=chunk_size)
    with full_precision(q):
        out: Tensor = module.read(feature_map, q, state, scale=scale, chunk_size=chunk_size, normalise=normalise)
    return out.to(q.dtype)
