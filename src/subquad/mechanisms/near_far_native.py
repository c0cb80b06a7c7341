"""Hybrid attention by the native kernels: near and far in one fused loop (csrc/hybrid.h). Same meaning as near_far.py.

This file says where everything stands: which keys are far, which tokens are sinks, what remains of them in the state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..features.base import FeatureMap
from ..kernels import native
from ..kernels.checkpointing import tracing
from ..kernels.native_hybrid import NOWHERE, Results, call_hybrid, hybrid
from ..kernels.native_hybrid_step import Memory, call_step
from ..kernels.native_hybrid_transforms import functional_hybrid
from ..kernels.native_operators import pack_maps
from ..state import LinearState
from .base import real_keys
from .hybrid_state import HybridState, settle
from .near_far import positions
from .windows import take

__all__ = ["attend", "scan", "wins"]


def wins(feature_map: FeatureMap, *tensors: Tensor) -> bool:
    """Whether the kernels compute this far map themselves and can take the tensors."""
    return native.fused(feature_map) and not native.refusal(feature_map, *tensors)


def _gain(form: native.Form, log_far: Tensor | None, groups: int) -> Tensor | None:
    """(Hq,): what is added to the logarithm of far weights."""
    gain = None if log_far is None else log_far.to(torch.float32)
    if form.level is None:
        return gain
    level = form.level.repeat_interleave(groups)
    return level if gain is None else gain + level


def _run(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    state: list[Tensor],
    masks: list[Tensor],
    log_far: Tensor | None,
    *,
    scale: float,
    window: int,
    past: int,
    causal: bool,
    tail: bool,
) -> Results:
    form, far_q, far_k = native._inputs(feature_map, q, k, scale)
    far = [] if far_q is q and far_k is k else [far_q, far_k]
    gain = _gain(form, log_far, q.shape[1] // k.shape[1])
    gain = native.NOTHING if gain is None else gain
    arrays = [*form.arrays, form.tilt]
    inputs = (q, k, v, sinks, far, state, masks, gain)
    options = (scale, window, past, causal, tail)
    tensors = (q, k, v, *sinks, *far, *state[:2], gain)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and any(tracing(x) for x in tensors):
        return _rounded(hybrid(*inputs, arrays, *form[1:5], *options, keep=wanted), v.dtype)
    if transformed or wanted:
        return _rounded(functional_hybrid(*inputs, arrays, *form[1:5], *options), v.dtype)
    return call_hybrid(*inputs, arrays, *form[1:5], scale, window, past, causal, tail, keep=False, maps=form.row_maps)


def _rounded(result: Results, dtype: torch.dtype) -> Results:
    return result[0].to(dtype), *result[1:]


def _first_sinks(k: Tensor, v: Tensor, key_mask: Tensor | None, sinks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Sinks [k, v] of whole sequences, and [real keys, far keys, the sinks' places]."""
    batch, length = k.shape[0], k.shape[2]
    number = min(sinks, length)
    everywhere = torch.arange(length, device=k.device)
    if key_mask is None:
        places = everywhere[:number].expand(batch, number)
        far = (everywhere >= number).expand(batch, length) if number else native.NO_MASK
        return ([k[:, :, :number], v[:, :, :number]] if number else []), [native.NO_MASK, far, places]
    start = (key_mask.long().cumsum(-1) == 0).sum(-1, keepdim=True)
    places = start + torch.arange(number, device=k.device)
    index = places.clamp(max=length - 1)
    there = (places < length) & key_mask.gather(1, index)
    far = key_mask & (everywhere >= start + number)
    found = [take(k, index), take(v, index)] if number else []
    return found, [key_mask, far, torch.where(there, places, NOWHERE)]


