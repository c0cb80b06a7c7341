"""Multipole attention in constant memory: a fixed number of clusters stands for everything before the own chunk.

    out = (sum_c e^{l_c} vbar_c + sum_{j in own chunk} e^{s q.k_j} v_j) / (the same with 1 for the values)
    l_c = s q.mu_c + min(cap, s^2 |q|^2 var_c / 2) + log n_c

When a chunk is complete and a further key comes, its keys are clustered and join the clusters of the chunks before it.
Of more than `limit` clusters the closest are merged: pairs that are each other's nearest by Ward's criterion
n_a n_b / (n_a + n_b) |mu_a - mu_b|^2, the cheapest first. Sizes, means and variances of what is merged are combined
exactly (Chan, Golub and LeVeque, 1979). The first keys of a sequence (sinks) stay clusters of one key, which is exact.

All of it is a function of the past, cut at chunk borders: any split of a sequence gives the same clusters. Which keys
and clusters go together is a constant for gradients; sizes, means, variances and values are differentiated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..kmeans import lloyd
from .definition import Spec, take_per_head

__all__ = ["Bounded", "Far", "Memory", "absorb_chunk", "attend", "empty", "extend", "read", "scan"]

LARGE = 1e38
SAME = 1e-6  # means whose distance is a smaller part of their squares are the same: rounding must not tell them apart


class Bounded(NamedTuple):
    """What is computed: chunks and their k-means as `spec` says, `limit` clusters, and the first `sinks` keys."""

    spec: Spec
    limit: int
    sinks: int


class Far(NamedTuple):
    """Clusters (B, H, N): the sinks, then `limit` others; empty ones have size 0. mean (.., D), mean_value (.., E)."""

    size: Tensor
    mean: Tensor
    variance: Tensor
    mean_value: Tensor


class Memory(NamedTuple):
    """What remains of a sequence: clusters, and the keys after the last absorbed chunk in order of rank.

    total: (B,) int64 real keys so far;  k (B, H, chunk, D), v (B, H, chunk, E): `held` of them are there, the rest is 0
    """

    total: Tensor
    k: Tensor
    v: Tensor
    far: Far

    def absorbed(self) -> Tensor:
        """(B,): chunks that are clusters. A full chunk becomes one when the next key comes."""
        return (self.total - 1).clamp(min=0) // self.k.shape[2]

    def held(self) -> Tensor:
        """(B,): keys that are held one by one, 0 to chunk."""
        return self.total - self.absorbed() * self.k.shape[2]


def empty(bounded: Bounded, k: Tensor, v: Tensor) -> Memory:
    """Nothing yet, for keys and values like k (B, H, ., D) and v (B, H, ., E)."""
    batch, heads, _, dim = k.shape
    slots, chunk, width = bounded.sinks + bounded.limit, bounded.spec.chunk, v.shape[3]
    zeros = k.new_zeros
    far = Far(
        zeros((batch, heads, slots)),
        zeros((batch, heads, slots, dim)),
        zeros((batch, heads, slots)),
        zeros((batch, heads, slots, width)),
    )
    count = torch.zeros(batch, dtype=torch.int64, device=k.device)
    return Memory(count, zeros((batch, heads, chunk, dim)), zeros((batch, heads, chunk, width)), far)


def _round(size: Tensor, mean: Tensor, excess: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the `excess` (X,) closest of all pairs of clusters (X, P) that are each other's nearest.

    Returns where each cluster goes (X, P), and sizes and means after it; what went elsewhere has size 0.
    """
    number = torch.arange(size.shape[-1], device=size.device)
    there = size > 0
    square = mean.square().sum(-1)
    both = square.unsqueeze(-1) + square.unsqueeze(-2)
    away = both - 2 * mean @ mean.mT
    away = away.masked_fill(away <= SAME * both, 0.0)
    cost = away * (size.unsqueeze(-1) * size.unsqueeze(-2)) / (size.unsqueeze(-1) + size.unsqueeze(-2)).clamp(min=1)
    cost = cost.nan_to_num(nan=LARGE, posinf=LARGE).clamp(max=LARGE)  # what is not a number still has to go somewhere
    pair = there.unsqueeze(-1) & there.unsqueeze(-2) & (number != number[:, None])
    cost = cost.masked_fill(~pair, float("inf"))
    near = cost.argmin(-1)  # the first of equals
    value = cost.gather(-1, near.unsqueeze(-1)).squeeze(-1)
    first = (near.gather(-1, near) == number) & (number < near) & (value < float("inf"))
    rank = value.masked_fill(~first, float("inf")).sort(dim=-1, stable=True).indices.argsort(-1)
    keeps = first & (rank < excess.unsqueeze(-1))  # this one takes its nearest in
    goes = keeps.gather(-1, near) & (near.gather(-1, near) == number)
    other = size.gather(-1, near) * keeps
    total = size + other
    theirs = mean.gather(-2, near.unsqueeze(-1).expand_as(mean))
    share = (other / total.clamp(min=1)).unsqueeze(-1)
    merged = torch.where(keeps.unsqueeze(-1), mean + share * (theirs - mean), mean)
    return torch.where(goes, near, number), total.masked_fill(goes, 0.0), merged


