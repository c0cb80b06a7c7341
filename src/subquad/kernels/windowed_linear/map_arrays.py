"""A feature map as plain arrays, for backends that fuse it: a projection and a function of one number.

Exponential maps are projections (`FeatureMap.linear_form`), Hadamard ones matrix-free; elu + 1 and relu go by name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...features.base import FeatureMap
from ...features.elementwise import ElementwiseFeatures
from ...features.hadamard import HadamardProjection
from ...features.random import ExponentialFeatures, GeneralisedFeatures

__all__ = ["NOTHING", "Arrays", "MapArrays", "map_arrays"]

NOTHING = torch.empty(0, dtype=torch.float32)


class Arrays(NamedTuple):
    """A projection by a matrix or by Hadamard butterflies, and what is added to log phi. Empty where there is none."""

    weight: Tensor = NOTHING  # (h, R, D), h = 1 or the number of KV heads
    bias: Tensor = NOTHING  # (h, R)
    tilt: Tensor = NOTHING  # (h, D): tilt . k
    signs: Tensor = NOTHING  # (h, n, k, D')
    norms: Tensor = NOTHING  # (h, R)


class MapArrays(NamedTuple):
    """A feature map for fused kernels: its arrays, and how to read them."""

    arrays: Arrays = Arrays()
    square: float = 0.0
    function: str = "identity"
    antithetic: bool = False
    epsilon: float = 0.0
    means: tuple[Tensor, Tensor] | None = None  # (H, 1, D) each: subtracted from queries and keys beforehand
    # What the normaliser of plain attention cancels: log phi_q is larger by square |y|^2 + tilt . y + level.
    tilt: Tensor = NOTHING  # (H, D), y = q - mean
    level: Tensor | None = None  # (H,)


def map_arrays(feature_map: FeatureMap, scale: float, *, butterflies: bool = True) -> MapArrays | None:
    """The map as a projection and a function, or None where it is none; `butterflies` keeps Hadamard matrix-free."""
    if isinstance(feature_map, ElementwiseFeatures):
        if isinstance(feature_map.function, str) and scale == 1.0:
            return MapArrays(function=feature_map.function)
        return None
    if isinstance(feature_map, GeneralisedFeatures):
        if feature_map.function is not F.relu or scale <= 0:
            return None
        # The factor 1/sqrt(M) goes into the state like everywhere else, so it must not be dropped here.
        factor = feature_map.num_features**-0.5
        weight = _stacked(feature_map.projection.as_matrix(torch.float32), 3) * (math.sqrt(scale) * factor)
        return MapArrays(Arrays(weight.contiguous()), function="relu", epsilon=feature_map.kernel_eps * factor)
    linear = feature_map.linear_form(scale)
    if linear is None or not isinstance(feature_map, ExponentialFeatures):
        return None
    arrays = Arrays(linear.weight, linear.bias)
    projection = feature_map.projection
    matrix_free = butterflies and feature_map.features != "sderf"
    if matrix_free and isinstance(projection, HadamardProjection) and _butterflies_win(projection):
        lengths = _stacked(projection.lengths, 2) * (
            math.sqrt(scale) * projection.padded_dim ** (-0.5 * projection.blocks)
        )
        if feature_map.features == "oprf":
            lengths = lengths * (1.0 - 4.0 * feature_map.a).sqrt()
        arrays = Arrays(bias=linear.bias, signs=_stacked(projection.signs, 4), norms=lengths)
    means, tilt, level = None, NOTHING, None
    if feature_map.center:
        # Tokens are centred before they are projected: adding W mean back as an offset would cancel large numbers.
        assert feature_map.calibration is not None
        q_mean, k_mean = (
            x.to(torch.float32).unsqueeze(-2)
            for x in (feature_map.calibration.query_mean, feature_map.calibration.key_mean)
        )
        means = (q_mean, k_mean)
        # What the map gives at its centre, so that a state means the same to every backend.
        at_centre = feature_map.keys(k_mean.unsqueeze(0), scale).log_scale
        assert at_centre is not None
        arrays = arrays._replace(
            bias=at_centre[0, :, 0, : linear.bias.shape[-1]],
            tilt=linear.linear + 2.0 * linear.quadratic * k_mean.squeeze(-2),
        )
        rows_at_centre = feature_map.queries(q_mean.unsqueeze(0), scale).log_scale
        assert rows_at_centre is not None
        level = (rows_at_centre - at_centre)[0, :, 0, 0]  # the same for every feature
        tilt = scale * k_mean.squeeze(-2)
        if feature_map.kernel == "gaussian":
            tilt = tilt - scale * q_mean.squeeze(-2)
        tilt = tilt.contiguous()
    arrays = Arrays(*(x.to(torch.float32).contiguous() for x in arrays))
    return MapArrays(arrays, linear.quadratic, "exp", linear.antithetic, means=means, tilt=tilt, level=level)


def _stacked(x: Tensor, dims: int) -> Tensor:
    """With a leading head axis, of length 1 where the heads share."""
    return x if x.dim() == dims else x.unsqueeze(0)


def _butterflies_win(projection: HadamardProjection) -> bool:
    """k log2(d') additions per row against d multiply-adds; below about 32 columns a matrix is as fast."""
    width = projection.padded_dim
    return projection.blocks * math.log2(width) * 2 < projection.dim
