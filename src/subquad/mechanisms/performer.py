"""FAVOR+: softmax attention estimated by random features.

    e^{q.k / sqrt(D)} = E[phi(q).phi(k)],     out_i = phi(q_i)^T S / phi(q_i)^T z

Choromanski et al., "Rethinking Attention with Performers", 2021; the feature maps are in `features/random.py`, the
random matrices in `features/projections.py`, their exact variances in `features/variance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..features.projections import PROJECTIONS
from ..features.random import EXPONENTIAL, ExponentialFeatures, GeneralisedFeatures, RandomFeatures, TrigFeatures
from .kernelised import Kernelised

__all__ = ["Performer"]

FEATURES = (*EXPONENTIAL, "trig", "relu")


def _variants() -> tuple[dict[str, Any], ...]:
    pairs = [{"features": features, "projection": projection} for features in FEATURES for projection in PROJECTIONS]
    extra: list[dict[str, Any]] = [
        {"features": "positive", "antithetic": True},
        {"features": "oprf", "antithetic": True, "norms": "sqrt"},
        {"features": "sderf", "antithetic": True, "center": True, "per_head": True},
        {"features": "positive", "center": True},
        {"features": "trig", "center": True, "kernel": "gaussian"},
        {"features": "hyperbolic", "kernel": "gaussian", "projection": "hadamard", "blocks": 1},
        {"features": "relu", "kernel_eps": 0.1, "per_head": True},
    ]
    return tuple({"num_features": 24, "seed": 3, **variant} for variant in [*pairs, *extra])


@final
class Performer(Kernelised):
    """Random-feature attention.

    num_features: M, the rows of the state (even for hyperbolic, trig and antithetic maps, which draw M/2 directions)
    features:     positive | hyperbolic | trig | oprf | sderf | relu | a callable f for f(W x)
    kernel:       softmax | gaussian
    projection:   orthogonal | gaussian | hadamard | simplex; `blocks` factors for hadamard (3 unless given)
    norms:        chi (unbiased) | sqrt (regularised: a small bias, no heavy tail)
    antithetic:   pair every direction w with -w (positive, oprf, sderf)
    center:       remove calibrated means first, exactly; needs heads and calibrate(q, k)
    per_head:     one projection per KV head instead of a shared one; needs heads
    kernel_eps:   added to f(W x) for relu and callables (part of that kernel; 1e-3 unless given)
    seed:         integer or torch.Generator; None takes one integer from torch's generator

    >>> import torch, subquad as sq
    >>> attn = sq.create("performer", head_dim=16, num_features=64, seed=0)
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16)
    >>> attn(q, k, v, is_causal=True).shape
    torch.Size([1, 4, 100, 16])
    """

    name = "performer"
    equation = "phi(q)^T S / phi(q)^T z, E[phi(q).phi(k)] = exp(q.k / sqrt(D))"
    paper = 'Choromanski et al., "Rethinking Attention with Performers", 2021'
    complexity = "O(L M (D + E))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = _variants()
    feature_map: RandomFeatures
    features: str | Callable[[Tensor], Tensor]

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        num_features: int = 256,
        features: str | Callable[[Tensor], Tensor] = "hyperbolic",
        kernel: str = "softmax",
        projection: str = "orthogonal",
        blocks: int | None = None,
        norms: str = "chi",
        antithetic: bool = False,
        center: bool = False,
        per_head: bool = False,
        kernel_eps: float | None = None,
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("num_features", num_features)
        for argument, flag in (("antithetic", antithetic), ("center", center), ("per_head", per_head)):
            checks.check_flag(argument, flag)
        if not callable(features):
            checks.check_option("features", features, FEATURES)
        checks.check_option("kernel", kernel, ("softmax", "gaussian"))
        generalised = callable(features) or features == "relu"
        if generalised and (center or kernel != "softmax"):
            raise ValueError(
                f"center and kernel belong to estimates of the softmax kernel, {features=} is a kernel of its own"
            )
        if antithetic and features not in EXPONENTIAL:
            raise ValueError(f"antithetic=True pairs w with -w in exponential maps {EXPONENTIAL}; got {features=}")
        if kernel_eps is not None and not generalised:
            raise ValueError(
                f"kernel_eps belongs to features='relu' or a callable; added to {features!r} features it would mix in "
                "uniform attention"
            )
        if kernel_eps is not None:
            checks.check_number("kernel_eps", kernel_eps, 0, closed=True)
        if (antithetic or features in ("hyperbolic", "trig")) and num_features % 2:
            raise ValueError(
                f"num_features={num_features} must be even: {features!r} features come in pairs; use {num_features + 1}"
            )
        if center or per_head or features == "sderf":
            self.need_heads("features='sderf'" if features == "sderf" else "center=True" if center else "per_head=True")
        # Past nn.Module's registration: the map already holds it, where it is a module.
        object.__setattr__(self, "features", features)
        self.num_features, self.kernel, self.projection = num_features, kernel, projection
        self.blocks, self.norms, self.antithetic, self.center = blocks, norms, antithetic, center
        self.per_head = per_head
        self.signed = features == "trig" or callable(features)
        self.kernel_eps = 1e-3 if generalised and kernel_eps is None else kernel_eps
        drawing: dict[str, Any] = {
            "kv_heads": self.kv_heads,
            "projection": projection,
            "blocks": blocks,
            "norms": norms,
            "per_head": per_head,
            "seed": seed,
        }
        if generalised:
            function = F.relu if isinstance(features, str) else features
            self.feature_map = GeneralisedFeatures(
                head_dim, num_features, function, kernel_eps=self.kernel_eps or 0.0, **drawing
            )
        elif features == "trig":
            self.feature_map = TrigFeatures(head_dim, num_features, kernel=kernel, center=center, **drawing)
        else:
            self.feature_map = ExponentialFeatures(
                head_dim,
                num_features,
                features=str(features),
                kernel=kernel,
                antithetic=antithetic,
                center=center,
                **drawing,
            )

    @property
    def seed(self) -> int:
        """The integer behind the draws."""
        return self.feature_map.projection.draw_key()[0]

    def extra_repr(self) -> str:
        return f"{self.features}, {self.projection}, M={self.num_features}, {self.kernel}, norms={self.norms}"
