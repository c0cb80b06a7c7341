"""Kernelised attention in torch matmuls, chunk by chunk: any device, time O(L), memory O(L), no host synchronisation.

With K, Q the key and query features of a chunk, V its values and S, z the state before it:

    causal      N = Q S + tril(Q K^T) V,   Z = Q z + tril(Q K^T) 1,   out = N / Z
    state       S <- S + K^T V,            z <- z + K^T 1

Exponential features are taken relative to one shift per feature, the maximum over the state and the whole chunk. A row
early in the chunk may then find all its own keys underflowed because of a much larger later key. Such chunks go through
`exact_causal`, which never lets a row see a shift from its future. On a CPU this is decided by looking at the
normalisers (and at NaN); where looking would wait for a device (or cannot be traced) the exact form is always used.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ....features.base import FeatureMap, Features, weigh
from ....features.precision import widened
from ....state import Partial, State, Sums, finite, join, masked, row_weights, safe_divide
from ...checkpointing import Carry, scan_chunks, tracing
from ...operator import Call
from ..definition import WindowedLinear

__all__ = [
    "BLOCK",
    "UNDERFLOW",
    "absorb",
    "causal",
    "default_chunk",
    "exact_causal",
    "hidden_values",
    "read",
    "shared_shift",
]

# Tokens per triangular block inside a chunk: intra-block work grows with it, the number of block states shrinks.
BLOCK = 64
# Bytes of one chunk's features: large enough for full-speed matmuls, small enough to stay in the last-level cache.
CHUNK_BYTES = 4 << 20
# Below this shifted normaliser a row may have lost keys that matter to it.
UNDERFLOW = 1e-20


def default_chunk(x: Tensor, features: int) -> int:
    """Tokens per chunk for inputs like x (B, H, L, D) and `features` features."""
    tokens = CHUNK_BYTES // max(1, x.shape[0] * x.shape[1] * features * 4)
    return max(BLOCK, min(1024, tokens // BLOCK * BLOCK))


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """(B, G H, L, D) -> (B, H, G L, D): the queries that share a key head stand in one row of tokens."""
    batch, heads, length, width = q.shape
    if heads == kv_heads:
        return q
    return q.reshape(batch, kv_heads, heads // kv_heads * length, width)


def _hidden(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.logical_not().unsqueeze(1).unsqueeze(-1)


def hidden_values(v: Tensor, hidden: Tensor | None) -> Tensor:
    """Values with 0 at hidden keys: garbage times a weight of zero is only zero if it is finite."""
    return v if hidden is None else v.masked_fill(hidden, 0.0)


def _count(k: Tensor, hidden: Tensor | None) -> Tensor | int:
    return k.shape[-2] if hidden is None else hidden.logical_not().sum((1, 2, 3))


def _map(spec: WindowedLinear) -> FeatureMap:
    assert spec.feature_map is not None
    return spec.feature_map


def absorb(spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E)."""
    phi, scale = _map(spec), call.scale
    assert state.far is not None

    def step(carry: Carry, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Carry, None]:
        features = masked(phi.keys(widened(k), scale), hidden)
        return tuple(Sums(*carry).absorb(features, hidden_values(widened(v), hidden))), None

    size = call.chunk_size or default_chunk(k, phi.num_features)
    hidden, constants = _hidden(call.key_mask), list(phi.parameters())
    carry, _ = scan_chunks(
        step, tuple(state.far), (k, v, hidden), constants, size, checkpoint=not phi.hidden_parameters
    )
    return replace(state, far=Sums(*carry), count=state.count + _count(k, hidden))


