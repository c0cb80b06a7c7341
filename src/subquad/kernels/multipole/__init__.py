"""Multipole attention: clusters of keys, exact where it matters. `definition.py` has the equations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checkpointing import tracing
from ..operator import Backend, Call, by_name
from . import chunked, constant, native
from .chunked import Chunked
from .definition import Choices, Inspection, Spec
from .native import Native
from .reference import Reference

__all__ = ["BACKENDS", "Choices", "Inspection", "Spec", "cluster", "constant", "inspect", "paged"]

_native = Native()
BACKENDS: dict[str, Backend[Spec]] = by_name(_native, Chunked(), Reference())


def cluster(spec: Spec, call: Call, k: Tensor) -> Choices:
    """Clusters of the complete chunks of keys k (B, H, S, D); those of `spec.known` stay as they are."""
    if tracing(k) or _native.refusal(spec, call, k):
        return chunked.cluster(spec, call, k)
    return native.cluster(spec, call, k)


def paged(call: Call, q: Tensor, k: Tensor, v: Tensor, state: Any) -> bool:
    """Whether the native kernels keep the keys of this call and of the state before it as pages: nothing is traced,
    needs a gradient, or names another backend.
    """
    if call.backend not in (None, _native.name) or call.chunk_size is not None or tracing(q) or q.shape[0] == 0:
        return False
    if _native.refusal(None, call, q, k, v):
        return False
    if not torch.is_grad_enabled():
        return True
    held = () if state is None or state.pages is not None else (state.k, state.v)
    return not any(x.requires_grad for x in (q, k, v, *held))


def inspect(spec: Spec, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Inspection:
    """Expected errors and numbers of exact keys of every query, from a forward pass."""
    if tracing(q) or _native.refusal(spec, call, q, k, v):
        return chunked.inspect(spec, call, q, k, v)
    return native.inspect(spec, call, q, k, v)
