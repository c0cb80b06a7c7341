"""LSH attention from its definition: softmax under an L x S mask."""

from __future__ import annotations

from torch import Tensor

from ..operator import Call, ReferenceBackend
from ..softmax import dense_softmax
from .definition import Spec, flatten, visible

__all__ = ["Reference"]


class Reference(ReferenceBackend[Spec]):
    """The oracle of the other backends."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        problem = flatten(spec, call, q, k, v)
        queries, keys, values = (x.unsqueeze(1) for x in problem[:3])
        out = dense_softmax(queries, keys, values, visible(spec, problem)[:, None], call.scale)
        return out.view(*q.shape[:3], -1)
