"""The oracle of hybrid attention: O(L^2), near and far as explicit masks. Readable, not fast.

    weight_ij = e^{s_ij} if j is near i, c phi(q_i).phi(k_j) if it is far, 0 if it is not visible

Each row is relative to its own largest term, so nothing here depends on a shift that is shared between tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..features.base import FeatureMap
from ..features.precision import widened
from ..kernels import reference
from ..state import finite, safe_divide
from .hybrid_state import HybridState, settle

__all__ = ["causal", "full"]


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


def _reference_masks(
    position: Tensor, rows: Tensor, mask: Tensor, start: Tensor, window: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which keys (B, S) at `position` with `mask` are near or far for rows (B, L), seen without regard to order, and
    how far behind the rows they are: three times (B, L, S)."""
    distance = rows[:, :, None] - position[:, None, :]
    is_sink = ((position >= start[:, None]) & (position < start[:, None] + sinks))[:, None]
    near = ((distance.abs() <= window) | is_sink) & mask[:, None]
    return near, ~near & mask[:, None], distance


def full(
    feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: HybridState, log_far: Tensor | None, mask: Tensor
) -> Tensor:
    """out (B, Hq, L, E): the window on both sides; `state` is empty, mask (B, L) True = real."""
    window, sinks = state.window_mask.shape[1], state.sink_mask.shape[1]
    position = torch.arange(k.shape[2], device=k.device).expand(k.shape[0], -1)
    near, far, _ = _reference_masks(position, position, mask, state.first_real(mask), window, sinks)
    return _dense(feature_map, widened(q), widened(k), widened(v), near, far, state, log_far)


def causal(
    feature_map: FeatureMap, q: Tensor, k: Tensor, v: Tensor, state: HybridState, log_far: Tensor | None, mask: Tensor
) -> tuple[Tensor, HybridState]:
    """out and the state after the last token: from every key still known by itself and the far field of the state."""
    window, sinks = state.window_mask.shape[1], state.sink_mask.shape[1]
    start, tokens = state.first_real(mask), k.shape[2]
    if tokens == 0:
        return state.window_v.new_zeros((*q.shape[:3], v.shape[-1])), state
    rows = state.length[:, None] + torch.arange(tokens, device=k.device)
    numbers = torch.arange(sinks, device=k.device)
    old = state.length[:, None] - torch.arange(window, 0, -1, device=k.device)
    position = torch.cat([state.start[:, None] + numbers, old, rows], 1)
    known = torch.cat([state.sink_mask, state.window_mask, mask], 1)
    all_k = torch.cat([state.sink_k, state.window_k, widened(k)], 2)
    all_v = torch.cat([state.sink_v, state.window_v, widened(v)], 2)
    near, far, distance = _reference_masks(position, rows, known, start, window, sinks)
    out = _dense(feature_map, widened(q), all_k, all_v, near & (distance >= 0), far & (distance >= 0), state, log_far)
    left = slice(sinks, sinks + tokens)
    slot = position[:, left] - start[:, None]
    settled, _ = settle(state.sinks, all_k[:, :, left], all_v[:, :, left], known[:, left], slot)
    far_mask = known[:, left] & ~((slot >= 0) & (slot < sinks))
    after = reference.absorb(
        feature_map, all_k[:, :, left], all_v[:, :, left], state.far, scale=state.scale, key_mask=far_mask
    )
    rest = slice(sinks + tokens, None)
    return out, replace(
        state,
        far=after,
        window_k=all_k[:, :, rest],
        window_v=all_v[:, :, rest],
        window_mask=known[:, rest],
        sink_k=settled.k,
        sink_v=settled.v,
        sink_mask=settled.mask,
        length=state.length + tokens,
        start=start,
    )
