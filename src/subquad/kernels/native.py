"""Kernelised attention in fused C++ loops on the CPU: project, exponentiate, accumulate, all inside the cache.

The chunked backend pays one pass over memory and one barrier per torch operation; here one loop per head takes 48
tokens at a time through all steps (see csrc/). Exponential maps are handed over as projections
(`FeatureMap.linear_form`), Hadamard projections matrix-free, elu + 1, relu and the products of Taylor features by name;
any other map has its features computed by torch first.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.base import FeatureMap, Features, scaled
from ..features.elementwise import ElementwiseFeatures, LogFeatures
from ..features.hadamard import HadamardProjection
from ..features.polynomial import PolynomialFeatures
from ..features.random import ExponentialFeatures, GeneralisedFeatures
from ..state import LinearState
from . import native_library
from .native_operators import Attention, attention, call_forward, pack_maps
from .native_step import call_step
from .native_transforms import functional_attention

__all__ = ["NO_MASK", "Form", "absorb", "causal", "full", "fused", "make_form", "multiplied", "read", "refusal"]

# Opened here and not at the first call, which may happen inside torch.compile. It takes less than a millisecond.
native_library.missing()
NOTHING = torch.empty(0)
NO_MASK = torch.empty(0, dtype=torch.bool)


class Form(NamedTuple):
    """What the kernels need to know of a map: the arrays of `native_operators.attention`, and how to read them."""

    arrays: list[Tensor]
    square: float = 0.0
    function: str = "identity"
    antithetic: bool = False
    epsilon: float = 0.0
    means: tuple[Tensor, Tensor] | None = None  # (H, 1, D) each: subtracted from queries and keys beforehand
    maps: bytes | None = None  # the arrays as the library sees them
    # What the normaliser of plain attention cancels: log phi_q is larger by square |y|^2 + tilt . y + level.
    tilt: Tensor = NOTHING  # (H, D), y = q - mean
    level: Tensor | None = None  # (H,)
    row_maps: bytes | None = None  # the arrays and the tilt, likewise


def fused(feature_map: FeatureMap) -> bool:
    """Whether the kernels compute this map themselves, so that no (L, M) features are ever stored.

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


def refusal(feature_map: FeatureMap, *tensors: Tensor, normalise: bool = True) -> str:
    """Why the native kernels cannot take this call, or "" if they can."""
    missing = native_library.missing()
    if missing:
        return missing
    for x in tensors:
        if x.device.type != "cpu":
            return f"they run on the CPU, got a tensor on {x.device}"
        if x.dtype not in native_library.DTYPES:
            return f"they take float32, bfloat16 and float16, got {x.dtype}"
    if feature_map.per_key_scale == "token":
        return f"{type(feature_map).__name__} has one scale per token, which only the chunked backend carries"
    if not normalise and feature_map.per_key_scale != "none":
        return "exponential features are only known up to a factor per row, so normalise=False needs backend='chunked'"
    return ""


class _Kept(NamedTuple):
    """A form, and what it was made from. Looking at these few entries is much quicker than walking the module tree."""

    scale: float
    children: list[tuple[dict[str, Any], str, Any]]
    buffers: list[tuple[dict[str, Any], str, Tensor, int]]
    form: Form

    def valid(self, scale: float) -> bool:
        return (
            self.scale == scale
            and all(where.get(name) is child for where, name, child in self.children)
            and all(where.get(name) is b and b._version == version for where, name, b, version in self.buffers)
        )


_forms: WeakKeyDictionary[FeatureMap, _Kept] = WeakKeyDictionary()


