"""The oracle: kernelised attention written as its definition, O(L^2) time and memory. Readable, not fast.

    A_ij = phi_q(q_i) . phi_k(k_j),     out_i = sum_j A_ij v_j / sum_j A_ij      over the keys j visible to i

Weights are formed in the log domain, each row relative to its own largest term, so nothing here depends on a shift that
is shared between tokens. A state contributes to each row as the sum over the keys it has absorbed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..features.base import FeatureMap, Features
from ..features.precision import widened
from ..state import LinearState, finite, safe_divide

__all__ = ["absorb", "causal", "full", "log_weights", "read"]


def log_weights(queries: Features, keys: Features) -> tuple[Tensor, Tensor]:
    """A = sign_or_value * exp(log): (..., L, S) each."""
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


def _attend(
    queries: Features, keys: Features, v: Tensor, visible: Tensor, state: LinearState, normalise: bool
) -> Tensor:
    values, log = log_weights(queries, keys)
    log = log.masked_fill(~visible, float("-inf"))
    past = state.log_max.unsqueeze(-2) + (0.0 if queries.log_scale is None else queries.log_scale)
    past_values = torch.ones_like(past) if queries.values is None else queries.values
    if normalise:
        row = torch.cat([log, past.expand(*log.shape[:-1], past.shape[-1])], -1).detach().amax(-1, keepdim=True)
    else:
        row = log.new_zeros((*log.shape[:-1], 1))
    weights = torch.where(visible, values, 0.0) * torch.exp(log - finite(row))
    past_weights = past_values * torch.exp(past - finite(row))
    numerator = weights @ v + past_weights @ state.weighted
    if not normalise:
        return numerator
    return safe_divide(numerator, weights.sum(-1) + (past_weights @ state.normaliser.unsqueeze(-1)).squeeze(-1))


def _dense(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    visible: Tensor,
    *,
    scale: float,
    key_mask: Tensor | None,
    normalise: bool,
) -> Tensor:
    """Attention under a visibility mask (L, S); queries that share a key head are stacked along the length."""
    batch, heads, length, _ = q.shape
    groups = heads // k.shape[1]
    rows = q.reshape(batch, k.shape[1], groups * length, q.shape[-1])
    visible = visible.repeat(groups, 1)
    values = widened(v)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
        values = values.masked_fill(~key_mask[:, None, :, None], 0.0)
    queries, keys = feature_map.queries(widened(rows), scale), feature_map.keys(widened(k), scale)
    return _attend(queries, keys, values, visible, state, normalise).reshape(batch, heads, length, v.shape[-1])


def full(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
    normalise: bool = True,
) -> Tensor:
    """out (B, Hq, L, E): every query sees the state and every key."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device)
    return _dense(feature_map, q, k, v, state, visible, scale=scale, key_mask=key_mask, normalise=normalise)


def causal(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
    normalise: bool = True,
) -> tuple[Tensor, LinearState]:
    """out (B, Hq, L, E) and the state after the last token; token i sees the state and tokens 0..i."""
    visible = torch.ones(k.shape[-2], k.shape[-2], dtype=torch.bool, device=k.device).tril()
    out = _dense(feature_map, q, k, v, state, visible, scale=scale, key_mask=key_mask, normalise=normalise)
    return out, absorb(feature_map, k, v, state, scale=scale, key_mask=key_mask)


def absorb(
    feature_map: FeatureMap,
    k: Tensor,
    v: Tensor,
    state: LinearState,
    *,
    scale: float,
    key_mask: Tensor | None = None,
    chunk_size: int | None = None,
) -> LinearState:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E), one token after the other."""
    features = feature_map.keys(widened(k), scale)
    v = widened(v)
    real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_mask is None else key_mask
    for i in range(k.shape[-2]):
        token = Features(*(None if part is None else part[..., i : i + 1, :] for part in features))
        taken = state.absorb(token, v[..., i : i + 1, :], 1)
        here = real[:, i]
        state = LinearState(
            torch.where(here[:, None, None, None], taken.weighted, state.weighted),
            torch.where(here[:, None, None], taken.normaliser, state.normaliser),
            torch.where(here[:, None, None], taken.log_max, state.log_max),
            torch.where(here, taken.count, state.count),
            state.origin,
        )
    return state


def read(
    feature_map: FeatureMap,
    q: Tensor,
    state: LinearState,
    *,
    scale: float,
    chunk_size: int | None = None,
    normalise: bool = True,
) -> Tensor:
    """out (B, Hq, L, E): every absorbed key is visible to every query."""
    batch, kv_heads, _, width = state.weighted.shape
    none = q.new_zeros((batch, kv_heads, 0, q.shape[-1]))
    return full(
        feature_map, q, none, none.new_zeros((batch, kv_heads, 0, width)), state, scale=scale, normalise=normalise
    )
