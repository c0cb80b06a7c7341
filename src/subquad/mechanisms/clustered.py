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
from torch import Tensor

from .. import checks
from ..kernels.clustered import BACKENDS, Spec
from ..kernels.kmeans import CLUSTERINGS, ClusterDraw
from ..kernels.operator import Call, attend
from .base import Mechanism

__all__ = ["Clustered", "ImprovedClustered"]


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

    def _spec(self) -> Spec:
        return Spec(self.clusters, self.clustering, self.iterations, self.draw)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        if q.shape[2] == 0 or k.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        spec = self._spec()
        return attend(BACKENDS, spec, call, q, k, v)


@final
class Clustered(_ByCluster):
    """Clustered attention: every query gets the attention row of its cluster's centroid.

    clusters:   C; with as many clusters as queries, or more, the result is exact softmax attention, as long as no two
                queries (for hamming their hash codes) are nearly equal: those within 0.4 % of the queries' mean norm
                share a cluster
    clustering: lloyd (K-means on the queries) | hamming (K-means on sign hashes, the paper's)
    bits:       length of the hash codes; hamming only
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
    complexity = "O(C S (D + E) + C L (D + E) + C^2 D iterations)"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clusters": 5, "seed": 3},
        {"clusters": 5, "clustering": "hamming", "iterations": 3, "seed": 3},
        {"clusters": 64, "clustering": "hamming", "bits": 16, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        clusters: int = 50,
        clustering: str = "lloyd",
        bits: int = 31,
        iterations: int = 5,
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads, clusters, clustering, bits, iterations, seed)


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
    complexity = "O(C S (D + E) + C L D + C^2 D iterations + L topk (D + E))"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clusters": 5, "topk": 8, "seed": 3},
        {"clusters": 5, "topk": 8, "group_size": 4, "seed": 3},
        {"clusters": 5, "topk": 4, "clustering": "hamming", "iterations": 3, "seed": 3},
        {"clusters": 3, "topk": 100, "clustering": "hamming", "bits": 16, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        clusters: int = 50,
        topk: int = 32,
        group_size: int = 1,
        clustering: str = "lloyd",
        bits: int = 31,
        iterations: int = 5,
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

    def _spec(self) -> Spec:
        return super()._spec()._replace(topk=self.topk, group_size=self.group_size)
