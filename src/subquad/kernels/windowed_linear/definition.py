"""Windowed linear attention: exact softmax weights near, kernelised ones far, one normaliser.

    out_i = (sum_near e^{s_ij} v_j + e^gain sum_far phi(q_i).phi(k_j) v_j) / (the same with 1 for v_j),   s = scale q.k

    near i: |i - j| <= window, and the first `sinks` keys        causal: j <= i as well
    far:    every other key

Without a window every key is far: linear attention. Without a feature map nothing is: local attention. The spec says
which of them is meant; backends compute it, and mechanisms only describe what they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...features.base import FeatureMap
from ...features.precision import compute_dtype
from ...state import State, Sums, Tokens

__all__ = ["WindowedLinear"]


class WindowedLinear(NamedTuple):
    """What is computed.

    feature_map: phi of the far keys; None: nothing is far
    window:      tokens on each side with exact weights (causal: the last `window` and the token itself); None:
                 nothing is near, and `sinks` is 0
    sinks:       the first keys, exact for everyone
    gain:        (Hq,), added to the logarithm of far weights, or None
    causal:      query i sees tokens 0..i
    normalise:   whether sums are divided by the sum of weights; only without a window
    """

    feature_map: FeatureMap | None
    window: int | None = None
    sinks: int = 0
    gain: Tensor | None = None
    causal: bool = False
    normalise: bool = True

    def empty(self, k: Tensor, v: Tensor, scale: float, origin: str) -> State:
        """A state that has seen nothing, for keys k (B, H, ., D) and values v (B, H, ., E)."""
        batch, heads, width = k.shape[0], k.shape[1], v.shape[-1]
        dtype = compute_dtype(v)

        def places(number: int) -> Tokens:
            shape = (batch, heads, number)
            return Tokens(k.new_zeros((*shape, k.shape[-1]), dtype=dtype), v.new_zeros((*shape, width), dtype=dtype))

        phi = self.feature_map
        near = self.window is not None
        return State(
            count=k.new_zeros((batch,), dtype=torch.int64),
            far=None
            if phi is None
            else Sums.empty(batch, heads, phi.num_features, width, v, per_key_scale=phi.per_key_scale),
            window=places(self.window or 0) if near else None,
            sinks=places(self.sinks) if near else None,
            origin=origin,
            feature_map=phi if near else None,
            scale=scale,
        )
