"""Clustered attention: one softmax row per cluster of queries, corrected on the keys that matter.

    c_j      = mean of the queries of cluster j
    A^c_j    = softmax(scale c_j K^T)
    clustered            out_i = A^c_j V                                                 for i in cluster j
    improved-clustered   out_i = m_j softmax_{l in T_j}(scale q_i.k_l) V + sum_{l not in T_j} A^c_jl v_l,
                         T_j the k keys with the largest A^c_jl,  m_j = sum_{l in T_j} A^c_jl

Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020; `kmeans.py` clusters the queries.
Rows sum to 1 in both, and a row of the improved form is never further from the exact one than the clustered row, in
L1: on T_j its error is |m_j - exact mass|, the least that any row of that mass can have there, and off T_j the two are
equal.

If a query is within eps of its centroid, ||A^c_j - A_i||_2 <= scale eps ||K||_2 / 2 (the paper has twice that). There
is no causal form: a centroid is a mean over the whole sequence.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype, full_precision
from ..kernels.kmeans import CLUSTERINGS, ClusterDraw, cluster, cluster_means
from ..kernels.operator import Call
from .base import Mechanism, check_call
from .buckets import slots, take_rows

__all__ = ["Clustered", "ImprovedClustered"]

# The score of a masked key: far enough below any other that its weight underflows to an exact 0, and finite, so that a
# sequence without any real key stays finite too.
LOW = -1e30


class _ByCluster(Mechanism):
    causal = False
    causal_refusal = "a centroid is a mean over queries of the whole sequence, so every output would see later tokens"

    def __init__(
        self,
        head_dim: int,
        heads: int | None,
        kv_heads: int | None,
        clusters: int,
        clustering: str,
        bits: int,
        iterations: int,
        seed: int | torch.Generator | None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("clusters", clusters)
        checks.check_option("clustering", clustering, CLUSTERINGS)
        checks.check_positive("bits", bits)
        checks.check_positive("iterations", iterations, least=0)
        if clusters * (bits + 1) >= 1 << 24:
            raise ValueError(
                f"clusters * (bits + 1) must be below 2**24, so that float32 counts exactly, got {clusters=}, {bits=}"
            )
        self.clusters, self.clustering, self.bits, self.iterations = clusters, clustering, bits, iterations
        self.draw = ClusterDraw(clusters, bits, head_dim, seed=seed)

    @property
    def seed(self) -> int:
        """The integer behind the draws."""
        return self.draw.draw_key()[0]

    def redraw(self) -> None:
        """Resample hyperplanes and starting points: the next draw of the same seed."""
        self.draw.redraw()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        batch, heads, length, _ = q.shape
        if length == 0 or k.shape[2] == 0:
            return v.new_zeros((batch, heads, length, v.shape[-1]))
        with full_precision(q):
            dtype = compute_dtype(q)
            queries, keys, values = q.to(dtype), k.to(dtype), v.to(dtype)
            if call.key_mask is not None:
                keys, values = (x.masked_fill(~call.key_mask[:, None, :, None], 0.0) for x in (keys, values))
            asked = None if call.query_mask is None else call.query_mask.repeat_interleave(heads, 0)
            if call.query_mask is not None:
                queries = queries.masked_fill(~call.query_mask[:, None, :, None], 0.0)
            flat = queries.flatten(0, 1)
            assigned = cluster(flat, asked, self.draw, clustering=self.clustering, iterations=self.iterations)
            centroid = cluster_means(flat, assigned, asked, self.clusters)  # (X, C, D)
            # Query heads that share a key head stand side by side in one product: (B, H, groups C, D).
            centroid = centroid.view(batch, k.shape[1], -1, self.head_dim)
            scores = (call.scale * centroid) @ keys.mT
            if call.key_mask is not None:
                scores = scores.masked_fill(~call.key_mask[:, None, None, :], LOW)
            dense = call.backend == "reference"
            corrected = self._correct(queries, keys, values, scores, assigned, call.scale, call.key_mask, dense)
            if call.key_mask is not None:
                corrected = corrected.masked_fill(~call.key_mask.any(-1)[:, None, None, None], 0.0)
        return corrected.to(v.dtype)

    def _correct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        assigned: Tensor,
        scale: float,
        key_mask: Tensor | None,
        dense: bool,
    ) -> Tensor:
        """out (B, Hq, L, E) from centroid scores (B, H, groups C, S) and clusters of queries (B Hq, L)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how rows of centroids become rows of queries")


