"""Polynomial features: e^s replaced by its expansion in s = x.y, no randomness.

    degree 1   1 + s                       M = 1 + D
    degree 2   1 + s + s^2 / 2             M = 1 + D + D (D + 1) / 2,  never below 1/2

Keles et al., 2023; "Based" (Arora et al., 2024). For scores s ~ N(0, tau^2) the best degree-2 polynomial is not
Taylor's but the Hermite projection, proportional to (1 - tau^2/2) + s + s^2/2: the same features with another constant
per query, tau_i^2 = x_i^T Cov(y) x_i from calibration (`hermite=True`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import FeatureMap, Features, scaled
from .calibration import Calibration

__all__ = ["PolynomialFeatures"]


class PolynomialFeatures(FeatureMap):
    """phi(x).phi(y) = 1 + s (+ s^2/2), exactly. With `center` the expansion is of centred tokens,

        e^{x.y} = e^{(x - xbar).(y - ybar)} e^{xbar.(y - ybar)} e^{x.ybar},

    and the last two factors, weights of the key and of the query, are exact.

    >>> phi = PolynomialFeatures(4, degree=2)
    >>> q, k = torch.randn(2, 1, 1, 1, 4)
    >>> s = 0.5 * (q * k).sum(-1)
    >>> estimate = (phi.queries(q, 0.5).values * phi.keys(k, 0.5).values).sum(-1)
    >>> torch.allclose(estimate, 1 + s + s**2 / 2, atol=1e-6)
    True
    """

    estimates_softmax = True

    def __init__(
        self,
        head_dim: int,
        *,
        degree: int = 2,
        hermite: bool = False,
        center: bool = False,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.degree, self.hermite = head_dim, degree, hermite
        self.num_features = 1 + head_dim + (head_dim * (head_dim + 1) // 2 if degree == 2 else 0)
        self.calibration: Calibration | None = None
        if center or hermite:
            assert kv_heads is not None
            self.calibration = Calibration(kv_heads, head_dim)
            self.per_key_scale = "token"
        first, second = torch.triu_indices(head_dim, head_dim)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        self.register_buffer("diagonal", first == second, persistent=False)

    first: Tensor
    second: Tensor
    diagonal: Tensor

    def reset_parameters(self) -> None:
        """Write the index buffers again: for modules built on 'meta' and materialised by `to_empty`."""
        first, second = torch.triu_indices(self.head_dim, self.head_dim, device="cpu")
        with torch.no_grad():
            self.first.copy_(first)
            self.second.copy_(second)
            self.diagonal.copy_(first == second)

    def default_scale(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)

    def check_ready(self) -> None:
        if self.calibration is not None and not self.calibration.ready:
            raise RuntimeError(
                "taylor with center=True or hermite=True needs calibration: call calibrate(q, k) on sample data first"
            )

    def _pack(self, x: Tensor, constant: Tensor) -> Tensor:
        parts = [constant, x]
        if self.degree == 2:
            # 1/sqrt(2) on the squares, rounded in x's own precision.
            weight = 1.0 - (1.0 - math.sqrt(0.5)) * self.diagonal.to(x.dtype)
            parts.append(x[..., self.first] * x[..., self.second] * weight)
        return torch.cat(parts, -1)

    def queries(self, q: Tensor, scale: float) -> Features:
        x = scaled(q, scale, queries=True)
        constant = torch.ones_like(x[..., :1])
        if self.calibration is None:
            return Features(self._pack(x, constant), None)
        sign = math.copysign(math.sqrt(abs(scale)), scale)
        # The factor of the query, e^{x.ybar}, cancels in each row but makes phi_q.phi_k an estimate of e^{x.y} itself.
        key_mean = math.sqrt(abs(scale)) * self.calibration.key_mean.to(x.dtype).unsqueeze(-2)
        log_scale = (x * key_mean).sum(-1, keepdim=True)
        x = x - sign * self.calibration.query_mean.to(x.dtype).unsqueeze(-2)
        if self.hermite:
            cov = abs(scale) * self.calibration.key_cov.to(x.dtype)
            constant = 1 - 0.5 * ((x @ cov) * x).sum(-1, keepdim=True)
        return Features(self._pack(x, constant), log_scale)

    def keys(self, k: Tensor, scale: float) -> Features:
        y = scaled(k, scale, queries=False)
        if self.calibration is None:
            return Features(self._pack(y, torch.ones_like(y[..., :1])), None)
        root = math.sqrt(abs(scale))
        y = y - root * self.calibration.key_mean.to(y.dtype).unsqueeze(-2)
        pull = math.copysign(root, scale) * self.calibration.query_mean.to(y.dtype).unsqueeze(-2)
        return Features(self._pack(y, torch.ones_like(y[..., :1])), (y * pull).sum(-1, keepdim=True))
