"""What a feature map is: phi, applied to one token at a time, never along the sequence.

A kernelised mechanism replaces the weight e^{q.k} by phi_q(q) . phi_k(k). A map returns its features as a pair

    phi = values * exp(log_scale)

so that nothing has to be exponentiated before the state has chosen a shift. Exponential maps leave `values` out and put
everything in `log_scale` (..., L, M); maps with plain, possibly signed values (trig, Taylor, relu, elu + 1, callables)
give `values` (..., L, M) and at most one scale per token, `log_scale` (..., L, 1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .calibration import calibrations
from .precision import Float32Buffers

__all__ = ["LOG2_E", "FeatureMap", "Features", "LinearForm", "exp_", "scaled", "weigh"]

LOG2_E = 1.0 / math.log(2.0)


class Features(NamedTuple):
    """Features of a run of tokens: `values * exp(log_scale)`; a missing part counts as 1 and 0.

    values:    (..., L, M) or None
    log_scale: (..., L, M) for exponential maps, (..., L, 1) for one scale per token, or None
    """

    values: Tensor | None
    log_scale: Tensor | None


class LinearForm(NamedTuple):
    """An exponential map written as a projection, for backends that fuse it.

    With p = weight q (keys: weight k), H = 1 or the number of KV heads, R directions:

        log phi_q(q) = +-p + bias                                   (+ a term per query, which the normaliser cancels)
        log phi_k(k) = +-p + bias + quadratic |k|^2 + linear . k     (+ a constant per head, likewise)

    Antithetic maps have the features [+p, -p], M = 2 R of them; the others +p alone, M = R.
    """

    weight: Tensor  # (H, R, D)
    bias: Tensor  # (H, R)
    quadratic: float
    linear: Tensor  # (H, D)
    antithetic: bool


def exp_(x: Tensor) -> Tensor:
    """e^x, in place: for fresh tensors that nothing else needs (the backward of exp needs only its result).

    In float32 on a CPU as 2^(x log2 e): twice as fast as torch.exp, and up to eight times where e^x underflows, which
    is where most weights of sharp attention lie. The rounding of the product costs |x| 6e-8 relative, no more than x
    itself was rounded by when it was computed.
    """
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return x.mul_(LOG2_E).exp2_()
    return x.exp_()


def weigh(features: Features, shift: Tensor | None) -> Tensor:
    """values * exp(log_scale + shift): (..., L, M). `shift` broadcasts over the log scale."""
    values, log_scale = features
    if log_scale is None:
        assert values is not None
        return values
    weights = torch.exp(log_scale) if shift is None else exp_(log_scale + shift)
    return weights if values is None else values * weights


def scaled(x: Tensor, scale: float, *, queries: bool) -> Tensor:
    """Split `scale` evenly over both sides, x = sqrt(|scale|) q, so that x.y = scale q.k; queries carry the sign."""
    root = math.sqrt(abs(scale))
    if queries and scale < 0:
        root = -root
    return x if root == 1.0 else x * root


class FeatureMap(Float32Buffers):
    """Base of all feature maps. Tokens come as (..., H, L, D), H the KV heads; features leave as (..., H, L, M).

    `num_features` is M, the number of rows of the state. `per_key_scale` says what a state must remember of the log
    scale: "feature" (one maximum per feature), "token" (one for all features) or "none".
    """

    num_features: int
    per_key_scale: str = "none"
    # A plain function may close over tensors that want a gradient; what cannot be listed cannot be checkpointed.
    hidden_parameters: bool = False
    # Whether phi_q(q).phi_k(k) estimates e^{scale q.k} itself, not a multiple of it or another kernel: only then can
    # its weights stand beside exact softmax weights in one normaliser.
    estimates_softmax: bool = False

    def queries(self, q: Tensor, scale: float) -> Features:
        """Features of queries; `scale` multiplies q.k inside the kernel."""
        raise NotImplementedError

    def keys(self, k: Tensor, scale: float) -> Features:
        """Features of keys."""
        raise NotImplementedError

    def default_scale(self, head_dim: int) -> float:
        """The scale used when the caller gives none."""
        return 1.0

    def draw_key(self) -> tuple[int, ...]:
        """What identifies the random draw behind this map; states of different draws must not be merged."""
        return ()

    def linear_form(self, scale: float) -> LinearForm | None:
        """The map as a projection for fused backends, or None where it is not of that form."""
        return None

    def calibrate(self, q: Tensor, k: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None) -> None:
        """Add a batch of sample data to the statistics, where the map has any."""
        for statistics in calibrations(self):
            statistics.update(q, k, key_mask, query_mask)

    def check_ready(self) -> None:
        """Raise if the map needs calibration and has none."""