def _broadcast(assigned: Tensor, rows: Tensor) -> Tensor:
    """Rows of clusters (B, H, groups C, W) handed to their members, assigned (B Hq, L): (B, Hq, L, W)."""
    batch, sequences = rows.shape[0], assigned.shape[0]
    out: Tensor = take_rows(rows.reshape(sequences, -1, rows.shape[-1]), assigned).unflatten(0, (batch, -1))
    return out


@final
class Clustered(_ByCluster):
    """Clustered attention: every query gets the attention row of its cluster's centroid.

    clusters:   C; with as many clusters as queries, or more, the result is exact softmax attention, as long as the
                queries' hash codes differ
    clustering: hamming (K-means on sign hashes) | lloyd (K-means on the queries)
    bits:       length of the hash codes
    iterations: of K-means; 0 = nearest starting point
    seed:       integer or torch.Generator; None takes one integer from torch's generator

    Pass `query_mask` for padded batches: masked queries then have no influence on the centroids.

    >>> import torch, subquad as sq
    >>> attn = sq.create("clustered", head_dim=16, clusters=8, seed=0)
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16)
    >>> attn(q, k, v).shape
    torch.Size([1, 4, 100, 16])
    """

    name = "clustered"
    equation = "softmax(c_j k^T / sqrt(D)) v for every query i of cluster j, c_j the mean of its queries"
    paper = 'Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020'
    complexity = "O(C S (D + E) + C L (E + bits iterations))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clusters": 5, "seed": 3},
        {"clusters": 5, "clustering": "lloyd", "iterations": 3, "seed": 3},
        {"clusters": 64, "bits": 16, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        clusters: int = 25,
        clustering: str = "hamming",
        bits: int = 31,
        iterations: int = 10,
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads, clusters, clustering, bits, iterations, seed)

    def _correct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        assigned: Tensor,
        scale: float,
        key_mask: Tensor | None,
        dense: bool,
    ) -> Tensor:
        weights = torch.softmax(scores, -1)
        if dense:
            every = _broadcast(assigned, weights)  # (B, Hq, L, S)
            return every @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        return _broadcast(assigned, weights @ v)


