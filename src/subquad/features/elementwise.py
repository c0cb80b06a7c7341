"""Feature maps that act on each component alone: phi(x) = f(x), M = D.

elu(x) + 1 is the map of Katharopoulos et al., "Transformers are RNNs", 2020. It does not estimate the softmax kernel;
it is a kernel of its own, for models trained with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import FeatureMap, Features, scaled

__all__ = ["ELEMENTWISE", "ElementwiseFeatures", "LogFeatures", "elu1"]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1: x + 1 above 0, e^x below; always positive.

    >>> elu1(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    """
    # e^x itself below zero: elu(x) + 1 would round to 0 from x = -17 on in float32 and lose the key.
    return torch.where(x > 0, x + 1.0, torch.exp(x.clamp(max=0.0)))


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {"elu": elu1, "relu": F.relu}


class ElementwiseFeatures(FeatureMap):
    """phi(x) = f(x) for a name in ELEMENTWISE or any callable (..., D) -> (..., M), an `nn.Module` included.

    >>> ElementwiseFeatures("elu", 4).keys(torch.zeros(1, 1, 3, 4), 1.0).values.shape
    torch.Size([1, 1, 3, 4])
    """

    def __init__(self, function: str | Callable[[Tensor], Tensor], head_dim: int) -> None:
        super().__init__()
        self.function = function  # registered where it is a module, so that its parameters are ours
        with torch.enable_grad():
            probe = self._call(torch.zeros(1, 1, 1, head_dim))
        if not isinstance(probe, Tensor) or probe.shape[:-1] != (1, 1, 1):
            given = tuple(probe.shape) if isinstance(probe, Tensor) else type(probe).__name__
            raise ValueError(
                f"the feature map must turn (..., {head_dim}) into (..., M), one token at a time; "
                f"for shape (1, 1, 1, {head_dim}) it returned {given}"
            )
        self.num_features = probe.shape[-1]
        self.hidden_parameters = probe.requires_grad and not isinstance(function, nn.Module)

    def _call(self, x: Tensor) -> Tensor:
        function: Any = self.function
        values: Tensor = ELEMENTWISE[function](x) if isinstance(function, str) else function(x)
        return values

    def queries(self, q: Tensor, scale: float) -> Features:
        return Features(self._call(scaled(q, scale, queries=True)), None)

    def keys(self, k: Tensor, scale: float) -> Features:
        return Features(self._call(scaled(k, scale, queries=False)), None)


class LogFeatures(FeatureMap):
    """phi(x) = e^x: what is handed in are log features already."""

    per_key_scale = "feature"

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def queries(self, q: Tensor, scale: float) -> Features:
        return Features(None, scaled(q, scale, queries=True))

    def keys(self, k: Tensor, scale: float) -> Features:
        return Features(None, scaled(k, scale, queries=False))
