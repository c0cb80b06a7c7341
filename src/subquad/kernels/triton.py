"""Kernelised attention in Triton, for GPUs: must be asked for by name, `backend="triton"`.

Forward and backward, full and causal, with key masks, states and grouped-query heads, for exponential maps (positive,
hyperbolic, OPRF, SDERF) with a running maximum per feature. The kernels agree with the reference under Triton's
interpreter; they have not been timed on a GPU, so no call is ever given to them without being asked.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ..features.base import FeatureMap
from ..features.random import ExponentialFeatures
from ..state import LinearState
from .native import NO_MASK, make_form

__all__ = ["absorb", "causal", "full", "read", "refusal"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A head stands in one block of the kernels.
WIDEST = 256


def refusal(feature_map: FeatureMap, *tensors: Tensor, normalise: bool = True) -> str:
    """Why the Triton kernels cannot take this call, or "" if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for x in tensors:
        if x.device.type == "cpu" and not interpreted:
            return "they run on a GPU, got a tensor on cpu (TRITON_INTERPRET=1 runs them there, slowly, for tests)"
        if x.dtype not in DTYPES:
            return f"they take float32, bfloat16 and float16, got {x.dtype}"
        if x.shape[-1] > WIDEST:
            return f"they take head and value widths up to {WIDEST}, got {x.shape[-1]}"
    if not isinstance(feature_map, ExponentialFeatures):
        return f"they take exponential features (positive, hyperbolic, oprf, sderf), got {type(feature_map).__name__}"
    if any(p.requires_grad for p in feature_map.parameters()):
        return "the parameters of the feature map want a gradient, which only the chunked backend computes"
    if not normalise:
        return "exponential features are only known up to a factor per row, so normalise must be True"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms need torch's own operators"
    return ""


def _run(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    key_mask: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, LinearState]:
    # Here, because it needs Triton.
    from .triton_operators import attention

    form = make_form(feature_map, scale, butterflies=False)
    if form is None:
        raise ValueError(
            f"backend='triton' needs a positive scale for exponential features, got {scale}. "
            "Use backend=None or 'chunked'"
        )
    weight, bias, tilt = form.arrays[0], form.arrays[3], form.arrays[4]
    if form.antithetic:
        weight, bias = torch.cat([weight, -weight], 1), torch.cat([bias, bias], 1)
    if not tilt.numel():
        tilt = weight.new_zeros((1, q.shape[3]))
    if form.means is not None:
        groups = q.shape[1] // max(1, k.shape[1])
        q = q.to(torch.float32) - form.means[0].repeat_interleave(groups, 0)
        k = k.to(torch.float32) - form.means[1]
    past = [state.weighted, state.normaliser, state.log_max.expand_as(state.normaliser)]
    mask = NO_MASK.to(q.device) if key_mask is None else key_mask
    past, maps = [x.to(torch.float32) for x in past], [weight, bias, tilt]
    result = attention(q, k, v, mask, past, maps, form.square, causal)
    count = k.shape[-2] if key_mask is None else key_mask.sum(-1)
    return result[0], LinearState(result[1], result[2], result[3].detach(), state.count + count, state.origin)


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
    return _run(feature_map, q, k, v, state, key_mask, scale, False)[0]


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
    return _run(feature_map, q, k, v, state, key_mask, scale, True)


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
    return _run(feature_map, none, k, v, state, key_mask, scale, False)[1]


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
    return _run(feature_map, q, keys, values, state, None, scale, False)[0]
