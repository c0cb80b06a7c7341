"""Multipole attention: what is computed, and the choices it rests on.

Real keys are counted from a row's first one (their rank) and cut into chunks of C ranks. The keys of a complete chunk
are clustered. With s the scale and n_c, mu_c, var_c, vbar_c the size, mean key, mean variance per coordinate and mean
value of cluster c,

    t_c = min(cap, s^2 |q|^2 var_c / 2)                                   second order of the log mass
    l_c = s q.mu_c + t_c + log n_c                                        estimated log mass of the cluster
    out = (sum_{c far} e^{l_c} vbar_c + sum_{j exact} e^{s q.k_j} v_j) / (the same with 1 for the values)

Exact are the keys in no complete chunk, in causal calls those of the query's own chunk, and the keys of the clusters
that the query chooses. With r_c the distance of a cluster's farthest key and V_c the summed variance of its values,

    x_c = s q.mu_c + max(t_c, radius s |q| r_c) + t_c / 2 + log(n_c sqrt(var_c V_c))

orders the clusters, about the logarithm of the error that a mean in place of its keys makes; the first ones are chosen
as long as their keys together are at most `most_keys`. Where an `error` is asked for, `expected_error` orders them,
with weights raised by e^{u - t_c} where that is more; they are chosen until the rest is below it.

    u = max(rise s |q| r_c, tau sqrt(2 log n_c) - log n_c),   rise = radius / 3 and more for errors below 0.01

With scores of variance tau^2 = s^2 |q|^2 var_c inside a cluster, the second is what its largest key weighs: beyond
tau = sqrt(2 log n_c) that key is most of the cluster (the transition of the random energy model, Derrida, 1981).

Choices are constants for gradients. They are made in float32 whatever the dtype, the same for every precision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..kmeans import ClusterDraw, lloyd, rank_order

__all__ = [
    "Choices",
    "Inspection",
    "Sight",
    "Spec",
    "Statistics",
    "cluster_keys",
    "expected_error",
    "log_masses",
    "rank_order",
    "select_clusters",
    "sight",
    "slot_of_members",
    "statistics",
    "take_per_head",
    "weighted",
]

SMALL = 1e-30
SHARP = 3.0  # mean second order of a query from which it evaluates twice as many keys


class Spec(NamedTuple):
    """What is computed.

    chunk:      ranks per chunk
    clusters:   k-means clusters per chunk
    largest:    the most keys in one cluster; larger ones are cut
    iterations: of k-means
    exact_keys: the most keys of chosen clusters per query; None = by the number of clustered keys, see `most_keys`
    error:      None, or the relative squared error that chosen clusters bring the expected one down to
    cap:        of the second order of the log mass
    radius:     weight of a cluster's farthest key in the order of choice
    draw:       where k-means starts
    causal:     query i stands at key past + i and sees no later one
    known:      choices that stand: clusters of the first chunks, or all clusters and the selection among them
    """

    chunk: int
    clusters: int
    largest: int
    iterations: int
    exact_keys: int | None
    error: float | None
    cap: float
    radius: float
    draw: ClusterDraw
    causal: bool = False
    past: int = 0
    known: Choices | None = None

    @property
    def slots(self) -> int:
        """Clusters of one chunk at the most, cut ones included; unused slots are empty."""
        return self.clusters + self.chunk // self.largest

    def most_keys(self, far: int, sharp: bool = False) -> int:
        """The most keys that a query evaluates of `far` clustered ones.

        Few clustered keys need the most of them in proportion, many need more in number: single keys that matter are
        harder to tell from their clusters. So they are where scores spread widely inside clusters: sharp queries, whose
        mean second order is above `SHARP`, take twice as many.
        """
        if self.exact_keys is not None:
            return self.exact_keys
        # When causal, the own chunk is exact as well.
        most = min(far // 4, max(160, far // 48)) if self.causal else min(3 * far // 8, max(256, far // 32))
        return 2 * most if sharp else most

    @property
    def rise(self) -> float:
        """How far towards its farthest key a cluster may hold one that counts, where an error is asked for.

        Single keys far above the mean of their cluster are rare: they add about 0.01 to the error, so that they matter
        to smaller ones only.
        """
        assert self.error is not None
        return self.radius / 3 * (1 + math.log10(0.01 / min(max(self.error, 1e-4), 0.01)))

    def starts(self) -> Tensor:
        """Ranks inside a chunk that k-means starts from, (clusters,) int64."""
        number = torch.arange(self.clusters, device=self.draw.starts.device)
        return ((number + self.draw.starts) * (self.chunk / self.clusters)).long().clamp(max=self.chunk - 1)


class Choices(NamedTuple):
    """What is decided before anything is differentiated; n = S // chunk complete chunks at the most.

    order:     (B, H, n, chunk) int32   ranks inside the chunk, sorted by cluster; 0 where the chunk is not complete
    sizes:     (B, H, n, slots) int32   keys of every cluster; 0 likewise
    selection: (B, Hq, L, n * slots) bool, which clusters a query evaluates key by key; None = not decided yet
    """

    order: Tensor
    sizes: Tensor
    selection: Tensor | None = None


class Sight(NamedTuple):
    """What queries see, in ranks: clusters of chunks below `chunks`, and single keys in [dense, end). (B, L) each."""

    chunks: Tensor
    dense: Tensor
    end: Tensor


class Statistics(NamedTuple):
    """Of all N = n * slots clusters: n_c, var_c, V_c, r_c (B, H, N), mu_c (B, H, N, D), vbar_c (B, H, N, E)."""

    size: Tensor
    mean: Tensor
    variance: Tensor
    radius: Tensor
    mean_value: Tensor
    spread: Tensor


class Inspection(NamedTuple):
    """What a call does, per query, (B, Hq, L) each.

    squared_error: expected |out - exact|^2;    squared_norm: |out|^2
    exact_keys:    keys of chosen clusters;     limited: an error was asked for, `exact_keys` kept it from being reached
    """

    squared_error: Tensor
    squared_norm: Tensor
    exact_keys: Tensor
    limited: Tensor


def take_per_head(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (B, H, S, W) at index (B, H, ...): (B, H, ..., W)."""
    flat = index.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    rows: Tensor = x.gather(2, flat.long()).unflatten(2, index.shape[2:])
    return rows


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """weights (..., L, S) @ values (..., S, E); a value that is not finite reaches only queries that give it a weight.

    The plain product would hand it to all: 0 * nan is nan.
    """
    bad = ~values.isfinite().all(-1, keepdim=True)
    if values.device.type == "cpu" and not tracing(values) and not bool(bad.any()):
        return weights @ values
    seen = (weights.detach() != 0).to(values.dtype) @ bad.to(values.dtype) > 0
    return (weights @ values.masked_fill(bad, 0.0)).masked_fill(seen, float("nan"))