def read(spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
    """out (B, Hq, L, E) for queries q (B, Hq, L, D): every absorbed key is visible to every query."""
    phi, scale = _map(spec), call.scale
    assert state.far is not None
    batch, heads, length, _ = q.shape
    rows = _grouped(q, state.far.weighted.shape[1])

    # The state is carried, not closed over: it may itself depend on the parameters of the map, and the gradient of a
    # chunk must stop at it.
    def step(carry: Carry, q: Tensor) -> tuple[Carry, Tensor]:
        numerator, normaliser, _ = Sums(*carry).partial(phi.queries(widened(q), scale))
        return carry, safe_divide(numerator, normaliser) if spec.normalise else numerator

    size = call.chunk_size or default_chunk(rows, phi.num_features)
    constants = list(phi.parameters())
    _, out = scan_chunks(step, tuple(state.far), (rows,), constants, size, checkpoint=not phi.hidden_parameters)
    if out is None:
        return state.far.weighted.new_zeros((batch, heads, length, state.far.weighted.shape[-1]))
    return out.reshape(batch, heads, length, out.shape[-1])


def causal(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
    """out (B, Hq, L, E) and the state after the last token; token i sees the state and tokens 0..i."""
    phi, scale, normalise = _map(spec), call.scale, spec.normalise
    assert state.far is not None
    groups = q.shape[1] // k.shape[1]
    careful = tracing(q) or q.device.type != "cpu"

    def step(carry: Carry, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Carry, Tensor]:
        before, count = Sums(*carry[:3]), carry[3]
        queries = phi.queries(widened(_grouped(q, k.shape[1])), scale)
        keys, values = masked(phi.keys(widened(k), scale), hidden), hidden_values(widened(v), hidden)
        shape = (*q.shape[:3], v.shape[-1])
        seen = count + _count(k, hidden)
        if k.shape[-2] == 1:
            # The recurrent form. Its rows are the chunk, so no later key can disturb them.
            after = before.absorb(keys, values)
            numerator, normaliser, _ = after.partial(queries)
            out = safe_divide(numerator, normaliser) if normalise else numerator
            return (*after, seen), out.reshape(shape)
        if keys.log_scale is None or not careful:
            after, part = shared_shift(queries, keys, values, before, groups)
            out, normaliser = safe_divide(part[0], part[1]) if normalise else part[0], part[1]
            if careful or _sound(out, normaliser, keys.log_scale is not None, count, hidden):
                return (*after, seen), out.reshape(shape)
        part = exact_causal(queries, keys, values, before, groups)
        # Unnormalised maps carry no log scale, so their numerator has no shift to undo.
        out = safe_divide(part[0], part[1]) if normalise else part[0]
        return (*before.absorb(keys, values), seen), out.reshape(shape)

    size = call.chunk_size or default_chunk(q, phi.num_features)
    inputs, constants = (q, k, v, _hidden(call.key_mask)), list(phi.parameters())
    start = (*state.far, state.count)
    carry, out = scan_chunks(step, start, inputs, constants, size, checkpoint=not phi.hidden_parameters)
    if out is None:
        out = state.far.weighted.new_zeros((*q.shape[:3], v.shape[-1]))
    return out, replace(state, far=Sums(*carry[:3]), count=carry[3])


def _sound(out: Tensor, normaliser: Tensor, scaled: bool, seen: Tensor, hidden: Tensor | None) -> bool:
    """Whether a chunk with a shared shift lost nothing and mixed no NaN of a later token into an earlier row."""
    with torch.no_grad():
        if not bool(out.sum().isfinite()):
            return False
        if not scaled:
            return True
        lost = normaliser.abs() < UNDERFLOW
        if hidden is not None:  # rows that see no key at all have a normaliser of 0, correctly
            lost = lost & ((seen[:, None] + (~hidden[:, 0, :, 0]).cumsum(-1)) > 0)[:, None, None]
        return not bool(lost.any())


def shared_shift(
    queries: Features, keys: Features, v: Tensor, state: Sums, groups: int, *, strict: bool = False
) -> tuple[Sums, Partial]:
    """One chunk with one shift per feature: next state, and the partial attention of its rows (B, H, G, T).

    Row i sees the state and keys 0..i of the chunk; `strict` leaves out key i. A row whose normaliser is below
    UNDERFLOW may have lost keys that matter to it, where `exact_causal` loses none.
    """
    batch, heads, tokens, width = v.shape
    count = state.normaliser.shape[-1]
    weighted, normaliser, log_max = state.weighted, state.normaliser, state.log_max
    if keys.log_scale is None:
        key_weights, query_weights = weigh(keys, None), weigh(queries, None)
        shift = log_max
    else:
        log_max = torch.maximum(log_max, keys.log_scale.detach().amax(-2))
        key_weights = weigh(keys, -finite(log_max).unsqueeze(-2))
        rho = torch.exp(state.log_max - finite(log_max))
        weighted, normaliser = weighted * rho.unsqueeze(-1), normaliser * rho
        query_weights, shift = row_weights(queries, log_max)
        shift = finite(shift)

    block = min(BLOCK, tokens)
    blocks = -(-tokens // block)
    spare = blocks * block - tokens
    query_weights = query_weights.reshape(batch, heads, groups, tokens, count)
    if spare:
        key_weights, v = F.pad(key_weights, (0, 0, 0, spare)), F.pad(v, (0, 0, 0, spare))
        query_weights = F.pad(query_weights, (0, 0, 0, spare))
    flat = batch * heads * blocks
    key_blocks = key_weights.reshape(flat, block, count)
    value_blocks = v.reshape(flat, block, width)
    query_blocks = (
        query_weights.reshape(batch, heads, groups, blocks, block, count)
        .transpose(2, 3)
        .reshape(flat, groups * block, count)
    )

    # States before each block, and after the last: plain sums, because the shift is the same for all of them. Adding
    # whole states is several times faster than a cumulative sum, which walks along the blocks for each element.
    sums = torch.bmm(key_blocks.transpose(1, 2), value_blocks).view(batch, heads, blocks, count, width)
    totals = key_blocks.sum(1).view(batch, heads, blocks, count)
    states = [weighted]
    for i in range(blocks):
        states.append(states[-1] + sums.select(2, i))
    before = torch.stack(states[:-1], 2).view(flat, count, width)
    totals = torch.cat([normaliser.unsqueeze(2), totals], 2).cumsum(2)

    scores = torch.bmm(query_blocks, key_blocks.transpose(1, 2))
    visible = torch.ones(block, block, dtype=scores.dtype, device=scores.device).tril_(-1 if strict else 0)
    scores = (scores.view(flat, groups, block, block) * visible).view(flat, groups * block, block)
    numerator = torch.baddbmm(torch.bmm(scores, value_blocks), query_blocks, before)
    rows = scores.sum(-1) + (query_blocks * totals.narrow(2, 0, blocks).reshape(flat, 1, count)).sum(-1)

    def unblocked(x: Tensor) -> Tensor:
        x = (
            x.view(batch, heads, blocks, groups, block, x.shape[-1])
            .transpose(2, 3)
            .reshape(batch, heads, groups, blocks * block, x.shape[-1])
        )
        return x.narrow(-2, 0, tokens)

    after = Sums(states[-1], totals.select(2, -1), log_max)
    shift = shift.expand(batch, heads, groups * tokens).reshape(batch, heads, groups, tokens)
    return after, Partial(unblocked(numerator), unblocked(rows.unsqueeze(-1)).squeeze(-1), shift)


def exact_causal(
    queries: Features, keys: Features, v: Tensor, state: Sums, groups: int, *, strict: bool = False
) -> Partial:
    """One chunk in which no row ever meets a shift from its future: partial attention of its rows (B, H, G, T).

    A row's past is the state, itself (unless `strict`), and for each power of two s the s tokens of the aligned block
    before its own where that block is a left half. Every key of such a block is visible to every row of the right half,
    so a block's own maxima are a safe shift: the largest term of each row is exactly 1. log2(T) levels, each a batched
    matmul.
    """
    batch, heads, tokens, width = v.shape
    length = 1 << (tokens - 1).bit_length()

    def token_axis(x: Tensor | None, repeat: int, fill: float) -> Tensor | None:
        return (
            None
            if x is None
            else F.pad(x.reshape(batch, heads, repeat, tokens, x.shape[-1]), (0, 0, 0, length - tokens), value=fill)
        )

    q_values, q_log = token_axis(queries.values, groups, 0.0), token_axis(queries.log_scale, groups, 0.0)
    k_values, k_log = token_axis(keys.values, 1, 0.0), token_axis(keys.log_scale, 1, float("-inf"))
    values = token_axis(v, 1, 0.0)
    assert values is not None
    if k_log is None:
        k_log = torch.zeros_like(values.narrow(-1, 0, 1))

    def attend(qv: Tensor | None, ql: Tensor | None, kv: Tensor | None, kl: Tensor, v: Tensor) -> Partial:
        """All keys of the last-but-one axis visible to all queries there."""
        peak = kl.detach().amax(-2, keepdim=True)
        key_weights = weigh(Features(kv, kl), -finite(peak))
        shifted = peak + (0.0 if ql is None else ql)
        shift = shifted.detach().amax(-1, keepdim=True)
        query_weights = weigh(Features(qv, shifted), -finite(shift))
        scores = query_weights @ key_weights.transpose(-1, -2)
        return Partial(scores @ v, scores.sum(-1), shift.squeeze(-1).expand(scores.shape[:-1]))

    numerator, normaliser, shift = state.partial(queries)
    rows = (batch, heads, groups, tokens)
    spare = length - tokens
    total = Partial(
        F.pad(numerator.reshape(*rows, width), (0, 0, 0, spare)),
        F.pad(normaliser.reshape(rows), (0, spare)),
        F.pad(shift.reshape(rows), (0, spare), value=float("-inf")),
    )

    def single(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.unsqueeze(-2)

    if not strict:
        own = attend(single(q_values), single(q_log), single(k_values), k_log.unsqueeze(-2), values.unsqueeze(-2))
        total = join(total, Partial(own[0].squeeze(-2), own[1].squeeze(-1), own[2].squeeze(-1)))
    size = 1
    while size < length:

        def halves(x: Tensor | None, index: int, size: int = size) -> Tensor | None:
            return None if x is None else x.unflatten(3, (length // (2 * size), 2, size)).select(4, index)

        left_log, left_values = halves(k_log, 0), halves(values, 0)
        assert left_log is not None and left_values is not None
        part = attend(halves(q_values, 1), halves(q_log, 1), halves(k_values, 0), left_log, left_values)
        split = [x.unflatten(3, (length // (2 * size), 2, size)) for x in total]
        right = join(Partial(*(x.select(4, 1) for x in split)), part)
        total = Partial(*(torch.stack([x.select(4, 0), y], 4).flatten(3, 5) for x, y in zip(split, right, strict=True)))
        size *= 2
    return Partial(*(x.narrow(3, 0, tokens) for x in total))
