"""Exact near field and kernelised far field under one normaliser, chunk by chunk: O(L) time and memory.

With W the window, a chunk of T rows and the W + T keys [window before the chunk | chunk] in slots 0 .. W + T - 1,

    row i    near   slots i .. i + W          exact, in blocks (windows.py)
             far    the state and the slots 0 .. i - 1, as features: strictly lower triangular, the causal kernel
             sinks  exact, from the moment they leave the window

A key changes from near to far exactly when it leaves the window, so the two never overlap and nothing is subtracted.
Both sides without a causal mask are two such passes: a forward one, and one over the reversed sequence that leaves
out the row's own key. The three parts are joined by their log shifts, each row relative to its own largest mass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..features.base import FeatureMap, Features
from ..kernels import reference
from ..kernels.checkpointing import Carry, scan_chunks, tracing
from ..kernels.chunked import UNDERFLOW, default_chunk, exact_causal, masked, shared_shift
from ..state import LinearState, finite, safe_divide
from .hybrid_state import HybridState, Sinks, settle
from .windows import Partial, dense_partial, window_partial

__all__ = ["causal", "causal_reference", "combine", "full", "full_reference", "real_keys"]


def _compute(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


def _far(
    queries: Features,
    keys: Features,
    v: Tensor,
    state: LinearState,
    mask: Tensor | None,
    near: Partial,
    log_far: Tensor | None,
    careful: bool,
) -> tuple[LinearState, Partial]:
    """The far field of one chunk, strictly causal over the keys that leave the window: next state, partial rows."""
    batch, kv_heads, tokens, _ = v.shape
    heads = near.shift.shape[1]
    groups = heads // kv_heads
    count = state.count + (tokens if mask is None else mask.sum((1, 2, 3)))

    def laid_out(part: Sequence[Tensor]) -> Partial:
        numerator, normaliser, shift = (x.reshape(batch, heads, tokens, *x.shape[4:]) for x in part)
        return Partial(numerator, normaliser, shift if log_far is None else shift + log_far.to(shift.dtype)[:, None])

    if tokens == 1:  # the recurrent form
        part = [x.reshape(batch, kv_heads, groups, 1, *x.shape[3:]) for x in state.partial(queries)]
        return state.absorb(keys, v, count - state.count), laid_out(part)
    scaled = keys.log_scale is not None
    if not (scaled and careful):
        after, shared = shared_shift(queries, keys, v, state, groups, strict=True)
        far = laid_out(shared)
        if careful or _sound(far, near, state, mask, scaled):
            return LinearState(after.weighted, after.normaliser, after.log_max, count, state.origin), far
    after = state.absorb(keys, v, count - state.count)
    return after, laid_out(exact_causal(queries, keys, v, state, groups, strict=True))


def _sound(far: Partial, near: Partial, state: LinearState, mask: Tensor | None, scaled: bool) -> bool:
    """Whether a shift shared by the chunk lost no key that matters and mixed no NaN of a later key into earlier rows."""
    with torch.no_grad():
        if not bool(far.numerator.sum().isfinite()):
            return False
        if not scaled:
            return True
        # What the near field weighs in units of the far one: keys that vanish beside it do not matter.
        mass = far.normaliser.abs() + near.normaliser.abs() * (near.shift - far.shift).clamp(max=80.0).exp()
        lost = mass < UNDERFLOW
        if not bool(lost.any()):
            return True
        seen = state.count[:, None]
        if mask is None:
            seen = seen + torch.arange(far.shift.shape[-1], device=seen.device)
        else:
            seen = seen + mask[:, 0, :, 0].long().cumsum(-1) - mask[:, 0, :, 0].long()
        return not bool((lost & (seen > 0)[:, None]).any())


def _pass(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slot: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    chunk_size: int | None,
    own: bool = True,
    other: Tensor | None = None,
    finish: bool = True,
) -> tuple[Tensor, Carry]:
    """One direction. mask, slot: (B, L) real keys and their sink numbers; `own`: a row sees its own key.

    Returns out (B, Hq, L, E), or with finish=False numerator, normaliser and shift in (B, Hq, L, E + 2), the form in
    which `other` brings the rows of the opposite direction; and what the state is made of after the last token.
    """
    window, number, scale = state.window_mask.shape[1], state.sink_mask.shape[1], state.scale
    careful = tracing(q) or q.device.type != "cpu"
    far = state.far
    start: Carry = (
        *(far.weighted, far.normaliser, far.log_max, far.count),
        *(state.window_k, state.window_v, state.window_mask, state.window_slot),
        *state.sinks,
    )

    def step(
        carry: Carry, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slot: Tensor, other: Tensor | None
    ) -> tuple[Carry, Tensor]:
        before = LinearState(*carry[:4], origin=far.origin)
        tokens = q.shape[2]
        q, k = _compute(q), torch.cat([carry[4], _compute(k)], 2)
        v = torch.cat([carry[5], _compute(v)], 2)
        mask = torch.cat([carry[6], mask[:, 0, :, 0]], 1)
        slot = torch.cat([carry[7], slot[:, 0, :, 0]], 1)
        sinks = Sinks(*carry[8:])
        keys_seen = window + tokens if own else window + tokens - 1
        parts = []
        if own or window:
            visible = mask[:, None, :keys_seen, None]
            parts.append(window_partial(q, k[:, :, :keys_seen], v[:, :, :keys_seen], visible, scale))
        left_k, left_v, left_mask, left_slot = k[:, :, :tokens], v[:, :, :tokens], mask[:, :tokens], slot[:, :tokens]
        if number:
            sinks, arrival = settle(sinks, left_k, left_v, left_mask, left_slot)
            after_arrival = torch.arange(tokens, device=q.device)[:, None] > arrival[:, None]
            parts.append(dense_partial(q, sinks.k, sinks.v, after_arrival & sinks.mask[:, None], scale))
            left_mask = left_mask & ~((left_slot >= 0) & (left_slot < number))
        if other is not None:
            parts.append(Partial(other[..., :-2], other[..., -2], other[..., -1]))
        near = combine(parts) if parts else _nothing(q, v.shape[-1])
        queries = feature_map.queries(q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]), scale)
        # Looking is free on a CPU and saves a pass over the features; nothing else depends on it.
        hidden = None if not careful and bool(left_mask.all()) else left_mask[:, None, :, None]
        keys, values = masked(feature_map.keys(left_k, scale), left_v, hidden)
        assert values is not None
        after, part = _far(queries, keys, values, before, hidden, near, log_far, careful)
        total = combine([near, part])
        carry = (
            *(after.weighted, after.normaliser, after.log_max, after.count),
            *(k[:, :, tokens:], v[:, :, tokens:], mask[:, tokens:], slot[:, tokens:]),
            *sinks,
        )
        if finish:
            return carry, safe_divide(total.numerator, total.normaliser)
        return carry, torch.cat([total.numerator, total.normaliser.unsqueeze(-1), total.shift.unsqueeze(-1)], -1)

    # A chunk copies the window before it: shorter ones would copy more than they compute.
    size = chunk_size or max(default_chunk(q, feature_map.num_features), -(-window // 64) * 64)
    constants = [*feature_map.parameters(), *([] if log_far is None else [log_far])]
    inputs = (q, k, v, mask[:, None, :, None], slot[:, None, :, None], other)
    carry, out = scan_chunks(step, start, inputs, constants, size, checkpoint=not feature_map.hidden_parameters)
    if out is None:
        out = far.weighted.new_zeros((*q.shape[:3], v.shape[-1] + (0 if finish else 2)))
    return out, carry


def _nothing(q: Tensor, width: int) -> Partial:
    rows = q.new_zeros(q.shape[:3])
    return Partial(q.new_zeros((*q.shape[:3], width)), rows, torch.full_like(rows, float("-inf")))


def _positions(state: HybridState, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sink numbers (B, L) of the tokens that follow `state`, and `start` after them."""
    start = state.first_real(mask)
    return (state.length - start)[:, None] + torch.arange(mask.shape[1], device=mask.device), start


