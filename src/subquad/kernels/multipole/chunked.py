"""Multipole attention in torch operations, some queries at a time: any device and precision, shapes known beforehand.

A block of T queries sees the clusters, up to `exact_keys` gathered keys of chosen clusters, and single keys: for each
sequence those from the first query's own chunk on, chunk + T of them. All are columns of one softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...features.precision import compute_dtype
from ..checkpointing import Carry, scan_chunks
from ..operator import Backend, Call
from ..padding import all_finite, real_keys
from .definition import (
    Choices,
    Inspection,
    Spec,
    Statistics,
    cluster_keys,
    expected_error,
    log_masses,
    rank_order,
    select_clusters,
    sight,
    slot_of_members,
    statistics,
    take_per_head,
    weighted,
)

__all__ = ["Chunked", "cluster", "inspect"]

ROWS = 64


def _members(spec: Spec, choices: Choices) -> tuple[Tensor, Tensor]:
    """The rank of every member, sorted by cluster, (B, H, n * chunk), and every cluster's first member (B, H, N)."""
    first = spec.chunk * torch.arange(choices.order.shape[2], device=choices.order.device)[:, None]
    sizes = choices.sizes.long()
    return (choices.order + first).flatten(2), (sizes.cumsum(-1) - sizes + first).flatten(2)


def _owners(spec: Spec, choices: Choices) -> Tensor:
    """The cluster of every rank (B, H, n * chunk)."""
    number = spec.slots * torch.arange(choices.order.shape[2], device=choices.order.device)[:, None]
    slot = (slot_of_members(spec, choices.sizes).clamp(max=spec.slots - 1) + number).flatten(2)
    return torch.zeros_like(slot).scatter(-1, _members(spec, choices)[0].long(), slot)


def _members_of(owner: Tensor, selection: Tensor, dense: Tensor, groups: int) -> Tensor:
    """Which ranks are in clusters that a query evaluates: (B, Hq, T, n * chunk) bool."""
    index = owner.repeat_interleave(groups, 1).unsqueeze(2).expand(-1, -1, selection.shape[2], -1)
    below = torch.arange(owner.shape[-1], device=owner.device) < dense.unsqueeze(-1)
    return selection.gather(-1, index) & below.unsqueeze(1)


