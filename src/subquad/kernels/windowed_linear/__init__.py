"""Windowed linear attention: its backends, and what each may rely on (precision, padding at the end, tokens).

`triton` and `fla` have not been timed on a GPU: they are used where they are named and nowhere else.
"""

from __future__ import annotations

from torch import Tensor

from ...state import State
from ..experimental.fla import FlashLinearAttention
from ..experimental.triton import Triton
from ..operator import Backend, Call, by_name, choose_backend
from ..padding import Order
from .chunked import Chunked
from .definition import WindowedLinear
from .native import Native
from .reference import Reference

__all__ = ["BACKENDS", "WindowedLinear", "absorb", "attend", "read", "scan"]

BACKENDS: dict[str, Backend[WindowedLinear]] = by_name(
    Native(), Chunked(), Reference(), Triton(), FlashLinearAttention()
)


def _chosen(spec: WindowedLinear, call: Call, *tensors: Tensor) -> Backend[WindowedLinear]:
    if spec.feature_map is not None:
        spec.feature_map.check_ready()
    return choose_backend(BACKENDS, spec, call, *tensors)


def attend(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out (B, Hq, L, E) in v's dtype, of whole sequences."""
    backend = _chosen(spec, call, q, k, v)
    if spec.window is not None:
        if q.shape[2] == 0:
            return v.new_zeros((*q.shape[:3], v.shape[-1]))
        spec = spec._replace(window=min(spec.window, q.shape[2] - 1))
    if spec.window is None or call.key_mask is None:
        return backend.attend(spec, call, q, k, v).to(v.dtype)
    order = Order(call.key_mask, k.shape[2], k.device)
    call = call._replace(key_mask=order.real)
    return order.back(backend.attend(spec, call, *(order.front(x) for x in (q, k, v)))).to(v.dtype)


def scan(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State) -> tuple[Tensor, State]:
    """out (B, Hq, L, E) in v's dtype of the tokens that follow `state`, and the state after them; spec.causal."""
    backend = _chosen(spec, call, q, k, v)
    if spec.window is not None and q.shape[2] == 0:
        return v.new_zeros((*q.shape[:3], v.shape[-1])), state
    if spec.window is None or call.key_mask is None:
        out, after = backend.scan(spec, call, q, k, v, state)
    elif q.shape[2] == 1:
        out, after = backend.scan(spec, call, q, k, v, state)
        out = out.masked_fill(~call.key_mask[:, None, :, None], 0.0)
    else:
        order = Order(call.key_mask, k.shape[2], k.device)
        call = call._replace(key_mask=order.real)
        q, k, wide = (order.front(x) for x in (q, k, v))
        out, after = backend.scan(spec, call, q, k, wide, state)
        out = order.back(out)
    return out.to(v.dtype), after


def absorb(spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
    """The state after keys k (B, H, S, D) and values v (B, H, S, E); without a window."""
    backend = _chosen(spec, call, k, v)
    after: State = backend.absorb(spec, call, k, v, state)
    return after


def read(spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
    """out (B, Hq, L, E) in q's dtype: every absorbed key is visible to every query; without a window."""
    backend = _chosen(spec, call, q)
    return backend.read(spec, call, q, state).to(q.dtype)