def sight(spec: Spec, mask: Tensor, queries: int) -> Sight:
    """What each of L queries sees of the keys whose mask is (B, S)."""
    batch = mask.shape[0]
    if spec.causal:
        end = mask.cumsum(-1)[:, spec.past : spec.past + queries]
        chunks = (end - 1).clamp(min=0) // spec.chunk
    else:
        end = mask.sum(-1, keepdim=True).expand(batch, queries)
        chunks = end // spec.chunk
    return Sight(chunks, chunks * spec.chunk, end)


def cluster_keys(spec: Spec, k: Tensor, mask: Tensor) -> Choices:
    """Clusters of the complete chunks of keys k (B, H, S, D), already in order of rank; `mask` is (B, S)."""
    before = spec.known
    batch, heads, keys, _ = k.shape
    chunks, size = keys // spec.chunk, spec.chunk
    known = 0 if before is None else before.order.shape[2]
    rows = k[:, :, known * size : chunks * size].detach().to(torch.float32).reshape(-1, size, k.shape[-1])
    count = torch.zeros(rows.shape[0], spec.clusters, dtype=torch.int64, device=k.device)
    if rows.shape[0]:
        rows = rows - rows.mean(1, keepdim=True)  # a large common part would take the digits of the distances
        assigned = lloyd(rows, None, rows.index_select(1, spec.starts().to(k.device)), spec.iterations)
        place = torch.arange(size, device=k.device)
        order = (assigned * size + place).sort(-1).values % size
        count = count.scatter_add(-1, assigned, torch.ones_like(assigned))
    else:
        order = torch.zeros(0, size, dtype=torch.int64, device=k.device)
    # A cluster of more than `largest` keys is cut evenly: slot = first slot of the cluster + rank in it // piece.
    pieces = (-(-count // spec.largest)).clamp(min=1)
    piece = (-(-count // pieces)).clamp(min=1)
    slot = torch.arange(spec.slots, device=k.device)
    owner = (slot[:, None] >= pieces.cumsum(-1).unsqueeze(-2)).sum(-1)  # (X, slots): the cluster that a slot belongs to
    inside = owner < spec.clusters
    owner = owner.clamp(max=spec.clusters - 1)
    number = slot - (pieces.cumsum(-1) - pieces).gather(-1, owner)
    sizes = (count.gather(-1, owner) - number * piece.gather(-1, owner)).clamp(min=0)
    sizes = sizes.minimum(piece.gather(-1, owner)) * inside
    order, sizes = (x.to(torch.int32).reshape(batch, heads, chunks - known, x.shape[-1]) for x in (order, sizes))
    complete = (torch.arange(known, chunks, device=k.device) + 1) * size <= mask.sum(-1, keepdim=True)  # (B, n)
    order, sizes = (x * complete[:, None, :, None] for x in (order, sizes))
    if before is not None:
        order, sizes = torch.cat([before.order, order], 2), torch.cat([before.sizes, sizes], 2)
    return Choices(order, sizes)


def slot_of_members(spec: Spec, sizes: Tensor) -> Tensor:
    """The slot (B, H, n, chunk) of every member in `order`; that of a chunk which is not there is `slots`."""
    place = torch.arange(spec.chunk, device=sizes.device)
    ends = sizes.long().cumsum(-1).unsqueeze(-2)  # (B, H, n, 1, slots)
    return (place.unsqueeze(-1) >= ends).sum(-1)


def statistics(spec: Spec, k: Tensor, v: Tensor, choices: Choices) -> Statistics:
    """Of the clusters of keys k (B, H, S, D) and values v (B, H, S, E), both in order of rank."""
    chunks = choices.order.shape[2]
    member = slot_of_members(spec, choices.sizes)  # (B, H, n, chunk)
    belongs = (member.unsqueeze(-1) == torch.arange(spec.slots, device=k.device)).to(k.dtype)
    size = choices.sizes.to(k.dtype)
    part = size.clamp(min=1).reciprocal()
    first = spec.chunk * torch.arange(chunks, device=k.device)[:, None]
    # Chunks that are not there read any rows: they belong to no slot.
    keys, values = (take_per_head(x, choices.order + first) for x in (k, v))
    origin = keys[:, :, :, :1].detach()  # what is common to a chunk does not take part in rounding
    mean = belongs.mT @ (keys - origin) * part.unsqueeze(-1)
    mean_value = belongs.mT @ values * part.unsqueeze(-1)
    away = (keys - origin - belongs @ mean).square().sum(-1)
    variance = (belongs.mT @ away.unsqueeze(-1)).squeeze(-1) * part / k.shape[-1]
    radius = (belongs * away.detach().unsqueeze(-1)).amax(-2).sqrt()
    spread = (belongs.mT @ (values - belongs @ mean_value).square().sum(-1, keepdim=True)).squeeze(-1) * part
    found = (size, mean + origin, variance, radius, mean_value, spread)
    return Statistics(*(x.flatten(2, 3) for x in found))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Statistics of key heads for query heads, with an axis for queries: (B, H, N) -> (B, Hq, 1, N)."""
    return x.repeat_interleave(groups, 1).unsqueeze(-2)


def second_order(spec: Spec, q: Tensor, stats: Statistics) -> Tensor:
    """t_c for queries q (B, Hq, L, D) that are multiplied by the scale already: (B, Hq, L, N)."""
    variance = _grouped(stats.variance, q.shape[1] // stats.size.shape[1])
    return (0.5 * q.square().sum(-1, keepdim=True) * variance).clamp(max=spec.cap)


def log_masses(spec: Spec, q: Tensor, stats: Statistics, chunks: Tensor) -> Tensor:
    """l_c (B, Hq, L, N) for queries that are multiplied by the scale; -inf where a cluster is empty or not visible.

    chunks: (B, L), clusters of the chunks below it are visible
    """
    groups = q.shape[1] // stats.size.shape[1]
    number = torch.arange(stats.size.shape[-1], device=q.device) // spec.slots
    visible = (number < chunks.unsqueeze(-1)).unsqueeze(1) & (_grouped(stats.size, groups) > 0)
    scores = q @ stats.mean.repeat_interleave(groups, 1).mT
    mass = scores + second_order(spec, q, stats) + _grouped(stats.size.clamp(min=1).log(), groups)
    return mass.masked_fill(~visible, float("-inf"))


def expected_error(spec: Spec, q: Tensor, stats: Statistics, weight: Tensor, out: Tensor) -> Tensor:
    """Expected squared error of every cluster that is not chosen, (B, Hq, L, N).

    weight: P_c (B, Hq, L, N), its weight in the output; out: the output (B, Hq, L, E)

        P_c^2 ((e^{2 t} - 1) V_c + ((e^{2 t} - 1) / n_c + t^2 / 4) |vbar_c - out|^2)
    """
    groups = q.shape[1] // stats.size.shape[1]
    t = second_order(spec, q, stats)
    growth = torch.expm1(2 * t)
    mean_value = stats.mean_value.repeat_interleave(groups, 1)
    norms = mean_value.square().sum(-1).unsqueeze(-2) + out.square().sum(-1, keepdim=True)
    away = (norms - 2 * out @ mean_value.mT).clamp(min=0)
    size = _grouped(stats.size.clamp(min=1), groups)
    return weight.square() * (growth * _grouped(stats.spread, groups) + (growth / size + 0.25 * t.square()) * away)


def _most_keys(spec: Spec, q: Tensor, stats: Statistics, chunks: Tensor) -> Tensor:
    """The most keys that every query evaluates of the clusters of `chunks` (B, L) chunks, (B, Hq, L)."""
    count = stats.size.shape[-1] // spec.slots
    chunks = chunks.clamp(max=count)
    blunt, sharp = (
        torch.tensor([spec.most_keys(n * spec.chunk, sharp) for n in range(count + 1)], device=q.device)[chunks]
        for sharp in (False, True)
    )
    if spec.exact_keys is not None or not count:
        return blunt.unsqueeze(1)
    sums = torch.stack([stats.size * stats.variance, stats.size]).unflatten(-1, (count, -1)).sum(-1).cumsum(-1)
    mean = torch.nn.functional.pad(sums[0] / sums[1].clamp(min=1), (1, 0))  # (B, H, n + 1): of the first chunks
    mean = mean.gather(-1, chunks.unsqueeze(1).expand(-1, mean.shape[1], -1))
    order = 0.5 * q.square().sum(-1) * mean.repeat_interleave(q.shape[1] // mean.shape[1], 1)
    return torch.where(order > SHARP, sharp.unsqueeze(1), blunt.unsqueeze(1))


def select_clusters(spec: Spec, q: Tensor, stats: Statistics, chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Clusters that queries q (multiplied by the scale) evaluate key by key: (B, Hq, L, N) bool.

    And (B, Hq, L) bool: `error` was asked for and `exact_keys` kept it from being reached.
    """
    groups = q.shape[1] // stats.size.shape[1]
    mass = log_masses(spec, q, stats, chunks)
    visible = mass > float("-inf")
    size = _grouped(stats.size, groups).expand_as(mass)
    if spec.error is None:
        t = second_order(spec, q, stats)
        reach = spec.radius * q.norm(dim=-1, keepdim=True) * _grouped(stats.radius, groups)
        level = 0.5 * (stats.variance.clamp(min=SMALL).log() + stats.spread.clamp(min=SMALL).log())
        value = mass + (torch.maximum(t, reach) - t) + 0.5 * t + _grouped(level, groups)
    else:
        peak = mass.amax(-1, keepdim=True) if mass.shape[-1] else mass.sum(-1, keepdim=True)
        weight = (mass - peak.masked_fill(peak == float("-inf"), 0.0)).exp()
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=SMALL)
        out = weighted(weight, stats.mean_value.repeat_interleave(groups, 1))
        # A cluster may hold keys far above its mean: its mass may be that of a key some way towards its farthest one,
        # or, where scores spread widely, that of the largest of n such scores.
        above = spec.rise * q.norm(dim=-1, keepdim=True) * _grouped(stats.radius, groups)
        log_size = _grouped(stats.size.clamp(min=1).log(), groups)
        uncapped = 0.5 * q.square().sum(-1, keepdim=True) * _grouped(stats.variance, groups)
        above = torch.maximum(above, 2 * (uncapped * log_size).sqrt() - log_size)
        rise = (above - second_order(spec, q, stats)).clamp(0, 80)
        value = expected_error(spec, q, stats, (weight * rise.exp()).clamp(max=1), out)
    order = torch.sort(value.masked_fill(~visible, float("-inf")), dim=-1, descending=True, stable=True)
    keys = (size * visible).gather(-1, order.indices).cumsum(-1)
    fits = keys <= _most_keys(spec, q, stats, chunks).unsqueeze(-1)
    limited = torch.zeros_like(fits[..., :0].any(-1))
    if spec.error is not None:
        # A cluster is chosen if it and those after it are still too much. Summed from the last one: the small ones,
        # which decide, would be lost beside the first. Without any error allowed, underflow must leave out none.
        rest = order.values.clamp(min=0).flip(-1).cumsum(-1).flip(-1)
        needed = rest > spec.error * out.square().sum(-1, keepdim=True) if spec.error else torch.ones_like(fits)
        limited = (needed & ~fits & visible.gather(-1, order.indices)).any(-1)
        fits = fits & needed
    return torch.zeros_like(visible).scatter(-1, order.indices, fits) & visible, limited
