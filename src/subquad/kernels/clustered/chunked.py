"""Clustered attention in torch operations: any device and precision. Members are computed in blocks of one cluster."""

from __future__ import annotations

import torch
from torch import Tensor

from ...features.precision import compute_dtype
from ..blocks import slots, take_rows
from ..operator import Backend, Call
from .definition import LOW, Spec, assign, centroid_scores, top_keys

__all__ = ["Chunked"]


class Chunked(Backend[Spec]):
    """Rows of centroids as one product; members in blocks that read their cluster's T once."""

    name = "chunked"

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        q, k, v = (x.to(compute_dtype(q)) for x in (q, k, v))
        if q.shape[2] == 0 or k.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        assigned = assign(spec, call, q)
        scores = centroid_scores(spec, call, q, k, assigned)
        if spec.topk:
            out = _corrected(spec, call, q, k, v, assigned, scores)
        else:
            rows = _with_values(torch.softmax(scores, -1), v)
            out = take_rows(rows.flatten(0, 1), assigned.flatten(0, 1)).unflatten(0, q.shape[:2])
        return out if call.key_mask is None else out.masked_fill(~call.key_mask.any(-1)[:, None, None, None], 0.0)


def _with_values(weights: Tensor, v: Tensor) -> Tensor:
    """weights (B, Hq, C, S) times v (B, H, S, E): (B, Hq, C, E)."""
    grouped = weights.view(v.shape[0], v.shape[1], -1, v.shape[2])
    return (grouped @ v).view(*weights.shape[:3], -1)


def _corrected(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor, assigned: Tensor, scores: Tensor) -> Tensor:
    weights = torch.softmax(scores, -1)
    top, hidden = top_keys(spec, call, scores)
    inside = weights.gather(-1, top)
    mass = (inside if hidden is None else inside.masked_fill(hidden, 0.0)).sum(-1, keepdim=True)
    rest = _with_values(weights.scatter(-1, top, 0.0), v)
    batch, heads, length, _ = q.shape
    sequences, clusters = batch * heads, spec.clusters
    # Queries in blocks of one cluster each; a block reads its cluster's keys once.
    size = 16 if length < 32 * clusters else 32 if length < 128 * clusters else 64
    slot, slot_query, block = slots(assigned.flatten(0, 1), clusters, size)
    block = block + clusters * torch.arange(sequences, device=q.device).unsqueeze(-1)

    def per_block(rows: Tensor) -> Tensor:
        """Rows of clusters (.., W) -> (X n, 1, W): that of every block's cluster."""
        return rows.reshape(sequences * clusters, -1).index_select(0, block.flatten()).unsqueeze(1)

    # Scale and mass go to the few rows of the clusters, before every block gets its copy.
    index = top.reshape(batch * k.shape[1], -1)
    keys, values = (take_rows(x.flatten(0, 1), index).view(*top.shape, -1) for x in (k, v))
    keys, values = per_block(call.scale * keys), per_block(mass.unsqueeze(-1) * values)
    # An empty slot may hold any query: nobody reads it.
    rows = take_rows(q.flatten(0, 1), slot_query.clamp(max=length - 1)).view(-1, size, q.shape[-1])
    exact = rows @ keys.view(-1, top.shape[-1], k.shape[-1]).mT
    if hidden is not None:
        exact = exact.masked_fill(per_block(hidden), LOW)
    values = values.view(-1, top.shape[-1], v.shape[-1])
    out = torch.baddbmm(per_block(rest), torch.softmax(exact, -1), values)
    return take_rows(out.view(sequences, -1, v.shape[-1]), slot).view(batch, heads, length, -1)
