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

from typing import NamedTuple

import torch
from torch import Tensor

from ..blocks import before, counts, ordered
from ..checkpointing import tracing

__all__ = ["HIDDEN", "Chunks", "aligned", "hash_buckets", "ranked", "ranked_shared"]

# Products per piece of hashing: they stay in the caches.
PIECE = 1 << 18
# The chunk number of a masked key: no query is there or one after it.
HIDDEN = -4


class Chunks(NamedTuple):
    """What is decided before any score is computed.

    query        (X, R, L)  c_i
    key          (X, R, S)  c_j, HIDDEN for masked keys
    query_place  (X, R, L)  where queries stand in an order of their own by (bucket, position); by rank: how many keys
                            of the keys' order come before or with it
    key_place    (X, R, S)  where keys stand in theirs
    limit        all chunk numbers are below it
    """

    query: Tensor
    key: Tensor
    query_place: Tensor
    key_place: Tensor
    limit: int


def hash_buckets(x: Tensor, matrix: Tensor, rounds: int) -> Tensor:
    """h(x) = argmax [xR, -xR] for x (X, L, D) and R^T = `matrix` (rounds * buckets/2, D): int64 (X, rounds, L).

    >>> hash_buckets(torch.tensor([[[1.0, 0.1], [-1.0, 0.1]]]), torch.eye(2), rounds=1)
    tensor([[[0, 2]]])
    """
    rows = x.detach().flatten(0, 1)
    pieces = (rows,) if tracing(x) else rows.split(max(1, PIECE // matrix.shape[0]))
    bucket: Tensor = torch.cat([_largest((piece @ matrix.mT).unflatten(-1, (rounds, -1))) for piece in pieces])
    bucket = bucket.unflatten(0, x.shape[:2]).mT.contiguous()
    return bucket


def _largest(y: Tensor) -> Tensor:
    """argmax [y, -y] of the last dimension, without joining the two."""
    index = y.abs().argmax(-1)
    negative = y.gather(-1, index.unsqueeze(-1)).squeeze(-1) < 0
    return index + negative * y.shape[-1]


def _ending(bucket: Tensor, mask: Tensor | None, buckets: int) -> Tensor:
    """Masked tokens (mask (X, L) False) in a bucket of their own behind all others."""
    return bucket if mask is None else bucket.masked_fill(~mask.unsqueeze(-2), buckets)


def _hide(chunk: Tensor, mask: Tensor | None) -> Tensor:
    return chunk if mask is None else chunk.masked_fill(~mask.unsqueeze(-2), HIDDEN)


def aligned(
    key_bucket: Tensor,
    query_bucket: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    buckets: int,
    size: int,
) -> Chunks:
    """Chunks of the whole order (`sorted`); `query_bucket=None` where queries and keys are the same tokens.

    Other queries are ordered the same way and cut into blocks of m. A query is worth a place among the keys: the start
    of its bucket plus its rank there, stretched to the number of keys. A block reads the chunk nearest to its first
    query's place, and the one before.
    """
    bucket = _ending(key_bucket, key_mask, buckets)
    _, place = ordered(bucket)
    key_chunk = _hide(place // size, key_mask)
    if query_bucket is None:
        return Chunks(place // size, key_chunk, place, place, place.shape[-1] + 1)
    asked = _ending(query_bucket, query_mask, buckets)
    query_order, slot = ordered(asked)
    keys, queries = counts(bucket, buckets + 1), counts(asked, buckets + 1)
    rank = slot - before(queries).gather(-1, asked)
    worth = before(keys).gather(-1, asked) + rank * keys.gather(-1, asked) // queries.gather(-1, asked)
    first = query_order[..., ::size]
    block = (worth.gather(-1, first) + size // 2) // size
    chunk = block.gather(-1, slot // size)
    return Chunks(chunk, key_chunk, slot, place, place.shape[-1] + 2)


def _rank_chunks(keys: Tensor, size: int) -> Tensor:
    """The number of the first chunk of every bucket: consecutive, with one unused number between buckets."""
    return before((keys + size - 1) // size + 1)


def _limit(bucket: Tensor, buckets: int) -> int:
    """No chunk number reaches it: at most a chunk per token, and two more numbers per bucket."""
    return bucket.shape[-1] + 2 * (buckets + 1)


def ranked_shared(bucket: Tensor, mask: Tensor | None, buckets: int, size: int) -> Chunks:
    """Chunks by rank inside a bucket, queries and keys being the same tokens."""
    bucket = _ending(bucket, mask, buckets)
    _, place = ordered(bucket)
    keys = counts(bucket, buckets + 1)
    rank = place - before(keys).gather(-1, bucket)
    chunk = _rank_chunks(keys, size).gather(-1, bucket) + rank // size
    return Chunks(chunk, _hide(chunk, mask), place, place, _limit(bucket, buckets))


def ranked(key_bucket: Tensor, query_bucket: Tensor, key_mask: Tensor | None, buckets: int, size: int) -> Chunks:
    """Chunks by rank inside a bucket, for separate queries and keys of one length.

    Query i has the rank of the last key of its bucket at or before position i.
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
    return Chunks(query_chunk, _hide(key_chunk, key_mask), worth, place, _limit(bucket, buckets))
