"""What any approximation must beat: the plain mean of the values, and polynomials of the scores.

    uniform     1/n                                                    no features at all
    degree-1    (1 + s) e^{xbar.(y - ybar)}                            1 + D features
    hermite-2   (1 - tau^2/2 + s + s^2/2) e^{xbar.(y - ybar)}          1 + D + D(D+1)/2 features
    taylor-2    1 + x.y + (x.y)^2/2                                    the same without calibration

with s = (x - xbar).(y - ybar), tau_i^2 = (x_i - xbar)^T Cov(y) (x_i - xbar). They have no randomness: their errors are
computed, not estimated. An error curve of random features without these beside it says little: on flat attention all
of them are better than any number of random features, and on sharp attention a random-feature map can be worse than the
mean of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..features.calibration import Calibration
from .sampling import Block

__all__ = [
    "BASELINES",
    "Means",
    "baseline_errors",
    "means_of",
    "polynomial_weights",
    "squared_errors",
    "uniform_attention",
    "uniform_weights",
]

BASELINES = ("uniform", "degree-1", "hermite-2", "taylor-2")


@dataclass(frozen=True)
class Means:
    """Centres of scaled queries and keys (D,) and the covariance of the keys (D, D), of one KV head."""

    x: Tensor
    y: Tensor
    y_cov: Tensor


def means_of(calibration: Calibration, scale: float) -> list[Means]:
    """Per KV head, in float64, with `scale` split over both sides as the feature maps do."""
    root = math.sqrt(abs(scale))
    x = math.copysign(root, scale) * calibration.query_mean.cpu().to(torch.float64)
    y = root * calibration.key_mean.cpu().to(torch.float64)
    cov = abs(scale) * calibration.key_cov.cpu().to(torch.float64)
    return [Means(*parts) for parts in zip(x, y, cov, strict=True)]


def _normalised(weights: Tensor, visible: Tensor) -> Tensor:
    weights = weights.masked_fill(~visible, 0.0)
    return weights / weights.sum(-1, keepdim=True)


def uniform_attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, key_mask: Tensor | None = None
) -> Tensor:
    """The mean of the visible values, whatever q and k are; 0 where nothing is visible.

    q (B, Hq, L, D), k (B, H, S, D), v (B, H, S, E), key_mask (B, S) bool -> (B, Hq, L, E), of v's dtype

    >>> q, k = torch.randn(2, 1, 1, 3, 2)
    >>> v = torch.tensor([0.0, 2.0, 7.0]).view(1, 1, 3, 1)
    >>> uniform_attention(q, k, v).flatten().tolist(), uniform_attention(q, k, v, is_causal=True).flatten().tolist()
    ([3.0, 3.0, 3.0], [0.0, 1.0, 3.0])
    """
    # Whole numbers and sums in at least float32: half precision cannot count to a few thousand.
    values = v.to(torch.promote_types(v.dtype, torch.float32))
    visible = torch.ones(v.shape[2], dtype=torch.bool, device=v.device) if key_mask is None else key_mask.unsqueeze(1)
    if key_mask is not None:
        values = values.masked_fill(~visible.unsqueeze(-1), 0.0)
    if is_causal:
        total, count = values.cumsum(2), visible.cumsum(-1)
    else:
        total, count = values.sum(2, keepdim=True), visible.sum(-1, keepdim=True)
    mean = (total / count.clamp(min=1).unsqueeze(-1)).to(v.dtype)
    return mean.repeat_interleave(q.shape[1] // k.shape[1], 1).expand(*q.shape[:3], v.shape[-1])


def uniform_weights(block: Block) -> Tensor:
    """The rows (n, S) of `uniform_attention`: 1/n on the n visible keys."""
    return _normalised(torch.ones_like(block.weights), block.visible)


def polynomial_weights(block: Block, means: Means | None, *, degree: int, hermite: bool = False) -> Tensor:
    """Normalised rows (n, S) of the Taylor mechanism: what `create("taylor", ...)` computes, written out."""
    if means is None:
        zero = torch.zeros_like(block.x[0])
        means = Means(zero, zero, torch.zeros(len(zero), len(zero), dtype=zero.dtype))
    x, y = block.x - means.x, block.y - means.y
    s = x @ y.mT
    values = 1 + s
    if degree == 2:
        values = values + s * s / 2
    if hermite:
        values = values - ((x @ means.y_cov) * x).sum(-1, keepdim=True) / 2
    key = (y * means.x).sum(-1)
    # One shift for all keys of a row cancels; without it a far centre overflows.
    key = key.expand_as(s).masked_fill(~block.visible, -math.inf)
    return _normalised(values * torch.exp(key - key.amax(-1, keepdim=True)), block.visible)


def squared_errors(block: Block, weights: Tensor) -> tuple[float, float]:
    """|A' - A|^2 and, where there are values, |A' v - A v|^2 of the rows `weights`."""
    difference = weights - block.weights
    out = 0.0 if block.v is None else block.total((difference @ block.v).square())
    return block.total(difference.square()), out


def baseline_errors(sample: list[Block], means: list[Means]) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of the weights and of the outputs of every one of BASELINES."""

    def rows(block: Block) -> Iterator[tuple[str, Tensor]]:
        centre = means[block.kv_head]
        yield "uniform", uniform_weights(block)
        yield "degree-1", polynomial_weights(block, centre, degree=1)
        yield "hermite-2", polynomial_weights(block, centre, degree=2, hermite=True)
        yield "taylor-2", polynomial_weights(block, None, degree=2)

    norm = sum(block.total(block.weights.square()) for block in sample)
    norm_out = sum(block.total(block.out.square()) for block in sample if block.v is not None)
    weights: dict[str, float] = {}
    outs: dict[str, float] = {}
    for block in sample:
        for name, approximation in rows(block):
            error, out = squared_errors(block, approximation)
            weights[name] = weights.get(name, 0.0) + error / norm
            if norm_out > 0:
                outs[name] = outs.get(name, 0.0) + out / norm_out
    return weights, outs
