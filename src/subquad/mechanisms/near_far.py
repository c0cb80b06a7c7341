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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..features.base import FeatureMap, Features
from ..features.precision import widened
from ..kernels.checkpointing import Carry, scan_chunks, tracing
from ..kernels.chunked import UNDERFLOW, default_chunk, exact_causal, masked, shared_shift
from ..state import LinearState, Partial, finite
from .base import real_keys
from .hybrid_state import HybridState, Sinks, settle
from .windows import dense_partial, packed, unpacked, window_partial

__all__ = ["causal", "chunk_tokens", "combine", "full", "lay_out", "positions", "sound"]


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


def lay_out(part: Sequence[Tensor], heads: int, log_far: Tensor | None) -> Partial:
    """Rows (B, H, G, T) of a far field as (B, Hq, T), times the learned factor."""
    numerator, normaliser, shift = (x.reshape(x.shape[0], heads, x.shape[3], *x.shape[4:]) for x in part)
    return Partial(numerator, normaliser, shift if log_far is None else shift + log_far.to(shift.dtype)[:, None])


def _far(
    queries: Features,
    keys: Features,
    v: Tensor,
    state: LinearState,
    mask: Tensor | None,
    near: Sequence[Partial],
    log_far: Tensor | None,
    heads: int,
    careful: bool,
) -> tuple[LinearState, Partial]:
    """The far field of one chunk, strictly causal over the keys that leave the window: next state, partial rows."""
    batch, kv_heads, tokens, _ = v.shape
    groups = heads // kv_heads
    count = state.count + (tokens if mask is None else mask.sum((1, 2, 3)))
    if tokens == 1:  # the recurrent form
        part = [x.reshape(batch, kv_heads, groups, 1, *x.shape[3:]) for x in state.partial(queries)]
        return state.absorb(keys, v, count - state.count), lay_out(part, heads, log_far)
    scaled = keys.log_scale is not None
    if not (scaled and careful):
        after, shared = shared_shift(queries, keys, v, state, groups, strict=True)
        far = lay_out(shared, heads, log_far)
        if careful or sound(far, near, scaled, _far_keys(state, tokens, mask)):
            return replace(after, count=count), far
    after = state.absorb(keys, v, count - state.count)
    return after, lay_out(exact_causal(queries, keys, v, state, groups, strict=True), heads, log_far)


def _far_keys(state: LinearState, tokens: int, mask: Tensor | None) -> Tensor:
    """How many far keys each row has: (B, T), those before it in the chunk and those in the state."""
    if mask is None:
        return state.count[:, None] + torch.arange(tokens, device=state.count.device)
    real = mask[:, 0, :, 0].long()
    return state.count[:, None] + real.cumsum(-1) - real


