"""What needs no attention: how frequent a token is, alone and after the one before it, counted in training examples.

The levels that curves of benchmarks/experiments have to pass before they say anything about a mechanism.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.tasks.base import UNLIMITED, Task, generator_for
from subquad.tasks.heads import IGNORED
from subquad.train import Run
from subquad.train.data import order

EXAMPLES = 3000


def pairs(task: Task, split: str, indices: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(token before, token) of every target; -1 where none is before it, or where it is not to be seen."""
    examples = task.examples(split)
    for draw, index in enumerate(indices):
        item = examples.item(index, generator_for(split, 0, draw if split == "train" else index))
        if "values" in item:
            values = item["values"]
            yield torch.cat([torch.tensor([-1]), values[:-1]]), values
        elif "targets" in item:
            kept = item["targets"] != IGNORED
            seen = torch.full_like(item["tokens"], -1) if _masked(task) else item["tokens"]
            yield seen[kept], item["targets"][kept]


def _masked(task: Task) -> bool:
    return bool(getattr(task, "masked", False)) or (task.name == "protein" and not getattr(task, "causal", False))


def baselines(run: Run) -> dict[str, float]:
    """The task's metric of `frequencies` and, left to right, `pairs` on the run's validation examples; {} without any.

    A pair that was rarely seen leans on how frequent its second token is (one imagined observation).
    """
    task = run.task
    valid = task.examples("valid")
    # Examples that are made up anew have no frequencies worth counting, and labels are no tokens.
    if len(valid) == UNLIMITED or not {"values", "targets"} & set(valid.item(0, generator_for("valid", 0, 0))):
        return {}
    known = len(task.examples("train"))
    counted = list(pairs(task, "train", order(known, 0, 0, min(EXAMPLES, known))))
    before, after = (torch.cat(side) for side in zip(*counted, strict=True))
    size = int(max(before.max(), after.max())) + 2
    single = torch.bincount(after, minlength=size).double() + 1 / size
    single /= single.sum()
    table = torch.bincount((before + 1) * size + after, minlength=(size + 1) * size).view(size + 1, size).double()
    table = (table + single) / (table.sum(-1, keepdim=True) + 1)
    new = list(pairs(task, "valid", list(range(min(run.settings.valid_examples, len(valid))))))
    before, after = (torch.cat(side) for side in zip(*new, strict=True))
    levels = {"frequencies": single[after]}
    if not _masked(task):
        levels["pairs"] = table[before + 1, after]
    totals = {
        name: {"loss": -float(p.log().sum()), "right": 0.0, "weight": float(len(p))} for name, p in levels.items()
    }
    return {name: task.metrics(total)[task.metric] for name, total in totals.items()}
