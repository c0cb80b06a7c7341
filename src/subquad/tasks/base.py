"""What a task is: examples, a model and a metric, in one place, for one training loop.

A task is a frozen dataclass. Its fields are its options (`--set length=64` on the command line), its class attributes
say which model and settings are a good start, and two methods do the work, `examples` and `build`; `metrics` where
there is more to say than loss and accuracy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .. import checks
from ..features.seeded import mix
from ..nn.attention import calibrating
from ..nn.stack import Model

__all__ = [
    "IGNORED",
    "SPLITS",
    "UNLIMITED",
    "Batch",
    "DataError",
    "Examples",
    "Progress",
    "SequentialExamples",
    "Task",
    "TaskModel",
    "generator_for",
    "pad",
    "split_of",
]

Batch = dict[str, Tensor]

# (what is going on, how much of it is done, how much there is); the last is None for a note, which is to stay
Progress = Callable[[str, int, int | None], None]

# The length of examples that are made up as they are asked for.
UNLIMITED = 1 << 62
# Validation examples are the same for every run, whatever its seed: runs can be compared.
_STREAMS = {"train": 0x7472, "valid": 0x7661}
SPLITS = tuple(_STREAMS)
# Targets that do not count.
IGNORED = -100


class DataError(ValueError):
    """A data file that cannot be used; the message names it and says what is expected."""


class Examples(Protocol):
    """Numbered examples. `item` gives the same tensors for the same index and the same generator state."""

    def __len__(self) -> int: ...

    def item(self, index: int, generator: torch.Generator) -> Batch: ...


@runtime_checkable
class SequentialExamples(Examples, Protocol):
    """Examples of a stream: training takes them in order, in its own process, and `close`s them in the end.

    `position(index)` is JSON data that a checkpoint keeps; `seek` takes it, so that a resumed run need not read
    everything before `index` again.
    """

    def position(self, index: int) -> dict[str, Any]: ...

    def seek(self, position: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def generator_for(split: str, seed: int, draw: int) -> torch.Generator:
    """The generator of one use of one example: what it makes up (crops, masks) depends on these three only.

    That is why training can stop anywhere and go on as if it had not: no hidden state has to be restored.

    >>> a, b = (torch.rand(2, generator=generator_for("train", 0, 5)) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """
    checks.check_option("split", split, SPLITS)
    stream = mix(_STREAMS[split], seed if split == "train" else 0)
    return torch.Generator().manual_seed(mix(stream, draw) >> 1)


def split_of(index: int, valid_part: int = 10) -> str:
    """Where item `index` of an unsplit collection belongs: one in `valid_part`, spread evenly, is kept for validation.

    >>> [split_of(i) for i in (0, 8, 9, 10)]
    ['train', 'train', 'valid', 'train']
    """
    return "valid" if index % valid_part == valid_part - 1 else "train"


def pad(tensors: Sequence[Tensor], value: float = 0) -> Tensor:
    """Tensors of shape (L_i, ...) side by side, (B, max L_i, ...), filled up at the end.

    >>> pad([torch.tensor([1, 2]), torch.tensor([3])]).tolist()
    [[1, 2], [3, 0]]
    """
    return torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=value)


class TaskModel(nn.Module, ABC):
    """A backbone with the head and the loss of a task.

    `forward(batch)` gives sums over the batch, so that they can be added over batches and over processes: `loss` (of
    which `batch["weight"].sum()` is the divisor) and, when the model is in evaluation mode, whatever else the task's
    metrics need.
    """

    @abstractmethod
    def forward(self, batch: Batch) -> Batch:
        """Sums over the batch: `loss` and more."""

    def redraw(self) -> None:
        """Resample what is random in the mechanisms; a model without any is left as it is."""
        for module in self.children():
            if isinstance(module, Model):
                module.redraw()

    def calibrate(self, batch: Batch) -> None:
        """Give queries and keys of a batch to the mechanisms that need them (centring, SDERF); others ignore them."""
        with calibrating(self):
            self(batch)


@dataclass(frozen=True)
class Task(ABC):
    """One experiment. Subclasses add their options as fields with defaults that need no download."""

    name: ClassVar[str]
    # The metric that curves show and runs are compared by, and whether more of it is better.
    metric: ClassVar[str]
    larger_is_better: ClassVar[bool] = False
    # Whether examples differ in length: they are padded at the end, and a batch has a `key_mask`.
    padded: ClassVar[bool] = False
    # Where to start: fields of ModelConfig, and of train.Settings.
    model: ClassVar[dict[str, Any]]
    training: ClassVar[dict[str, Any]]

    @abstractmethod
    def examples(self, split: str) -> Examples:
        """The examples of 'train' or 'valid'; reads and checks the data."""

    @abstractmethod
    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """A fresh model; `model` holds fields of `ModelConfig` (layers, heads, dim, mechanism, ...)."""

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Figures from the sums that the model gave over all validation batches, and `weight`: here the mean loss in
        nats and the share of right tokens or labels."""
        return {"loss": totals["loss"] / totals["weight"], "accuracy": totals["right"] / totals["weight"]}

    def collate(self, items: Sequence[Batch]) -> Batch:
        """Examples to a batch, of which the first entry is the input."""
        columns = {name: [item[name] for item in items] for name in items[0]}
        if not self.padded:
            return {name: torch.stack(column) for name, column in columns.items()}
        lengths = torch.tensor([len(x) for x in next(iter(columns.values()))])
        batch = {
            name: pad(column, IGNORED if name == "targets" else 0) if column[0].dim() else torch.stack(column)
            for name, column in columns.items()
        }
        return {**batch, "key_mask": torch.arange(int(lengths.max())) < lengths.unsqueeze(-1)}

    def tokens(self, batch: Batch) -> int:
        """Places of sequences that the model sees in a batch, padding included: what throughput counts.

        The first entry of a batch is its input, (B, L) or (B, L, ...).
        """
        first = next(iter(batch.values()))
        return first.shape[0] * first.shape[1]

    def finish(self, model: Any, folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """After training: write samples and the like into `folder`, return figures about them."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """The options, as JSON data."""
        return asdict(self)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Task:
        """The task with these options; unknown ones are refused by name.

        >>> from subquad.tasks import get_task
        >>> get_task("copy").from_options({"length": 8}).to_dict()
        {'length': 8, 'symbols': 10}
        """
        checks.check_options(f"task {cls.name!r}", options, (field.name for field in fields(cls)))
        if not isinstance(options.get("data"), str | None):
            raise DataError(f"data must be the path of a file or a folder, or hub:NAME, got {options['data']!r}")
        return cls(**options)
