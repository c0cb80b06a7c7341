"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode"]


@contextmanager
def evaluation_mode(model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Inside, no dropout; afterwards each module is in the mode that it had, also a frozen block in a training model.

    model: or all its modules, where they are not to be looked for each time

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with evaluation_mode(model):
    ...     [part.training for part in model]
    [False, False]
    >>> [part.training for part in model]
    [True, False]
    """
    modules = model.modules() if isinstance(model, nn.Module) else model
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
