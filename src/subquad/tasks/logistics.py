"""A discretised mixture of logistics over the 256 values of a pixel.

    P(x) = sum_i w_i [ sigma((x + 1/255 - m_i)/s_i) - sigma((x - 1/255 - m_i)/s_i) ],    x = value / 127.5 - 1

with the lowest and the highest value taking the tails, so the 256 probabilities add up to 1. Salimans et al.,
"PixelCNN++", 2017. The difference of two sigmoids is computed without cancellation or a case for small ones:

    log(sigma(a) - sigma(b)) = log sigma(a) + log sigma(-b) + log(1 - e^{b - a})
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["log_probability", "parameters_per_pixel", "sample_values"]

HALF_STEP = 1 / 255
# Below this log scale a component is narrower than a pixel value by far, and its gradient is of no use.
SMALLEST_LOG_SCALE = -7.0


def parameters_per_pixel(components: int) -> int:
    """Weight, mean and log scale of each component."""
    return 3 * components


def _split(parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., 3K) -> log weights, means, log scales, each (..., K)."""
    weights, means, scales = parameters.float().chunk(3, -1)
    return weights.log_softmax(-1), means, scales.clamp(min=SMALLEST_LOG_SCALE)


def log_probability(parameters: Tensor, values: Tensor) -> Tensor:
    """parameters (..., 3K), values (...) integers in 0..255 -> log P (...), in float32.

    >>> everything = log_probability(torch.randn(30).expand(256, 30), torch.arange(256)).exp().sum()
    >>> round(float(everything), 4)
    1.0
    """
    weights, means, scales = _split(parameters)
    x = (values.float() / 127.5 - 1).unsqueeze(-1)
    inverse = (-scales).exp()
    upper, lower = (x + HALF_STEP - means) * inverse, (x - HALF_STEP - means) * inverse
    below_upper, above_lower = F.logsigmoid(upper), F.logsigmoid(-lower)
    inside = below_upper + above_lower + torch.log(-torch.expm1(-2 * HALF_STEP * inverse))
    value = values.unsqueeze(-1)
    inside = torch.where(value == 0, below_upper, torch.where(value == 255, above_lower, inside))
    return torch.logsumexp(weights + inside, -1)


def sample_values(parameters: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """parameters (..., 3K) -> one value in 0..255 per distribution, int64 (...)."""
    weights, means, scales = _split(parameters)
    flat = weights.exp().flatten(0, -2)
    chosen = torch.multinomial(flat, 1, generator=generator).view(*weights.shape[:-1], 1)
    mean, scale = means.gather(-1, chosen).squeeze(-1), scales.gather(-1, chosen).squeeze(-1)
    u = torch.rand(mean.shape, generator=generator, device=mean.device).clamp(1e-6, 1 - 1e-6)
    x = mean + scale.exp() * (u.log() - torch.log1p(-u))
    return ((x.clamp(-1, 1) + 1) * 127.5).round().long()
