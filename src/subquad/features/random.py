"""Random features of the softmax kernel e^{x.y} (FAVOR+ and its relatives), x = sqrt(scale) q, y = sqrt(scale) k.

With omega ~ N(0, I), R directions, every map below has E[phi(x).phi(y)] = e^{x.y}:

    positive    e^{w.x - |x|^2/2} / sqrt(M)                                  Choromanski et al., 2021        M = R
    hyperbolic  e^{-|x|^2/2} [e^{w.x}, e^{-w.x}] / sqrt(M)                   the same                        M = 2R
    trig        e^{|x|^2/2} [cos w.x, sin w.x] / sqrt(R)                     Rahimi and Recht, 2007          M = 2R
    oprf        (1-4A)^{D/4} e^{A|w|^2 + sqrt(1-4A) w.x - |x|^2/2} / sqrt(M) Likhosherstov et al., 2022      M = R
    sderf       oprf with one A per eigen-direction of the data, calibrated  Likhosherstov et al., 2023      M = R

`antithetic` uses +w and -w for positive, oprf and sderf (M = 2R). `center` removes calibrated means first,

    e^{x.y} = e^{(x - xbar).(y - ybar)} e^{xbar.(y - ybar)} e^{x.ybar}

exactly: the middle factor is a weight of the key, the last one cancels in each row. The Gaussian kernel e^{-|x-y|^2/2}
is the softmax kernel with key weights e^{-|y|^2/2}. No epsilon is added anywhere: it would mix in uniform attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import FeatureMap, Features, LinearForm, scaled
from .calibration import Calibration
from .projections import make_projection
from .seeded import Projection
from .variance import oprf_optimal_a, sderf_a

__all__ = [
    "EXPONENTIAL", "ExponentialFeatures", "GeneralisedFeatures", "RandomFeatures", "TrigFeatures", "apply_statistics",
]  # fmt: skip

EXPONENTIAL = ("positive", "hyperbolic", "oprf", "sderf")


class RandomFeatures(FeatureMap):
    """What the random maps share: a projection, its draw, and centring."""

    projection: Projection

    def __init__(
        self, head_dim: int, directions: int, *, kernel: str, center: bool, kv_heads: int | None, **projection: Any
    ) -> None:
        super().__init__()
        self.head_dim, self.kernel, self.center = head_dim, kernel, center
        per_head = projection.pop("per_head", False)
        kind = projection.pop("projection", "orthogonal")
        self.projection = make_projection(
            kind, directions, head_dim, heads=kv_heads if per_head else None, **projection
        )
        self.calibration: Calibration | None = Calibration(kv_heads, head_dim) if center and kv_heads else None
        self._kept: tuple[Any, list[Tensor], list[int], Any] | None = None

    def default_scale(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)

    def draw_key(self) -> tuple[int, ...]:
        return self.projection.draw_key()

    def check_ready(self) -> None:
        if self.center and (self.calibration is None or not self.calibration.ready):
            raise RuntimeError("center=True needs calibration: call calibrate(q, k) on sample data first")

    def _kept_for(self, key: Any, make: Callable[[], Any]) -> Any:
        """`make()`, remembered until a buffer changes: rebuilding a projection for every generated token costs more
        than the token."""
        if torch.compiler.is_compiling() or any(p.requires_grad for p in self.parameters()):
            return make()
        buffers = list(self.buffers())
        if any(b.is_inference() or type(b) is not Tensor for b in buffers):
            return make()
        versions = [b._version for b in buffers]
        if self._kept is not None:
            old_key, old_buffers, old_versions, value = self._kept
            same = len(old_buffers) == len(buffers) and all(a is b for a, b in zip(old_buffers, buffers, strict=True))
            if same and old_key == key and old_versions == versions:
                return value
        if torch._C._are_functorch_transforms_active():  # what a transform makes is void when it has ended
            return make()
        # Ordinary tensors even inside inference mode: a later training step may save them for its backward.
        with torch.inference_mode(False), torch.no_grad():
            value = make()
        self._kept = (key, buffers, versions, value)
        return value

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_kept"] = None
        return state

    def _means(self, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """xbar, ybar as (H, 1, D), or None when nothing is centred."""
        if not self.center:
            return None
        assert self.calibration is not None
        x = scaled(self.calibration.query_mean.to(dtype), scale, queries=True)
        y = scaled(self.calibration.key_mean.to(dtype), scale, queries=False)
        return x.unsqueeze(-2), y.unsqueeze(-2)

    def _token_weights(self, x: Tensor, scale: float, *, queries: bool) -> tuple[Tensor, Tensor | float]:
        """Centred tokens and the log weight (..., L, 1) that makes the centred kernel the whole one."""
        means = self._means(scale, x.dtype)
        log: Tensor | float = -0.5 * (x * x).sum(-1, keepdim=True) if self.kernel == "gaussian" else 0.0
        if means is None:
            return x, log
        x_mean, y_mean = means
        if queries:
            return x - x_mean, log + (x * y_mean).sum(-1, keepdim=True)
        x = x - y_mean
        return x, log + (x * x_mean).sum(-1, keepdim=True)


class ExponentialFeatures(RandomFeatures):
    """positive, hyperbolic, OPRF and SDERF: log phi(x) = B w.x + bias_w - |x|^2/2 (+ weights), in log form.

    >>> phi = ExponentialFeatures(4, 8, features="positive", seed=0)
    >>> phi.keys(torch.zeros(1, 1, 3, 4), 0.5).log_scale.shape
    torch.Size([1, 1, 3, 8])
    """

    per_key_scale = "feature"
    a: Tensor
    basis: Tensor

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        features: str = "hyperbolic",
        kernel: str = "softmax",
        antithetic: bool = False,
        center: bool = False,
        kv_heads: int | None = None,
        **projection: Any,
    ) -> None:
        self.antithetic = antithetic or features == "hyperbolic"
        directions = num_features // 2 if self.antithetic else num_features
        super().__init__(head_dim, directions, kernel=kernel, center=center, kv_heads=kv_heads, **projection)
        self.features, self.num_features = features, num_features
        self.estimates_softmax = kernel == "softmax"
        if features == "oprf":
            if self.calibration is None:
                # Optional: the optimum for unit-variance queries and keys until calibrate() is called.
                self.calibration = Calibration(kv_heads or 1, head_dim)
            start = float(oprf_optimal_a(head_dim, 2.0 * math.sqrt(head_dim)))
            self.register_buffer("a", torch.full((kv_heads or 1, 1), start, dtype=torch.float32))
        elif features == "sderf":
            assert kv_heads is not None
            if self.calibration is None:
                self.calibration = Calibration(kv_heads, head_dim)
            self.register_buffer("a", torch.zeros(kv_heads, head_dim, dtype=torch.float32))
            self.register_buffer("basis", torch.eye(head_dim, dtype=torch.float32).repeat(kv_heads, 1, 1))

    def check_ready(self) -> None:
        super().check_ready()
        if self.features == "sderf" and not (self.calibration and self.calibration.ready):
            raise RuntimeError("features='sderf' needs calibration: call calibrate(q, k) on sample data first")

    def calibrate(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> None:
        super().calibrate(q, k, key_mask, query_mask)
        self.use_statistics()

    def use_statistics(self) -> None:
        """Set the scales of oprf and sderf from the statistics gathered so far; the other maps have none."""
        if self.features not in ("oprf", "sderf"):
            return
        stats = self.calibration
        assert stats is not None
        # z = x + y in the estimator's variance: M = E[z z^T] over independent queries and keys.
        moment = (stats.query_cov + stats.key_cov).to(torch.float64)
        if not self.center:
            z_mean = (stats.query_mean + stats.key_mean).to(torch.float64)
            moment = moment + z_mean.unsqueeze(-1) * z_mean.unsqueeze(-2)
        moment = moment * self.default_scale(self.head_dim)
        if self.features == "oprf":
            self.a.copy_(oprf_optimal_a(self.head_dim, moment.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)))
        else:
            eigenvalues, basis = torch.linalg.eigh(moment)
            self.a.copy_(sderf_a(eigenvalues.clamp(min=0.0)))
            self.basis.copy_(basis)

    def _directions(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Effective directions (H or 1, R, D) and log weights (H or 1, R), the factor 1/sqrt(M) included."""
        weight = self.projection.as_matrix(dtype)
        weight = weight if weight.dim() == 3 else weight.unsqueeze(0)
        bias = weight.new_full((weight.shape[0], weight.shape[1]), -0.5 * math.log(self.num_features))
        if self.features in ("oprf", "sderf"):
            a = self.a.to(dtype)  # (H, 1) or (H, D)
            gain = 1.0 - 4.0 * a
            each = self.head_dim if self.features == "oprf" else 1
            bias = bias + (weight.square() * a.unsqueeze(-2)).sum(-1) + 0.25 * each * gain.log().sum(-1, keepdim=True)
            weight = weight * gain.sqrt().unsqueeze(-2)
            if self.features == "sderf":
                weight = weight @ self.basis.to(dtype).mT
        return weight, bias

    def _augmented(self, dtype: torch.dtype) -> Tensor:
        """[B w, 1, bias] per feature, (H or 1, M, D + 2): one matmul with [x, token weight, 1] gives log phi."""
        weight, bias = self._directions(dtype)
        columns = torch.stack([torch.ones_like(bias), bias], -1)
        if self.antithetic:
            weight, columns = torch.cat([weight, -weight], -2), torch.cat([columns, columns], -2)
        return torch.cat([weight, columns], -1)

    def _log_features(self, x: Tensor, scale: float, *, queries: bool) -> Features:
        x, log_weight = self._token_weights(scaled(x, scale, queries=queries), scale, queries=queries)
        log_weight = log_weight - 0.5 * (x * x).sum(-1, keepdim=True)
        augmented = torch.cat([x, log_weight, torch.ones_like(log_weight)], -1)
        matrix = self._kept_for(x.dtype, lambda: self._augmented(x.dtype))
        if matrix.shape[0] == 1:
            return Features(None, F.linear(augmented, matrix.squeeze(0)))
        return Features(None, augmented @ matrix.mT)

    def queries(self, q: Tensor, scale: float) -> Features:
        return self._log_features(q, scale, queries=True)

    def keys(self, k: Tensor, scale: float) -> Features:
        return self._log_features(k, scale, queries=False)

    def linear_form(self, scale: float) -> LinearForm | None:
        if scale <= 0:
            return None
        root = math.sqrt(scale)
        weight, bias = self._directions(torch.float32)
        linear = weight.new_zeros(weight.shape[0], self.head_dim)
        quadratic = -0.5 * scale * (2.0 if self.kernel == "gaussian" else 1.0)
        means = self._means(scale, torch.float32)
        if means is not None:
            x_mean, y_mean = means
            linear = root * (x_mean + y_mean).squeeze(-2)
        return LinearForm(weight * root, bias, quadratic, linear, self.antithetic)


