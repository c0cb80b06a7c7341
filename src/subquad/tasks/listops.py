"""ListOps: the value of nested lists of operators and digits, ten classes; long-range classification.

    [MAX 4 3 [MIN 2 3 ] 1 0 [MEDIAN 1 5 8 9 2 ] ]  ->  5

Nangia and Bowman, "ListOps", 2018; Tay et al., "Long Range Arena", 2021. The expressions are generated; `data=` names a
folder with `basic_train.tsv` and `basic_val.tsv` (columns Source and Target) as the benchmark publishes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import checks
from .base import UNLIMITED, Batch, DataError, Examples, Task, TaskModel
from .heads import Classifier, with_positions

__all__ = ["Listops", "evaluate"]

OPERATORS = ("[MAX", "[MIN", "[MED", "[SM")
# Other spellings of the benchmark's files.
_SAME = {"[MEDIAN": "[MED", "[SUM_MOD": "[SM", "[MEDIAN_": "[MED"}
SYMBOLS = (*"0123456789", *OPERATORS, "]")
_IDS = {symbol: index for index, symbol in enumerate(SYMBOLS)}
CLASSES = 10


def evaluate(symbols: Sequence[str]) -> int:
    """The value of an expression.

    >>> evaluate("[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]".split())
    5
    """
    stack: list[list[Any]] = [[]]
    for symbol in symbols:
        if symbol in OPERATORS:
            stack.append([symbol])
        elif symbol == "]":
            closed = stack.pop()
            if not stack or len(closed) < 2:
                raise ValueError(f"{' '.join(symbols)!r:.80} closes a bracket that was not opened, or has no values")
            stack[-1].append(_apply(closed[0], closed[1:]))
        else:
            stack[-1].append(int(symbol))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"{' '.join(symbols)!r:.80} is no complete expression")
    return int(stack[0][0])


def _apply(operator: str, values: list[int]) -> int:
    if operator == "[MAX":
        return max(values)
    if operator == "[MIN":
        return min(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered = sorted(values)
    middle = len(ordered) // 2
    # The benchmark's median of an even number is the mean of the two, rounded down.
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


@dataclass(frozen=True)
class _Generated:
    length: int
    depth: int
    arguments: int

    def __len__(self) -> int:
        return UNLIMITED

    def _expression(self, depth: int, room: int, generator: torch.Generator) -> list[str]:
        """At most `room` symbols, at least one; deeper only while there is room for more than a digit each."""
        u = torch.rand(2, generator=generator)
        if depth == 0 or room < 5 or (depth < self.depth and float(u[0]) < 0.5):
            return [str(int(torch.randint(10, (), generator=generator)))]
        count = min(2 + int(float(u[1]) * (self.arguments - 1)), room - 2)
        symbols = [OPERATORS[int(torch.randint(len(OPERATORS), (), generator=generator))]]
        for left in range(count, 0, -1):
            # What remains is shared evenly, so that the last argument is not always the short one.
            symbols += self._expression(depth - 1, (room - len(symbols) - 1) // left, generator)
        return [*symbols, "]"]

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (n,), n at most `length`, and the label."""
        symbols = self._expression(self.depth, self.length, generator)
        return {
            "tokens": torch.tensor([_IDS[symbol] for symbol in symbols]),
            "label": torch.tensor(evaluate(symbols)),
            "weight": torch.tensor(1.0),
        }


@dataclass(frozen=True)
class _Read:
    rows: tuple[tuple[tuple[int, ...], int], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        tokens, label = self.rows[index]
        return {
            "tokens": torch.tensor(tokens),
            "label": torch.tensor(label),
            "weight": torch.tensor(1.0),
        }


_VALUES = tuple(str(value) for value in range(CLASSES))


@lru_cache(maxsize=2)
def _read(path: Path) -> tuple[tuple[tuple[int, ...], int], ...]:
    rows = []
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # what is no UTF-8 is no symbol either
        for number, line in enumerate(file, 1):
            row = line.rstrip("\n").split("\t")
            if number == 1 and row and row[0] == "Source":
                continue
            if len(row) != 2 or row[1].strip() not in _VALUES or not row[0].strip():
                raise DataError(f"{path}, line {number}: expected an expression, a tab and a digit, got {row!r:.80}")
            symbols = [_SAME.get(s, s) for s in row[0].split() if s not in ("(", ")")]
            if odd := next((s for s in symbols if s not in _IDS), None):
                raise DataError(f"{path}, line {number}: {odd!r} is no symbol of ListOps ({' '.join(SYMBOLS)})")
            try:
                value = evaluate(symbols)
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}") from None
            if value != int(row[1]):
                raise DataError(f"{path}, line {number}: the expression is {value}, and {row[1].strip()} is given")
            rows.append((tuple(_IDS[s] for s in symbols), value))
    if not rows:
        raise DataError(f"{path} is empty; expected lines of an expression, a tab and its value")
    return tuple(rows)


@dataclass(frozen=True)
class Listops(Task):
    """Expressions of at most `length` symbols, `depth` levels and `arguments` arguments, or the files in `data`."""

    name: ClassVar[str] = "listops"
    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True
    padded: ClassVar[bool] = True
    model: ClassVar[dict[str, Any]] = {"layers": 4, "heads": 4, "dim": 64}
    training: ClassVar[dict[str, Any]] = {"steps": 2000, "batch": 32, "lr": 1e-3, "warmup": 100, "valid_examples": 256}

    data: str | None = None
    length: int = 200
    depth: int = 6
    arguments: int = 5

    def __post_init__(self) -> None:
        checks.check_positive("length", self.length, least=5)
        checks.check_positive("depth", self.depth)
        checks.check_positive("arguments", self.arguments, least=2)

    def examples(self, split: str) -> Examples:
        """Generated without end, or read."""
        if self.data is None:
            return _Generated(self.length, self.depth, self.arguments)
        path = Path(self.data) / ("basic_train.tsv" if split == "train" else "basic_val.tsv")
        if not path.is_file():
            raise DataError(
                f"data={self.data!r} holds no {path.name}; expected the files of the benchmark, columns Source, Target"
            )
        rows = _read(path)
        longest = max(len(tokens) for tokens, _ in rows)
        if longest > self.length:
            raise DataError(
                f"{path} has an expression of {longest} symbols, and length={self.length}: cut, it would have another "
                f"value. Use --set length={longest}"
            )
        return _Read(rows)

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """An encoder whose mean output is classified."""
        return Classifier(len(SYMBOLS), CLASSES, with_positions(model, self.length))
