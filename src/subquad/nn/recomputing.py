"""Activations that the backward computes again: only right if nothing they depend on has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["Unchanged", "recomputed"]


class Unchanged:
    """The parameters and buffers of modules as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.before = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        # Each tensor and how often it was written to. Tensors made in inference mode have no such number.
        tensors = (x for module in self.modules for x in (*module.parameters(), *module.buffers()))
        return [(id(x), -1 if x.is_inference() else x._version) for x in tensors]

    def check(self) -> None:
        """Raise if one was written to or replaced."""
        if self._versions() != self.before:
            raise RuntimeError(
                "a parameter or a buffer was changed between forward and backward, so activations cannot be computed "
                "again; call backward() before optimizer.step(), redraw() and calibrate()"
            )


def recomputed(block: nn.Module) -> Callable[..., Tensor]:
    """`block` as torch.utils.checkpoint calls it, first in the forward and once more in the backward."""
    unchanged = Unchanged([block])

    def run(*args: Any) -> Tensor:
        unchanged.check()
        out: Tensor = block(*args)
        return out

    return run
