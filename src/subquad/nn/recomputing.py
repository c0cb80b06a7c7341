"""Activations that the backward computes again: only right if nothing they depend on has changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["Unchanged", "recomputed"]


class Unchanged:
    """The parameters, buffers and modes of modules as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = list(modules)
        self.before = self._versions()
        self.modes = [(part, part.training) for module in self.modules for part in module.modules()]

    def _versions(self) -> list[tuple[int, int]]:
        # Each tensor and how often it was written to. Tensors made in inference mode have no such number.
        tensors = (x for module in self.modules for x in (*module.parameters(), *module.buffers()))
        return [(id(x), -1 if x.is_inference() else x._version) for x in tensors]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, modules are in the modes of then; raise if a parameter or a buffer was written to or replaced."""
        if self._versions() != self.before:
            raise RuntimeError(
                "a parameter or a buffer was changed between forward and backward, so activations cannot be computed "
                "again; call backward() before optimizer.step(), redraw() and calibrate()"
            )
        # `model.eval()` before the backward is fine for any other module: dropout then drops what it dropped before.
        other = [(part, mode) for part, mode in self.modes if part.training != mode]
        for part, mode in other:
            part.training = mode
        try:
            yield
        finally:
            for part, mode in other:
                part.training = not mode


def recomputed(block: nn.Module) -> Callable[..., Tensor]:
    """`block` as torch.utils.checkpoint calls it, first in the forward and once more in the backward."""
    unchanged = Unchanged([block])

    def run(*args: Any) -> Tensor:
        with unchanged.again():
            out: Tensor = block(*args)
        return out

    return run
