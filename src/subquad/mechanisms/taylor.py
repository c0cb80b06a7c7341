"""Taylor features: e^s replaced by 1 + s (degree 1) or 1 + s + s^2/2 (degree 2), s = q.k / sqrt(D).

    out_i = sum_j (1 + s_ij + s_ij^2/2) v_j / sum_j (1 + s_ij + s_ij^2/2)

No randomness and no variance, but a bias that more features cannot remove: good while scores are small (standard
deviation up to about 1). `hermite` uses the best degree-2 polynomial for Gaussian scores instead. Arora et al.,
"Simple linear attention language models balance the recall-throughput tradeoff" (Based), 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

from .. import checks
from ..features.polynomial import PolynomialFeatures
from .kernelised import Kernelised

__all__ = ["Taylor"]


@final
class Taylor(Kernelised):
    """Polynomial attention; M = 1 + D (degree 1) or 1 + D + D(D+1)/2 (degree 2).

    degree:  1 | 2
    hermite: degree 2 with the constant 1 - tau^2/2 per query; implies centring; needs heads and calibrate(q, k)
    center:  remove calibrated means first, exactly; needs heads and calibrate(q, k)

    Degree 1, and hermite where scores are large, can give negative weights; degree 2 never does.

    >>> import torch, subquad as sq
    >>> q, k, v = 0.1 * torch.randn(3, 1, 2, 50, 8)
    >>> exact = sq.attention(q, k, v, "softmax")
    >>> bool((sq.attention(q, k, v, "taylor") - exact).norm() < 1e-3 * exact.norm())
    True
    """

    name = "taylor"
    equation = "sum_j (1 + s_ij + s_ij^2/2) v_j / sum_j (1 + s_ij + s_ij^2/2), s = q.k / sqrt(D)"
    paper = 'Arora et al., "Simple linear attention language models balance the recall-throughput tradeoff", 2024'
    complexity = "O(L D^2 E) for degree 2, O(L D E) for degree 1"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"degree": 1},
        {"degree": 2},
        {"degree": 1, "center": True},
        {"degree": 2, "center": True},
        {"degree": 2, "hermite": True},
    )
    feature_map: PolynomialFeatures

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        degree: int = 2,
        hermite: bool = False,
        center: bool = False,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_flag("hermite", hermite)
        checks.check_flag("center", center)
        if isinstance(degree, bool) or degree not in (1, 2):
            raise ValueError(f"degree must be 1 or 2, got {degree!r}")
        if hermite and degree == 1:
            raise ValueError(
                "hermite=True changes nothing at degree 1 (the projection is proportional to 1 + s); use degree=2"
            )
        if hermite or center:
            self.need_heads("hermite=True" if hermite else "center=True")
        self.degree, self.hermite, self.center = degree, hermite, center
        self.signed = degree == 1 or hermite
        self.feature_map = PolynomialFeatures(
            head_dim, degree=degree, hermite=hermite, center=center, kv_heads=self.kv_heads
        )
