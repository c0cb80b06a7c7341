"""The oracle: windowed linear attention written as its definition, O(L^2) time and memory. Readable, not fast.

    weight_ij = e^{s_ij} if j is near i, e^gain phi(q_i).phi(k_j) if it is far, 0 if it is not visible
    out_i = sum_j weight_ij v_j / sum_j weight_ij

Weights are formed in the log domain, each row relative to its own largest term, so nothing here depends on a shift that
is shared between tokens. The far sums of a state contribute to each row as the keys that they have absorbed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...features.base import FeatureMap, Features
from ...features.precision import widened
from ...state import State, Sums, finite, safe_divide
from ..operator import Call, ReferenceBackend
from ..padding import real_keys
from .definition import WindowedLinear

__all__ = ["Reference"]


def _log_weights(queries: Features, keys: Features) -> tuple[Tensor, Tensor]:
    """phi(q).phi(k) = values * exp(log): (..., L, S) each."""
    if queries.values is None and keys.values is None:
        assert queries.log_scale is not None and keys.log_scale is not None
        log = torch.logsumexp(queries.log_scale.unsqueeze(-2) + keys.log_scale.unsqueeze(-3), dim=-1)
        return torch.ones_like(log), log
    assert queries.values is not None and keys.values is not None
    values = queries.values @ keys.values.transpose(-1, -2)
    log = torch.zeros_like(values)
    if queries.log_scale is not None:
        log = log + queries.log_scale
    if keys.log_scale is not None:
        log = log + keys.log_scale.transpose(-1, -2)
    return values, log


def _dense(
    spec: WindowedLinear, scale: float, q: Tensor, k: Tensor, v: Tensor, near: Tensor, far: Tensor, past: Sums | None
) -> Tensor:
    """Exact weights under `near`, far ones under `far` and for `past`; masks (B or 1, L, S).

    Queries that share a key head are stacked along the length.
    """
    batch, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    rows = widened(q).reshape(batch, k.shape[1], groups * length, q.shape[-1])
    k, v = widened(k), widened(v)
    near, far = (x.repeat(1, groups, 1)[:, None] for x in (near, far))
    v = v.masked_fill(~(near | far).any(-2).unsqueeze(-1), 0.0)
    # (weights, log, values) of each part: what a key is worth is weights * exp(log)
    logs: list[Tensor] = []
    parts: list[tuple[Tensor | None, Tensor, Tensor, Tensor | None]] = []
    if spec.window is not None:
        exact = (scale * rows @ k.mT).masked_fill(~near, float("-inf"))
        logs.append(exact)
        parts.append((None, exact, v, None))
    phi = spec.feature_map
    if phi is not None:
        gain = rows.new_zeros(())
        if spec.gain is not None:
            gain = spec.gain.to(rows.dtype).repeat_interleave(length).view(k.shape[1], -1, 1)
        queries = phi.queries(rows, scale)
        values, log = _log_weights(queries, phi.keys(k, scale))
        log = (log + gain).masked_fill(~far, float("-inf"))
        logs.append(log.masked_fill(values == 0, float("-inf")))
        parts.append((torch.where(far, values, 0.0), log, v, None))
        if past is not None:
            old = past.log_max.unsqueeze(-2) + (0.0 if queries.log_scale is None else queries.log_scale) + gain
            old_values = torch.ones_like(old) if queries.values is None else queries.values
            unseen = (old_values * past.normaliser.unsqueeze(-2) == 0) & (past.weighted == 0).all(-1).unsqueeze(-2)
            old = old.expand_as(unseen)
            logs.append(old.masked_fill(unseen, float("-inf")))
            parts.append((old_values, old, past.weighted, past.normaliser))
    every = torch.cat(logs, -1).detach()
    if spec.normalise and every.shape[-1]:
        shift = finite(every.amax(-1, keepdim=True))
    else:
        shift = rows.new_zeros((*rows.shape[:-1], 1))
    numerator, normaliser = rows.new_zeros(()), rows.new_zeros(())
    for values_, log_, what, mass in parts:
        rise = log_ - shift
        if values_ is not None:  # what is 0 has no part in the shift, but a gradient
            rise = torch.where(values_ == 0, rise.clamp(max=60.0), rise)
        weights = rise.exp()
        weights = weights if values_ is None else values_ * weights
        numerator = numerator + weights @ what
        normaliser = normaliser + (weights.sum(-1) if mass is None else (weights @ mass.unsqueeze(-1)).squeeze(-1))
    out = safe_divide(numerator, normaliser) if spec.normalise else numerator
    return out.reshape(batch, heads, length, v.shape[-1])


def _absorb(phi: FeatureMap, k: Tensor, v: Tensor, sums: Sums, mask: Tensor, scale: float) -> Sums:
    """The sums after further keys, one token after the other; mask (B, S)."""
    features, v = phi.keys(widened(k), scale), widened(v)
    for i in range(k.shape[-2]):
        token = Features(*(None if part is None else part[..., i : i + 1, :] for part in features))
        taken = sums.absorb(token, v[..., i : i + 1, :])
        here = mask[:, i]
        sums = Sums(
            torch.where(here[:, None, None, None], taken.weighted, sums.weighted),
            torch.where(here[:, None, None], taken.normaliser, sums.normaliser),
            torch.where(here[:, None, None], taken.log_max, sums.log_max),
        )
    return sums


def _visible(spec: WindowedLinear, row: Tensor, rank: Tensor, there: Tensor, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """Which keys are near and which far, (B or 1, L, S) each; row (., L) and rank (., S): places in the sequence.

    The first `sinks` keys are copies of the sinks; their tokens have no weight where they stand.
    """
    distance = row[:, :, None] - rank[:, None, :]
    visible = there[:, None, :] & torch.ones_like(distance, dtype=torch.bool)
    if spec.causal:
        visible = visible & (distance >= 0)
    if spec.window is None:
        return torch.zeros_like(visible), visible
    is_sink = (rank < spec.sinks)[:, None, :].clone()
    near = (distance.abs() <= spec.window) | is_sink
    if sinks:
        copies = torch.arange(rank.shape[1], device=rank.device) < sinks
        visible = visible & (copies | ~is_sink)
    far = visible & ~near if spec.feature_map is not None else torch.zeros_like(visible)
    return visible & near, far


class Reference(ReferenceBackend[WindowedLinear]):
    """The definition. `backend=None` never takes it."""

    def attend(self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row, rank = (torch.arange(x.shape[2], device=k.device)[None] for x in (q, k))
        near, far = _visible(spec, row, rank, real_keys(k, call.key_mask))
        return _dense(spec, call.scale, q, k, v, near, far, None)

    def scan(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State
    ) -> tuple[Tensor, State]:
        real = real_keys(k, call.key_mask)
        if spec.window is None:
            row = torch.arange(q.shape[2], device=k.device)[None]
            near, far = _visible(spec, row, row, real)
            out = _dense(spec, call.scale, q, k, v, near, far, state.far)
            return out, self.absorb(spec, call, k, v, state)
        assert state.window is not None
        after = state.extend(k, v, real.sum(-1))
        assert after.sinks is not None
        tokens = k.shape[2]
        ranks = state.ranks(tokens)
        rows = ranks[:, spec.window :]
        first = torch.arange(spec.sinks, device=k.device).expand(k.shape[0], -1)
        there = (ranks >= 0) & (ranks < after.count[:, None])
        kept = state.window.followed_by(k, v)
        known = after.sinks.followed_by(*kept)
        near, far = _visible(
            spec,
            rows,
            torch.cat([first, ranks], 1),
            torch.cat([first < after.count[:, None], there], 1),
            spec.sinks,
        )
        out = _dense(spec, call.scale, q, known.k, known.v, near, far, state.far)
        if state.far is not None and spec.feature_map is not None:
            leaves = there & (ranks >= spec.sinks) & (ranks < after.count[:, None] - spec.window)
            left_k, left_v = (x[:, :, :tokens] for x in kept)
            sums = _absorb(spec.feature_map, left_k, left_v, state.far, leaves, call.scale)
            after = replace(after, far=sums)
        return out, after

    def absorb(self, spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
        assert spec.feature_map is not None and state.far is not None
        real = real_keys(k, call.key_mask)
        sums = _absorb(spec.feature_map, k, v, state.far, real, call.scale)
        return replace(state, far=sums, count=state.count + real.sum(-1))

    def read(self, spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
        assert state.far is not None
        batch, heads, _, width = state.far.weighted.shape
        k = q.new_zeros((batch, heads, 0, q.shape[-1]))
        none = torch.zeros(1, q.shape[2], 0, dtype=torch.bool, device=q.device)
        v = k.new_zeros((batch, heads, 0, width))
        return _dense(spec, call.scale, q, k, v, none, none, state.far)
