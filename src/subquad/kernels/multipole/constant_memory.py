"""Multipole attention that keeps a fixed number of clusters (`constant.py`): the calls of `all_keys.py` for it."""

from __future__ import annotations

from torch import Tensor

from ... import checks
from ...features.precision import compute_dtype
from ..operator import Call
from ..padding import Order
from . import constant, paged
from .constant import Bounded
from .constant_pages import begin_constant
from .states import ConstantState

__all__ = ["absorb", "attend", "read", "scan"]


def attend(spec: Bounded, call: Call, q: Tensor, k: Tensor, v: Tensor, origin: str = "") -> Tensor:
    """out (B, Hq, L, E) of whole sequences; not causal: every query reads what remains of all keys."""
    if spec.spec.causal:
        return scan(spec, call, q, k, v, None, origin)[0]
    return read(spec, call, q, absorb(spec, call, k, v, None, origin)).to(v.dtype)


def scan(
    spec: Bounded, call: Call, q: Tensor, k: Tensor, v: Tensor, state: ConstantState | None, origin: str
) -> tuple[Tensor, ConstantState]:
    """out (B, Hq, L, E) of tokens after those of `state`, 0 at masked ones, and the state after them."""
    out, after = _continue(spec, call, q, k, v, state, origin)
    assert out is not None
    return out, after


def absorb(spec: Bounded, call: Call, k: Tensor, v: Tensor, state: ConstantState | None, origin: str) -> ConstantState:
    """The state after further keys and values."""
    return _continue(spec, call, None, k, v, state, origin)[1]


def read(spec: Bounded, call: Call, q: Tensor, state: ConstantState) -> Tensor:
    """out (B, Hq, L, E) in q's dtype: every key of `state` is visible to every query."""
    if state.pages is not None and paged(call, q, q, q, state):
        out: Tensor = state.pages.read(q)
        return out.to(q.dtype)
    memory = state.memory()
    _block(spec, call)
    return constant.read(spec, memory, call.scale * q.to(memory.k.dtype)).to(q.dtype)


def _block(spec: Bounded, call: Call) -> int:
    """Tokens that torch computes at a time; the definition takes one."""
    if call.backend is not None:
        checks.check_option("backend", call.backend, ("chunked", "reference"))
    chunk = spec.spec.chunk
    return 1 if call.backend == "reference" else min(call.chunk_size or chunk, chunk)


def _continue(
    spec: Bounded, call: Call, q: Tensor | None, k: Tensor, v: Tensor, state: ConstantState | None, origin: str
) -> tuple[Tensor | None, ConstantState]:
    """`scan`, or `absorb` without queries."""
    if call.backend is None and paged(call, k if q is None else q, k, v, state):
        pages = None if state is None else state.pages
        if pages is None:
            pages = begin_constant(spec, call, k, v, None if state is None else state.memory())
        out, pages = pages.scan(q, k, v, call.key_mask)
        if out is not None and call.key_mask is not None:
            out = out.masked_fill(~call.key_mask[:, None, :, None], 0.0)
        return out, ConstantState.of(pages, origin)
    block, order = _block(spec, call), Order(call.key_mask, k.shape[2], k.device)
    dtype, kind = compute_dtype(k), v.dtype
    k, v = order.front(k.to(dtype)), order.front(v.to(dtype))
    memory = constant.empty(spec, k, v) if state is None else state.memory()
    scaled = None if q is None else order.front(call.scale * q.to(dtype))
    count = order.count.squeeze(-1).expand(k.shape[0])
    out, after = constant.scan(spec, memory, scaled, k, v, count, block)
    return None if out is None else order.back(out).to(kind), ConstantState.from_memory(after, origin)
