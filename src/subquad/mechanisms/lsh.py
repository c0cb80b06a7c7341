"""LSH attention (Reformer): softmax over the keys that hash to the same place.

    h_r(x) = argmax [x R_r, -x R_r]                        one bucket per round r
    P_i    = union over r of the keys in i's own chunk and the one before; chunks are cut from the order by
             (bucket, position)
    out_i  = sum_{j in P_i} e^{scale q_i.k_j} v_j / sum_{j in P_i} e^{scale q_i.k_j}

Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer", 2020. A key seen in N_ij rounds would count N_ij
times if the rounds were simply merged; the paper subtracts log N_ij from its score. Here it counts in the first round
that sees it and is hidden in the others: the same softmax over the union, with half the comparisons.

Causal. The paper's chunks are cut from the sorted order, so where a chunk begins depends on later tokens: masking the
scores does not stop that, and a later token changes what an earlier one sees. `chunking="rank"` cuts by the rank inside
a bucket, which depends on the past only. Without `is_causal` there is nothing to hide, and chunks are always cut from
the sorted order, across buckets.

Every choice is made per sequence from its real tokens, and the number of buckets does not depend on any length. So a
sequence gives the same alone and in a padded batch and, causal by rank, as the prefix of a longer one.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype
from ..features.projections import GaussianProjection
from ..kernels.lsh import BACKENDS, Spec
from ..kernels.operator import Call, attend
from .base import Mechanism

__all__ = ["LSH"]


@final
class LSH(Mechanism):
    """Locality-sensitive hashing attention.

    rounds:      R, independent hashes; a query sees the union of what the rounds show it
    buckets:     buckets per round, even. About length / bucket_size is a good number; it is not derived from the
                 length, because then a token would depend on how many follow it
    bucket_size: m, tokens per chunk of the order; a query sees at most 2m keys per round
    shared_qk:   the paper's form: the keys are the queries, scaled to norm 1. `k` is not read (pass q again), a masked
                 key is a masked query too (its output is 0), and a token sees itself only if it sees nothing else
    chunking:    rank (causal chunks depend on the past only) | sorted (the paper's; leaks the future by selection)
    seed:        integer or torch.Generator; None takes one integer from torch's generator

    With separate queries and keys and `is_causal`, a token always sees itself. Without `is_causal`, q and k may differ
    in length. Nothing has to divide anything: fewer tokens than m, and buckets without a token, are as good as any.

    >>> import torch, subquad as sq
    >>> attn = sq.create("lsh", head_dim=16, rounds=2, buckets=8, bucket_size=32, seed=0)
    >>> q, k, v = torch.randn(3, 1, 4, 100, 16)
    >>> attn(q, k, v, is_causal=True).shape
    torch.Size([1, 4, 100, 16])
    """

    name = "lsh"
    equation = "softmax(q_i k_j^T / sqrt(D)) v over the keys j that share a bucket's chunk with i in some round"
    paper = 'Kitaev, Kaiser and Levskaya, "Reformer: The Efficient Transformer", 2020'
    complexity = "O(R L (m (D + E) + buckets D + log L)), m = bucket_size"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = (
        {"rounds": 2, "buckets": 4, "bucket_size": 8, "seed": 3},
        {"rounds": 3, "buckets": 6, "bucket_size": 5, "shared_qk": True, "seed": 3},
        {"rounds": 2, "buckets": 4, "bucket_size": 8, "chunking": "sorted", "seed": 3},
        {"rounds": 2, "buckets": 4, "bucket_size": 4, "chunking": "sorted", "shared_qk": True, "seed": 3},
        {"rounds": 1, "buckets": 2, "bucket_size": 1, "seed": 3},
    )

    def __init__(
        self,
        head_dim: int,
        heads: int | None = None,
        kv_heads: int | None = None,
        *,
        rounds: int = 4,
        buckets: int = 64,
        bucket_size: int = 64,
        shared_qk: bool = False,
        chunking: str = "rank",
        seed: int | torch.Generator | None = None,
    ) -> None:
        super().__init__(head_dim, heads, kv_heads)
        checks.check_positive("rounds", rounds)
        checks.check_positive("buckets", buckets, least=2)
        checks.check_positive("bucket_size", bucket_size)
        checks.check_flag("shared_qk", shared_qk)
        checks.check_option("chunking", chunking, ("rank", "sorted"))
        if buckets % 2:
            raise ValueError(
                f"buckets={buckets} must be even: a direction and its opposite are two buckets; use {buckets + 1}"
            )
        self.rounds, self.buckets, self.bucket_size = rounds, buckets, bucket_size
        self.shared_qk, self.chunking = shared_qk, chunking
        self.uses_keys = self.cross = not shared_qk
        self.leaks_by_selection = chunking == "sorted"
        self.projection = GaussianProjection(rounds * buckets // 2, head_dim, seed=seed)

    @property
    def seed(self) -> int:
        """The integer behind the draws."""
        return self.projection.draw_key()[0]

    def _spec(self, dtype: torch.dtype, is_causal: bool) -> Spec:
        sizes = self.rounds, self.buckets, self.bucket_size
        by_rank = is_causal and self.chunking == "rank"
        return Spec(self.projection.as_matrix(dtype), *sizes, self.shared_qk, by_rank, is_causal)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        batch, heads, length, _ = q.shape
        if self.shared_qk and length != k.shape[2]:
            raise ValueError(
                f"shared_qk=True makes the keys from the queries, so q and k must have the same length, got {length} "
                f"and {k.shape[2]}; use shared_qk=False for cross attention"
            )
        if length == 0 or k.shape[2] == 0:
            return v.new_zeros((batch, heads, length, v.shape[-1]))
        spec = self._spec(compute_dtype(q), is_causal)
        return attend(BACKENDS, spec, call, q, k, v)