@final
class ImprovedClustered(_ByCluster):
    """Clustered attention with the exact softmax on each cluster's most important keys.

    clusters, clustering, bits, iterations, seed: as for `clustered`
    topk:       keys per cluster on which the weights of each query are recomputed; all keys, if there are fewer
    group_size: choose groups of this many neighbouring keys by their joint mass instead of single keys, topk in all

    >>> import torch, subquad as sq
    >>> attn = sq.create("improved-clustered", head_dim=16, clusters=8, topk=16, seed=0)
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16)
    >>> attn(q, k, v).shape
    torch.Size([1, 4, 100, 16])
    """

    name = "improved-clustered"
    equation = "m_j softmax(q_i k_T^T / sqrt(D)) v_T + clustered off T; T the cluster's top keys, m_j their mass"
    paper = 'Vyas, Katharopoulos and Fleuret, "Fast Transformers with Clustered Attention", 2020'
    complexity = "O(C S (D + E) + C L bits iterations + L topk (D + E))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clusters": 5, "topk": 8, "seed": 3},
        {"clusters": 5, "topk": 8, "group_size": 4, "seed": 3},
        {"clusters": 5, "topk": 4, "clustering": "lloyd", "iterations": 3, "seed": 3},
        {"clusters": 3, "topk": 100, "bits": 16, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        clusters: int = 25,
        topk: int = 32,
        group_size: int = 1,
        clustering: str = "hamming",
        bits: int = 31,
        iterations: int = 10,
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads, clusters, clustering, bits, iterations, seed)
        checks.check_positive("topk", topk)
        checks.check_positive("group_size", group_size)
        if topk % group_size:
            raise ValueError(
                f"topk={topk} must be a multiple of group_size={group_size}; "
                f"use topk={-(-topk // group_size) * group_size}"
            )
        self.topk, self.group_size = topk, group_size

    def _top(self, scores: Tensor, weights: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """T_j as indices (B, H, groups C, k), k = topk or all keys, and which of them do not count."""
        keys, size = scores.shape[-1], self.group_size
        scores, weights = scores.detach(), weights.detach()
        if size == 1:
            return scores.topk(min(self.topk, keys), sorted=False).indices, None
        order = torch.arange(keys, device=scores.device)
        if key_mask is not None:
            # Groups are cut from the real keys, so that they do not depend on where padding is.
            order = (order + keys * (~key_mask)).sort(-1).values % keys  # (B, S)
            order = order[:, None, None, :].expand_as(scores)
            scores, weights = scores.gather(-1, order), weights.gather(-1, order)
        short = -keys % size
        mass = F.pad(weights, (0, short)).unflatten(-1, (-1, size)).sum(-1)
        largest = F.pad(scores, (0, short), value=2 * LOW).unflatten(-1, (-1, size)).amax(-1)
        # The logarithm of the mass, also where the mass itself has underflowed: ties would make the choice arbitrary.
        total = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        rank = torch.maximum(mass.log(), largest - total)
        groups = rank.topk(min(self.topk // size, rank.shape[-1]), sorted=False).indices
        index = (groups.unsqueeze(-1) * size + torch.arange(size, device=groups.device)).flatten(-2)
        missing = index >= keys  # of a short last group; the key before them is in T as well
        index = index.clamp(max=keys - 1)
        return (index if key_mask is None else order.gather(-1, index)), missing

    def _correct(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor,
        assigned: Tensor,
        scale: float,
        key_mask: Tensor | None,
        dense: bool,
    ) -> Tensor:
        weights = torch.softmax(scores, -1)
        top, hidden = self._top(scores, weights, key_mask)
        if key_mask is not None:
            masked = ~key_mask[:, None, None, :].expand_as(scores).gather(-1, top)
            hidden = masked if hidden is None else hidden | masked
        inside = weights.gather(-1, top)
        mass = (inside if hidden is None else inside.masked_fill(hidden, 0.0)).sum(-1, keepdim=True)
        rest = weights.scatter(-1, top, 0.0)
        if dense:
            return self._dense(q, k, v, assigned, scale, mass, rest, top, key_mask)
        batch, heads, length, _ = q.shape
        sequences, clusters = assigned.shape[0], self.clusters
        # Queries in blocks of one cluster each; a block reads its cluster's keys once.
        size = 16 if length < 32 * clusters else 32 if length < 128 * clusters else 64
        slot, slot_query, block = slots(assigned, clusters, size)
        block = block + clusters * torch.arange(sequences, device=q.device).unsqueeze(-1)

        def per_block(rows: Tensor) -> Tensor:
            """Rows of clusters (.., W) -> (X n, 1, W): that of every block's cluster."""
            return rows.reshape(sequences * clusters, -1).index_select(0, block.flatten()).unsqueeze(1)

        # Scale and mass go to the few rows of the clusters, before every block gets its copy.
        index = top.reshape(batch * k.shape[1], -1)
        keys, values = (take_rows(x.flatten(0, 1), index).view(*top.shape, -1) for x in (k, v))
        keys, values = per_block(scale * keys), per_block(mass.unsqueeze(-1) * values)
        # An empty slot may hold any query: nobody reads it.
        rows = take_rows(q.flatten(0, 1), slot_query.clamp(max=length - 1)).view(-1, size, q.shape[-1])
        scores = rows @ keys.view(-1, top.shape[-1], k.shape[-1]).mT
        if hidden is not None:
            scores = scores.masked_fill(per_block(hidden), LOW)
        values = values.view(-1, top.shape[-1], v.shape[-1])
        out = torch.baddbmm(per_block(rest @ v), torch.softmax(scores, -1), values)
        return take_rows(out.view(sequences, -1, v.shape[-1]), slot).view(batch, heads, length, -1)

    def _dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        assigned: Tensor,
        scale: float,
        mass: Tensor,
        rest: Tensor,
        top: Tensor,
        key_mask: Tensor | None,
    ) -> Tensor:
        """The oracle: every weight written out, (B, Hq, L, S)."""
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        inside = _broadcast(assigned, torch.zeros_like(rest).scatter(-1, top, 1.0)) > 0
        if key_mask is not None:
            inside = inside & key_mask[:, None, None, :]
        exact = torch.softmax((scale * q @ k.mT).masked_fill(~inside, LOW), -1).masked_fill(~inside, 0.0)
        return (_broadcast(assigned, mass) * exact + _broadcast(assigned, rest)) @ v
