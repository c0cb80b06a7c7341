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
import torch.nn.functional as F
from torch import Tensor

from .. import checks
from ..features.base import LOG2_E
from ..features.precision import compute_dtype, full_precision
from ..features.projections import GaussianProjection
from ..kernels.blocks import take_rows
from ..kernels.checkpointing import scan_chunks, tracing
from ..kernels.operator import Call
from .base import Mechanism, check_call
from .buckets import Choices, aligned, hash_buckets, ranked, ranked_shared

__all__ = ["LSH"]

# Subtracted from scores that do not count: their weights underflow to an exact 0. Finite, so that a row without any key
# stays finite as well; its log-sum-exp below LOWEST tells that there was nothing to see.
HUGE, LOWEST = 1e30, -1e20
# Scores per piece of work: a few of them together stay in a core's cache.
PIECE = 1 << 18


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

    def redraw(self) -> None:
        """Resample the hash functions: the next draw of the same seed."""
        self.projection.redraw()

    def _choose(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, is_causal: bool
    ) -> Choices:
        """Buckets and chunks of q (X, L, D) and k (X, S, D)."""
        matrix = self.projection.as_matrix(q.dtype)
        key_bucket = hash_buckets(k, matrix, self.rounds)
        numbers = self.buckets, self.bucket_size
        by_rank = is_causal and self.chunking == "rank"
        if self.shared_qk:
            # |q| does not change a bucket, so the keys' buckets are the queries' as well.
            if by_rank:
                return ranked_shared(key_bucket, key_mask, *numbers)
            return aligned(key_bucket, None, key_mask, None, *numbers)
        query_bucket = hash_buckets(q, matrix, self.rounds)
        if by_rank:
            return ranked(key_bucket, query_bucket, key_mask, *numbers)
        return aligned(key_bucket, query_bucket, key_mask, query_mask, *numbers)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        check_call(call)
        batch, heads, length, _ = q.shape
        if self.shared_qk and length != k.shape[2]:
            raise ValueError(
                f"shared_qk=True makes the keys from the queries, so q and k must have the same length, got {length} "
                f"and {k.shape[2]}; use shared_qk=False for cross attention"
            )
        if length == 0 or k.shape[2] == 0:
            return v.new_zeros((batch, heads, length, v.shape[-1]))
        with full_precision(q):
            dtype = compute_dtype(q)
            groups = heads // k.shape[1]
            queries = q.to(dtype).flatten(0, 1)
            keys, values = (x.to(dtype).repeat_interleave(groups, 1).flatten(0, 1) for x in (k, v))
            if self.shared_qk:
                keys = F.normalize(queries, dim=-1)
            real = None if call.key_mask is None else call.key_mask.repeat_interleave(heads, 0)  # (X, S)
            asked = None if call.query_mask is None else call.query_mask.repeat_interleave(heads, 0)
            if real is not None:
                keys, values = (x.masked_fill(~real.unsqueeze(-1), 0.0) for x in (keys, values))
            choices = self._choose(queries, keys, real, asked, is_causal)
            alone = self.shared_qk or is_causal  # a token's own key is treated apart
            if call.backend == "reference":
                out = _dense(queries, keys, values, choices, real, is_causal, alone, call.scale, self.shared_qk)
            else:
                tables = _tables(choices, real, length, keys.shape[-2])
                # One row past the end serves every empty slot.
                sources = tuple(F.pad(x, (0, 0, 0, 1)) for x in (queries, keys, values))
                rounds = [
                    _one_round(
                        sources, tables, choices, is_causal, alone, call.scale, r, self.bucket_size, call.chunk_size
                    )
                    for r in range(self.rounds)
                ]
                out = _merge(torch.stack(rounds), queries, keys, values, real, alone, call.scale, self.shared_qk)
            if self.shared_qk and real is not None:
                out = out.masked_fill(~real.unsqueeze(-1), 0.0)
        return out.view(batch, heads, length, -1).to(v.dtype)


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choices: Choices,
    real: Tensor | None,
    is_causal: bool,
    alone: bool,
    scale: float,
    shared: bool,
) -> Tensor:
    """The oracle: softmax over the union, from a mask (X, L, S)."""
    offset = choices.query_chunk.unsqueeze(-1) - choices.key_chunk.unsqueeze(-2)
    visible = ((offset == 0) | (offset == 1)).any(1)
    if real is not None:
        visible = visible & real.unsqueeze(-2)
    if is_causal:
        visible = visible.tril()
    if alone:
        diagonal = torch.eye(q.shape[-2], dtype=torch.bool, device=q.device)
        itself = diagonal if real is None else diagonal & real.unsqueeze(-2)
        others = visible & ~diagonal
        visible = torch.where(others.any(-1, keepdim=True), others, itself) if shared else others | itself
    scores = (scale * q @ k.mT).masked_fill(~visible, float("-inf"))
    empty = ~visible.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(~visible, 0.0) @ v


