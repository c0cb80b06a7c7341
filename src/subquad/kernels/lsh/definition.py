"""LSH attention: softmax over the keys that share a chunk of some round with the query, or are in the chunk before.

    h_r(x) = argmax [x R_r, -x R_r]                      the bucket of a token in round r
    c_i, c_j                                             chunks of the order by (bucket, position), see choices.py
    P_i    = {j: c_i - c_j = 0 or 1 in some round},      causal: j <= i as well
    out_i  = sum_{j in P_i} e^{scale q_i.k_j} v_j / sum_{j in P_i} e^{scale q_i.k_j},   0 where P_i is empty

A token's own key is treated apart where queries and keys are one sequence:

    shared   keys are the queries, scaled to norm 1: j = i is left out, and taken where P_i is empty without it
    causal   j = i is always in P_i, if it is real
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...features.precision import compute_dtype
from ..operator import Call
from .choices import Chunks, aligned, hash_buckets, ranked, ranked_shared

__all__ = ["Problem", "Spec", "choose_chunks", "flatten", "visible"]


class Spec(NamedTuple):
    """matrix: R^T of all rounds (rounds * buckets / 2, D); size: m, tokens per chunk; by_rank: by past tokens only"""

    matrix: Tensor
    rounds: int
    buckets: int
    size: int
    shared: bool
    by_rank: bool
    causal: bool

    @property
    def alone(self) -> bool:
        """Whether a token's own key is treated apart."""
        return self.shared or self.causal


def choose_chunks(spec: Spec, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None) -> Chunks:
    """Chunks of q (X, L, D) and k (Y, S, D), X a multiple of Y; masks (X, S) and (X, L) or None."""
    matrix = spec.matrix.to(q.dtype)
    key_bucket = hash_buckets(k, matrix, spec.rounds).repeat_interleave(q.shape[0] // k.shape[0], 0)
    numbers = spec.buckets, spec.size
    if spec.shared:
        # |q| does not change a bucket, so the keys' buckets are the queries' as well.
        if spec.by_rank:
            return ranked_shared(key_bucket, key_mask, *numbers)
        return aligned(key_bucket, None, key_mask, None, *numbers)
    query_bucket = hash_buckets(q, matrix, spec.rounds)
    if spec.by_rank:
        return ranked(key_bucket, query_bucket, key_mask, *numbers)
    return aligned(key_bucket, query_bucket, key_mask, query_mask, *numbers)


class Problem(NamedTuple):
    """A call with every head on its own: q (X, L, D), k (X, S, D), v (X, S, E), which keys are real (X, S), chunks."""

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor | None
    chunks: Chunks


def flatten(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """Heads apart, in the dtype that is computed in; keys and values of masked tokens are 0."""
    dtype, heads = compute_dtype(q), q.shape[1]
    queries = q.to(dtype).flatten(0, 1)
    keys, values = (x.to(dtype).repeat_interleave(heads // k.shape[1], 1).flatten(0, 1) for x in (k, v))
    if spec.shared:
        keys = F.normalize(queries, dim=-1)
    real, asked = (None if x is None else x.repeat_interleave(heads, 0) for x in (call.key_mask, call.query_mask))
    if real is not None:
        keys, values = (x.masked_fill(~real.unsqueeze(-1), 0.0) for x in (keys, values))
    return Problem(queries, keys, values, real, choose_chunks(spec, queries, keys, real, asked))


def visible(spec: Spec, problem: Problem) -> Tensor:
    """P_i as a mask (X, L, S)."""
    chunks, real = problem.chunks, problem.real
    offset = chunks.query.unsqueeze(-1) - chunks.key.unsqueeze(-2)
    seen = ((offset == 0) | (offset == 1)).any(1)
    if real is not None:
        seen = seen & real.unsqueeze(-2)
    if spec.causal:
        seen = seen.tril()
    if spec.alone:
        diagonal = torch.eye(seen.shape[-1], dtype=torch.bool, device=seen.device)
        itself = diagonal if real is None else diagonal & real.unsqueeze(-2)
        others = seen & ~diagonal
        seen = torch.where(others.any(-1, keepdim=True), others, itself) if spec.shared else others | itself
    if spec.shared and real is not None:
        seen = seen & real.unsqueeze(-1)
    return seen
