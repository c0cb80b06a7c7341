"""Clustered attention: what is computed, and the choices it rests on.

    c_j    = mean of the queries of cluster j
    A_j    = softmax(scale c_j K^T)
    out_i  = A_j V                                                                    topk = 0, for i in cluster j
    out_i  = m_j softmax_{l in T_j}(scale q_i.k_l) V + sum_{l not in T_j} A_jl v_l    topk > 0
             T_j the topk keys with the largest A_jl,  m_j = sum_{l in T_j} A_jl

With groups, T_j are the topk / group_size groups of neighbouring real keys with the largest joint weight. Clusters and
T_j are choices: constants for gradients, made before anything else from real queries and real keys alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kmeans import ClusterDraw, cluster, cluster_means
from ..operator import Call

__all__ = ["LOW", "Choices", "Spec", "assign", "centroid_scores", "make_choices", "top_keys"]

# The score of a masked key: far enough below any other that its weight underflows to an exact 0, and finite, so that a
# sequence without any real key stays finite too.
LOW = -1e30


class Spec(NamedTuple):
    """What is computed.

    clusters, clustering, iterations, draw: of k-means, see kmeans.py
    topk:       keys of T_j; 0 = none, every query gets its centroid's row
    group_size: neighbouring keys that are chosen together
    """

    clusters: int
    clustering: str
    iterations: int
    draw: ClusterDraw
    topk: int = 0
    group_size: int = 1

    def chosen(self, keys: int) -> int:
        """Places for T_j of so many keys."""
        return min(self.topk, -(-keys // self.group_size) * self.group_size)


class Choices(NamedTuple):
    """assigned (B, Hq, L) int64: the cluster of every query; top (B, Hq, C, k) int64: T_j, -1 in places left over."""

    assigned: Tensor
    top: Tensor


def assign(spec: Spec, call: Call, q: Tensor) -> Tensor:
    """The cluster of every query (B, Hq, L); 0 where it is masked."""
    asked = None if call.query_mask is None else call.query_mask.repeat_interleave(q.shape[1], 0)
    found = cluster(q.flatten(0, 1), asked, spec.draw, clustering=spec.clustering, iterations=spec.iterations)
    rows: Tensor = (found if asked is None else found * asked).unflatten(0, q.shape[:2])
    return rows


def centroid_scores(spec: Spec, call: Call, q: Tensor, k: Tensor, assigned: Tensor) -> Tensor:
    """scale c_j.k_l (B, Hq, C, S), LOW at masked keys."""
    asked = None
    if call.query_mask is not None:
        q = q.masked_fill(~call.query_mask[:, None, :, None], 0.0)
        asked = call.query_mask.repeat_interleave(q.shape[1], 0)
    centroid = cluster_means(q.flatten(0, 1), assigned.flatten(0, 1), asked, spec.clusters)
    # Query heads that share a key head stand side by side in one product: (B, H, groups C, D).
    rows = (call.scale * centroid).view(q.shape[0], k.shape[1], -1, q.shape[-1])
    scores = (rows @ k.mT).view(*q.shape[:2], spec.clusters, -1)
    return scores if call.key_mask is None else scores.masked_fill(~call.key_mask[:, None, None, :], LOW)


def top_keys(spec: Spec, call: Call, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """T_j as indices (B, Hq, C, k) of scores (B, Hq, C, S), and which of them do not count, or None."""
    keys, size, mask = scores.shape[-1], spec.group_size, call.key_mask
    scores = scores.detach()
    if size == 1:
        index = scores.topk(spec.chosen(keys), sorted=False).indices
        return index, None if mask is None else ~mask[:, None, None, :].expand_as(scores).gather(-1, index)
    order = torch.arange(keys, device=scores.device)
    if mask is not None:
        # Groups are cut from the real keys, so that they do not depend on where padding is.
        order = ((order + keys * (~mask)).sort(-1).values % keys)[:, None, None, :].expand_as(scores)
        scores = scores.gather(-1, order)
    joint = F.pad(scores, (0, -keys % size), value=2 * LOW).unflatten(-1, (-1, size)).logsumexp(-1)
    groups = joint.topk(spec.chosen(keys) // size, sorted=False).indices
    index = (groups.unsqueeze(-1) * size + torch.arange(size, device=groups.device)).flatten(-2)
    hidden = index >= keys  # of a short last group; the key before them is in T as well
    index = index.clamp(max=keys - 1)
    if mask is None:
        return index, hidden
    index = order.gather(-1, index)
    return index, hidden | ~mask[:, None, None, :].expand_as(scores).gather(-1, index)


def make_choices(spec: Spec, call: Call, q: Tensor, k: Tensor) -> Choices:
    """All choices of a call, without a gradient."""
    with torch.no_grad():
        assigned = assign(spec, call, q)
        if not spec.topk:
            return Choices(assigned, assigned.new_zeros((*q.shape[:2], spec.clusters, 0)))
        top, hidden = top_keys(spec, call, centroid_scores(spec, call, q, k, assigned))
    return Choices(assigned, top if hidden is None else top.masked_fill(hidden, -1))
