"""Our feature maps on the kernels of flash-linear-attention: must be asked for by name, `backend="fla"`.

    plain maps (elu + 1, relu, Taylor, callables)    chunk_linear_attn:  S_t = S_{t-1} + k_t v_t^T
    exponential maps                                 chunk_gla:          S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T

A running maximum per feature, c_t = max(c_{t-1}, log phi(k_t)), is a gate of gated linear attention (Yang et al.): with
g_t = c_{t-1} - c_t <= 0, k_t = phi(k_t) e^{-c_t} and q_t = phi(q_t) e^{c_t} the two recurrences are the same, so no row
meets a shift from its future. The normaliser is one more column of values, all 1; the library's own adds 1e-10.

Those kernels are causal, need a GPU, and may multiply float32 in TF32. What they are handed has been tested with a
stand-in of the same signature in plain torch; on a GPU it has been neither run nor timed.
"""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from ..features.base import FeatureMap, Features, weigh
from ..state import LinearState, finite, safe_divide
from .chunked import masked

__all__ = ["absorb", "causal", "full", "read", "refusal"]


def refusal(feature_map: FeatureMap, *tensors: Tensor, normalise: bool = True) -> str:
    """Why flash-linear-attention cannot take this call, or "" if it can."""
    if importlib.util.find_spec("fla") is None:
        return "the package fla is not installed (pip install flash-linear-attention)"
    for x in tensors:
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "its kernels run on a GPU, got a tensor on cpu"
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"its kernels take float32, bfloat16 and float16, got {x.dtype}"
    if feature_map.per_key_scale == "token":
        return f"{type(feature_map).__name__} has one scale per token, which only the chunked backend carries"
    if not normalise and feature_map.per_key_scale != "none":
        return "exponential features are only known up to a factor per row, so normalise must be True"
    return ""


def _tokens_first(x: Tensor) -> Tensor:
    """(B, H, L, width) -> (B, L, H, width), the library's layout."""
    return x.transpose(1, 2).contiguous()


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
    from fla.ops.gla import chunk_gla
    from fla.ops.linear_attn import chunk_linear_attn

    batch, heads, length, _ = k.shape
    groups = q.shape[1] // max(1, heads)
    if length == 0:
        return state.weighted.new_zeros((*q.shape[:3], v.shape[-1])), state
    mask = None if key_mask is None else key_mask[:, None, :, None]
    keys, values = masked(feature_map.keys(k.to(torch.float32), scale), v.to(torch.float32), mask)
    assert values is not None
    rows = feature_map.queries(q.to(torch.float32).reshape(batch, heads, groups * length, q.shape[-1]), scale)
    queries = Features(*(None if x is None else x.reshape(batch, heads, groups, length, -1) for x in rows))

    # One state per query head inside the kernels: they know no grouped heads.
    shared = [torch.cat([values, torch.ones_like(values[..., :1])], -1)]
    start = torch.cat([state.weighted, state.normaliser.unsqueeze(-1)], -1).repeat_interleave(groups, 1)
    log_max = state.log_max
    if keys.log_scale is None:
        query_weights = weigh(queries, None)
        shared.append(weigh(keys, None))
    else:
        with torch.no_grad():
            before = log_max.unsqueeze(-2)
            tops = torch.maximum(keys.log_scale.cummax(-2).values, before)
            earlier = torch.cat([before, tops[..., :-1, :]], -2)
            # Nothing was absorbed before the first key, so there is nothing to fade.
            gates = torch.where(earlier.isinf(), 0.0, earlier - tops)
            log_max = tops[..., -1, :]
        assert queries.log_scale is not None
        shifted = queries.log_scale + tops.unsqueeze(2)
        query_weights = weigh(Features(queries.values, shifted), -finite(shifted.detach().amax(-1, keepdim=True)))
        shared += [weigh(keys, -finite(tops)), gates]
    over = [_tokens_first(x.repeat_interleave(groups, 1)) for x in shared]
    call = {"scale": 1.0, "initial_state": start.contiguous(), "output_final_state": True}
    given = _tokens_first(query_weights.reshape(batch, heads * groups, length, -1))
    if keys.log_scale is None:
        out, after = chunk_linear_attn(given, over[1], over[0], normalize=False, **call)
    else:
        out, after = chunk_gla(given, over[1], over[0], over[2], **call)
    out, after = out.transpose(1, 2), after[:, ::groups]
    count = length if key_mask is None else key_mask.sum(-1)
    result = LinearState(after[..., :-1], after[..., -1], log_max, state.count + count, state.origin)
    return safe_divide(out[..., :-1], out[..., -1]) if normalise else out[..., :-1], result


def _causal_only(what: str) -> ValueError:
    return ValueError(f"backend='fla' has causal kernels only and cannot {what}. Use backend=None or 'chunked'")


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
    """Refused: two matrix products, which need no kernel."""
    raise _causal_only("attend to every key (is_causal=False)")


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
    """Refused, like `full`."""
    raise _causal_only("absorb keys without queries")


def read(
    feature_map: FeatureMap,
    q: Tensor,
    state: LinearState,
    *,
    scale: float,
    chunk_size: int | None = None,
    normalise: bool = True,
) -> Tensor:
    """Refused, like `full`."""
    raise _causal_only("read a state without keys")