def _form(feature_map: FeatureMap, scale: float) -> Form | None:
    """The map for the kernels, kept until one of its buffers changes; None where torch has to compute the features."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not traced:
        kept = _forms.get(feature_map)
        if kept is not None and kept.valid(scale):
            return kept.form
    fused = isinstance(feature_map, (ExponentialFeatures, GeneralisedFeatures, ElementwiseFeatures))
    if not fused or any(p.requires_grad for p in feature_map.parameters()):
        return None
    tensors = list(feature_map.buffers())
    if traced or list(feature_map.parameters()) or any(b.is_inference() or type(b) is not Tensor for b in tensors):
        return make_form(feature_map, scale)
    # Ordinary tensors even inside inference mode: a later training step may save them for its backward.
    with torch.inference_mode(False), torch.no_grad():
        form = make_form(feature_map, scale)
    if form is not None:
        form = form._replace(
            maps=pack_maps(form.arrays, form.square), row_maps=pack_maps([*form.arrays, form.tilt], form.square)
        )
        modules = list(feature_map.modules())
        children = [(m._modules, name, child) for m in modules for name, child in m._modules.items()]
        buffers = [
            (m._buffers, name, b, b._version) for m in modules for name, b in m._buffers.items() if b is not None
        ]
        _forms[feature_map] = _Kept(scale, children, buffers, form)
    return form


def make_form(feature_map: FeatureMap, scale: float, *, butterflies: bool = True) -> Form | None:
    """The map as a projection and a function, or None where it is none; `butterflies` keeps Hadamard matrix-free."""
    if isinstance(feature_map, ElementwiseFeatures):
        if isinstance(feature_map.function, str) and scale == 1.0:
            return Form([NOTHING] * 7, function=feature_map.function)
        return None
    if isinstance(feature_map, GeneralisedFeatures):
        if feature_map.function is not F.relu or scale <= 0:
            return None
        # The factor 1/sqrt(M) goes into the state like everywhere else, so it must not be dropped here.
        factor = feature_map.num_features**-0.5
        weight = _stacked(feature_map.projection.as_matrix(torch.float32), 3) * (math.sqrt(scale) * factor)
        return Form([weight.contiguous(), *[NOTHING] * 6], function="relu", epsilon=feature_map.kernel_eps * factor)
    linear = feature_map.linear_form(scale)
    if linear is None or not isinstance(feature_map, ExponentialFeatures):
        return None
    arrays = [linear.weight, NOTHING, NOTHING, linear.bias, NOTHING, NOTHING, NOTHING]
    projection = feature_map.projection
    matrix_free = butterflies and feature_map.features != "sderf"
    if matrix_free and isinstance(projection, HadamardProjection) and _butterflies_win(projection):
        lengths = _stacked(projection.lengths, 2) * (
            math.sqrt(scale) * projection.padded_dim ** (-0.5 * projection.blocks)
        )
        if feature_map.features == "oprf":
            lengths = lengths * (1.0 - 4.0 * feature_map.a).sqrt()
        arrays[0], arrays[5], arrays[6] = NOTHING, _stacked(projection.signs, 4), lengths
    means, tilt, level = None, NOTHING, None
    if feature_map.center:
        # Tokens are centred before they are projected: adding W mean back as an offset would cancel large numbers.
        assert feature_map.calibration is not None
        q_mean, k_mean = (
            x.to(torch.float32).unsqueeze(-2)
            for x in (feature_map.calibration.query_mean, feature_map.calibration.key_mean)
        )
        means = (q_mean, k_mean)
        arrays[4] = linear.linear + 2.0 * linear.quadratic * k_mean.squeeze(-2)
        # What the map gives at its centre, so that a state means the same to every backend.
        at_centre = feature_map.keys(k_mean.unsqueeze(0), scale).log_scale
        assert at_centre is not None
        arrays[3] = at_centre[0, :, 0, : linear.bias.shape[-1]]
        rows_at_centre = feature_map.queries(q_mean.unsqueeze(0), scale).log_scale
        assert rows_at_centre is not None
        level = (rows_at_centre - at_centre)[0, :, 0, 0]  # the same for every feature
        tilt = scale * k_mean.squeeze(-2)
        if feature_map.kernel == "gaussian":
            tilt = tilt - scale * q_mean.squeeze(-2)
        tilt = tilt.contiguous()
    arrays = [x.to(torch.float32).contiguous() for x in arrays]
    return Form(arrays, linear.quadratic, "exp", linear.antithetic, means=means, tilt=tilt, level=level)


def _stacked(x: Tensor, dims: int) -> Tensor:
    """With a leading head axis, of length 1 where the heads share."""
    return x if x.dim() == dims else x.unsqueeze(0)


def _butterflies_win(projection: HadamardProjection) -> bool:
    """k log2(d') additions per row against d multiply-adds; below about 32 columns a matrix is as fast."""
    width = projection.padded_dim
    return projection.blocks * math.log2(width) * 2 < projection.dim


def _inputs(feature_map: FeatureMap, q: Tensor, k: Tensor, scale: float) -> tuple[Form, Tensor, Tensor]:
    form = _form(feature_map, scale)
    if form is not None and form.means is not None:
        groups = q.shape[1] // max(1, k.shape[1])
        return (
            form,
            q.to(torch.float32) - form.means[0].repeat_interleave(groups, 0),
            k.to(torch.float32) - form.means[1],
        )
    if form is not None:
        return form, q, k

    def features(x: Tensor, *, queries: bool) -> tuple[Tensor, str]:
        found: Features = (feature_map.queries if queries else feature_map.keys)(x.to(torch.float32), scale)
        if found.log_scale is None:
            assert found.values is not None
            return found.values, "identity"
        assert found.values is None
        return found.log_scale, "exp"

    if isinstance(feature_map, ElementwiseFeatures) and isinstance(feature_map.function, str):
        form = Form([NOTHING] * 7, function=feature_map.function)
        return form, scaled(q, scale, queries=True), scaled(k, scale, queries=False)
    heads, groups = k.shape[1], q.shape[1] // max(1, k.shape[1])
    rows = q.reshape(q.shape[0], heads, groups * q.shape[2], q.shape[3])
    query_features, kind = features(rows, queries=True)
    key_features, _ = features(k, queries=False)
    query_features = query_features.reshape(q.shape[0], q.shape[1], q.shape[2], query_features.shape[-1])
    return Form([NOTHING] * 7, function=kind), query_features, key_features


def _run(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
    normalise: bool,
) -> Attention:
    if multiplied(feature_map):
        q, k = q.to(torch.float32), k.to(torch.float32)  # the products would double the rounding of a lower precision
        form = Form([NOTHING] * 7, function="taylor")
        q, k = scaled(q, scale, queries=True), scaled(k, scale, queries=False)
    else:
        form, q, k = _inputs(feature_map, q, k, scale)
    log_max = state.log_max
    if log_max.shape[-1] != state.normaliser.shape[-1]:
        log_max = log_max.expand_as(state.normaliser)
    past = [state.weighted, state.normaliser, log_max]
    past = [x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous() for x in past]
    mask = NO_MASK if key_mask is None else key_mask
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *past[:2]))
    arguments = (q, k, v, mask, past, *form[:5], causal, normalise)
    traced = any(type(x) is not Tensor and type(x) is not torch.nn.Parameter for x in (q, k, v, *past))
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and (traced or torch.compiler.is_compiling()):
        return _rounded(attention(*arguments, keep=wanted), v.dtype)
    if transformed or wanted:
        return _rounded(functional_attention(*arguments, maps=form.maps), v.dtype)
    if causal and q.shape[2] == 1 and k.shape[2] == 1:
        return call_step(q, k, v, mask, past, form[:5], normalise=normalise, maps=form.maps)
    return call_forward(*arguments, keep=False, maps=form.maps)


