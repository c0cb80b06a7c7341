"""Memory for the states that decode steps return: used again as soon as nothing refers to the old state.

A step returns a new state and the one before it is dropped, once per layer. The C library gives such large blocks back
to the system and asks for them again, and every fresh page costs a fault and a zeroing: several times what the step
itself takes. Here one block is lent to all tensors of a state; it comes back when they and every view of them are gone.
"""

from __future__ import annotations

import ctypes
import math
import os
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGEST", "LAST_CACHE", "SMALLEST", "BlockPool", "new_states", "states_exceed_caches"]

SMALLEST = 1 << 17  # bytes; below this the C library keeps freed blocks itself
LARGEST = 1 << 28  # bytes kept for later, in all

# Floats in the block, what exposes it to torch, and (shape, strides, offset) of each tensor.
_Layout = tuple[int, Any, list[tuple[tuple[int, ...], list[int], int]]]


class BlockPool:
    """Blocks of float32 by size. Lending and returning are single operations on lists, so threads need no lock.

    >>> pool = BlockPool()
    >>> sums, totals = pool.lend((2, 1 << 15), (2, 16))
    >>> sums.shape, totals.shape, pool.kept_bytes()
    (torch.Size([2, 32768]), torch.Size([2, 16]), 0)
    >>> view, address = sums[1], sums.data_ptr()
    >>> del sums, totals
    >>> pool.kept_bytes()  # the view still needs the memory
    0
    >>> del view
    >>> pool.kept_bytes(), pool.lend((2, 1 << 15), (32,))[0].data_ptr() == address
    (262272, True)
    """

    def __init__(self, most: int = LARGEST) -> None:
        self.most = most
        self._kept: dict[int, list[Tensor]] = {}
        self._lent: dict[int, set[int]] = {}  # addresses of the blocks of a size that are in use
        self._layouts: dict[tuple[tuple[int, ...], ...], _Layout] = {}

    def kept_bytes(self) -> int:
        """How many bytes wait for their next use."""
        return sum(4 * size * len(blocks) for size, blocks in list(self._kept.items()))

    def lent_bytes(self) -> int:
        """How many bytes are in use."""
        return sum(4 * size * len(places) for size, places in list(self._lent.items()))

    def clear(self) -> None:
        """Return everything that is not in use to the system."""
        for blocks in list(self._kept.values()):
            blocks.clear()

    def lend(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Uninitialised contiguous float32 tensors of these shapes, on the CPU, all in one block."""
        size, kind, places = self._layouts.get(shapes) or self._layout(shapes)
        if not SMALLEST <= 4 * size <= self.most:
            whole = torch.empty(size, dtype=torch.float32)
        else:
            try:
                block = self._kept[size].pop()
            except (KeyError, IndexError):
                block = torch.empty(size, dtype=torch.float32)
            place = block.data_ptr()
            self._lent.setdefault(size, set()).add(place)
            lent = kind.from_address(place)
            lent.block = block
            whole = torch.frombuffer(lent, dtype=torch.float32)
        return [whole.as_strided(*place) for place in places]

    def _layout(self, shapes: tuple[tuple[int, ...], ...]) -> _Layout:
        """How the tensors share a block, each on a cache line of its own."""
        places, size = [], 0
        for shape in shapes:
            strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            places.append((shape, strides, size))
            size += -(-math.prod(shape) // 16) * 16
        if len(self._layouts) > 256:  # a service that sees every batch size must not collect them for ever
            self._layouts.clear()
        self._layouts[shapes] = layout = (size, self._kind(size), places)
        return layout

    def _kind(self, size: int) -> Any:
        """What exposes the memory of a block to torch; it lives as long as the tensor does, which tells the end."""
        pool = self

        def ended(lent: Any) -> None:
            pool._lent[size].discard(lent.block.data_ptr())
            pool._keep(size, lent.block)

        return type("Lent", (ctypes.c_float * size,), {"__del__": ended})

    def _keep(self, size: int, block: Tensor) -> None:
        kept = self.kept_bytes()
        if kept + 4 * size > self.most:
            for other, blocks in list(self._kept.items()):  # blocks of another size belong to work that has ended
                if other != size:
                    blocks.clear()
            kept = self.kept_bytes()
        if kept + 4 * size <= self.most:
            self._kept.setdefault(size, []).append(block)


def _last_cache() -> int:
    """Bytes of the largest cache, as far as the system says."""
    try:
        found = os.sysconf("SC_LEVEL3_CACHE_SIZE")  # 0 or less where it is not known
    except (AttributeError, OSError, ValueError):
        found = 0
    return found if found > 0 else 1 << 25


LAST_CACHE = _last_cache()
_states = BlockPool()


def new_states(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Uninitialised float32 tensors for the parts of a state that lives for a few steps."""
    return _states.lend(*shapes)


def states_exceed_caches() -> bool:
    """Whether a state that is written will have left the caches before it is read: all that are held do not fit."""
    return _states.lent_bytes() > LAST_CACHE
