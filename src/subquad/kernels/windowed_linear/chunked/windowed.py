"""Exact near part and kernelised far part under one normaliser, chunk by chunk: O(L) time and memory.

With a span of W places before each query, a chunk of T rows and the W + T keys [places before the chunk | chunk]:

    row i    near   places i .. i + W         exact, in blocks (windows.py)
             far    the sums and the places 0 .. i - 1, as features: strictly lower triangular, the causal kernel
             sinks  exact, one small product

A key changes from near to far exactly when it leaves the window, so the two never overlap and nothing is subtracted.
Both sides without a causal mask are two such sweeps: a forward one, and one over the reversed sequence that leaves out
the row's own key. The parts are joined by their log shifts, each row relative to its own largest mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....features.base import FeatureMap, Features
from ....features.precision import widened
from ....state import Partial, State, Sums, finite, masked
from ...checkpointing import Carry, scan_chunks, tracing
from ...operator import Call
from ...padding import real_keys
from ..definition import WindowedLinear
from .linear import UNDERFLOW, default_chunk, exact_causal, hidden_values, shared_shift
from .windows import block_size, dense_partial, packed, unpacked, window_attention, window_partial

__all__ = ["CHUNK_BYTES", "Far", "Shared", "attend", "combine", "scan", "sweep"]

# Bytes of the scores of one chunk of queries, small enough to stay in the last-level cache between passes.
CHUNK_BYTES = 8 << 20


def combine(parts: Sequence[Partial]) -> Partial:
    """Partial attentions of the same rows over different keys.

    The common shift is that of the largest *mass*, shift + log |normaliser|: the shift of a far field bounds its
    weights but may lie far above them, and must not push an exact part below the smallest float.
    """
    shift = torch.stack([(p.shift + p.normaliser.abs().log()).detach() for p in parts]).amax(0)
    most = math.log(torch.finfo(shift.dtype).max) - 8.0
    base = finite(shift)
    factors = [(p.shift - base).clamp(max=most).exp() for p in parts]
    numerator, normaliser = parts[0].numerator * factors[0].unsqueeze(-1), parts[0].normaliser * factors[0]
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        numerator = torch.addcmul(numerator, part.numerator, factor.unsqueeze(-1))
        normaliser = torch.addcmul(normaliser, part.normaliser, factor)
    return Partial(numerator, normaliser, shift)


def lay_out(part: Sequence[Tensor], heads: int, gain: Tensor | None) -> Partial:
    """Rows (B, H, G, T) of a far field as (B, Hq, T), times the learned factor."""
    numerator, normaliser, shift = (x.reshape(x.shape[0], heads, x.shape[3], *x.shape[4:]) for x in part)
    return Partial(numerator, normaliser, shift if gain is None else shift + gain.to(shift.dtype)[:, None])


class Shared(NamedTuple):
    """Keys outside the window: k (B, H, g, D), v (B, H, g, E); query i sees those up to limit (B or 1, 1, L, 1)."""

    k: Tensor
    v: Tensor
    limit: Tensor


class Far(NamedTuple):
    """The far part of a sweep: the map, log factor (Hq,), the sums so far, and how many keys (B,) are in them."""

    phi: FeatureMap
    gain: Tensor | None
    sums: Sums
    seen: Tensor


def _far(
    queries: Features,
    keys: Features,
    v: Tensor,
    before: Sums,
    far_keys: Tensor,
    near: Sequence[Partial],
    gain: Tensor | None,
    heads: int,
    careful: bool,
) -> tuple[Sums, Partial]:
    """The far part of one chunk, strictly causal over the keys that leave the window: next sums, partial rows."""
    batch, kv_heads, tokens, _ = v.shape
    groups = heads // kv_heads
    if tokens == 1:  # the recurrent form
        part = [x.reshape(batch, kv_heads, groups, 1, *x.shape[3:]) for x in before.partial(queries)]
        return before.absorb(keys, v), lay_out(part, heads, gain)
    scaled = keys.log_scale is not None
    if not (scaled and careful):
        after, shared = shared_shift(queries, keys, v, before, groups, strict=True)
        far = lay_out(shared, heads, gain)
        if careful or sound(far, near, scaled, far_keys):
            return after, far
    exact = exact_causal(queries, keys, v, before, groups, strict=True)
    return before.absorb(keys, v), lay_out(exact, heads, gain)


def sound(far: Partial, near: Sequence[Partial], scaled: bool, far_keys: Tensor) -> bool:
    """Whether a shift shared by the chunk lost no key that matters and took no NaN of a later key into earlier rows.

    far_keys (B, T): how many far keys a row has; a row without any has lost none.
    """
    with torch.no_grad():
        if not bool(far.numerator.sum().isfinite()):
            return False
        if not scaled:
            return True
        # What the near part weighs in units of the far one: keys that vanish beside it do not matter.
        mass = far.normaliser.abs()
        for part in near:
            mass = mass + part.normaliser.abs() * (part.shift - far.shift).clamp(max=80.0).exp()
        return not bool(((mass < UNDERFLOW) & (far_keys > 0)[:, None]).any())


def sweep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    *,
    shared: Shared | None = None,
    far: Far | None = None,
    leaving: Tensor | None = None,
    other: Partial | None = None,
    own: bool = True,
    finish: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, Sums | None]:
    """Query i of q (B, Hq, L, D) over the places i .. i + span of k (B, H, span + L, D), v (B, H, span + L, E).

    visible: (B or 1, 1, span + L, 1) bool, which places hold a key
    shared:  further keys, and `other`: further partial rows (B, Hq, L, ..), in the same softmax
    far:     also the keys that have left the window, by their features; `leaving`, like `visible`: those that may
    own:     whether a row sees the last place of its window, its own key

    Returns out (B, Hq, L, E), or with finish=False the rows `packed` in (B, Hq, L, E + 2), and the sums after the last
    row. The backward computes each chunk again from its inputs, so O(L) memory is kept and not O(L w).
    """
    length, span = q.shape[2], k.shape[2] - q.shape[2]
    careful = tracing(q) or q.device.type != "cpu"
    plain = shared is None and far is None and other is None and own and finish
    constants = [] if shared is None else [shared.k, shared.v]
    start: Carry = (*(widened(x[:, :, :span]) for x in (k, v)), visible[:, :, :span])
    if far is not None:
        start = (*start, *far.sums, far.seen)
        constants += [*far.phi.parameters(), *([] if far.gain is None else [far.gain])]

    def step(
        carry: Carry,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Tensor,
        leaving: Tensor | None,
        limit: Tensor | None,
        other: Tensor | None,
    ) -> tuple[Carry, Tensor]:
        q, k, v = widened(q), widened(k), widened(v)
        k, v, visible = (torch.cat([old, new], 2) for old, new in zip(carry[:3], (k, v, visible), strict=True))
        tokens = q.shape[2]
        after = tuple(x[:, :, tokens:] for x in (k, v, visible))
        if plain:
            return after, window_attention(q, k, v, visible, scale)
        last = span + tokens if own else span + tokens - 1
        parts: list[Partial] = []
        sinks = None
        if shared is not None:
            assert limit is not None
            sinks = torch.arange(shared.k.shape[2], device=q.device) <= limit.squeeze(1)
        if tokens == 1 and last:
            # One row sees the whole window: one small product with the shared keys.
            near_k, near_v, seen = k[:, :, :last], v[:, :, :last], visible[:, :, :last, 0]
            if shared is not None and sinks is not None:
                near_k, near_v = torch.cat([shared.k, near_k], 2), torch.cat([shared.v, near_v], 2)
                rows = max(sinks.shape[0], seen.shape[0])
                seen = torch.cat([sinks.expand(rows, -1, -1), seen.expand(rows, -1, -1)], 2)
            parts.append(dense_partial(q, near_k, near_v, seen, scale))
        else:
            if last:
                parts.append(window_partial(q, k[:, :, :last], v[:, :, :last], visible[:, :, :last], scale))
            if shared is not None:
                parts.append(dense_partial(q, shared.k, shared.v, sinks, scale))
        if other is not None:
            parts.append(unpacked(other))
        if far is not None:
            before, seen = Sums(*carry[3:6]), carry[6]
            left = (visible if leaving is None else leaving)[:, :, :tokens]
            # Looking is free on a CPU and saves work when nothing is hidden; the result does not depend on it.
            hidden = None if not careful and bool(left.all()) else ~left
            grouped = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1] * tokens, q.shape[-1])
            queries = far.phi.queries(q.reshape(grouped), scale)
            keys = masked(far.phi.keys(k[:, :, :tokens], scale), hidden)
            values = hidden_values(v[:, :, :tokens], hidden)
            real = left[:, 0, :, 0].long()
            far_keys = seen[:, None] + real.cumsum(-1) - real
            sums, part = _far(queries, keys, values, before, far_keys, parts, far.gain, q.shape[1], careful)
            parts.append(part)
            after = (*after, *sums, seen + real.sum(-1))
        total = combine(parts)
        return after, total.finish() if finish else packed(total)

    size = chunk_size or _chunk_tokens(q, span, far)
    # Places leave the window `span` tokens after they came: those of a chunk stand where its first rows begin.
    gone = None if leaving is None else leaving[:, :, :length]
    inputs = (q, *(x[:, :, span:] for x in (k, v, visible)), gone)
    limit = None if shared is None else shared.limit
    carry, out = scan_chunks(
        step,
        start,
        (*inputs, limit, None if other is None else packed(other)),
        constants,
        size,
        checkpoint=far is None or not far.phi.hidden_parameters,
    )
    assert out is not None
    return out, None if far is None else Sums(*carry[3:6])


def _chunk_tokens(q: Tensor, span: int, far: Far | None) -> int:
    """Tokens per chunk. A chunk copies the span before it: shorter ones would copy more than they compute."""
    if far is not None:
        return max(default_chunk(q, far.phi.num_features), -(-span // 64) * 64)
    block = block_size(q.shape[2], span)
    row_bytes = q.shape[0] * q.shape[1] * (block + span) * q.element_size()
    return max(block, span // block * block, CHUNK_BYTES // max(1, row_bytes) // block * block)


def _far_of(spec: WindowedLinear, state: State) -> Far | None:
    if spec.feature_map is None:
        return None
    assert state.far is not None and spec.window is not None
    return Far(spec.feature_map, spec.gain, state.far, (state.count - spec.window - spec.sinks).clamp(min=0))


def attend(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out (B, Hq, L, E) of whole sequences, L > 0."""
    assert spec.window is not None
    length, window = q.shape[2], spec.window
    real = real_keys(k, call.key_mask) if call.key_mask is not None else real_keys(k[:1], None)
    place = torch.arange(length, device=q.device)
    visible = (real & (place >= spec.sinks))[:, None, :, None]
    shared = None
    if spec.sinks:
        limit = place[None, None, :, None] if spec.causal else (real.sum(-1) - 1)[:, None, None, None]
        first = min(spec.sinks, length)
        sink_k, sink_v = (widened(x[:, :, :first]) for x in (k, v))
        shared = Shared(sink_k, sink_v, limit.expand(-1, -1, length, -1))
    far = _far_of(spec, spec.empty(k, v, call.scale, ""))
    both = window if far is None and not spec.causal else 0
    ends = (0, 0, window, both)
    keys, values, seen = (F.pad(x, ends) for x in (k, v, visible))
    other = None
    if far is not None and not spec.causal:
        # From the right, without the row's own key and the sinks, which the sweep from the left has.
        keys_, values_, seen_ = (F.pad(x.flip(-2), ends) for x in (k, v, visible))
        later, _ = sweep(
            *(q.flip(-2), keys_, values_, seen_),
            call.scale,
            far=far,
            own=False,
            finish=False,
            chunk_size=call.chunk_size,
        )
        other = unpacked(later.flip(-2))
    return sweep(q, keys, values, seen, call.scale, shared=shared, far=far, other=other, chunk_size=call.chunk_size)[0]


def scan(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
    """out (B, Hq, L, E) and the state after the last token, L > 0."""
    assert spec.window is not None and state.window is not None
    new: Tensor | int = k.shape[2] if call.key_mask is None else call.key_mask.sum(-1)
    after = state.extend(k, v, new)
    assert after.sinks is not None
    ranks, end = state.ranks(k.shape[2]), after.count[:, None]
    visible = (ranks >= spec.sinks) & (ranks < end)
    leaving = visible & (ranks < end - spec.window)
    known = state.window.followed_by(k, v)
    shared = Shared(*after.sinks, ranks[:, None, spec.window :, None]) if spec.sinks else None
    out, sums = sweep(
        *(q, known.k, known.v, visible[:, None, :, None]),
        call.scale,
        shared=shared,
        far=_far_of(spec, state),
        leaving=leaving[:, None, :, None],
        chunk_size=call.chunk_size,
    )
    return out, replace(after, far=sums)