def real_keys(k: Tensor, key_mask: Tensor | None) -> Tensor:
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask


def causal(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    key_mask: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, HybridState]:
    """out (B, Hq, L, E) and the state after the last token."""
    mask = real_keys(k, key_mask)
    slot, start = _positions(state, mask)
    out, carry = _pass(feature_map, q, k, v, mask, slot, state, log_far=log_far, chunk_size=chunk_size)
    far = LinearState(*carry[:4], origin=state.far.origin)
    rest: Any = (*carry[4:7], *carry[8:], state.length + k.shape[2], start)
    return out, HybridState(far, *rest, state.feature_map, state.scale, state.origin)


def full(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    key_mask: Tensor | None,
    chunk_size: int | None,
) -> Tensor:
    """out (B, Hq, L, E): the window on both sides, the far field before and after it; `state` is empty."""
    mask = real_keys(k, key_mask)
    slot, _ = _positions(state, mask)
    backwards = (x.flip(-2) for x in (q, k, v))
    call: dict[str, Any] = {"log_far": log_far, "chunk_size": chunk_size}
    later, _ = _pass(feature_map, *backwards, mask.flip(-1), slot.flip(-1), state, own=False, finish=False, **call)
    return _pass(feature_map, q, k, v, mask, slot, state, other=later.flip(-2), **call)[0]


# -- the oracle: O(L^2), near and far as explicit masks ------------------------------------------------------------


