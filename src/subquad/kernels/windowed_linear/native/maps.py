"""Feature maps as the native kernels take them: arrays, kept until the map changes, or features by torch."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ....features.base import FeatureMap, Features, scaled
from ....features.elementwise import ElementwiseFeatures, LogFeatures
from ....features.polynomial import PolynomialFeatures
from ....features.random import ExponentialFeatures, GeneralisedFeatures
from ..map_arrays import MapArrays, map_arrays
from .operator import PACKED_SIZE, pack_maps

__all__ = ["NO_MAP", "NativeMap", "fused", "map_inputs", "multiplied"]


class NativeMap(NamedTuple):
    """A map for the kernels, and its arrays as the library sees them: alone, and beside near keys."""

    map: MapArrays
    packed: bytes | None = None
    packed_rows: bytes | None = None  # with the queries' own tilt, see `pack_maps`

    @property
    def options(self) -> tuple[float, str, bool, float]:
        """The first of `Options`."""
        return self.map[1:5]


TAYLOR = NativeMap(MapArrays(function="taylor"))
# Nothing is far.
NO_MAP = NativeMap(MapArrays(function="none"), bytes(PACKED_SIZE), bytes(PACKED_SIZE))


def fused(feature_map: FeatureMap) -> bool:
    """Whether the kernels compute this map, or exponentiate what torch computed of it.

    Parameters that want a gradient are for the chunked backend: it differentiates the map chunk by chunk.
    """
    if torch.is_grad_enabled() and any(p.requires_grad for p in feature_map.parameters()):
        return False
    if isinstance(feature_map, ElementwiseFeatures):
        return isinstance(feature_map.function, str)
    if isinstance(feature_map, GeneralisedFeatures):
        return feature_map.function is F.relu
    return isinstance(feature_map, (ExponentialFeatures, LogFeatures))


def multiplied(feature_map: FeatureMap) -> bool:
    """Whether the map is products of components, which the kernels form chunk by chunk: Taylor features of degree 2."""
    return isinstance(feature_map, PolynomialFeatures) and feature_map.degree == 2 and feature_map.calibration is None


class _Cached(NamedTuple):
    """A map's arrays, and what they were made from: a few entries to look at, instead of the whole module tree."""

    scale: float
    children: list[tuple[dict[str, Any], str, Any]]
    buffers: list[tuple[dict[str, Any], str, Tensor, int]]
    found: NativeMap

    def valid(self, scale: float) -> bool:
        return (
            self.scale == scale
            and all(where.get(name) is child for where, name, child in self.children)
            and all(where.get(name) is b and b._version == version for where, name, b, version in self.buffers)
        )


_cache: WeakKeyDictionary[FeatureMap, _Cached] = WeakKeyDictionary()


def _native_map(feature_map: FeatureMap, scale: float) -> NativeMap | None:
    """The map for the kernels, kept until one of its buffers changes; None where torch has to compute the features."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not traced:
        kept = _cache.get(feature_map)
        if kept is not None and kept.valid(scale):
            return kept.found
    # These are no projections: said here, since a decode step has no time to find out.
    if isinstance(feature_map, LogFeatures | PolynomialFeatures):
        return None
    if any(p.requires_grad for p in feature_map.parameters()):
        return None
    tensors = list(feature_map.buffers())
    if traced or list(feature_map.parameters()) or any(b.is_inference() or type(b) is not Tensor for b in tensors):
        arrays = map_arrays(feature_map, scale)
        return None if arrays is None else NativeMap(arrays)
    # Ordinary tensors even inside inference mode: a later training step may save them for its backward.
    with torch.inference_mode(False), torch.no_grad():
        made = map_arrays(feature_map, scale)
    if made is None:
        return None
    found = NativeMap(made, pack_maps(made.arrays, made.square), pack_maps([*made.arrays, made.tilt], made.square))
    modules = list(feature_map.modules())
    children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
    buffers = [(m._buffers, name, b, b._version) for m in modules for name, b in m._buffers.items() if b is not None]
    _cache[feature_map] = _Cached(scale, children, buffers, found)
    return found


def map_inputs(feature_map: FeatureMap, q: Tensor, k: Tensor, scale: float) -> tuple[NativeMap, Tensor, Tensor]:
    """The map, and queries and keys as it takes them: centred, or features already where torch has to compute them."""
    found = _native_map(feature_map, scale)
    if found is not None and found.map.means is not None:
        means = found.map.means
        groups = q.shape[1] // max(1, k.shape[1])
        return (
            found,
            q.to(torch.float32) - means[0].repeat_interleave(groups, 0),
            k.to(torch.float32) - means[1],
        )
    if found is not None:
        return found, q, k

    def features(x: Tensor, *, queries: bool) -> tuple[Tensor, str]:
        made: Features = (feature_map.queries if queries else feature_map.keys)(x.to(torch.float32), scale)
        if made.log_scale is None:
            assert made.values is not None
            return made.values, "identity"
        assert made.values is None
        return made.log_scale, "exp"

    if isinstance(feature_map, ElementwiseFeatures) and isinstance(feature_map.function, str):
        plain = NativeMap(MapArrays(function=feature_map.function))
        return plain, scaled(q, scale, queries=True), scaled(k, scale, queries=False)
    if multiplied(feature_map):
        # The products would double the rounding of a lower precision.
        q, k = q.to(torch.float32), k.to(torch.float32)
        return TAYLOR, scaled(q, scale, queries=True), scaled(k, scale, queries=False)
    heads, groups = k.shape[1], q.shape[1] // max(1, k.shape[1])
    rows = q.reshape(q.shape[0], heads, groups * q.shape[2], q.shape[3])
    query_features, kind = features(rows, queries=True)
    key_features, _ = features(k, queries=False)
    query_features = query_features.reshape(q.shape[0], q.shape[1], q.shape[2], query_features.shape[-1])
    return NativeMap(MapArrays(function=kind)), query_features, key_features
