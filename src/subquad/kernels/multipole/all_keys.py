"""Multipole attention that keeps every key: whole sequences, and states that are continued, absorbed into and read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import operator
from ..checkpointing import tracing
from ..operator import Call
from ..padding import real_keys
from . import BACKENDS, cluster, paged
from .definition import Choices, Spec
from .pages import Pages, begin
from .states import MultipoleState

__all__ = ["absorb", "attend", "read", "scan"]


def attend(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out (B, Hq, L, E) of whole sequences."""
    return operator.attend(BACKENDS, spec, call, q, k, v)


def scan(
    spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor, state: MultipoleState | None, origin: str
) -> tuple[Tensor, MultipoleState]:
    """out (B, Hq, L, E) of tokens after those of `state`, and the state after them."""
    if paged(call, q, k, v, state):
        out, pages = _pages(spec, call, k, v, state).scan(q, k, v, call.key_mask)
        assert out is not None
        return out, MultipoleState.of(pages, origin)
    after = absorb(spec, call, k, v, state, origin)
    known = Choices(after.order, after.sizes)
    spec = spec._replace(causal=True, past=after.k.shape[2] - k.shape[2], known=known)
    masked = call.key_mask is not None or tracing(k) or not bool(after.mask.all())
    seen = call._replace(key_mask=after.mask if masked else None, query_mask=None)
    return attend(spec, seen, q, after.k, after.v), after


def absorb(spec: Spec, call: Call, k: Tensor, v: Tensor, state: MultipoleState | None, origin: str) -> MultipoleState:
    """The state after further keys and values; clusters of complete chunks stay as they are."""
    if paged(call, k, k, v, state):
        _, pages = _pages(spec, call, k, v, state).scan(None, k, v, call.key_mask)
        return MultipoleState.of(pages, origin)
    mask, known = real_keys(k, call.key_mask), None
    if state is None:
        k, v, mask = k.clone(), v.clone(), mask.clone()  # the caller may use the memory again
    else:
        k, v = torch.cat([state.k, k], 2), torch.cat([state.v, v], 2)
        mask = torch.cat([state.mask, mask], 1)
        if not tracing(k):
            done = state.complete()
            known = Choices(state.order[:, :, :done], state.sizes[:, :, :done])
    made = cluster(spec._replace(known=known), call._replace(key_mask=mask), k)
    return MultipoleState(k, v, mask, made.order, made.sizes, origin)


def read(spec: Spec, call: Call, q: Tensor, state: MultipoleState) -> Tensor:
    """out (B, Hq, L, E) in q's dtype: every key of `state` is visible to every query."""
    if state.pages is not None and paged(call, q, q, q, state):
        out: Tensor = state.pages.read(q)
        return out.to(q.dtype)
    spec = spec._replace(known=Choices(state.order, state.sizes))
    return attend(spec, call._replace(key_mask=state.mask), q, state.k, state.v)


def _pages(spec: Spec, call: Call, k: Tensor, v: Tensor, state: Any) -> Pages:
    """The keys of a state, or none, as the native kernels keep them."""
    if state is None:
        return begin(spec, call, k, v)
    if state.pages is not None:
        kept: Pages = state.pages
        return kept
    mask = None if bool(state.mask.all()) else state.mask
    known = Choices(state.order, state.sizes)
    return begin(spec, call, k, v).scan(None, state.k.detach(), state.v.detach(), mask, known)[1]