def _rounded(result: Attention, dtype: torch.dtype) -> Attention:
    return result[0].to(dtype), *result[1:]


def _after(state: LinearState, result: Attention, k: Tensor, key_mask: Tensor | None) -> LinearState:
    count = k.shape[-2] if key_mask is None else key_mask.sum(-1)
    # Maps without a log scale keep their c = 0 of shape (B, H, 1).
    log_max = result[3] if state.log_max.shape[-1] != 1 or result[3].shape[-1] == 1 else state.log_max
    log_max = log_max.detach() if log_max.requires_grad else log_max
    return LinearState(result[1], result[2], log_max, state.count + count, state.origin)


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
) -> Tensor:
    """out (B, Hq, L, E): every query sees the state and every key. The kernels choose their own chunks."""
    return _run(feature_map, q, k, v, state, key_mask, scale, False, normalise)[0]


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
) -> tuple[Tensor, LinearState]:
    """out (B, Hq, L, E) and the state after the last token; token i sees the state and tokens 0..i."""
    result = _run(feature_map, q, k, v, state, key_mask, scale, True, normalise)
    return result[0], _after(state, result, k, key_mask)


def absorb(
    feature_map: FeatureMap,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> LinearState:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E); `key_mask` (B, S) True = real."""
    none = k.new_empty((k.shape[0], k.shape[1], 0, k.shape[3]))
    result = _run(feature_map, none, k, v, state, key_mask, scale, False, True)
    return _after(state, result, k, key_mask)


def read(
    feature_map: FeatureMap,
    q: Tensor,
    state: LinearState,
    *,
    scale: float,
    chunk_size: int | None = None,
    normalise: bool = True,
) -> Tensor:
    """out (B, Hq, L, E) for queries q (B, Hq, L, D): every absorbed key is visible to every query."""
    batch, heads, _, width = state.weighted.shape
    keys = q.new_empty((batch, heads, 0, q.shape[3]))
    values = state.weighted.new_empty((batch, heads, 0, width))
    return _run(feature_map, q, keys, values, state, None, scale, False, normalise)[0]