def merged(size: Tensor, mean: Tensor, limit: int, most: int) -> Tensor:
    """The slot below `limit` of each of P clusters, sizes (X, P), means (X, P, D), after at most `most` merges."""
    with torch.no_grad():
        size, mean = size.to(torch.float32), mean.to(torch.float32)
        weight = size / size.sum(-1, keepdim=True).clamp(min=1)
        mean = mean - weight.unsqueeze(-2) @ mean  # a large common part would take the digits of the distances
        owner = torch.arange(size.shape[-1], device=size.device).expand_as(size)
        for _ in range(most):  # the closest pair of all is always merged, so this many rounds are enough
            excess = (size > 0).sum(-1) - limit
            if not tracing(size) and not bool((excess > 0).any()):
                break
            goes, size, mean = _round(size, mean, excess)
            owner = goes.gather(-1, owner)
        slot = ((size > 0).cumsum(-1) - 1).clamp(min=0)
        return slot.gather(-1, owner)


def _combined(parts: Far, belongs: Tensor) -> Far:
    """Clusters of clusters: belongs (B, H, P, M), which of the M each of P parts goes to."""
    size = (belongs.mT @ parts.size.unsqueeze(-1)).squeeze(-1)
    share = belongs * (parts.size.unsqueeze(-1) / size.clamp(min=1).unsqueeze(-2))
    mean = share.mT @ parts.mean
    away = (parts.mean - belongs @ mean).square().mean(-1)
    variance = (share.mT @ (parts.variance + away).unsqueeze(-1)).squeeze(-1)
    return Far(size, mean, variance, share.mT @ parts.mean_value)


def absorb_chunk(bounded: Bounded, far: Far, k: Tensor, v: Tensor, first: Tensor) -> Far:
    """Clusters with those of a further chunk k (B, H, chunk, D), v (B, H, chunk, E); first (B,): of a row's first."""
    spec, sinks = bounded.spec, bounded.sinks
    rows = k.detach().to(torch.float32).flatten(0, 1)
    rows = rows - rows.mean(1, keepdim=True)
    assigned = lloyd(rows, None, rows.index_select(1, spec.starts().to(k.device)), spec.iterations)
    place = torch.arange(spec.chunk, device=k.device)
    kept = first[:, None] & (place < sinks)  # (B, chunk)
    belongs = (assigned.unsqueeze(-1) == torch.arange(spec.clusters, device=k.device)).unflatten(0, k.shape[:2])
    belongs = (belongs & ~kept[:, None, :, None]).to(k.dtype)
    one = torch.ones_like(k[..., 0])
    new = _combined(Far(one, k, torch.zeros_like(one), v), belongs)
    pool = Far(*(torch.cat([x[:, :, sinks:], y], 2) for x, y in zip(far, new, strict=True)))
    owner = merged(pool.size.flatten(0, 1), pool.mean.detach().flatten(0, 1), bounded.limit, spec.clusters)
    target = torch.arange(bounded.limit, device=k.device)
    kinds = (owner.unflatten(0, k.shape[:2]).unsqueeze(-1) == target).to(k.dtype)
    rest = _combined(pool, kinds)
    exact = Far(one[:, :, :sinks], k[:, :, :sinks], torch.zeros_like(one[:, :, :sinks]), v[:, :, :sinks])
    return Far(
        *(torch.cat([_where(first, e, x[:, :, :sinks]), y], 2) for e, x, y in zip(exact, far, rest, strict=True))
    )


