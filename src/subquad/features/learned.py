"""Learned feature maps: W per head, trained so that the kernelised weights match softmax attention.

    softmax   phi(x) = [softmax(W x), softmax(-W x)]          exp   phi(x) = [e^{W x}, e^{-W x}]          M = 2 D

with x = sqrt(scale) q for queries and sqrt(scale) k for keys. Zhang et al., "The Hedgehog and the Porcupine: Expressive
Linear Attentions with Softmax Mimicry", 2024. Both are kept in log form, so that large W x neither overflow nor vanish.

Training minimises the cross-entropy to the softmax map, the mean over rows of sum_j -A_ij log A'_ij, which is the mean
KL(A_i || A'_i) plus the entropy of A, a constant.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import FeatureMap, Features, scaled
from .precision import compute_dtype, full_precision

__all__ = ["HedgehogFeatures", "fit", "mean_divergence"]


class HedgehogFeatures(FeatureMap):
    """phi(x) = [f(W x), f(-W x)], f = softmax or exp; W (H, D, D) starts as the identity.

    >>> phi = HedgehogFeatures(4, kv_heads=2)
    >>> phi.keys(torch.zeros(1, 2, 3, 4), 0.5).log_scale.exp().sum(-1)[0, 0]  # two softmaxes
    tensor([2., 2., 2.], grad_fn=<SelectBackward0>)
    """

    per_key_scale = "feature"

    def __init__(self, head_dim: int, *, kv_heads: int, activation: str = "softmax", shared: bool = False) -> None:
        super().__init__()
        self.num_features, self.activation = 2 * head_dim, activation
        start = torch.eye(head_dim).repeat(kv_heads, 1, 1)
        self.query_weight = nn.Parameter(start)
        self.key_weight = self.query_weight if shared else nn.Parameter(start.clone())

    def default_scale(self, head_dim: int) -> float:
        return float(head_dim**-0.5)

    def _log_features(self, x: Tensor, weight: Tensor) -> Features:
        projected = x @ weight.to(x.dtype).mT
        both = torch.stack([projected, -projected], -2)  # (..., L, 2, D): each half has a softmax of its own
        if self.activation == "softmax":
            both = torch.log_softmax(both, -1)
        return Features(None, both.flatten(-2))

    def queries(self, q: Tensor, scale: float) -> Features:
        return self._log_features(scaled(q, scale, queries=True), self.query_weight)

    def keys(self, k: Tensor, scale: float) -> Features:
        return self._log_features(scaled(k, scale, queries=False), self.key_weight)


def _divergence(feature_map: FeatureMap, q: Tensor, k: Tensor, visible: Tensor, real: Tensor, scale: float) -> Tensor:
    """Mean KL from the softmax rows to those of the map; q (B, H, G, L, D), visible (B, L, S), real (B, L)."""
    batch, heads, groups, length, width = q.shape
    hidden = ~visible[:, None, None]
    with torch.no_grad():
        exact = torch.log_softmax((scale * q @ k.unsqueeze(2).mT).masked_fill(hidden, float("-inf")), -1)
        exact = exact.masked_fill(~visible.any(-1)[:, None, None, :, None], float("-inf"))
        weights = exact.exp()
    queries = feature_map.queries(q.reshape(batch, heads, groups * length, width), scale).log_scale
    keys = feature_map.keys(k, scale).log_scale
    if queries is None or keys is None:
        raise TypeError(f"fit needs a map in log form such as HedgehogFeatures, got {type(feature_map).__name__}")
    # A key feature that is masked somewhere must not set the shift: it may be finite garbage of any size.
    keys = keys.masked_fill(~visible.any(-2)[:, None, :, None], float("-inf"))
    peak = keys.detach().amax(-2, keepdim=True)
    peak = torch.where(torch.isinf(peak), 0.0, peak)
    shifted = queries + peak
    shifted = shifted - shifted.detach().amax(-1, keepdim=True)
    products = (shifted.exp() @ (keys - peak).exp().mT).view(batch, heads, groups, length, -1).masked_fill(hidden, 0.0)
    # Sharp rows may underflow: the least positive number bounds the loss of such a pair instead of making it infinite.
    tiny = torch.finfo(products.dtype).tiny
    log_ratio = torch.where(weights > 0, exact, 0.0) - products.clamp(min=tiny).log()
    rows = (weights * log_ratio).sum(-1) + products.sum(-1).clamp(min=tiny).log()
    counted = (real & visible.any(-1))[:, None, None].expand_as(rows)
    return rows.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


def _sample(
    q: Tensor, k: Tensor, is_causal: bool, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Detached q (B, H, G, L, D) and k (B, H, S, D) in float32 or wider, visible (B, L, S), real queries (B, L)."""
    dtype = compute_dtype(q)
    q = q.detach().to(dtype).unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
    k = k.detach().to(dtype)
    visible = torch.ones(q.shape[0], q.shape[3], k.shape[2], dtype=torch.bool, device=q.device)
    if is_causal:
        visible = visible.tril()
    if key_mask is not None:
        visible = visible & key_mask[:, None]
        k = k.masked_fill(~key_mask[:, None, :, None], 0.0)
    real = visible.new_ones(visible.shape[:2]) if query_mask is None else query_mask
    return q, k, visible, real


def mean_divergence(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> float:
    """Mean over the real rows of KL(softmax row || row of the map), in nats; q (B, G H, L, D), k (B, H, S, D).

    >>> phi = HedgehogFeatures(4, kv_heads=1)
    >>> mean_divergence(phi, torch.zeros(1, 1, 5, 4), torch.randn(1, 1, 5, 4), scale=0.5) < 0.2
    True
    """
    q, k, visible, real = _sample(q, k, is_causal, key_mask, query_mask)
    with torch.no_grad(), full_precision(q):
        return float(_divergence(feature_map, q, k, visible, real, scale))


def fit(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    steps: int = 200,
    lr: float = 1e-2,
    rows: int | None = 256,
    seed: int = 0,
) -> list[float]:
    """Train the parameters of `feature_map` to match softmax weights; returns the loss (mean KL in nats) at every step.

    q (B, G H, L, D) and k (B, H, S, D) are samples of what the attention will see; `rows` query positions are drawn at
    each step (None = all), so a step costs O(rows S) memory per head. Adam, with a cosine decay of `lr` to a tenth.
    """
    q, k, visible, real = _sample(q, k, is_causal, key_mask, query_mask)
    length = q.shape[3]
    generator = torch.Generator().manual_seed(seed)
    parameters = [p for p in feature_map.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError(f"fit: {type(feature_map).__name__} has no parameters to train")
    optimizer = torch.optim.Adam(parameters, lr=lr)
    kept = [p.grad for p in parameters]
    losses: list[float] = []
    # fit() trains even where the caller's code runs under no_grad, as evaluation loops do.
    with torch.enable_grad(), full_precision(q):
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            picked_q, picked_visible, picked_real = q, visible, real
            if rows is not None and rows < length:
                taken = torch.randperm(length, generator=generator)[:rows].to(q.device)
                picked_q, picked_visible, picked_real = q[:, :, :, taken], visible[:, taken], real[:, taken]
            loss = _divergence(feature_map, picked_q, k, picked_visible, picked_real, scale)
            gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            losses.append(float(loss.detach()))
    for parameter, former in zip(parameters, kept, strict=True):
        parameter.grad = former
    return losses