def sound(far: Partial, near: Sequence[Partial], scaled: bool, far_keys: Tensor) -> bool:
    """Whether a shift shared by the chunk lost no key that matters and took no NaN of a later key into earlier rows.

    far_keys (B, T or 1): how many far keys a row has; a row without any has lost none.
    """
    with torch.no_grad():
        if not bool(far.numerator.sum().isfinite()):
            return False
        if not scaled:
            return True
        # What the near field weighs in units of the far one: keys that vanish beside it do not matter.
        mass = far.normaliser.abs()
        for part in near:
            mass = mass + part.normaliser.abs() * (part.shift - far.shift).clamp(max=80.0).exp()
        return not bool(((mass < UNDERFLOW) & (far_keys > 0)[:, None]).any())


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

    Returns out (B, Hq, L, E), or with finish=False the partial rows `packed` in (B, Hq, L, E + 2), the form in which
    `other` brings the rows of the opposite direction; and what the state is made of after the last token.
    """
    window, number, scale = state.window_mask.shape[1], state.sink_mask.shape[1], state.scale
    careful = tracing(q) or q.device.type != "cpu"
    far = state.far
    start: Carry = (
        *far.tensors,
        *(state.window_k, state.window_v, state.window_mask, state.window_slot),
        *state.sinks,
    )

    def step(
        carry: Carry, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, slot: Tensor, other: Tensor | None
    ) -> tuple[Carry, Tensor]:
        before = LinearState.of(carry[:4], far.origin)
        tokens = q.shape[2]
        q, k = widened(q), torch.cat([carry[4], widened(k)], 2)
        v = torch.cat([carry[5], widened(v)], 2)
        mask = torch.cat([carry[6], mask[:, 0, :, 0]], 1)
        slot = torch.cat([carry[7], slot[:, 0, :, 0]], 1)
        sinks = Sinks(*carry[8:])
        seen = slice(0, window + tokens if own else window + tokens - 1)
        left_k, left_v, left_mask, left_slot = k[:, :, :tokens], v[:, :, :tokens], mask[:, :tokens], slot[:, :tokens]
        parts: list[Partial] = []
        if tokens == 1:
            # One row sees the whole window and the sinks that left before it: one small product.
            near_k, near_v = torch.cat([sinks.k, k[:, :, seen]], 2), torch.cat([sinks.v, v[:, :, seen]], 2)
            visible = torch.cat([sinks.mask, mask[:, seen]], 1)[:, None]
            if near_k.shape[2]:
                parts.append(dense_partial(q, near_k, near_v, visible, scale))
        elif own or window:
            parts.append(window_partial(q, k[:, :, seen], v[:, :, seen], mask[:, None, seen, None], scale))
        is_sink = (left_slot >= 0) & (left_slot < number)
        # Looking is free on a CPU and saves work when nothing is found; the result does not depend on it.
        arriving = bool(number) and (careful or bool(is_sink.any()))
        if arriving:
            sinks, arrival = settle(sinks, left_k, left_v, left_mask, left_slot)
            left_mask = left_mask & ~is_sink
        if number and tokens > 1:
            visible = sinks.mask[:, None]
            if arriving:
                visible = visible & (torch.arange(tokens, device=q.device)[:, None] > arrival[:, None])
            parts.append(dense_partial(q, sinks.k, sinks.v, visible, scale))
        if other is not None:
            parts.append(unpacked(other))
        queries = feature_map.queries(q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1]), scale)
        hidden = None if not careful and bool(left_mask.all()) else left_mask[:, None, :, None]
        keys, values = masked(feature_map.keys(left_k, scale), left_v, hidden)
        assert values is not None
        after, part = _far(queries, keys, values, before, hidden, parts, log_far, q.shape[1], careful)
        total = combine([*parts, part])
        carry = (
            *after.tensors,
            *(k[:, :, tokens:], v[:, :, tokens:], mask[:, tokens:], slot[:, tokens:]),
            *sinks,
        )
        if finish:
            return carry, total.finish()
        return carry, packed(total)

    size = chunk_size or chunk_tokens(q, feature_map, window)
    constants = [*feature_map.parameters(), *([] if log_far is None else [log_far])]
    inputs = (q, k, v, mask[:, None, :, None], slot[:, None, :, None], other)
    carry, out = scan_chunks(step, start, inputs, constants, size, checkpoint=not feature_map.hidden_parameters)
    if out is None:
        out = far.weighted.new_zeros((*q.shape[:3], v.shape[-1] + (0 if finish else 2)))
    return out, carry


def chunk_tokens(q: Tensor, feature_map: FeatureMap, window: int) -> int:
    """Tokens per chunk. A chunk copies the window beside it: shorter ones would copy more than they compute."""
    return max(default_chunk(q, feature_map.num_features), -(-window // 64) * 64)


def positions(state: HybridState, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sink numbers (B, L) of the tokens that follow `state`, and `start` after them."""
    start = state.first_real(mask)
    return (state.length - start)[:, None] + torch.arange(mask.shape[1], device=mask.device), start


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
    slot, start = positions(state, mask)
    out, carry = _pass(feature_map, q, k, v, mask, slot, state, log_far=log_far, chunk_size=chunk_size)
    sinks = Sinks(*carry[8:])
    return out, replace(
        state,
        far=LinearState.of(carry[:4], state.far.origin),
        window_k=carry[4],
        window_v=carry[5],
        window_mask=carry[6],
        sink_k=sinks.k,
        sink_v=sinks.v,
        sink_mask=sinks.mask,
        length=state.length + k.shape[2],
        start=start,
    )


def full(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    slot: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    chunk_size: int,
) -> Tensor:
    """out (B, Hq, L, E): the window on both sides, the far field before and after it; `state` is empty.

    mask, slot (B, L): real keys, and positions from the first real key on. Two passes that look at no values;
    `two_sided.full` is the same in one sweep, where looking is possible.
    """
    q2, k2, v2 = (x.flip(-2) for x in (q, k, v))
    call: dict[str, Any] = {"log_far": log_far, "chunk_size": chunk_size}
    later, _ = _pass(feature_map, q2, k2, v2, mask.flip(-1), slot.flip(-1), state, own=False, finish=False, **call)
    return _pass(feature_map, q, k, v, mask, slot, state, other=later.flip(-2), **call)[0]
