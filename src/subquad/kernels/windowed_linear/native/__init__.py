"""Windowed linear attention in fused C++ loops on the CPU: project, exponentiate, accumulate, all inside the cache.

The chunked backend pays one pass over memory and one barrier per torch operation; here one loop per head takes 48
or 64 tokens at a time through all steps (see csrc/README.md). Exponential maps are handed over as projections, Hadamard
projections matrix-free, elu + 1, relu and the products of Taylor features by name; any other map has its features
computed by torch first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....state import State, Sums
from ...native import library
from ...operator import Backend, Call
from ...padding import real_keys
from ..definition import WindowedLinear
from ..map_arrays import NOTHING
from .maps import NO_MAP, NativeMap, fused, map_inputs, multiplied
from .operator import NOWHERE, Batched, Inputs, Options, attention, past_sums, sums_after
from .step import linear_step, window_step

__all__ = ["Native"]

# Opened here and not at the first call, which may happen inside torch.compile. It takes less than a millisecond.
library.missing()
# Stored features per component of a key, at most, where another backend could do without storing any.
MOST_STORED = 4


def _run(found: NativeMap, inputs: Inputs, batched: Batched, options: Options) -> Sequence[Tensor]:
    """The results of the operator, out in the dtype of the values."""
    arrays = [*found.map.arrays, *([found.map.tilt] if options.near else [])]
    packed = found.packed_rows if options.near else found.packed
    out, *rest = attention(inputs, batched, arrays, *options.encoded(), packed)
    return out.to(inputs.v.dtype), *rest


def _eager(*tensors: Tensor | None) -> bool:
    """Whether no gradient and no tracer wants an operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    wanted = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and ((wanted and x.requires_grad) or type(x) not in (Tensor, torch.nn.Parameter)):
            return False
    return True


def _state_after(state: State, result: Sequence[Tensor], count: Tensor | int) -> State:
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
        batched = Batched()
        if number or call.key_mask is not None:
            place = torch.arange(length, device=k.device)
            mask = real_keys(k, call.key_mask) & (place >= number)
            places = place[:number].expand(k.shape[0], number)
            if number and call.key_mask is not None:
                places = torch.where(call.key_mask[:, :number], places, NOWHERE)
            batched = Batched(far_mask=mask, near_mask=mask, places=places)
        return self._attend_windowed(spec, call.scale, q, k, v, sinks, None, batched, 0, spec.causal, False)[0]

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
    ) -> Sequence[Tensor]:
        assert spec.feature_map is not None
        found, q, k = map_inputs(spec.feature_map, q, k, call.scale)
        inputs, batched = _after(Inputs(q, k, v), Batched(), None if state is None else state.far)
        if call.key_mask is not None:
            batched = batched._replace(far_mask=call.key_mask)
        options = Options(
            *found.options, scale=1.0, window=-1, past=0, causal=causal, normalise=spec.normalise, tail=tail
        )
        return _run(found, inputs, batched, options)

    def _attend_windowed(
        self,
        spec: WindowedLinear,
        scale: float,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: list[Tensor],
        far: Sums | None,
        batched: Batched,
        before: int,
        causal: bool,
        tail: bool,
    ) -> Sequence[Tensor]:
        """k and v hold `before` tokens before the first query's own; far: the sums of the keys before these."""
        found, as_mapped, gain = self._far(spec, q, k, scale)
        assert spec.window is not None
        sink_k, sink_v = sinks or (NOTHING, NOTHING)
        inputs = Inputs(q, k, v, sink_k, sink_v, *as_mapped, gain=gain)
        inputs, batched = _after(inputs, batched, far)
        options = Options(
            *found.options,
            *(scale, spec.window, before, causal),
            normalise=True,
            tail=tail and spec.feature_map is not None,
        )
        return _run(found, inputs, batched, options)

    def _far(
        self, spec: WindowedLinear, q: Tensor, k: Tensor, scale: float
    ) -> tuple[NativeMap, tuple[Tensor, Tensor], Tensor]:
        """The map, queries and keys as it takes them where it takes others, and the log factor (B, Hq) of far weights;
        what is not there is empty."""
        if spec.feature_map is None:
            return NO_MAP, (NOTHING, NOTHING), NOTHING
        found, far_q, far_k = map_inputs(spec.feature_map, q, k, scale)
        gain = None if spec.gain is None else spec.gain.to(torch.float32)
        if found.map.level is not None:
            level = found.map.level.repeat_interleave(q.shape[1] // k.shape[1])
            gain = level if gain is None else gain + level
        gain = NOTHING if gain is None else gain.expand(q.shape[0], -1).contiguous()
        return found, (NOTHING, NOTHING) if far_q is q and far_k is k else (far_q, far_k), gain

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
            far = far if far[0].numel() else (q, leaving)
            return window_step(found, q, k, v, far, call.key_mask, state, gain, call.scale)
        after = state.extend(k, v, _new(k, call))
        assert after.sinks is not None
        ranks, end = state.ranks(k.shape[2]), after.count[:, None]
        near = (ranks >= spec.sinks) & (ranks < end)
        number = torch.arange(spec.sinks, device=k.device)
        # Token 0 of [window | new tokens] has the first of the ranks.
        places = torch.where(number < end, number - ranks[:, :1], NOWHERE)
        known = state.window.followed_by(k, v)
        batched = Batched(far_mask=near & (ranks < end - spec.window), near_mask=near, places=places)
        sinks = list(after.sinks) if spec.sinks else []
        result = self._attend_windowed(spec, call.scale, q, *known, sinks, state.far, batched, spec.window, True, True)
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


def _after(inputs: Inputs, batched: Batched, sums: Sums | None) -> tuple[Inputs, Batched]:
    """The same after the far keys that `sums` holds."""
    if sums is None:
        return inputs, batched
    weighted, normaliser, log_max = past_sums(sums)
    return inputs._replace(weighted=weighted, normaliser=normaliser), batched._replace(log_max=log_max)


def _new(k: Tensor, call: Call) -> Tensor | int:
    """How many of the tokens are real."""
    return k.shape[2] if call.key_mask is None else call.key_mask.sum(-1)


def _floats(state: State) -> tuple[Tensor, ...]:
    """What of a state may want a gradient."""
    far = () if state.far is None else state.far[:2]
    return far if state.window is None or state.sinks is None else (*far, *state.window, *state.sinks)
