"""Memory for the states that decode steps hand out: used again as soon as nobody holds the old state any more.

A step returns a new state and the one before it is dropped, once per layer. The C library gives such large blocks back
to the system and asks for them again, and every fresh page costs a fault and a zeroing: several times what the step
itself takes. Here a block is lent to one tensor and comes back when that tensor, and every view of it, is gone.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGEST", "SMALLEST", "BlockPool", "new_state"]

SMALLEST = 1 << 17  # bytes; below this the C library keeps freed blocks itself
LARGEST = 1 << 28  # bytes kept for later, in all


class BlockPool:
    """Blocks of float32 by size. Lending and returning are single operations on lists, so threads need no lock.

    >>> pool = BlockPool()
    >>> state = pool.lend((2, 1 << 15))
    >>> state.shape, pool.kept_bytes()
    (torch.Size([2, 32768]), 0)
    >>> view, address = state[1], state.data_ptr()
    >>> del state
    >>> pool.kept_bytes()  # the view still needs the memory
    0
    >>> del view
    >>> pool.kept_bytes(), pool.lend((1 << 16,)).data_ptr() == address
    (262144, True)
    """

    def __init__(self, most: int = LARGEST) -> None:
        self.most = most
        self._kept: dict[int, list[Tensor]] = {}
        self._kinds: dict[int, Any] = {}

    def kept_bytes(self) -> int:
        """How many bytes wait for their next use."""
        return sum(4 * size * len(blocks) for size, blocks in list(self._kept.items()))

    def clear(self) -> None:
        """Give everything that nobody holds back to the system."""
        for blocks in list(self._kept.values()):
            blocks.clear()

    def lend(self, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised float32 tensor of this shape, on the CPU."""
        size = math.prod(shape)
        if not SMALLEST <= 4 * size <= self.most:
            return torch.empty(shape, dtype=torch.float32)
        try:
            block = self._kept[size].pop()
        except (KeyError, IndexError):
            block = torch.empty(size, dtype=torch.float32)
        kind = self._kinds.get(size) or self._kind(size)
        lent = kind.from_address(block.data_ptr())
        lent.block = block
        return torch.frombuffer(lent, dtype=torch.float32).view(shape)

    def _kind(self, size: int) -> Any:
        """What exposes the memory of a block to torch; it lives as long as the tensor does, which tells the end."""
        pool = self

        def ended(lent: Any) -> None:
            pool._keep(size, lent.block)

        self._kinds[size] = kind = type("Lent", (ctypes.c_float * size,), {"__del__": ended})
        return kind

    def _keep(self, size: int, block: Tensor) -> None:
        if self.kept_bytes() + 4 * size > self.most:
            for other, blocks in list(self._kept.items()):  # blocks of another size belong to work that has ended
                if other != size:
                    blocks.clear()
        if self.kept_bytes() + 4 * size <= self.most:
            self._kept.setdefault(size, []).append(block)


_states = BlockPool()


def new_state(shape: tuple[int, ...]) -> Tensor:
    """An uninitialised float32 tensor for a state that lives for a few steps."""
    return _states.lend(shape)
