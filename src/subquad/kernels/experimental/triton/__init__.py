"""Kernelised attention in Triton, for GPUs: must be asked for by name, `backend="triton"`.

Forward and backward, full and causal, with key masks, states and grouped-query heads, for exponential maps (positive,
hyperbolic, OPRF, SDERF) with a running maximum per feature. The kernels agree with the reference under Triton's
interpreter; they have not been timed on a GPU, so no call is ever given to them without being asked.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import torch
from torch import Tensor

from ....features.random import ExponentialFeatures
from ....state import State, Sums
from ...operator import Backend, Call
from ...windowed_linear.definition import WindowedLinear
from ...windowed_linear.map_arrays import map_arrays

__all__ = ["Triton"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A head stands in one block of the kernels.
WIDEST = 256


class Triton(Backend[WindowedLinear]):
    """Linear attention by Triton kernels, where they are named."""

    name = "triton"

    def automatic(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> bool:
        return False

    def refusal(self, spec: WindowedLinear, call: Call, *tensors: Tensor) -> str:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed (pip install triton)"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        for x in tensors:
            if x.device.type == "cpu" and not interpreted:
                return "they run on a GPU, got a tensor on cpu (TRITON_INTERPRET=1 runs them there, slowly, for tests)"
            if x.dtype not in DTYPES:
                return f"they take float32, bfloat16 and float16, got {x.dtype}"
            if x.shape[-1] > WIDEST:
                return f"they take head and value widths up to {WIDEST}, got {x.shape[-1]}"
        phi = spec.feature_map
        if spec.window is not None:
            return "they have no window"
        if not isinstance(phi, ExponentialFeatures):
            return f"they take exponential features (positive, hyperbolic, oprf, sderf), got {type(phi).__name__}"
        if any(p.requires_grad for p in phi.parameters()):
            return "the parameters of the feature map want a gradient, which only the chunked backend computes"
        if not spec.normalise:
            return "exponential features are only known up to a factor per row, so normalise must be True"
        if torch._C._are_functorch_transforms_active():
            return "torch.func transforms need torch's own operators"
        return ""

    def _run(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State, causal: bool
    ) -> tuple[Tensor, State]:
        # Here, because it needs Triton.
        from .operators import attention

        phi, far, scale = spec.feature_map, state.far, call.scale
        assert phi is not None and far is not None
        form = map_arrays(phi, scale, butterflies=False)
        if form is None:
            raise ValueError(
                f"backend='triton' needs a positive scale for exponential features, got {scale}. "
                "Use backend=None or 'chunked'"
            )
        weight, bias, tilt = form.arrays.weight, form.arrays.bias, form.arrays.tilt
        if form.antithetic:
            weight, bias = torch.cat([weight, -weight], 1), torch.cat([bias, bias], 1)
        if not tilt.numel():
            tilt = weight.new_zeros((1, q.shape[3]))
        if form.means is not None:
            groups = q.shape[1] // max(1, k.shape[1])
            q = q.to(torch.float32) - form.means[0].repeat_interleave(groups, 0)
            k = k.to(torch.float32) - form.means[1]
        past = [far.weighted, far.normaliser, far.log_max.expand_as(far.normaliser)]
        mask = torch.empty(0, dtype=torch.bool, device=q.device) if call.key_mask is None else call.key_mask
        past, maps = [x.to(torch.float32) for x in past], [weight, bias, tilt]
        result = attention(q, k, v, mask, past, maps, form.square, causal)
        count = k.shape[-2] if call.key_mask is None else call.key_mask.sum(-1)
        sums = Sums(result[1], result[2], result[3].detach())
        return result[0], replace(state, far=sums, count=state.count + count)

    def attend(self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._run(spec, call, q, k, v, spec.empty(k, v, call.scale, ""), spec.causal)[0]

    def scan(
        self, spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor, state: State
    ) -> tuple[Tensor, State]:
        return self._run(spec, call, q, k, v, state, True)

    def absorb(self, spec: WindowedLinear, call: Call, k: Tensor, v: Tensor, state: State) -> State:
        none = k.new_empty((k.shape[0], k.shape[1], 0, k.shape[3]))
        return self._run(spec, call, none, k, v, state, False)[1]

    def read(self, spec: WindowedLinear, call: Call, q: Tensor, state: State) -> Tensor:
        assert state.far is not None
        batch, heads, _, width = state.far.weighted.shape
        keys = q.new_empty((batch, heads, 0, q.shape[3]))
        values = state.far.weighted.new_empty((batch, heads, 0, width))
        return self._run(spec, call._replace(key_mask=None), q, keys, values, state, False)[0]
