"""Sparse attention from its definition: softmax under an L x L mask."""

from __future__ import annotations

from torch import Tensor

from ..operator import Call, ReferenceBackend
from ..padding import real_keys
from ..softmax import dense_softmax
from .definition import Spec, visible

__all__ = ["Reference"]


class Reference(ReferenceBackend[Spec]):
    """The oracle of the other backends."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        return dense_softmax(q, k, v, visible(spec, real_keys(k, call.key_mask))[:, None], call.scale)
