"""LSH attention in torch: per round, queries in blocks of m against a few blocks of keys, and a merge of the rounds.

A key that several rounds show counts in the first of them and is hidden in the others. So the rounds are softmax means
over disjoint sets of keys, merged by their log-sum-exps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...features.base import LOG2_E
from ..blocks import inverse, slots, take_rows
from ..checkpointing import scan_chunks, tracing
from ..operator import Backend, Call
from .choices import Chunks
from .definition import Problem, Spec, flatten

__all__ = ["Chunked"]

# Subtracted from scores that do not count: their weights underflow to an exact 0. Finite, so that a row without any key
# stays finite as well; its log-sum-exp below LOWEST tells that there was nothing to see.
HUGE, LOWEST = 1e30, -1e20
# Scores per piece of work: a few of them together stay in a core's cache.
PIECE = 1 << 18


class Chunked(Backend[Spec]):
    """Any device, any dtype; gradients of any order."""

    name = "chunked"

    def attend(self, spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """out (B, Hq, L, E) in the dtype that is computed in."""
        problem = flatten(spec, call, q, k, v)
        layout = _layout(spec, problem.chunks)
        tables = _tables(problem.chunks, problem.real, q.shape[2], k.shape[2])
        # One row past the end serves every empty slot.
        sources = tuple(F.pad(x, (0, 0, 0, 1)) for x in problem[:3])
        rounds = [
            _one_round(spec, sources, tables, layout, call.scale, number, call.chunk_size)
            for number in range(spec.rounds)
        ]
        out = _merge(spec, torch.stack(rounds), problem, call.scale)
        if spec.shared and problem.real is not None:
            out = out.masked_fill(~problem.real.unsqueeze(-1), 0.0)
        return out.view(*q.shape[:3], -1)


class Layout(NamedTuple):
    """Where everything is computed: queries in blocks of m, each against a few blocks of keys.

    key_order    (X, R, S)   which key stands at each place of the order
    query_slot   (X, R, L)   where query i is computed
    slot_query   (X, R, n*m) which query that is; L where a slot is empty
    block        (X, R, n)   the last block of the key order that a query block reads; None = that of its own number
    back         how many blocks before that it reads
    """

    key_order: Tensor
    query_slot: Tensor
    slot_query: Tensor
    block: Tensor | None
    back: int


def _layout(spec: Spec, chunks: Chunks) -> Layout:
    size, order, place = spec.size, inverse(chunks.key_place), chunks.query_place
    if spec.by_rank and not spec.shared:
        # How many queries fall between two keys is not bounded, so blocks are padded.
        blocks = -(-order.shape[-1] // size)
        return Layout(order, *slots((place - 1).clamp(min=0) // size, blocks, size), 2)
    query_order = order if spec.shared else inverse(place)
    length = query_order.shape[-1]
    slot_query = F.pad(query_order, (0, -length % size), value=length)
    # By rank, the two chunks seen lie within 2m places before the own place.
    block = None if spec.shared else chunks.query.gather(-1, query_order[..., ::size])
    return Layout(order, place, slot_query, block, 2 if spec.by_rank else 1)


def _tables(chunks: Chunks, real: Tensor | None, length: int, keys: int) -> tuple[Tensor, Tensor]:
    """What decides visibility, as small integers: position and chunk per round, (1 + R, X, L or S, + 1).

    Keys that nothing sees have the largest position there is, and so has the one past the end.
    """
    # Half the memory traffic of int32; but torch's compiler writes C++ for 16-bit minima that does not compile.
    small = max(length, keys, chunks.limit) < 32000 and not torch.compiler.is_compiling()
    kind = torch.int16 if small else torch.int32
    beyond = torch.iinfo(kind).max

    def table(numbers: Tensor, hidden: Tensor | None, empty: int) -> Tensor:
        where = torch.arange(numbers.shape[-1], device=numbers.device).expand(numbers.shape[0], -1)
        where = where if hidden is None else where.masked_fill(hidden, beyond)
        return F.pad(torch.cat([where.unsqueeze(0), numbers.movedim(1, 0)]).to(kind), (0, 1), value=empty)

    return table(chunks.query, None, 0), table(chunks.key, None if real is None else ~real, beyond)


def _one_round(
    spec: Spec,
    sources: tuple[Tensor, ...],
    tables: tuple[Tensor, Tensor],
    layout: Layout,
    scale: float,
    number: int,
    chunk_size: int | None,
) -> Tensor:
    """Attention to the keys that round `number` shows and no round before it did.

    Returns (X, L, E + 1): the mean of the values under the softmax of the round, and its log-sum-exp, per query.
    """
    queries, keys, values = sources
    size, back, block = spec.size, layout.back, layout.block
    length, key_length = queries.shape[-2] - 1, keys.shape[-2] - 1
    query_table, key_table = (x[: number + 2] for x in tables)
    # The order of the keys after `back` empty blocks, the last block filled up.
    key_index = F.pad(layout.key_order[:, number], (back * size, -key_length % size), value=key_length)
    query_index = layout.slot_query[:, number]
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
        bias = _hidden(spec, ids, [c.mT for c in key_ids]).to(x.dtype).mul_(HUGE)
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
    slot = layout.query_slot[:, number] + (back * size if window is None else 0)
    return take_rows(out.unflatten(0, (queries.shape[0], -1)), slot)


def _hidden(spec: Spec, ids: list[Tensor], key_ids: list[Tensor]) -> Tensor:
    """-1 where a pair does not count in the latest of the rounds listed, else 0: (f, m, W) integers.

    ids: position and chunk per round, (f, m, 1) each; key_ids: the same, (f, 1, W). Small integers throughout, since
    comparisons that give bools are several times slower than arithmetic on a CPU.
    """
    position, key_position = ids[0], key_ids[0]
    if spec.causal:
        hidden = (position - 1 - key_position).clamp(-1, 0)  # keys strictly before the query; its own is treated apart
    else:
        hidden = -(key_position == torch.iinfo(position.dtype).max).to(position.dtype)
        if spec.alone:
            hidden = torch.minimum(hidden, (position - key_position).abs_().clamp(max=1).sub_(1))
    *earlier, now = (mine - theirs for mine, theirs in zip(ids[1:], key_ids[1:], strict=True))
    if spec.by_rank:  # blocks of places hold parts of other chunks
        hidden = torch.minimum(hidden, now.bitwise_and_(-2).abs_().clamp(max=1).neg_())
    for offset in earlier:  # 0 or 1: that round has counted the pair already
        hidden = torch.minimum(hidden, offset.bitwise_and_(-2).abs_().clamp(max=1).sub_(1))
    return hidden


def _merge(spec: Spec, rounds: Tensor, problem: Problem, scale: float) -> Tensor:
    """Merge the rounds (R, X, L, E + 1), and the token itself, by their log-sum-exps."""
    q, k, v, real, _ = problem
    out, total = rounds[..., :-1], rounds[..., -1:]
    apart = spec.alone and not spec.shared
    if apart:
        own = scale * (q * k).sum(-1, keepdim=True)
        own = own if real is None else own.masked_fill(~real.unsqueeze(-1), -HUGE)
        total = torch.cat([total, own.unsqueeze(0)])
    empty = total.amax(0) < LOWEST
    weight = torch.softmax(total, 0)
    merged = (weight[: out.shape[0]] * out).sum(0)
    if apart:
        merged = merged + weight[-1] * v
    # A masked key has value 0 here, so a masked token that sees nothing gives 0.
    return torch.where(empty, v if spec.shared else torch.zeros_like(merged), merged)
