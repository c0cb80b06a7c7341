"""Windowed linear attention in fused C++ loops on the CPU: project, exponentiate, accumulate, all inside the cache.

The chunked backend pays one pass over memory and one barrier per torch operation; here one loop per head takes 48
or 64 tokens at a time through all steps (see csrc/README.md). Exponential maps are handed over as projections, Hadamard
projections matrix-free, elu + 1, relu and the products of Taylor features by name; any other map has its features
computed by torch first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...state import State
from ..checkpointing import tracing
from ..map_arrays import NOTHING
from ..operator import Backend, Call
from ..padding import real_keys
from ..windowed_linear import WindowedLinear
from . import library
from .calls import NO_MASK, NO_PLACES, NOWHERE, Options, Results, call_forward, past_sums, sums_after
from .maps import NO_MAP, NativeMap, fused, map_inputs, multiplied
from .operators import attention, functional_attention
from .step import linear_step, window_step

__all__ = ["Native"]

# Opened here and not at the first call, which may happen inside torch.compile. It takes less than a millisecond.
library.missing()
# Stored features per component of a key, at most, where another backend could do without storing any.
MOST_STORED = 4


def _dispatch(
    found: NativeMap,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: list[Tensor],
    far: list[Tensor],
    past: list[Tensor],
    masks: list[Tensor],
    gain: Tensor,
    options: Options,
) -> Results:
    """The forward itself, the torch operator or the autograd function, as this call needs."""
    arrays = [*found.map.arrays, *([found.map.tilt] if options.near else [])]
    maps = found.packed_rows if options.near else found.packed
    arguments = (q, k, v, sinks, far, past, masks, gain, arrays)
    tensors = (q, k, v, *sinks, *far, *past[:2], gain)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    transformed = torch._C._are_functorch_transforms_active()
    if not transformed and any(tracing(x) for x in tensors):
        result: Results = attention(*arguments, *options, keep=wanted)
    elif transformed or wanted:
        result = functional_attention(*arguments, options, maps=maps)
    else:
        return call_forward(*arguments, options, keep=False, maps=maps)
    return result[0].to(v.dtype), *result[1:]


def _eager(*tensors: Tensor | None) -> bool:
    """Whether no gradient and no tracer wants an operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    wanted = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and ((wanted and x.requires_grad) or type(x) not in (Tensor, torch.nn.Parameter)):
            return False
    return True


def _state_after(state: State, result: Results, count: Tensor | int) -> State:
    assert state.far is not None
    return replace(state, far=sums_after(state.far, *result[1:4]), count=state.count + count)