def attend(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int,
    sinks: int,
    log_far: Tensor | None,
    key_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """out (B, Hq, L, E) of whole sequences, L > 0: no state comes in and none is kept."""
    found, masks = _first_sinks(k, v, key_mask, sinks)
    options = {"scale": scale, "window": window, "past": 0, "causal": causal, "tail": False}
    return _run(feature_map, q, k, v, found, [], masks, log_far, **options)[0]  # type: ignore[arg-type]


def _tensors(state: HybridState) -> tuple[Tensor, ...]:
    return (state.far.weighted, state.far.normaliser, state.window_k, state.window_v, state.sink_k, state.sink_v)


def _traced(*tensors: Tensor | None) -> bool:
    """Whether a gradient or a tracer wants an operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    wanted = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and ((wanted and x.requires_grad) or type(x) not in (Tensor, torch.nn.Parameter)):
            return True
    return False


def _step(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HybridState,
    log_far: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, HybridState]:
    """`scan` for one token without a gradient."""
    leaving = state.window_k[:, :, :1] if state.window_k.shape[2] else k
    form, far_q, far_k = native._inputs(feature_map, q, leaving, state.scale)
    maps = form.row_maps or pack_maps([*form.arrays, form.tilt], form.square)
    gain = _gain(form, log_far, q.shape[1] // k.shape[1])
    weighted, normaliser, log_max, count = state.far.tensors
    shared = log_max.shape[-1] != normaliser.shape[-1]  # maps without a log scale keep their c = 0 of shape (B, H, 1)
    memory = Memory(
        *(weighted, normaliser, log_max.expand_as(normaliser) if shared else log_max),
        *(state.window_k, state.window_v, state.sink_k, state.sink_v, state.window_mask, state.sink_mask),
        *(state.length, state.start, count),
    )
    if not all(x.is_contiguous() for x in memory):
        memory = Memory(*(x.contiguous() for x in memory))
    out, after = call_step(form, q, k, v, far_q, far_k, key_mask, memory, gain, state.scale, maps)
    weighted, normaliser, maxima = after[:3]
    far = LinearState(weighted, normaliser, log_max if shared else maxima, after.seen, state.far.origin)
    return out, HybridState(
        far,
        *(after.window_k, after.window_v, after.window_mask, after.sink_k, after.sink_v, after.sink_mask),
        *(after.length, after.start, state.feature_map, state.scale, state.origin),
    )


def scan(
    feature_map: FeatureMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: HybridState,
    *,
    log_far: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, HybridState]:
    """out (B, Hq, L, E) and the state after the last token, L > 0."""
    if k.shape[2] == 1 and not _traced(q, k, v, *_tensors(state), log_far):
        return _step(feature_map, q, k, v, state, log_far, key_mask)
    window, number, tokens = state.window_mask.shape[1], state.sink_mask.shape[1], k.shape[2]
    mask = real_keys(k, key_mask)
    slot, start = positions(state, mask)
    k, v = torch.cat([state.window_k, k.to(torch.float32)], 2), torch.cat([state.window_v, v.to(torch.float32)], 2)
    mask, slot = torch.cat([state.window_mask, mask], 1), torch.cat([state.window_slot, slot], 1)
    is_sink = (slot >= 0) & (slot < number)
    far = mask & ~is_sink
    # A token leaves the window, and can become a sink, as many places after its own as the window holds.
    sinks, arrival = settle(state.sinks, k[:, :, :tokens], v[:, :, :tokens], mask[:, :tokens], slot[:, :tokens])
    places = torch.where(sinks.mask, torch.where(arrival < 0, -NOWHERE, arrival), NOWHERE)
    past = [x.to(torch.float32).contiguous() for x in (state.far.weighted, state.far.normaliser)]
    past.append(state.far.log_max.to(torch.float32).expand_as(past[1]).contiguous())
    found = [sinks.k, sinks.v] if number else []
    out, sums, totals, maxima, _, _ = _run(
        *(feature_map, q, k, v, found, past, [mask, far, places], log_far),
        scale=state.scale,
        window=window,
        past=window,
        causal=True,
        tail=True,
    )
    # Maps without a log scale keep their c = 0 of shape (B, H, 1).
    log_max = state.far.log_max if state.far.log_max.shape[-1] != maxima.shape[-1] else maxima.detach()
    after = LinearState(sums, totals, log_max, state.far.count + far[:, :tokens].sum(-1), state.far.origin)
    rest = [x[:, :, tokens:] for x in (k, v)]
    if tokens > window:  # a view would keep all of the tokens alive
        rest = [x.clone() for x in rest]
    return out, replace(
        state,
        far=after,
        window_k=rest[0],
        window_v=rest[1],
        window_mask=mask[:, tokens:],
        sink_k=sinks.k,
        sink_v=sinks.v,
        sink_mask=sinks.mask,
        length=state.length + tokens,
        start=start,
    )
