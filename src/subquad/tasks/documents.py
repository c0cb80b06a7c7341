"""Long documents, byte by byte, one label each: a folder of labelled text files.

    data/positive/1.txt  data/positive/2.txt ...  data/negative/1.txt ...      (or data/train/..., data/valid/...)

or a data set of the hub with a column of text and one of labels, `hub:NAME:column=text:label=label`.

With `stretch`, documents are joined from stretches of so many bytes out of those files, one after the other, of which a
`share` is from files of the document's label and the rest from files of the others. Few long files become many
examples, and with a share below 1 a document has to be read to its end: what it is mostly made of is its label.

Built in are synthetic letters whose label needs the first word and the last one: does the person who writes sign?
Neither name tells it alone. Letters to train on have all lengths, so that in some the two names stand near each other;
those for validation are as long as `length` allows.
Byte-level document classification is one of the tasks of Tay et al., "Long Range Arena", 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from .. import checks
from .base import UNLIMITED, Batch, DataError, Examples, Task, TaskModel, split_of
from .heads import Classifier, with_positions
from .hub import HubName, Rows, choose_column, is_hub, open_rows

__all__ = ["Documents"]

_T = TypeVar("_T")

# Of one length: how long a letter is must not tell who signed.
NAMES = ("Ada", "Bea", "Cyd", "Dot", "Eve", "Flo", "Gus", "Hal")
_FILLER = (
    "The road was long and the rain did not stop. ", "We counted the boats in the harbour twice. ",
    "Nothing came of it in the end. ", "The garden is full of weeds again. ", "There was bread, and a little cheese. ",
    "I have not seen the sea this year. ", "They say that the winter will be mild. ", "The clock in the hall is slow. ",
)  # fmt: skip


@dataclass(frozen=True)
class _Letters:
    length: int
    writers: int
    split: str

    def __len__(self) -> int:
        return UNLIMITED

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (n,), n at most `length`; label 1 if the name at the end is the one at the beginning."""
        label = int(torch.randint(2, (), generator=generator))
        first = int(torch.randint(self.writers, (), generator=generator))
        shift = 0 if label else 1 + int(torch.randint(self.writers - 1, (), generator=generator))
        begin, end = f"{NAMES[first]} writes. ", f"Signed: {NAMES[(first + shift) % self.writers]}"
        room = self.length - len(begin) - len(end)
        if self.split == "train":
            room = int(torch.randint(room + 1, (), generator=generator))
        middle = ""
        while True:
            sentence = _FILLER[int(torch.randint(len(_FILLER), (), generator=generator))]
            if len(middle) + len(sentence) > room:
                break
            middle += sentence
        return _example((begin + middle + end).encode("ascii"), label)


def _example(text: bytes, label: int) -> Batch:
    return {"tokens": torch.tensor(list(text)), "label": torch.tensor(label), "weight": torch.tensor(1.0)}


