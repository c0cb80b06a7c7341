"""Softmax attention itself, for what needs it beside or inside a mechanism: from its definition, or torch's fused one.

out_i = sum_j e^{scale q_i.k_j} v_j / sum_j e^{scale q_i.k_j},     j visible to i;     0 where no key is
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.precision import compute_dtype
from .operator import Call, refuse_second_derivatives

__all__ = ["dense_softmax", "fused_attention", "softmax_attention"]


def dense_softmax(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """From the definition, under a mask that broadcasts to (B, Hq, L, S)."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    dtype = compute_dtype(q)
    scores = (scale * q.to(dtype) @ k.to(dtype).mT).masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(~visible, 0.0)
    return (weights @ v.to(dtype)).to(v.dtype)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's scaled_dot_product_attention, whose fused kernels have a first derivative only."""
    q, k, v = refuse_second_derivatives("torch's fused attention", q, k, v)
    return F.scaled_dot_product_attention(q, k, v, **options)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool, past: int = 0) -> Tensor:
    """Of whole sequences, by torch's fused attention; backend="reference": `dense_softmax`.

    With `is_causal` query i stands at position past + i.
    """
    visible = None
    dense = call.backend == "reference"
    if call.key_mask is not None or dense or (is_causal and past and q.shape[2] > 1):
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        visible = (visible.tril(past) if is_causal else visible)[None, None]
        if call.key_mask is not None:
            visible = visible & call.key_mask[:, None, None, :]
    if dense:
        assert visible is not None
        return dense_softmax(q, k, v, visible, call.scale)
    grouped, scale = _decided(q.shape[1] != k.shape[1]), call.scale
    if scale <= 0:  # torch hides later keys before it scales, which makes -inf something else
        q, scale = q * scale, 1.0
    if visible is None:
        first = is_causal and _decided(past == 0)
        return fused_attention(q, k, v, is_causal=first, scale=scale, enable_gqa=grouped)
    # A row without a visible key would be 0/0: let it see everything, then make it 0.
    empty = ~visible.any(-1, keepdim=True)
    out = fused_attention(q, k, v, attn_mask=visible | empty, scale=scale, enable_gqa=grouped)
    return out.masked_fill(empty, 0.0)


def _decided(truth: bool) -> bool:
    """`truth` as a plain bool: with dynamic shapes torch.compile has a symbolic one, which torch's attention refuses.

    A branch makes the tracer decide; bool() would not.
    """
    if truth:  # noqa: SIM103
        return True
    return False
