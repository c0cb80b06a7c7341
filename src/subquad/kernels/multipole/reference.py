"""Multipole attention from its definition: every weight written out, O(L S). The oracle of the other backends."""

from __future__ import annotations

import torch
from torch import Tensor

from ...features.precision import compute_dtype
from ..operator import Call, ReferenceBackend
from ..padding import real_keys
from .definition import (
    Choices,
    Spec,
    cluster_keys,
    log_masses,
    rank_order,
    select_clusters,
    sight,
    slot_of_members,
    statistics,
    take_per_head,
    weighted,
)

__all__ = ["Reference", "make_choices"]


def _by_rank(x: Tensor, mask: Tensor) -> Tensor:
    """Tokens x (B, H, S, W) in order of rank: real ones first."""
    return take_per_head(x, rank_order(mask)[:, None].expand(-1, x.shape[1], -1))


def make_choices(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Choices:
    """All choices of a call, those that are known as they are; made in float32, without a gradient."""
    if spec.known is not None and spec.known.selection is not None:
        return spec.known
    mask = real_keys(k, call.key_mask)
    with torch.no_grad():
        q32, k32, v32 = (x.to(torch.float32) for x in (q, k, v))
        k32, v32 = _by_rank(k32, mask), _by_rank(v32, mask)
        made = cluster_keys(spec, k32, mask)
        seen = sight(spec, mask, q.shape[2])
        selection, _ = select_clusters(spec, call.scale * q32, statistics(spec, k32, v32, made), seen.chunks)
    return made._replace(selection=selection)


class Reference(ReferenceBackend[Spec]):
    """Dense weights over all single keys and all clusters, with choices made beforehand."""

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        dtype = compute_dtype(q)
        choices = make_choices(spec, call, q, k, v)
        assert choices.selection is not None
        mask = real_keys(k, call.key_mask)
        q, k, v = call.scale * q.to(dtype), _by_rank(k.to(dtype), mask), _by_rank(v.to(dtype), mask)
        groups, keys, chunks = q.shape[1] // k.shape[1], k.shape[2], choices.order.shape[2]
        seen = sight(spec, mask, q.shape[2])
        stats = statistics(spec, k, v, choices)

        rank = torch.arange(keys, device=q.device)
        single = (rank >= seen.dense.unsqueeze(-1)) & (rank < seen.end.unsqueeze(-1))  # (B, L, S)
        single = single.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        if chunks:
            # The cluster of every clustered rank, and from it which ranks are chosen.
            number = torch.arange(chunks, device=q.device)[:, None]
            member = slot_of_members(spec, choices.sizes).clamp(max=spec.slots - 1) + spec.slots * number
            place = choices.order.long() + spec.chunk * number
            owner = torch.zeros_like(member.flatten(2)).scatter(-1, place.flatten(2), member.flatten(2))
            owner = owner.repeat_interleave(groups, 1).unsqueeze(2).expand(-1, -1, q.shape[2], -1)
            single = single.clone()
            single[..., : chunks * spec.chunk] |= choices.selection.gather(-1, owner) & (
                rank[: chunks * spec.chunk] < seen.dense.unsqueeze(1).unsqueeze(-1)
            )
        far = log_masses(spec, q, stats, seen.chunks).masked_fill(choices.selection, float("-inf"))
        near = (q @ k.repeat_interleave(groups, 1).mT).masked_fill(~single, float("-inf"))
        logits = torch.cat([near, far], -1)
        empty = (logits == float("-inf")).all(-1, keepdim=True)
        weights = torch.softmax(logits.masked_fill(empty, 0.0), -1).masked_fill(logits == float("-inf"), 0.0)
        values = torch.cat([v, stats.mean_value], 2).repeat_interleave(groups, 1)
        return weighted(weights, values)
