"""Which rows of an attention matrix to look at, and what is exact about them.

A prediction sums over pairs of keys, so it cannot see all of them. Per query it takes the keys with the largest
weights or errors, all of them, and an even sample of the rest that counts for the keys left out: where attention is
sharp the few keys that carry a row are there, where it is flat the rest is. Queries in two steps. First as many as
exact rows can be afforded: all, or half of them from the tenth with the largest norms, whose rows carry most of the
error (causal: at positions spaced by a factor, since early rows carry most of |A|^2), and each stands for as many as
its part of the sequence has. Of these, `pick_by_size` takes a few in proportion to what each will contribute.
Nothing is random: the same input gives the same sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..features.base import scaled

__all__ = ["CANDIDATES", "MOST_ROWS", "Block", "blocks", "evenly", "pick_by_size", "pick_keys", "pick_rows"]

MOST_KEYS = 16384  # beyond this even a row of scores is sampled
MOST_ROWS = 256  # over all heads: many heads share the work
CANDIDATES = 1024  # exact rows per head to pick from, as long as all heads together have no more scores than this
MOST_SCORES = 1 << 23


@dataclass(frozen=True)
class Block:
    """Some queries of one head of one sequence against its keys, in float64; n queries, S keys.

    x (n, D), y (S, D): scaled, so that the kernel is e^{x.y};  weights (n, S): exact softmax rows, 0 where not visible
    v (S, E) or None;  visible (n, S) bool;  head, kv_head: which heads these are
    count (n,): how many queries each of these stands for
    """

    head: int
    kv_head: int
    x: Tensor
    y: Tensor
    v: Tensor | None
    visible: Tensor
    weights: Tensor
    count: Tensor

    def total(self, squares: Tensor) -> float:
        """Squares (n, ...) summed over all queries that these stand for."""
        return float((squares.flatten(1).sum(-1) * self.count).sum())

    @property
    def out(self) -> Tensor:
        """The exact output (n, E)."""
        assert self.v is not None
        return self.weights @ self.v


def evenly(count: int, most: int) -> Tensor:
    """At most `most` of the indices 0 .. count - 1, evenly spread over the whole.

    >>> evenly(10, 4).tolist(), evenly(3, 4).tolist()
    ([1, 3, 6, 8], [0, 1, 2])
    """
    if count <= most:
        return torch.arange(count)
    return ((torch.arange(most, dtype=torch.float64) + 0.5) * (count / most)).long()


def pick_rows(x: Tensor, most: int, *, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Indices of at most `most` of the queries x (n, D), and how many queries each of them stands for."""
    count = len(x)
    if count <= most:
        return torch.arange(count), torch.ones(count, dtype=torch.float64)
    if is_causal:
        # A row of n keys has |a|^2 of about 1/n: every doubling of the position carries as much as the one before.
        edges = torch.logspace(0, math.log10(count + 1), most + 1, dtype=torch.float64).round().long().unique() - 1
        return (edges[:-1] + edges[1:]) // 2, torch.diff(edges).to(torch.float64)
    x = x.to(torch.float64)
    order = (x - x.mean(0)).square().sum(-1).argsort(dim=0, descending=True, stable=True)
    large = math.ceil(count / 10)
    parts = [(order[:large], most // 2), (order[large:], most - most // 2)]
    index = torch.cat([part[evenly(len(part), share)] for part, share in parts])
    counts = [torch.full((min(len(part), share),), len(part) / max(1, min(len(part), share))) for part, share in parts]
    return index, torch.cat(counts).to(torch.float64)


def blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    scale: float,
    is_causal: bool,
    key_mask: Tensor | None,
    max_queries: int,
) -> Iterator[Block]:
    """The sample, head by head: at most `max_queries` queries of each head, spread over at most four sequences."""
    batch, heads, length, _ = q.shape
    group = heads // k.shape[1]
    items = evenly(batch, 4).tolist()
    affordable = MOST_SCORES // (heads * min(k.shape[2], MOST_KEYS))
    per_head = max(len(items), min(max_queries, max(affordable, math.ceil(MOST_ROWS / heads))))
    for head in range(heads):
        for number, item in enumerate(items):
            share = per_head // len(items) + (number < per_head % len(items))
            real = torch.arange(length)
            if key_mask is not None and length == k.shape[2]:
                real = key_mask[item].cpu().nonzero().squeeze(-1)  # padding among the keys is padding among the queries
            picked, counts = pick_rows(q[item, head].detach().cpu()[real], share, is_causal=is_causal)
            rows = real[picked]
            columns = evenly(k.shape[2], MOST_KEYS)
            visible = torch.ones(len(rows), len(columns), dtype=torch.bool)
            if is_causal:
                visible = columns.unsqueeze(0) <= rows.unsqueeze(1)
            if key_mask is not None:
                visible = visible & key_mask[item].cpu()[columns].unsqueeze(0)
            seen = visible.any(1)  # a query without keys has no row to be wrong about
            rows, visible, counts = rows[seen], visible[seen], counts[seen]
            if not len(rows):
                continue
            kv_head = head // group

            def taken(source: Tensor, at: int, index: Tensor, item: int = item) -> Tensor:
                return source[item, at].detach().cpu()[index].to(torch.float64)

            x = scaled(taken(q, head, rows), scale, queries=True)
            y = scaled(taken(k, kv_head, columns), scale, queries=False)
            weights = torch.softmax((x @ y.mT).masked_fill(~visible, -math.inf), -1)
            values = None if v is None else taken(v, kv_head, columns)
            yield Block(head, kv_head, x, y, values, visible, weights, counts)


def pick_by_size(size: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Indices of at most about `most` of the items with this size (n,) >= 0, and how many items each one stands for.

    Systematic sampling with probability proportional to size: what is larger than its share is taken for sure and
    stands for itself; any sum of quantities proportional to `size` comes out exactly. A twentieth of the sizes is
    spread evenly, so that an item whose size was underestimated can still be met.

    >>> pick_by_size(torch.tensor([100.0, 1.0, 1.0, 1.0, 1.0]), 3)[0].tolist()
    [0, 1, 3]
    """
    count = len(size)
    if count <= most:
        return torch.arange(count), torch.ones(count, dtype=torch.float64)
    size = torch.nan_to_num(size.to(torch.float64), nan=0.0, posinf=1e300).clamp(min=0.0)
    size = size / size.max().clamp(min=1e-300)
    size = size + 0.05 * size.mean() + 1e-12
    sure = torch.zeros(count, dtype=torch.bool)
    while int(sure.sum()) < most:  # taking one for sure makes the share of the others smaller
        share = size[~sure].sum() / (most - int(sure.sum()))
        more = ~sure & (size >= share)
        if not bool(more.any()):
            break
        sure |= more
    index = sure.nonzero().squeeze(-1)
    multiples = torch.ones(len(index), dtype=torch.float64)
    left = most - len(index)
    rest = (~sure).nonzero().squeeze(-1)
    if left > 0 and len(rest):
        rest = rest[size[rest].argsort(descending=True, stable=True)]
        ends = size[rest].cumsum(0)
        points = (torch.arange(left, dtype=torch.float64) + 0.5) * (ends[-1] / left)
        picked = rest[torch.searchsorted(ends, points).clamp(max=len(rest) - 1)]
        index = torch.cat([index, picked])
        multiples = torch.cat([multiples, ends[-1] / (left * size[picked])])
    return index, multiples


def pick_keys(block: Block, max_keys: int, sizes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Indices (n, K) of the keys to look at per query, and for how many keys each of them counts (0: not visible).

    sizes: (n, S) what each key contributes to the error; the largest are taken beside those of the largest weights
    """
    count = block.y.shape[0]
    if count <= max_keys:
        index = torch.arange(count).expand(block.x.shape[0], count)
        return index, block.visible.to(torch.float64)
    top = max_keys // 2
    order = block.weights.masked_fill(~block.visible, -1.0).argsort(dim=-1, descending=True, stable=True)
    if sizes is not None:
        by_size = sizes.masked_fill(~block.visible, -1.0).argsort(dim=-1, descending=True, stable=True)
        rank = torch.minimum(order.argsort(-1), by_size.argsort(-1)).masked_fill(~block.visible, count)
        first = rank.argsort(dim=-1, stable=True)[:, :top]
        # The others stay in the order of their weights, so that every size of weight is represented.
        taken = torch.zeros_like(block.visible).scatter_(1, first, True)
        behind = taken.gather(1, order).to(torch.int8).argsort(dim=-1, stable=True)
        order = torch.cat([first, order.gather(1, behind)[:, : count - top]], 1)
    left = block.visible.sum(-1, keepdim=True) - top  # visible keys beyond the top ones, which come first in `order`
    rest = max_keys - top
    # Evenly along the order of weights: every size of weight is represented.
    steps = (torch.arange(rest, dtype=torch.float64) + 0.5) / rest
    few = left <= rest
    place = torch.where(few, torch.arange(rest), (steps * left.clamp(min=1)).long()) + top
    counts = torch.where(few, (torch.arange(rest) < left).to(torch.float64), left.to(torch.float64) / rest)
    index = torch.cat([order[:, :top], order.gather(1, place.clamp(max=count - 1))], 1)
    multiples = torch.cat([(torch.arange(top) < left + top).to(torch.float64), counts.expand(-1, rest)], 1)
    return index, multiples
