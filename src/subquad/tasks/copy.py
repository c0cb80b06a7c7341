"""Copying a sequence: 0 w1 ... wn 0 w1 ... wn, scored on the second half.

The experiment of Katharopoulos et al., "Transformers are RNNs", 2020, section 4.1: to produce w_i the model has to
attend to exactly one place, n + 1 tokens back, so it shows how sharp a mechanism's attention can be. By default one
layer and one head with 16 features; the sequences are drawn anew for every batch, and validation uses others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .. import checks
from .base import IGNORED, UNLIMITED, Batch, Examples, Task, TaskModel
from .heads import CausalModel, with_positions

__all__ = ["Copy"]


@dataclass(frozen=True)
class _Sequences:
    length: int
    symbols: int

    def __len__(self) -> int:
        return UNLIMITED

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (2 length + 1,), and targets that count where the copy begins."""
        word = torch.randint(1, self.symbols + 1, (self.length,), generator=generator)
        separator = torch.zeros(1, dtype=torch.int64)
        sequence = torch.cat([separator, word, separator, word])
        targets = sequence[1:].clone()
        targets[: self.length + 1] = IGNORED
        return {"tokens": sequence[:-1], "targets": targets, "weight": torch.tensor(float(self.length))}


@dataclass(frozen=True)
class Copy(Task):
    """Copy `length` symbols out of `symbols` different ones."""

    name: ClassVar[str] = "copy"
    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True
    # Learned positions, because what has to be found is a place; the head has 16 features of its own for 'linear'.
    model: ClassVar[dict[str, Any]] = {"layers": 1, "heads": 1, "dim": 64, "head_dim": 16, "positions": "learned"}
    training: ClassVar[dict[str, Any]] = {"steps": 2000, "batch": 64, "lr": 2e-3, "warmup": 100}

    length: int = 32
    symbols: int = 10

    def __post_init__(self) -> None:
        checks.check_positive("length", self.length)
        checks.check_positive("symbols", self.symbols, least=2)

    def examples(self, split: str) -> Examples:
        """Sequences (2 length + 1 tokens each), without end."""
        return _Sequences(self.length, self.symbols)

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """A decoder; learned positions get as many places as a sequence has."""
        return CausalModel(self.symbols + 1, with_positions(model, 2 * self.length + 1))
