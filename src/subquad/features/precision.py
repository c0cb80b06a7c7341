"""What is never rounded below float32: what is computed, and buffers whatever dtype their module is cast to.

A projection or a calibration that was rounded to bfloat16 is another projection: the estimate it gives is no longer the
one that was seeded, measured and saved. `Float32Buffers` therefore follows `.to(device)` but not `.half()`,
`.bfloat16()`, `.double()` or `.to(dtype)`; computations in another dtype cast a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Float32Buffers", "compute_dtype", "full_precision", "widened"]


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32, or x's own dtype if that is wider: features, scores and sums are never formed in half precision."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """x in the dtype that is computed in.

    >>> widened(torch.ones(2, dtype=torch.bfloat16)).dtype, widened(torch.ones(2, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(compute_dtype(x))


def full_precision(x: Tensor) -> AbstractContextManager[Any]:
    """Inside autocast a matmul would round features to bfloat16; leave it. (Meta tensors know no autocast.)"""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class Float32Buffers(nn.Module):
    """An `nn.Module` whose own floating-point buffers stay float32 under every cast.

    >>> class Holder(Float32Buffers):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.register_buffer("matrix", torch.ones(2))
    >>> Holder().half().matrix.dtype
    torch.float32
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before: dict[str, Tensor | None] = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and old.dtype == torch.float32 and new.dtype != torch.float32:
                # Start from the untouched values: a round trip through half would already have lost bits.
                self._buffers[name] = (
                    torch.empty_like(old, device=new.device) if old.is_meta else old.to(device=new.device)
                )
        return self
