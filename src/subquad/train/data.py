"""Which examples a step sees: a function of seed, step and process, so that it needs no memory of its own.

Every pass over the data has its own order, drawn from (seed, pass). Collections too large for a permutation in memory
are drawn with replacement instead; streams are taken in their order. A batch is cut into equal, consecutive parts for
the processes, so two processes see together exactly what one would see alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..features.seeded import mix
from ..files import fingerprint
from ..tasks.base import Batch, DataError, Examples, SequentialExamples, Task, generator_for

__all__ = ["batches", "check_examples", "data_fingerprint", "order", "validation_batches"]

# 4 M indices of 8 bytes: what a permutation may take.
LARGEST_PERMUTATION = 1 << 22

Key = tuple[int, int]


def data_fingerprint(splits: Mapping[str, Examples]) -> str:
    """Of the numbers of examples, and of the first, the middle and the last of every split; streams are not read.

    A checkpoint keeps it: a run whose data file was replaced since cannot go on as if nothing had happened.
    """
    parts = []
    for split, examples in sorted(splits.items()):
        if not isinstance(examples, SequentialExamples):
            count = len(examples)
            places = sorted({0, count // 2, count - 1}) if count else []
            parts.append((split, count, [examples.item(i, generator_for(split, 0, i)) for i in places]))
    return fingerprint(parts)


@lru_cache(maxsize=2)
def _shuffled(length: int, seed: int, turn: int) -> torch.Tensor:
    return torch.randperm(length, generator=torch.Generator().manual_seed(mix(seed, turn) >> 1))


def order(length: int, seed: int, begin: int, count: int) -> list[int]:
    """Indices number `begin` to `begin + count` of the endless shuffled stream over `length` examples.

    >>> sorted(order(4, seed=0, begin=0, count=4)), sorted(order(4, seed=0, begin=4, count=4))
    ([0, 1, 2, 3], [0, 1, 2, 3])
    >>> order(4, 0, 0, 8)[3:6] == order(4, 0, 3, 3)
    True
    """
    if length > LARGEST_PERMUTATION:
        return [mix(seed, begin + i) % length for i in range(count)]
    indices: list[int] = []
    while len(indices) < count:
        turn, place = divmod(begin + len(indices), length)
        indices += _shuffled(length, seed, turn)[place : place + count - len(indices)].tolist()
    return indices


class _Keyed(Dataset[Batch]):
    """Examples by (index, draw): the draw decides what is random about this use of the example."""

    def __init__(self, examples: Examples, split: str, seed: int) -> None:
        self.examples, self.split, self.seed = examples, split, seed

    def __getitem__(self, key: Key) -> Batch:
        index, draw = key
        return self.examples.item(index, generator_for(self.split, self.seed, draw))


class _Parts(Sampler[list[Key]]):
    """The parts of a process, from a step on: (index, draw) of each example."""

    def __init__(
        self, examples: Examples, seed: int, batch: int, share: int, accumulate: int, process: int, steps: range
    ) -> None:
        self.length, self.seed, self.batch, self.share = len(examples), seed, batch, share
        self.sequential = isinstance(examples, SequentialExamples)
        self.accumulate, self.process, self.steps = accumulate, process, steps

    def __len__(self) -> int:
        return len(self.steps) * self.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        for step in self.steps:
            first = step * self.batch
            if self.sequential:
                indices = [(first + i) % self.length for i in range(self.batch)]
            else:
                indices = order(self.length, self.seed, first, self.batch)
            keys = [(index, first + i) for i, index in enumerate(indices)]
            begin = self.process * self.accumulate * self.share
            for part in range(self.accumulate):
                yield keys[begin + part * self.share : begin + (part + 1) * self.share]


def _loader(task: Task, dataset: Dataset[Batch], parts: _Parts, workers: int) -> DataLoader[Batch]:
    return DataLoader(
        dataset,
        batch_sampler=parts,
        collate_fn=task.collate,
        num_workers=workers,
        # A loader takes a seed for its workers from torch's generator; from one of its own, so that it does not shift
        # the dropout of a run that was resumed.
        generator=torch.Generator().manual_seed(0),
    )


@contextmanager
def batches(
    task: Task,
    examples: Examples,
    *,
    seed: int,
    batch: int,
    share: int,
    accumulate: int,
    process: int,
    steps: range,
    workers: int,
) -> Iterator[Iterator[Batch]]:
    """The parts of `process` for all `steps`, in order; workers end with the block, however it is left.

    A stream is read in this process, whatever `workers` is: each of them would have to read all of it.
    """
    if len(examples) < 1:
        raise DataError(f"task {task.name!r} has no training examples")
    keyed = _Keyed(examples, "train", seed)
    parts = _Parts(examples, seed, batch, share, accumulate, process, steps)
    iterator = iter(_loader(task, keyed, parts, 0 if parts.sequential else workers))
    try:
        yield iterator
    finally:
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()
        if isinstance(examples, SequentialExamples):
            examples.close()


def check_examples(task: Task, valid: Examples) -> None:
    """Refuse data that leave nothing to validate on, before the first step."""
    if len(valid) < 1:
        raise DataError(f"task {task.name!r} has no validation examples; it needs more data")


def validation_batches(
    task: Task, examples: Examples, *, count: int, share: int, process: int, processes: int
) -> Iterator[tuple[Batch, bool]]:
    """The first `count` validation examples, cut over the processes, and whether a batch counts.

    Every process gets equally many batches, because sharded models compute together; where one has no examples left,
    it repeats one that does not count.
    """
    count = min(count, len(examples))
    keyed = _Keyed(examples, "valid", 0)
    each = -(-count // processes)
    mine = range(min(process * each, count), min((process + 1) * each, count))
    for begin in range(0, each, share):
        part: Sequence[int] = mine[begin : begin + share]
        yield task.collate([keyed[index, index] for index in part or range(1)]), bool(part)
