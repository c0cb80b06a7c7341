"""How a model is trained, as frozen plain data.

`Settings` holds what the result depends on: a run can only be resumed with the same. `Running` holds what it does not
depend on (how often to save, how many workers), which may change at every start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .. import checks
from ..files import write_json

__all__ = ["OPTIMIZERS", "PRECISIONS", "Running", "Settings", "learning_rate"]

PRECISIONS = ("no", "bf16", "fp16")
OPTIMIZERS = ("adamw", "adam", "radam", "nadam", "lion", "sgd")


def _check_number(name: str, value: object, least: float, most: float = float("inf")) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value <= most:  # type: ignore[operator]
        limits = f"at least {least}" if most == float("inf") else f"in {least}..{most}"
        raise ValueError(f"{name} must be a number {limits}, got {value!r}")


@dataclass(frozen=True)
class Settings:
    """What the final weights depend on, besides task and model.

    steps:        updates of the weights
    batch:        examples per update, over all processes and accumulated parts together
    accumulate:   parts that a process computes its share of a batch in: less memory, the same result
    optimizer:    adamw | adam | radam | nadam | lion | sgd
    lr, warmup, final_lr: its rate rises to `lr` over `warmup` steps, then falls as a cosine to `final_lr` times it
    weight_decay: on matrices only; biases, norms and embeddings have none. None = 0.01 where the optimiser decays
                  weights directly, 0 for adam and sgd, which add it to the gradient
    beta1, beta2: of its averages (sgd: beta1 is the momentum)
    clip:         largest norm of the gradient; 0 = no limit
    precision:    no | bf16 | fp16 (mixed precision)
    seed:         of the first weights, dropout and the order of the data; streams always have the same order
    redraw_every: resample random features every so many steps, before the step; 0 = never
    valid_every, valid_examples: how often to validate, and on how many examples
    """

    steps: int = 1000
    batch: int = 32
    accumulate: int = 1
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: int = 100
    final_lr: float = 0.1
    weight_decay: float | None = None
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    precision: str = "no"
    seed: int = 0
    redraw_every: int = 0
    valid_every: int = 100
    valid_examples: int = 128

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "accumulate", "valid_every", "valid_examples"):
            checks.check_positive(name, getattr(self, name))
        for name in ("warmup", "redraw_every", "seed"):
            checks.check_positive(name, getattr(self, name), least=0)
        if self.seed >= 1 << 63:
            raise ValueError(f"seed must be below 2^63, as torch's generators take it, got {self.seed}")
        if self.weight_decay is None:
            object.__setattr__(self, "weight_decay", 0.0 if self.optimizer in ("adam", "sgd") else 0.01)
        for name in ("lr", "weight_decay", "clip"):
            _check_number(name, getattr(self, name), 0)
        for name in ("final_lr", "beta1", "beta2"):
            _check_number(name, getattr(self, name), 0, 1)
        checks.check_option("precision", self.precision, PRECISIONS)
        checks.check_option("optimizer", self.optimizer, OPTIMIZERS)

    def share(self, processes: int) -> int:
        """Examples that one process computes at a time."""
        parts = processes * self.accumulate
        if self.batch % parts:
            raise ValueError(
                f"batch={self.batch} cannot be divided into {processes} processes x accumulate={self.accumulate} equal "
                f"parts; use a multiple of {parts}"
            )
        return self.batch // parts

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """What `to_dict` gave; unknown names are refused."""
        checks.check_options("training", data, (field.name for field in fields(cls)))
        return cls(**data)


@dataclass(frozen=True)
class Running:
    """What the result does not depend on.

    save_every:  steps between checkpoints.   keep: checkpoints that stay.   log_every: steps between lines of metrics
    valid_seconds: also validate whenever so many more seconds were spent in steps, for curves against time
    hours:       end the run after so long, counted over all its starts; it can be resumed with more
    workers:     processes that prepare batches; 0 = the training process itself
    device:      None = what Accelerate finds;  'cpu' to stay there
    tensorboard: write event files beside the JSON lines
    checkpoint_activations: keep only each block's input and compute it again in the backward: less memory, more time
    check_memory: refuse a batch that is estimated not to fit
    """

    save_every: int = 100
    keep: int = 2
    log_every: int = 10
    valid_seconds: float | None = None
    hours: float | None = None
    workers: int = 0
    device: str | None = None
    tensorboard: bool = True
    checkpoint_activations: bool = False
    check_memory: bool = True

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "log_every"):
            checks.check_positive(name, getattr(self, name))
        checks.check_positive("workers", self.workers, least=0)
        for name in ("valid_seconds", "hours"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), 0)
        if self.device not in (None, "cpu"):
            raise ValueError(f"device must be 'cpu', or None for the best one there is, got {self.device!r}")

    def write(self, folder: Path) -> None:
        """Keep it in a run's folder, for whoever resumes the run; `hours` are of one start."""
        write_json(folder / "running.json", {**asdict(self), "hours": None})

    @classmethod
    def read(cls, folder: Path) -> Running | None:
        """What `write` kept; None where nothing was, or nothing that can be read."""
        try:
            return cls(**json.loads((folder / "running.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def learning_rate(settings: Settings, step: int) -> float:
    """The rate of update number `step`, counted from 0: a linear rise, then half a cosine.

    >>> plan = Settings(steps=100, warmup=10, lr=1.0, final_lr=0.0)
    >>> [round(learning_rate(plan, step), 3) for step in (0, 9, 10, 55, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.0]
    """
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(settings.steps - settings.warmup, 1)
    low = settings.final_lr * settings.lr
    return low + (settings.lr - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