def _where(rows: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """`one` for the rows (B,) bool, `other` for the rest."""
    return torch.where(rows.view(-1, *[1] * (one.dim() - 1)), one, other)


def _logits(bounded: Bounded, q: Tensor, far: Far, groups: int) -> Tensor:
    """l_c (B, Hq, L, N) of queries that are multiplied by the scale; -inf where a cluster is empty."""
    size, mean, variance = (x.repeat_interleave(groups, 1) for x in (far.size, far.mean, far.variance))
    order = (0.5 * q.square().sum(-1, keepdim=True) * variance.unsqueeze(-2)).clamp(max=bounded.spec.cap)
    mass = q @ mean.mT + order + size.clamp(min=1).log().unsqueeze(-2)
    return mass.masked_fill((size <= 0).unsqueeze(-2), float("-inf"))


def _softmax(logits: list[Tensor], values: list[Tensor], groups: int) -> Tensor:
    """One normaliser over all columns: logits (B, Hq, L, N_i), values (B, H, N_i, E); 0 where nothing is visible."""
    joined = torch.cat(logits, -1)
    hidden = joined == float("-inf")
    empty_rows = hidden.all(-1, keepdim=True)
    weights = torch.softmax(joined.masked_fill(empty_rows, 0.0), -1).masked_fill(hidden, 0.0)
    return weights @ torch.cat(values, 2).repeat_interleave(groups, 1)


def extend(
    bounded: Bounded, memory: Memory, k: Tensor, v: Tensor, new: Tensor
) -> tuple[Memory, Tensor, Tensor, Tensor]:
    """The memory with at most `chunk` further keys (B, H, T, .), of which the first `new` (B,) are real.

    Also the keys and values (B, H, chunk + T, .) that were held one by one meanwhile, and whether (B,) the first chunk
    of them has become clusters.
    """
    chunk, held = memory.k.shape[2], memory.held()
    place = torch.arange(chunk + k.shape[2], device=k.device)
    # Held keys, then the new ones: place i takes the new key i - held.
    index = torch.where(place < held[:, None], place, chunk + place - held[:, None]).clamp(max=chunk + k.shape[2] - 1)
    there = (place < (held + new)[:, None])[:, None, :, None]
    index = index[:, None].expand(-1, k.shape[1], -1)
    keys, values = (take_per_head(torch.cat([x, y], 2), index) * there for x, y in ((memory.k, k), (memory.v, v)))
    full = held + new > chunk
    far = memory.far
    if tracing(k) or bool(full.any()):
        grown = absorb_chunk(bounded, far, keys[:, :, :chunk], values[:, :, :chunk], memory.absorbed() == 0)
        far = Far(*(_where(full, x, y) for x, y in zip(grown, far, strict=True)))
    rest = [torch.nn.functional.pad(x[:, :, chunk:], (0, 0, 0, chunk - k.shape[2])) for x in (keys, values)]
    after = Memory(
        memory.total + new,
        _where(full, rest[0], keys[:, :, :chunk]),
        _where(full, rest[1], values[:, :, :chunk]),
        far,
    )
    return after, keys, values, full


def attend(bounded: Bounded, memory: Memory, q: Tensor, k: Tensor, v: Tensor, new: Tensor) -> tuple[Tensor, Memory]:
    """At most `chunk` tokens, causally, of which the first `new` (B,) are real: out (B, Hq, T, E), and what remains.

    q is multiplied by the scale; the outputs of tokens that are not real mean nothing.
    """
    groups, chunk, held = q.shape[1] // k.shape[1], memory.k.shape[2], memory.held()
    after, keys, values, full = extend(bounded, memory, k, v, new)
    rank = held[:, None] + torch.arange(q.shape[2], device=q.device)  # (B, T), in held and new keys
    later = rank >= chunk  # these see the first chunk as clusters
    place = torch.arange(keys.shape[2], device=q.device)
    seen = (place <= rank.unsqueeze(-1)) & ~(later.unsqueeze(-1) & (place < chunk))
    near = (q @ keys.repeat_interleave(groups, 1).mT).masked_fill(~seen.unsqueeze(1), float("-inf"))
    logits, columns = [near], [values]
    late = later[:, None, :, None]
    before = _logits(bounded, q, memory.far, groups)
    if tracing(q) or bool(full.any()):
        logits += [before.masked_fill(late, float("-inf"))]
        logits += [_logits(bounded, q, after.far, groups).masked_fill(~late, float("-inf"))]
        columns += [memory.far.mean_value, after.far.mean_value]
    else:
        logits, columns = [near, before], [values, memory.far.mean_value]
    return _softmax(logits, columns, groups), after


def scan(
    bounded: Bounded, memory: Memory, q: Tensor | None, k: Tensor, v: Tensor, count: Tensor, block: int
) -> tuple[Tensor | None, Memory]:
    """Any number of tokens, real ones first: count (B,) of them. q None: only what remains is wanted."""
    pieces = []
    for start in range(0, k.shape[2], block):
        part = slice(start, start + block)
        new = (count - start).clamp(0, block)
        if q is None:
            memory = extend(bounded, memory, k[:, :, part], v[:, :, part], new)[0]
        else:
            out, memory = attend(bounded, memory, q[:, :, part], k[:, :, part], v[:, :, part], new)
            pieces.append(out)
    if q is None:
        return None, memory
    return (torch.cat(pieces, 2) if pieces else q.new_zeros((*q.shape[:3], v.shape[3]))), memory


def read(bounded: Bounded, memory: Memory, q: Tensor) -> Tensor:
    """Queries (B, Hq, L, D), multiplied by the scale, over everything; a full chunk is taken as clusters."""
    groups, chunk, held = q.shape[1] // memory.k.shape[1], memory.k.shape[2], memory.held()
    far, full = memory.far, held == chunk
    if tracing(q) or bool(full.any()):
        grown = absorb_chunk(bounded, far, memory.k, memory.v, memory.absorbed() == 0)
        far = Far(*(_where(full, x, y) for x, y in zip(grown, far, strict=True)))
    seen = (torch.arange(chunk, device=q.device) < held[:, None]) & ~full[:, None]
    near = (q @ memory.k.repeat_interleave(groups, 1).mT).masked_fill(~seen[:, None, None], float("-inf"))
    return _softmax([near, _logits(bounded, q, far, groups)], [memory.v, far.mean_value], groups)