class Native(Backend[WindowedLinear]):
    """The fused kernels of csrc/."""

    name = "native"

    def refusal(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> str:
        if reason := library.refusal(tensors):
            return reason
        phi = spec.feature_map
        if phi is not None and phi.per_key_scale == "token":
            return f"{type(phi).__name__} has one scale per token, which only the chunked backend carries"
        if phi is not None and not spec.normalise and phi.per_key_scale != "none":
            return "exponential features are only known up to a factor per row, so normalise=False needs 'chunked'"
        return ""

    def automatic(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> bool:
        # Who asks for chunks of a size gets the backend that has them: the native kernels choose their own.
        if call.chunk_size is not None:
            return False
        phi = spec.feature_map
        if phi is None or fused(phi) or multiplied(phi):
            return True
        # Features that torch computes are stored: as long as they are few, that costs less than the chunked loop.
        return phi.num_features <= MOST_STORED * tensors[0].shape[-1]

    def attend(self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if spec.window is None:
            return self._attend_linear(spec, call, q, k, v, None, spec.causal, False)[0]
        length = k.shape[2]
        number = min(spec.sinks, length)
        sinks = [x[:, :, :number] for x in (k, v)] if number else []
        mask, places = NO_MASK, NO_PLACES
        if number or call.key_mask is not None:
            place = torch.arange(length, device=k.device)
            mask = real_keys(k, call.key_mask) & (place >= number)
            places = place[:number].expand(k.shape[0], number)
            if number and call.key_mask is not None:
                places = torch.where(call.key_mask[:, :number], places, NOWHERE)
        masks = [mask, mask, places]
        return self._attend_windowed(spec, call.scale, q, k, v, sinks, [], masks, 0, spec.causal, False)[0]

    def _attend_linear(
        self,
        spec: WindowedLinear,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: State | None,
        causal: bool,
        tail: bool,
    ) -> Results:
        assert spec.feature_map is not None
        past = [] if state is None or state.far is None else past_sums(state.far)
        found, q, k = map_inputs(spec.feature_map, q, k, call.scale)
        masks = [NO_MASK if call.key_mask is None else call.key_mask, NO_MASK, NO_PLACES]
        options = Options(
            *found.options, scale=1.0, window=-1, past=0, causal=causal, normalise=spec.normalise, tail=tail
        )
        return _dispatch(found, q, k, v, [], [], past, masks, NOTHING, options)

    def _attend_windowed(
        self,
        spec: WindowedLinear,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: list[Tensor],
        past: list[Tensor],
        masks: list[Tensor],
        before: int,
        causal: bool,
        tail: bool,
    ) -> Results:
        """k and v hold `before` tokens before the first query's own."""
        found, far, gain = self._far(spec, q, k, scale)
        assert spec.window is not None
        tail = tail and spec.feature_map is not None
        options = Options(
            *found.options, scale=scale, window=spec.window, past=before, causal=causal, normalise=True, tail=tail
        )
        return _dispatch(found, q, k, v, sinks, far, past, masks, gain, options)

    def _far(self, spec: WindowedLinear, q: Tensor, k: Tensor, scale: float) -> tuple[NativeMap, list[Tensor], Tensor]:
        """The map, [queries, keys] as it takes them or [], and the log factor (Hq,) of the far weights or nothing."""
        if spec.feature_map is None:
            return NO_MAP, [], NOTHING
        found, far_q, far_k = map_inputs(spec.feature_map, q, k, scale)
        gain = None if spec.gain is None else spec.gain.to(torch.float32)
        if found.map.level is not None:
            level = found.map.level.repeat_interleave(q.shape[1] // k.shape[1])
            gain = level if gain is None else gain + level
        return found, [] if far_q is q and far_k is k else [far_q, far_k], NOTHING if gain is None else gain

    def scan(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State
    ) -> tuple[Tensor, State]:
        step = q.shape[2] == 1 and _eager(q, k, v, spec.gain, *_floats(state))
        if spec.window is None:
            if step:
                assert spec.feature_map is not None
                found, far_q, far_k = map_inputs(spec.feature_map, q, k, call.scale)
                return linear_step(found, far_q, far_k, v, call.key_mask, state, spec.normalise)
            result = self._attend_linear(spec, call, q, k, v, state, True, True)
            return result[0], _state_after(state, result, _new(k, call))
        assert state.window is not None
        if step:
            leaving = state.window.k[:, :, :1] if spec.window else k
            found, far, gain = self._far(spec, q, leaving, call.scale)
            return window_step(found, q, k, v, far or [q, leaving], call.key_mask, state, gain, call.scale)
        after = state.extend(k, v, _new(k, call))
        assert after.sinks is not None
        ranks, end = state.ranks(k.shape[2]), after.count[:, None]
        near = (ranks >= spec.sinks) & (ranks < end)
        number = torch.arange(spec.sinks, device=k.device)
        # Token 0 of [window | new tokens] has the first of the ranks.
        places = torch.where(number < end, number - ranks[:, :1], NOWHERE)
        known = state.window.followed_by(k, v)
        past = [] if state.far is None else past_sums(state.far)
        masks = [near & (ranks < end - spec.window), near, places]
        sinks = list(after.sinks) if spec.sinks else []
        result = self._attend_windowed(spec, call.scale, q, *known, sinks, past, masks, spec.window, True, True)
        return result[0], after if state.far is None else _state_after(after, result, 0)

    def absorb(self, spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
        none = k.new_empty((k.shape[0], k.shape[1], 0, k.shape[3]))
        result = self._attend_linear(spec, call, none, k, v, state, False, True)
        return _state_after(state, result, _new(k, call))

    def read(self, spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
        assert state.far is not None
        batch, heads, _, width = state.far.weighted.shape
        keys = q.new_empty((batch, heads, 0, q.shape[3]))
        values = state.far.weighted.new_empty((batch, heads, 0, width))
        return self._attend_linear(spec, call, q, keys, values, state, False, False)[0]


def _new(k: Tensor, call: Call) -> Tensor | int:
    """How many of the tokens are real."""
    return k.shape[2] if call.key_mask is None else call.key_mask.sum(-1)


def _floats(state: State) -> tuple[Tensor, ...]:
    """What of a state may want a gradient."""
    far = () if state.far is None else state.far[:2]
    return far if state.window is None or state.sinks is None else (*far, *state.window, *state.sinks)
