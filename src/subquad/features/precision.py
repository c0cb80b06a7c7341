"""Buffers that keep float32 whatever dtype their module is cast to.

A projection or a calibration that was rounded to bfloat16 is another projection: the estimate it gives is no longer the
one that was seeded, measured and saved. `Float32Buffers` therefore follows `.to(device)` but not `.half()`,
`.bfloat16()`, `.double()` or `.to(dtype)`; computations in another dtype cast a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Float32Buffers"]


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