def _read(path: Path, begin: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        text = file.read(length)
    if not text:
        raise DataError(f"{path} is empty; remove it or give it some text")
    if b"\0" in text:
        raise DataError(f"{path} holds zero bytes: it is no text file")
    return text


@dataclass(frozen=True)
class _Files:
    """The first `length` bytes of each file; `files` with their labels."""

    files: tuple[tuple[Path, int], ...]
    length: int

    def __len__(self) -> int:
        return len(self.files)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (n,), n at most `length`."""
        path, label = self.files[index]
        return _example(_read(path, 0, self.length), label)


@dataclass(frozen=True)
class _Joined:
    """Documents without end, of `count` stretches of `stretch` bytes; `files` are those of each label, with sizes."""

    files: tuple[tuple[tuple[Path, int], ...], ...]
    stretch: int
    count: int
    share: float

    def __len__(self) -> int:
        return UNLIMITED

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (count * stretch,)."""

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        label, text = draw(len(self.files)), b""
        for _ in range(self.count):
            other = float(torch.rand((), generator=generator)) >= self.share
            source = (label + 1 + draw(len(self.files) - 1)) % len(self.files) if other else label
            path, size = self.files[source][draw(len(self.files[source]))]
            text += _read(path, draw(size - self.stretch + 1), self.stretch)
        return _example(text, label)


@dataclass(frozen=True)
class _Table:
    rows: Rows
    column: str
    label: str
    values: tuple[Any, ...]
    length: int

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """The first `length` bytes of a row's text."""
        text, value = self.rows.text(index, self.column), self.rows[index][self.label]
        if value not in self.values:
            raise DataError(
                f"{self.rows.hub}: row {self.rows.chosen[index]} has the label {value!r}, which no training row has"
            )
        return _example(text.encode("utf-8")[: self.length], self.values.index(value))


@lru_cache(maxsize=4)
def _open_table(data: str, split: str, length: int) -> _Table:
    hub = HubName.parse(data)
    rows, train = open_rows(hub, split), open_rows(hub, "train").table
    if split == "valid":
        rows = replace(rows, chosen=_mixed(rows.chosen))
    label = choose_column(hub, train, hub.label, "label", ("label", "labels", "class"), only=False)
    values = tuple(sorted(train.unique(label), key=lambda value: (str(type(value)), value)))
    if len(values) < 2 or any(value is None for value in values):
        raise DataError(f"{hub}: column {label!r} holds the labels {list(values)}; expected two or more, none missing")
    return _Table(rows, choose_column(hub, train, hub.column, "column", ("text", "content")), label, values, length)


def _mixed(items: Sequence[_T]) -> tuple[_T, ...]:
    """In a fixed random order. Files and rows often stand label by label, and validation takes the first so many."""
    return tuple(items[i] for i in torch.randperm(len(items), generator=torch.Generator().manual_seed(0)).tolist())


def _labels(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.txt"))))


@lru_cache(maxsize=4)
def _find(folder: str, split: str) -> tuple[tuple[str, ...], tuple[Path, ...], tuple[int, ...]]:
    """(labels, files, label of each)."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"data={folder!r} is no folder that exists; expected one with a folder of .txt files per label")
    names = ("valid", "validation", "val", "test")
    parts = {"train": root / "train", "valid": next((root / n for n in names if (root / n).is_dir()), root)}
    apart = parts["train"].is_dir() and parts["valid"] != root
    labels = _labels(parts["train"] if apart else root)
    if apart and _labels(parts["valid"]) != labels:
        raise DataError(
            f"data={folder!r}: train has the labels {list(labels)}, {parts['valid'].name} has "
            f"{list(_labels(parts['valid']))}; expected the same"
        )
    if len(labels) < 2:
        raise DataError(
            f"data={folder!r} holds text files of {len(labels)} labels {list(labels)}; expected two or more folders, "
            "named by their label, with .txt files in them"
        )
    paths: list[Path] = []
    numbers: list[int] = []
    for number, label in enumerate(labels):
        for index, path in enumerate(sorted(((parts[split] if apart else root) / label).glob("*.txt"))):
            if apart or split_of(index) == split:
                if not path.stat().st_size:
                    raise DataError(f"{path} is empty; remove it or give it some text")
                paths.append(path)
                numbers.append(number)
        if number not in numbers:
            raise DataError(
                f"data={folder!r} holds too few files of the label {label!r} to keep some for validation (one in ten)"
            )
    return labels, tuple(paths), tuple(numbers)


@dataclass(frozen=True)
class Documents(Task):
    """Texts of the folder or data set `data`, the first `length` bytes of each; or letters of that length, made up.

    stretch: of files in a folder, documents joined from stretches of so many bytes instead; 0 = files as they are
    share:   the chance that a stretch is from a file with the document's label
    writers: of the letters; with two a model has learned them in a few hundred steps, more are harder
    """

    name: ClassVar[str] = "documents"
    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True
    padded: ClassVar[bool] = True
    model: ClassVar[dict[str, Any]] = {"layers": 2, "heads": 2, "dim": 64}
    training: ClassVar[dict[str, Any]] = {"steps": 400, "batch": 16, "lr": 2e-3, "warmup": 100, "valid_examples": 256}

    data: str | None = None
    length: int = 256
    stretch: int = 0
    share: float = 1.0
    writers: int = 2

    def __post_init__(self) -> None:
        checks.check_positive("length", self.length, least=64)
        checks.check_positive("writers", self.writers, least=2)
        if self.writers > len(NAMES):
            raise ValueError(f"writers={self.writers}: the letters have {len(NAMES)} names; expected 2 to {len(NAMES)}")
        checks.check_positive("stretch", self.stretch, least=0)
        if self.stretch and (self.data is None or is_hub(self.data)):
            raise ValueError(f"stretch={self.stretch} cuts the files of a folder; data={self.data!r} is none, name one")
        if self.stretch and self.length % self.stretch:
            raise ValueError(f"length={self.length} must be a multiple of stretch={self.stretch}")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise ValueError(f"share must be a number above 0, and at most 1, got {self.share!r}")
        if self.share < 1 and not self.stretch:
            raise ValueError(f"share={self.share} needs stretch=: it is the share of stretches of its own kind")

    def examples(self, split: str) -> Examples:
        """Files, or letters and joined documents without end."""
        if self.data is None:
            return _Letters(self.length, self.writers, split)
        if is_hub(self.data):
            return _open_table(self.data, split, self.length)
        names, paths, labels = _find(self.data, split)
        if not self.stretch:
            return _Files(_mixed(tuple(zip(paths, labels, strict=True))), self.length)
        files = tuple(
            tuple((path, size) for path, of in zip(paths, labels, strict=True)
                  if of == number and (size := path.stat().st_size) >= self.stretch)
            for number in range(len(names))
        )  # fmt: skip
        for name, found in zip(names, files, strict=True):
            if not found:
                raise DataError(
                    f"data={self.data!r} holds no file to {split} on of the label {name!r} with stretch={self.stretch} "
                    "bytes or more; lower stretch, or join files"
                )
        return _Joined(files, self.stretch, self.length // self.stretch, self.share)

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """An encoder over bytes whose mean output is classified."""
        return Classifier(256, self._classes(), with_positions(model, self.length))

    def _classes(self) -> int:
        if self.data is None:
            return 2
        if is_hub(self.data):
            return len(_open_table(self.data, "train", self.length).values)
        return len(_find(self.data, "train")[0])
