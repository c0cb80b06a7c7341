"""What a teacher gave once is not asked for again: its tensors, kept as long as they fit.

A distillation goes through its batches many times, and the teacher does not change. Beyond `limit` bytes nothing more
is kept, and what is missing is made again whenever it is needed: the results are the same, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor

__all__ = ["TeacherCache"]

LIMIT = 512 * 2**20  # bytes

T = TypeVar("T")


def _bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.nbytes
    if isinstance(x, dict):
        return sum(map(_bytes, x.values()))
    return sum(map(_bytes, x)) if isinstance(x, (list, tuple)) else 0


class TeacherCache:
    """Results by key, up to `limit` bytes of tensors.

    >>> import torch
    >>> kept, made = TeacherCache(limit=100), []
    >>> for key in (0, 1, 0, 1):
    ...     _ = kept.get(key, lambda: made.append(key) or torch.zeros(20))
    >>> made    # there was room for one of them
    [0, 1, 1]
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit, self.size = limit, 0
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `key`: as it was kept, or from `make`."""
        if key in self._found:
            found: T = self._found[key]
            return found
        made = make()
        size = _bytes(made)
        if self.size + size <= self.limit:
            self._found[key] = made
            self.size += size
        return made
