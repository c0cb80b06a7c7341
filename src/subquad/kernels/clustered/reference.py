"""Clustered attention from its definition: every weight written out, O(L S). The oracle of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from ...features.precision import compute_dtype
from ..operator import Call, ReferenceBackend
from .definition import LOW, Spec, centroid_scores, make_choices

__all__ = ["Reference"]


def _members(rows: Tensor, assigned: Tensor) -> Tensor:
    """Rows of clusters (B, Hq, C, W) for their members (B, Hq, L): (B, Hq, L, W)."""
    return rows.gather(2, assigned.unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1]))


class Reference(ReferenceBackend[Spec]):
    """Dense weights, with choices made beforehand."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        q, k, v = (x.to(compute_dtype(q)) for x in (q, k, v))
        assigned, top = make_choices(spec, call, q, k)
        weights = torch.softmax(centroid_scores(spec, call, q, k, assigned), -1)  # A_j
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        if spec.topk:
            # Places that are left over point behind the last key.
            index = top.masked_fill(top < 0, k.shape[2])
            inside = torch.zeros_like(weights[..., :1]).expand(-1, -1, -1, k.shape[2] + 1).scatter(-1, index, 1.0)
            inside = inside[..., :-1] > 0
            mass, rest = (weights * inside).sum(-1, keepdim=True), weights.masked_fill(inside, 0.0)
            shown = _members(inside, assigned)
            exact = torch.softmax((call.scale * q @ k.mT).masked_fill(~shown, LOW), -1).masked_fill(~shown, 0.0)
            every = _members(mass, assigned) * exact + _members(rest, assigned)
        else:
            every = _members(weights, assigned)
        out = every @ v
        return out if call.key_mask is None else out.masked_fill(~call.key_mask.any(-1)[:, None, None, None], 0.0)