def _tables(choices: Choices, real: Tensor | None, length: int, keys: int) -> tuple[Tensor, Tensor]:
    """What decides visibility, as small integers: position and chunk per round, (1 + R, X, L or S, + 1).

    Keys that nothing sees have the largest position there is, and so has the one past the end.
    """
    # Half the memory traffic of int32; but torch's compiler writes C++ for 16-bit minima that does not compile.
    small = max(length, keys, choices.chunks) < 32000 and not torch.compiler.is_compiling()
    kind = torch.int16 if small else torch.int32
    beyond = torch.iinfo(kind).max

    def table(chunks: Tensor, hidden: Tensor | None, empty: int) -> Tensor:
        where = torch.arange(chunks.shape[-1], device=chunks.device).expand(chunks.shape[0], -1)
        where = where if hidden is None else where.masked_fill(hidden, beyond)
        return F.pad(torch.cat([where.unsqueeze(0), chunks.movedim(1, 0)]).to(kind), (0, 1), value=empty)

    return table(choices.query_chunk, None, 0), table(choices.key_chunk, None if real is None else ~real, beyond)


def _one_round(
    sources: tuple[Tensor, ...],
    tables: tuple[Tensor, Tensor],
    choices: Choices,
    is_causal: bool,
    alone: bool,
    scale: float,
    number: int,
    size: int,
    chunk_size: int | None,
) -> Tensor:
    """Attention to the keys that round `number` shows and no round before it did.

    Returns (X, L, E + 1): the mean of the values under the softmax of the round, and its log-sum-exp, per query.
    """
    queries, keys, values = sources
    back, block = choices.back, choices.block
    length, key_length = queries.shape[-2] - 1, keys.shape[-2] - 1
    query_table, key_table = (x[: number + 2] for x in tables)
    # The order of the keys after `back` empty blocks, the last block filled up.
    key_index = F.pad(choices.key_order[:, number], (back * size, -key_length % size), value=key_length)
    query_index = choices.slot_query[:, number]
    if block is None:
        # Query blocks get the same empty blocks in front, so that the block before is a shift of the flat storage.
        query_index = F.pad(query_index, (back * size, 0), value=length)
        window = None
    else:
        key_index = F.pad(key_index, (0, size), value=key_length)  # a block past the last key: nothing there to read
        window = block[:, number]
    read: list[Tensor] = []
    for x in (keys, values, *key_table.unsqueeze(-1)):
        stored = take_rows(x, key_index)  # (X, (back + n) m, .)
        if window is None:
            flat = F.pad(stored.flatten(0, 1), (0, 0, back * size, 0))
            read.extend(flat[step * size : step * size + stored.shape[0] * stored.shape[1]] for step in range(back + 1))
        else:
            blocks = stored.unflatten(1, (-1, size)).flatten(-2)
            read.extend(take_rows(blocks, window + step).reshape(-1, x.shape[-1]) for step in range(back + 1))
    asked = [take_rows(x, query_index).flatten(0, 1) for x in (queries, *query_table.unsqueeze(-1))]
    width, columns = back + 1, number + 2

    def step(_: tuple[Tensor, ...], *inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        x, *ids = (part.unflatten(0, (-1, size)) for part in inputs[: 1 + columns])  # (f, m, .)
        ks, vs, *key_ids = (
            torch.cat([part.unflatten(0, (-1, size)) for part in inputs[i : i + width]], 1)  # (f, width m, .)
            for i in range(1 + columns, len(inputs), width)
        )
        bias = _hidden(ids, [c.mT for c in key_ids], is_causal, alone, back == 2).to(x.dtype).mul_(HUGE)
        # In powers of two, which are faster than e^x on a CPU, many times so where weights underflow. The shift is a
        # constant for gradients: through a maximum they would depend on how ties were rounded.
        scores = torch.baddbmm(bias, x, ks.mT, alpha=scale * LOG2_E)
        shift = scores.detach().amax(-1, keepdim=True)
        weights = scores.sub_(shift).exp2_()
        mass = weights.sum(-1, keepdim=True)
        total = (shift + mass.log2()) / LOG2_E
        return (), torch.cat([weights @ vs / mass, total], -1).flatten(0, 1)

    tokens = max(1, PIECE // (width * size)) if chunk_size is None else chunk_size
    piece = asked[0].shape[0] if tracing(queries) else size * max(1, tokens // size)
    _, out = scan_chunks(step, (), [*asked, *read], (), piece)
    assert out is not None
    slot = choices.query_slot[:, number] + (back * size if window is None else 0)
    return take_rows(out.unflatten(0, (queries.shape[0], -1)), slot)


def _hidden(ids: list[Tensor], key_ids: list[Tensor], is_causal: bool, alone: bool, by_rank: bool) -> Tensor:
    """-1 where a pair does not count in the latest of the rounds listed, else 0: (f, m, W) integers.

    ids: position and chunk per round, (f, m, 1) each; key_ids: the same, (f, 1, W). Small integers throughout, since
    comparisons that give bools are several times slower than arithmetic on a CPU.
    """
    position, key_position = ids[0], key_ids[0]
    if is_causal:
        hidden = (position - 1 - key_position).clamp(-1, 0)  # keys strictly before the query; its own is treated apart
    else:
        hidden = -(key_position == torch.iinfo(position.dtype).max).to(position.dtype)
        if alone:
            hidden = torch.minimum(hidden, (position - key_position).abs_().clamp(max=1).sub_(1))
    *earlier, now = (mine - theirs for mine, theirs in zip(ids[1:], key_ids[1:], strict=True))
    if by_rank:  # blocks of places hold parts of other chunks
        hidden = torch.minimum(hidden, now.bitwise_and_(-2).abs_().clamp(max=1).neg_())
    for offset in earlier:  # 0 or 1: that round has counted the pair already
        hidden = torch.minimum(hidden, offset.bitwise_and_(-2).abs_().clamp(max=1).sub_(1))
    return hidden


def _merge(
    rounds: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    real: Tensor | None,
    alone: bool,
    scale: float,
    shared: bool,
) -> Tensor:
    """Merge the rounds (R, X, L, E + 1), and the token itself, by their log-sum-exps."""
    out, total = rounds[..., :-1], rounds[..., -1:]
    if alone and not shared:
        own = scale * (q * k).sum(-1, keepdim=True)
        own = own if real is None else own.masked_fill(~real.unsqueeze(-1), -HUGE)
        total = torch.cat([total, own.unsqueeze(0)])
    empty = total.amax(0) < LOWEST
    weight = torch.softmax(total, 0)
    merged = (weight[: out.shape[0]] * out).sum(0)
    if alone and not shared:
        merged = merged + weight[-1] * v
    # A masked key has value 0 here, so a masked token that sees nothing gives 0.
    return torch.where(empty, v if shared else torch.zeros_like(merged), merged)
