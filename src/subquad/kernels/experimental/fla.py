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
from dataclasses import replace

import torch
from torch import Tensor

from ...features.base import Features, weigh
from ...state import State, Sums, finite, masked, safe_divide
from ..operator import Backend, Call
from ..windowed_linear.definition import WindowedLinear

__all__ = ["FlashLinearAttention"]


def _tokens_first(x: Tensor) -> Tensor:
    """(B, H, L, width) -> (B, L, H, width), the library's layout."""
    return x.transpose(1, 2).contiguous()


class FlashLinearAttention(Backend[WindowedLinear]):
    """Causal linear attention by flash-linear-attention, where it is installed and named."""

    name = "fla"

    def automatic(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> bool:
        return False

    def refusal(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> str:
        if importlib.util.find_spec("fla") is None:
            return "the package fla is not installed (pip install flash-linear-attention)"
        for x in tensors:
            if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                return "its kernels run on a GPU, got a tensor on cpu"
            if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                return f"its kernels take float32, bfloat16 and float16, got {x.dtype}"
        phi = spec.feature_map
        if phi is None or spec.window is not None:
            return "its kernels have no window"
        if not spec.causal:
            return "its kernels are causal: no is_causal=False, no absorb, no read"
        if phi.per_key_scale == "token":
            return f"{type(phi).__name__} has one scale per token, which only the chunked backend carries"
        if not spec.normalise and phi.per_key_scale != "none":
            return "exponential features are only known up to a factor per row, so normalise must be True"
        return ""

    def attend(self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.scan(spec, call, q, k, v, spec.empty(k, v, call.scale, ""))[0]

    def scan(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State
    ) -> tuple[Tensor, State]:
        from fla.ops.gla import chunk_gla
        from fla.ops.linear_attn import chunk_linear_attn

        phi, far = spec.feature_map, state.far
        assert phi is not None and far is not None
        batch, heads, length, _ = k.shape
        groups = q.shape[1] // max(1, heads)
        if length == 0:
            return far.weighted.new_zeros((*q.shape[:3], v.shape[-1])), state
        hidden = None if call.key_mask is None else ~call.key_mask[:, None, :, None]
        keys, values = masked(phi.keys(k.to(torch.float32), call.scale), hidden), v.to(torch.float32)
        values = values if hidden is None else values.masked_fill(hidden, 0.0)
        rows = phi.queries(q.to(torch.float32).reshape(batch, heads, groups * length, q.shape[-1]), call.scale)
        queries = Features(*(None if x is None else x.reshape(batch, heads, groups, length, -1) for x in rows))

        # One state per query head inside the kernels: they know no grouped heads.
        shared = [torch.cat([values, torch.ones_like(values[..., :1])], -1)]
        start = torch.cat([far.weighted, far.normaliser.unsqueeze(-1)], -1).repeat_interleave(groups, 1)
        log_max = far.log_max
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
        options = {"scale": 1.0, "initial_state": start.contiguous(), "output_final_state": True}
        given = _tokens_first(query_weights.reshape(batch, heads * groups, length, -1))
        if keys.log_scale is None:
            out, after = chunk_linear_attn(given, over[1], over[0], normalize=False, **options)
        else:
            out, after = chunk_gla(given, over[1], over[0], over[2], **options)
        out, after = out.transpose(1, 2), after[:, ::groups]
        count = state.count + (length if call.key_mask is None else call.key_mask.sum(-1))
        result = replace(state, far=Sums(after[..., :-1], after[..., -1], log_max), count=count)
        return safe_divide(out[..., :-1], out[..., -1]) if spec.normalise else out[..., :-1], result