class TrigFeatures(RandomFeatures):
    """e^{|x|^2/2} [cos w.x, sin w.x] / sqrt(R): unbiased, but signed, with a variance that grows with |x - y|.

    Its normaliser can cross zero: prefer positive maps for attention.
    """

    per_key_scale = "token"

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        *,
        kernel: str = "softmax",
        center: bool = False,
        kv_heads: int | None = None,
        **projection: Any,
    ) -> None:
        super().__init__(head_dim, num_features // 2, kernel=kernel, center=center, kv_heads=kv_heads, **projection)
        self.num_features = num_features
        self.estimates_softmax = kernel == "softmax"

    def _trig(self, x: Tensor, scale: float, *, queries: bool) -> Features:
        x, log_weight = self._token_weights(scaled(x, scale, queries=queries), scale, queries=queries)
        matrix = self._kept_for(x.dtype, lambda: self.projection.as_matrix(x.dtype))
        angle = x @ matrix.mT
        values = torch.cat([angle.cos(), angle.sin()], -1) * self.projection.rows**-0.5
        return Features(values, log_weight + 0.5 * (x * x).sum(-1, keepdim=True))

    def queries(self, q: Tensor, scale: float) -> Features:
        return self._trig(q, scale, queries=True)

    def keys(self, k: Tensor, scale: float) -> Features:
        return self._trig(k, scale, queries=False)


class GeneralisedFeatures(RandomFeatures):
    """Generalised kernels: phi(x) = (f(W x) + kernel_eps) / sqrt(M), Choromanski et al., 2021.

    f = relu estimates the first-order arc-cosine kernel. `kernel_eps` is a part of the kernel that is meant (it keeps
    the normaliser of relu away from 0), not a numerical safeguard.
    """

    def __init__(
        self,
        head_dim: int,
        num_features: int,
        function: Callable[[Tensor], Tensor],
        *,
        kernel_eps: float = 1e-3,
        kv_heads: int | None = None,
        **projection: Any,
    ) -> None:
        super().__init__(head_dim, num_features, kernel="softmax", center=False, kv_heads=kv_heads, **projection)
        self.num_features, self.kernel_eps = num_features, kernel_eps
        self.function = function  # registered where it is a module, so that its parameters are ours
        if not isinstance(function, nn.Module):
            with torch.enable_grad():
                self.hidden_parameters = function(torch.zeros(1, num_features)).requires_grad

    def _values(self, x: Tensor) -> Features:
        matrix = self._kept_for(x.dtype, lambda: self.projection.as_matrix(x.dtype))
        return Features((self.function(x @ matrix.mT) + self.kernel_eps) * self.num_features**-0.5, None)

    def queries(self, q: Tensor, scale: float) -> Features:
        return self._values(scaled(q, scale, queries=True))

    def keys(self, k: Tensor, scale: float) -> Features:
        return self._values(scaled(k, scale, queries=False))


def apply_statistics(module: nn.Module) -> None:
    """Set the scales of all maps inside `module` from the statistics that they hold."""
    for part in module.modules():
        if isinstance(part, ExponentialFeatures):
            part.use_statistics()
