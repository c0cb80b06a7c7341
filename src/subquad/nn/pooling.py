"""One vector per sequence, from those of its real tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype

__all__ = ["pool"]


def pool(hidden: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """hidden (B, L, dim) -> (B, dim): the mean of the real tokens, the first or the last of them. Means are computed in
    float32 or wider.

    >>> hidden, mask = torch.tensor([[[9.0], [1.0], [3.0]]]), torch.tensor([[False, True, True]])
    >>> [pool(hidden, mask, how).item() for how in ("mean", "first", "last")]
    [2.0, 1.0, 3.0]
    """
    checks.check_option("pooling", how, ("mean", "first", "last"))
    if mask is None:
        return {"mean": hidden.mean(1), "first": hidden[:, 0], "last": hidden[:, -1]}[how]
    if how == "mean":
        # Sum and number of many tokens: half precision has no such numbers.
        total = hidden.masked_fill(~mask.unsqueeze(-1), 0.0).sum(1, dtype=compute_dtype(hidden))
        return (total / mask.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)
    places = torch.arange(hidden.shape[1], device=hidden.device)
    index = (places * mask).amax(-1) if how == "last" else mask.to(torch.uint8).argmax(-1)
    return hidden.gather(1, index[:, None, None].expand(-1, 1, hidden.shape[-1])).squeeze(1)
