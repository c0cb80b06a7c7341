"""Linear attention with an element-wise feature map.

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j),     phi(x) = elu(x) + 1

Katharopoulos, Vyas, Pappas and Fleuret, "Transformers are RNNs: Fast Autoregressive Transformers with Linear
Attention", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, final

from torch import Tensor

from .. import checks
from ..features.elementwise import ELEMENTWISE, ElementwiseFeatures
from .kernelised import Kernelised

__all__ = ["LinearAttention"]


@final
class LinearAttention(Kernelised):
    """phi(q).phi(k) with phi = elu + 1, relu, or any callable (..., D) -> (..., M), applied to each token.

    `scale` is 1 unless given; sqrt(scale) multiplies q and k before phi. A map that can give a normaliser of 0 (relu)
    gives an output of 0 there.
    """

    name = "linear"
    equation = "phi(q)^T S / phi(q)^T z, phi(x) = elu(x) + 1"
    paper = 'Katharopoulos et al., "Transformers are RNNs", 2020'
    complexity = "O(L D E)"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"features": "relu"})
    features: str | Callable[[Tensor], Tensor]

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        features: str | Callable[[Tensor], Tensor] = "elu",
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        if isinstance(features, str):
            checks.check_option("features", features, ELEMENTWISE)
        elif not callable(features):
            raise TypeError(f"features must be one of {list(ELEMENTWISE)} or a callable, got {features!r}")
        # Past nn.Module's registration: the map already holds it, where it is a module.
        object.__setattr__(self, "features", features)
        self.feature_map = ElementwiseFeatures(features, head_dim)
        self.signed = callable(features)  # it may be, and nothing tells
