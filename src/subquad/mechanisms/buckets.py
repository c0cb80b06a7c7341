"""Who may see whom in LSH attention: hash buckets, the order of tokens inside them, and chunks of that order.

    h(x) = argmax [xR, -xR]          one bucket per token and round (Andoni et al., 2015)

Keys are ordered by (bucket, position) and cut into chunks of m. In each round every key j has a chunk number c_j and
every query i one c_i; i sees j when c_i - c_j is 0 or 1: its own chunk and the one before. Two ways to number:

    sorted  c_j = place of j in the whole order // m. A chunk may span buckets, and where it begins depends on every
            token.
    rank    c_j = rank of j inside its bucket // m, with a gap between buckets. The rank counts earlier tokens only, so
            a later token never changes what an earlier one sees.

Masked tokens have no place: they are ordered last and numbered so that nothing sees them. Everything here is integer
arithmetic on indices; no gradient passes through it. X = sequences (batch x heads), R = rounds, L queries, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.blocks import before, counts, inverse, ordered, slots

__all__ = ["HIDDEN", "Choices", "aligned", "hash_buckets", "ranked", "ranked_shared"]

# The chunk number of a masked key: no query is there or one after it.
HIDDEN = -4


@dataclass(frozen=True)
class Choices:
    """What was decided before any score is computed; the dense oracle reads the first two, the fast way all of them.

    query_chunk  (X, R, L)   c_i
    key_chunk    (X, R, S)   c_j, HIDDEN for masked keys
    key_order    (X, R, S)   which key stands at each place of the order
    query_slot   (X, R, L)   where query i is computed: queries in blocks of m, each against a few blocks of keys
    slot_query   (X, R, n*m) which query that is; L where a slot is empty
    block        (X, R, n)   the last block of the key order that a query block reads; None = that of its own number
    back         how many blocks before that it reads
    chunks       all chunk numbers are below it
    """

    query_chunk: Tensor
    key_chunk: Tensor
    key_order: Tensor
    query_slot: Tensor
    slot_query: Tensor
    block: Tensor | None
    back: int
    chunks: int


def hash_buckets(x: Tensor, matrix: Tensor, rounds: int) -> Tensor:
    """h(x) = argmax [xR, -xR] for x (X, L, D) and R^T = `matrix` (rounds * buckets/2, D): int64 (X, rounds, L).

    >>> hash_buckets(torch.tensor([[[1.0, 0.1], [-1.0, 0.1]]]), torch.eye(2), rounds=1)
    tensor([[[0, 2]]])
    """
    y = (x.detach() @ matrix.mT).unflatten(-1, (rounds, -1))  # (X, L, R, buckets/2)
    # The largest of [y, -y] has the largest |y|; this way nothing is concatenated.
    index = y.abs().argmax(-1)
    negative = y.gather(-1, index.unsqueeze(-1)).squeeze(-1) < 0
    bucket: Tensor = (index + negative * y.shape[-1]).mT.contiguous()
    return bucket


def _ending(bucket: Tensor, mask: Tensor | None, buckets: int) -> Tensor:
    """Masked tokens (mask (X, L) False) in a bucket of their own behind all others."""
    return bucket if mask is None else bucket.masked_fill(~mask.unsqueeze(-2), buckets)


def _hide(chunk: Tensor, mask: Tensor | None) -> Tensor:
    return chunk if mask is None else chunk.masked_fill(~mask.unsqueeze(-2), HIDDEN)


def _padded(order: Tensor, size: int) -> Tensor:
    """Fill the last block up to a multiple of `size` with the index one past the end, an empty slot."""
    length = order.shape[-1]
    return torch.nn.functional.pad(order, (0, -length % size), value=length)


def aligned(
    key_bucket: Tensor,
    query_bucket: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    buckets: int,
    size: int,
) -> Choices:
    """Chunks of the whole order (`sorted`); `query_bucket=None` where queries and keys are the same tokens.

    Other queries are ordered the same way and cut into blocks of m. A query is worth a place among the keys: the start
    of its bucket plus its rank there, stretched to the number of keys. A block reads the chunk nearest to its first
    query's place, and the one before.
    """
    bucket = _ending(key_bucket, key_mask, buckets)
    order, place = ordered(bucket)
    key_chunk = _hide(place // size, key_mask)
    if query_bucket is None:
        return Choices(place // size, key_chunk, order, place, _padded(order, size), None, 1, order.shape[-1])
    asked = _ending(query_bucket, query_mask, buckets)
    query_order, slot = ordered(asked)
    keys, queries = counts(bucket, buckets + 1), counts(asked, buckets + 1)
    rank = slot - before(queries).gather(-1, asked)
    worth = before(keys).gather(-1, asked) + rank * keys.gather(-1, asked) // queries.gather(-1, asked)
    first = query_order[..., ::size]
    block = (worth.gather(-1, first) + size // 2) // size
    chunk = block.gather(-1, slot // size)
    return Choices(chunk, key_chunk, order, slot, _padded(query_order, size), block, 1, order.shape[-1] + 2)


def _rank_chunks(keys: Tensor, size: int) -> Tensor:
    """The number of the first chunk of every bucket: consecutive, with one unused number between buckets."""
    return before((keys + size - 1) // size + 1)


def _limit(bucket: Tensor, buckets: int) -> int:
    """No chunk number reaches it: at most a chunk per token, and two more numbers per bucket."""
    return bucket.shape[-1] + 2 * (buckets + 1)


def ranked_shared(bucket: Tensor, mask: Tensor | None, buckets: int, size: int) -> Choices:
    """Chunks by rank inside a bucket, queries and keys being the same tokens.

    The two chunks seen lie within 2m places before the own place, so a block of m places reads two blocks before it.
    """
    bucket = _ending(bucket, mask, buckets)
    order, place = ordered(bucket)
    keys = counts(bucket, buckets + 1)
    rank = place - before(keys).gather(-1, bucket)
    chunk = _rank_chunks(keys, size).gather(-1, bucket) + rank // size
    return Choices(chunk, _hide(chunk, mask), order, place, _padded(order, size), None, 2, _limit(bucket, buckets))


def ranked(key_bucket: Tensor, query_bucket: Tensor, key_mask: Tensor | None, buckets: int, size: int) -> Choices:
    """Chunks by rank inside a bucket, for separate queries and keys of one length.

    Query i has the rank of the last key of its bucket at or before position i. How many queries fall between two keys
    is not bounded, so blocks are padded (`slots`).
    """
    length = key_bucket.shape[-1]
    bucket = _ending(key_bucket, key_mask, buckets)
    position = torch.arange(length, device=bucket.device)
    # One order for both: keys at even codes, the query of a position right after its key.
    both = torch.cat([2 * (bucket * length + position), 2 * (query_bucket * length + position) + 1], -1)
    code = both.sort(-1).values
    is_query = code % 2
    token = code // 2 % length + length * is_query
    seen = torch.zeros_like(token).scatter(-1, token, (1 - is_query).cumsum(-1))  # keys up to and including this token
    place, worth = seen[..., :length] - 1, seen[..., length:]
    keys = counts(bucket, buckets + 1)
    starts, chunks = before(keys), _rank_chunks(keys, size)
    key_chunk = chunks.gather(-1, bucket) + (place - starts.gather(-1, bucket)) // size
    rank = (worth - starts.gather(-1, query_bucket) - 1).clamp(min=0)
    query_chunk = chunks.gather(-1, query_bucket) + rank // size
    blocks = -(-length // size)
    slot, slot_query, block = slots((worth - 1).clamp(min=0) // size, blocks, size)
    limit = _limit(bucket, buckets)
    return Choices(query_chunk, _hide(key_chunk, key_mask), inverse(place), slot, slot_query, block, 2, limit)