def _gathered(
    spec: Spec, selection: Tensor, stats: Statistics, members: Tensor, first: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """Ranks of the keys of chosen clusters (B, Hq, T, exact_keys), and which of them are there."""
    size = (stats.size.repeat_interleave(groups, 1).unsqueeze(2) * selection).long()  # (B, Hq, T, N)
    ends = size.cumsum(-1)
    number = torch.arange(spec.most_keys(members.shape[-1], sharp=True), device=size.device)
    number = number.expand(*size.shape[:3], -1).contiguous()
    column = torch.searchsorted(ends, number, right=True).clamp(max=size.shape[-1] - 1)
    inside = number - (ends - size).gather(-1, column)
    first = first.repeat_interleave(groups, 1).unsqueeze(2).expand_as(size).gather(-1, column)
    place = (first + inside).clamp(0, members.shape[-1] - 1)
    ranks = members.repeat_interleave(groups, 1).unsqueeze(2).expand(-1, -1, size.shape[2], -1).gather(-1, place)
    return ranks, number < ends[..., -1:]


def cluster(spec: Spec, call: Call, k: Tensor) -> Choices:
    """Clusters of the complete chunks of keys k (B, H, S, D); those of `spec.known` stay as they are."""
    mask = real_keys(k, call.key_mask)
    order = rank_order(mask)[:, None].expand(-1, k.shape[1], -1)
    return cluster_keys(spec, take_per_head(k.detach(), order), mask)


def inspect(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Inspection:
    """Expected errors and numbers of exact keys of every query; all queries at once."""
    out = Chunked().attend(spec, call, q, k, v).to(torch.float32)
    mask = real_keys(k, call.key_mask)
    order = rank_order(mask)[:, None].expand(-1, k.shape[1], -1)
    keys, values = (take_per_head(x.to(torch.float32), order) for x in (k, v))
    q = call.scale * q.to(torch.float32)
    choices = cluster_keys(spec, keys, mask)
    stats = statistics(spec, keys, values, choices)
    seen = sight(spec, mask, q.shape[2])
    selection, limited = select_clusters(spec, q, stats, seen.chunks)
    groups = q.shape[1] // k.shape[1]
    mass = log_masses(spec, q, stats, seen.chunks).masked_fill(selection, float("-inf"))
    # The log normaliser: clusters, and every key that is evaluated.
    rank = torch.arange(keys.shape[2], device=q.device)
    exact = ((rank >= seen.dense.unsqueeze(-1)) & (rank < seen.end.unsqueeze(-1))).unsqueeze(1)
    if choices.order.shape[2]:
        owner = _owners(spec, choices)
        picked = _members_of(owner, selection, seen.dense, groups)
        exact = exact | torch.nn.functional.pad(picked, (0, keys.shape[2] - owner.shape[-1]))
    scores = (q @ keys.repeat_interleave(groups, 1).mT).masked_fill(~exact, float("-inf"))
    norm = torch.cat([scores, mass], -1).logsumexp(-1, keepdim=True)
    weight = (mass - norm.masked_fill(norm == float("-inf"), 0.0)).exp()
    error = expected_error(spec, q, stats, weight, out).sum(-1)
    number = (selection * stats.size.repeat_interleave(groups, 1).unsqueeze(2)).sum(-1).to(torch.int32)
    return Inspection(error, out.square().sum(-1), number, limited)


class Chunked(Backend[Spec]):
    """Blocks of queries in torch operations; the backward computes each block again."""

    name = "chunked"

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        dtype, mask = compute_dtype(q), real_keys(k, call.key_mask)
        order = rank_order(mask)[:, None].expand(-1, k.shape[1], -1)
        q, ranked, ranked_values = (
            call.scale * q.to(dtype),
            take_per_head(k.to(dtype), order),
            take_per_head(v.to(dtype), order),
        )
        choices = cluster_keys(spec, ranked, mask)
        with torch.no_grad():
            rounded = statistics(spec, ranked.to(torch.float32), ranked_values.to(torch.float32), choices)
        groups, chunks = q.shape[1] // k.shape[1], choices.order.shape[2]
        members, first = _members(spec, choices)
        # With most keys exact, or any number of them, a mask over all clustered keys is less work than gathering.
        given = [] if spec.known is None or spec.known.selection is None else [spec.known.selection]
        gather = (
            not given
            and spec.error is None
            and 2 * spec.most_keys(chunks * spec.chunk, sharp=True) < chunks * spec.chunk
        )
        owner = None
        if chunks and not gather:
            owner = _owners(spec, choices)

        def single(q: Tensor, keys: Tensor, values: Tensor, dense: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
            """Scores with single keys (B, Hq, T, chunk + T), and their values (B, H, chunk + T, E)."""
            start = dense[:, :1]  # later queries of the block do not begin earlier
            width = min(spec.chunk, keys.shape[2]) + q.shape[2]
            place = start + torch.arange(width, device=q.device)  # (B, chunk + T)
            seen = (place.unsqueeze(1) >= dense.unsqueeze(-1)) & (place.unsqueeze(1) < end.unsqueeze(-1))
            index = place.clamp(max=max(keys.shape[2] - 1, 0))[:, None].expand(-1, keys.shape[1], -1)
            near_k, near_v = take_per_head(keys, index), take_per_head(values, index)
            scores = q @ near_k.repeat_interleave(groups, 1).mT
            return scores.masked_fill(~seen.unsqueeze(1), float("-inf")), near_v

        def step(
            carry: Carry, q: Tensor, chunk_count: Tensor, dense: Tensor, end: Tensor, *given: Tensor
        ) -> tuple[Carry, Tensor]:
            # Handed on unchanged: that is how the gradients of all blocks add up.
            keys, values, stats = carry[0], carry[1], Statistics(*carry[2:])
            chunk_count, dense, end = (x[:, 0, :, 0] for x in (chunk_count, dense, end))
            near, near_values = single(q, keys, values, dense, end)
            logits = [near]
            if chunks:
                with torch.no_grad():
                    selection = (
                        given[0] if given else select_clusters(spec, q.to(torch.float32), rounded, chunk_count)[0]
                    )
                far = log_masses(spec, q, stats, chunk_count)
                logits.append(far.masked_fill(selection, float("-inf")))
                if owner is None:
                    ranks, there = _gathered(spec, selection, rounded, members, first, groups)
                    rows = ranks.unflatten(1, (-1, groups))  # (B, H, G, T, K)
                    exact = (
                        (take_per_head(keys, rows) @ q.unflatten(1, (-1, groups)).unsqueeze(-1))
                        .squeeze(-1)
                        .flatten(1, 2)
                    )
                    logits.append(exact.masked_fill(~there, float("-inf")))
                else:
                    clustered = keys[:, :, : owner.shape[-1]].repeat_interleave(groups, 1)
                    there = _members_of(owner, selection, dense, groups)
                    logits.append((q @ clustered.mT).masked_fill(~there, float("-inf")))
            joined = torch.cat(logits, -1)
            hidden = joined == float("-inf")
            empty = hidden.all(-1, keepdim=True)
            weights = torch.softmax(joined.masked_fill(empty, 0.0), -1).masked_fill(hidden, 0.0)
            parts = weights.split([x.shape[-1] for x in logits], -1)
            out = product(parts[0], near_values.repeat_interleave(groups, 1))
            if chunks:
                out = out + product(parts[1], stats.mean_value.repeat_interleave(groups, 1))
                if owner is None:
                    grouped = parts[2].unflatten(1, (-1, groups)).unsqueeze(-2)
                    out = out + product(grouped, take_per_head(values, rows)).squeeze(-2).flatten(1, 2)
                else:
                    out = out + product(parts[2], values[:, :, : owner.shape[-1]].repeat_interleave(groups, 1))
            return carry, out

        if q.shape[2] == 0 or k.shape[2] == 0:
            return q.new_zeros((*q.shape[:3], v.shape[-1])) + 0 * (q.sum() + k.sum() + v.sum())
        seen = sight(spec, mask, q.shape[2])
        inputs = [q, *(x[:, None, :, None] for x in seen), *given]
        stats = statistics(spec, ranked, ranked_values, choices)
        carry = (ranked, ranked_values, *stats)
        # Looked at once, not for the values that every block gathers.
        finite = all_finite(ranked_values, stats.mean_value)
        product = torch.matmul if finite else weighted
        _, out = scan_chunks(step, carry, inputs, [], call.chunk_size or ROWS)
        assert out is not None
        return out