def _dense(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: Tensor,
    far: Tensor,
    state: HybridState,
    log_far: Tensor | None,
) -> Tensor:
    """Attention with exact weights under `near` and far weights under `far` and for the far state; masks (B, L, S)."""
    batch, heads, length, _ = q.shape
    kv_heads, scale = k.shape[1], state.scale
    groups = heads // kv_heads
    rows = q.reshape(batch, kv_heads, groups * length, q.shape[-1])
    near, far = (x.repeat(1, groups, 1)[:, None] for x in (near, far))
    gain = 0.0 if log_far is None else log_far.to(rows.dtype).repeat_interleave(length).view(kv_heads, -1, 1)
    exact = (scale * rows @ k.mT).masked_fill(~near, float("-inf"))
    queries = feature_map.queries(rows, scale)
    values, log = reference.log_weights(queries, feature_map.keys(k, scale))
    log = (log + gain).masked_fill(~far | (values == 0), float("-inf"))
    past = state.far.log_max.unsqueeze(-2) + (0.0 if queries.log_scale is None else queries.log_scale) + gain
    past_values = torch.ones_like(past) if queries.values is None else queries.values
    unseen = (past_values * state.far.normaliser.unsqueeze(-2) == 0) & (state.far.weighted == 0).all(-1).unsqueeze(-2)
    past = past.expand_as(unseen).masked_fill(unseen, float("-inf"))
    shift = finite(torch.cat([exact, log, past], -1).detach().amax(-1, keepdim=True))
    weights = (exact - shift).exp() + torch.where(far, values, 0.0) * (log - shift).exp()
    past_weights = past_values * (past - shift).exp()
    hidden = ~(near | far).any(-2).unsqueeze(-1)
    numerator = weights @ v.masked_fill(hidden, 0.0) + past_weights @ state.far.weighted
    normaliser = weights.sum(-1) + (past_weights @ state.far.normaliser.unsqueeze(-1)).squeeze(-1)
    return safe_divide(numerator, normaliser).reshape(batch, heads, length, v.shape[-1])


def _reference_masks(position: Tensor, rows: Tensor, mask: Tensor, start: Tensor, window: int, sinks: int) -> Any:
    """Which keys (B, S) at `position` with `mask` are near or far for rows (B, L), seen without regard to order."""
    distance = rows[:, :, None] - position[:, None, :]
    is_sink = ((position >= start[:, None]) & (position < start[:, None] + sinks))[:, None]
    near = ((distance.abs() <= window) | is_sink) & mask[:, None]
    return near, ~near & mask[:, None], distance


def full_reference(
    feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: HybridState, log_far: Tensor | None, mask: Tensor
) -> Tensor:
    """The definition of `full`."""
    window, sinks = state.window_mask.shape[1], state.sink_mask.shape[1]
    position = torch.arange(k.shape[2], device=k.device).expand(k.shape[0], -1)
    near, far, _ = _reference_masks(position, position, mask, state.first_real(mask), window, sinks)
    return _dense(feature_map, _compute(q), _compute(k), _compute(v), near, far, state, log_far)


def causal_reference(
    feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: HybridState, log_far: Tensor | None, mask: Tensor
) -> tuple[Tensor, HybridState]:
    """The definition of `causal`: every key that is still known by itself, and the far field of the state."""
    window, sinks = state.window_mask.shape[1], state.sink_mask.shape[1]
    start, tokens = state.first_real(mask), k.shape[2]
    if tokens == 0:
        return state.window_v.new_zeros((*q.shape[:3], v.shape[-1])), state
    rows = state.length[:, None] + torch.arange(tokens, device=k.device)
    numbers = torch.arange(sinks, device=k.device)
    old = state.length[:, None] - torch.arange(window, 0, -1, device=k.device)
    position = torch.cat([state.start[:, None] + numbers, old, rows], 1)
    known = torch.cat([state.sink_mask, state.window_mask, mask], 1)
    all_k = torch.cat([state.sink_k, state.window_k, _compute(k)], 2)
    all_v = torch.cat([state.sink_v, state.window_v, _compute(v)], 2)
    near, far, distance = _reference_masks(position, rows, known, start, window, sinks)
    out = _dense(feature_map, _compute(q), all_k, all_v, near & (distance >= 0), far & (distance >= 0), state, log_far)
    left = slice(sinks, sinks + tokens)
    slot = position[:, left] - start[:, None]
    settled, _ = settle(state.sinks, all_k[:, :, left], all_v[:, :, left], known[:, left], slot)
    far_mask = known[:, left] & ~((slot >= 0) & (slot < sinks))
    after = reference.absorb(
        feature_map, all_k[:, :, left], all_v[:, :, left], state.far, scale=state.scale, key_mask=far_mask
    )
    rest = slice(sinks + tokens, None)
    ring: Any = (all_k[:, :, rest], all_v[:, :, rest], known[:, rest])
    end: Any = (state.length + tokens, start, state.feature_map, state.scale, state.origin)
    return out, HybridState(after, *ring, *settled, *end)
