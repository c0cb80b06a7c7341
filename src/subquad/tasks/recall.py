"""Multi-query associative recall: pairs of a key and a value, then keys again, each to be answered with its value.

    k1 v1 k2 v2 ... kn vn   . . k7 . k2 . . . . k1 .        targets: v7 after k7, v2 after k2, ...

Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023. A mechanism whose state has
a fixed size cannot hold any number of pairs; softmax attention, whose state grows, can. Every sequence has one of the
numbers of pairs 4, 8, 16, ... up to `pairs`, and the accuracy is given for each; `state_bytes` of the result is
what the model carries from token to token after a whole sequence. As in the paper the questions come soon rather than
late (a power law), and what stands between them means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from .. import checks
from .. import state as states
from .base import IGNORED, UNLIMITED, Batch, Examples, Progress, Task, TaskModel
from .heads import CausalModel, with_positions

__all__ = ["Recall", "RecallModel", "state_bytes"]

FEWEST = 4
# Exponent of the gaps between the pairs and their questions: P(gap) ~ gap^(POWER - 1).
POWER = 0.01


def _counts(pairs: int) -> tuple[int, ...]:
    """4, 8, 16, ... up to `pairs`, which is the last.

    >>> _counts(20), _counts(3)
    ((4, 8, 16, 20), (3,))
    """
    doubled = [FEWEST << i for i in range(pairs.bit_length()) if FEWEST << i < pairs]
    return (*doubled, pairs)


@dataclass(frozen=True)
class _Questions:
    length: int
    vocab: int
    counts: tuple[int, ...]
    split: str

    def __len__(self) -> int:
        return UNLIMITED

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (length,), targets that count where a key is asked for, and how many pairs there are."""
        kinds, half = len(self.counts), self.vocab // 2
        which = int(torch.randint(kinds, (), generator=generator)) if self.split == "train" else index % kinds
        count = self.counts[which]
        order = torch.randperm(half, generator=generator)
        keys, unused = order[:count], order[count:]
        values = half + torch.randint(self.vocab - half, (count,), generator=generator)
        pairs = torch.stack([keys, values], 1).flatten()
        # Any token between the questions but the keys of this sequence: those would be questions without an answer.
        filler = torch.cat([unused, torch.arange(half, self.vocab)])
        rest = self.length - 2 * count
        tokens = torch.cat([pairs, filler[torch.randint(len(filler), (rest,), generator=generator)]])
        slots = torch.arange(1, rest // 2 + 1, dtype=torch.float64) ** (POWER - 1)
        places = 2 * count + 2 * torch.multinomial(slots, count, generator=generator)
        tokens[places] = keys
        targets = torch.full_like(tokens, IGNORED)
        targets[places] = values
        return {
            "tokens": tokens, "targets": targets, "pairs": torch.tensor(count), "weight": torch.tensor(float(count))
        }  # fmt: skip


class RecallModel(CausalModel):
    """`CausalModel` that also counts, in evaluation, the right answers by the number of pairs."""

    def __init__(self, vocab: int, counts: tuple[int, ...], model: Mapping[str, Any]) -> None:
        super().__init__(vocab, model)
        self.counts = counts

    def forward(self, batch: Batch) -> Batch:
        """Sums of loss and right answers; of sequences with n pairs `right_n` and `asked_n`."""
        logits, targets = self.backbone(batch["tokens"]), batch["targets"]
        sums = self.sums(logits, targets)
        if not self.training:
            right = (logits.argmax(-1) == targets).sum(-1)
            for count in self.counts:
                here = batch["pairs"] == count
                sums[f"right_{count}"] = right[here].sum().float()
                sums[f"asked_{count}"] = batch["weight"][here].sum()
        return sums


def state_bytes(backbone: Any, tokens: torch.Tensor) -> int | None:
    """Bytes that a model carries on after tokens (1, L); None where a mechanism has no recurrent form."""
    if not all(mechanism.recurrent for mechanism in backbone.mechanisms()):
        return None
    with torch.no_grad():
        _, state = backbone.scan(tokens)
    return states.state_bytes(state.layers)


@dataclass(frozen=True)
class Recall(Task):
    """Sequences of `length` tokens out of `vocab`, half of them keys, with 4, 8, ... `pairs` pairs."""

    name: ClassVar[str] = "recall"
    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True
    model: ClassVar[dict[str, Any]] = {"layers": 2, "heads": 1, "dim": 64, "positions": "learned"}
    training: ClassVar[dict[str, Any]] = {"steps": 3000, "batch": 64, "lr": 3e-3, "warmup": 100, "valid_examples": 256}

    length: int = 64
    pairs: int = 16
    vocab: int = 256

    def __post_init__(self) -> None:
        for name, least in (("length", 4), ("pairs", 1), ("vocab", 4)):
            checks.check_positive(name, getattr(self, name), least=least)
        if self.length < 4 * self.pairs:
            raise ValueError(
                f"length={self.length} has no room for pairs={self.pairs} and as many questions; expected at least "
                f"4 pairs = {4 * self.pairs}"
            )
        if self.vocab // 2 <= self.pairs:
            raise ValueError(
                f"vocab={self.vocab} has {self.vocab // 2} keys for pairs={self.pairs}; expected more than "
                f"2 pairs + 1 = {2 * self.pairs + 1}"
            )

    def examples(self, split: str) -> Examples:
        """Sequences without end; the numbers of pairs are drawn for training and come in turn for validation."""
        return _Questions(self.length, self.vocab, _counts(self.pairs), split)

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """A decoder; learned positions get as many places as a sequence has."""
        return RecallModel(self.vocab, _counts(self.pairs), with_positions(model, self.length))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Loss and accuracy per answer, and the accuracy by the number of pairs."""
        counts = [count for count in _counts(self.pairs) if totals[f"asked_{count}"]]
        by_count = {f"accuracy_{count}": totals[f"right_{count}"] / totals[f"asked_{count}"] for count in counts}
        return {**super().metrics(totals), **by_count}

    def finish(self, model: Any, folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """`state_bytes` of one sequence, the other axis of the paper's figure."""
        progress("counting the state", 0, 1)
        device = next(model.parameters()).device
        tokens = self.examples("valid").item(0, torch.Generator())["tokens"][None].to(device)
        found = state_bytes(model.backbone, tokens)
        return {} if found is None else {"state_bytes": found}
