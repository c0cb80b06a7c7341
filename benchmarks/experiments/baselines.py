"""What needs no attention: how frequent a token is, alone and after the one before it, counted in training examples;
of whole texts with a label, how frequent it is under each label.

The levels that curves of benchmarks/experiments have to pass before they say anything about a mechanism.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from subquad.tasks.base import IGNORED, Task, generator_for
from subquad.tasks.documents import Documents
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
    if getattr(task, "data", None) is None:  # made up anew: no frequencies worth counting
        return {}
    kinds = set(valid.item(0, generator_for("valid", 0, 0)))
    if "label" in kinds:
        return labelled(task, run.settings.valid_examples)
    if not {"values", "targets"} & kinds:
        return {}
    known = len(task.examples("train"))
    counted = list(pairs(task, "train", order(known, 0, 0, min(EXAMPLES, known))))
    before, after = (torch.cat(side) for side in zip(*counted, strict=True))
    new = list(pairs(task, "valid", list(range(min(run.settings.valid_examples, len(valid))))))
    new_before, new_after = (torch.cat(side) for side in zip(*new, strict=True))
    size = int(max(side.max() for side in (before, after, new_before, new_after))) + 2
    single = torch.bincount(after, minlength=size).double() + 1 / size
    single /= single.sum()
    table = torch.bincount((before + 1) * size + after, minlength=(size + 1) * size).view(size + 1, size).double()
    table = (table + single) / (table.sum(-1, keepdim=True) + 1)
    levels = {"frequencies": single[new_after]}
    if not _masked(task):
        levels["pairs"] = table[new_before + 1, new_after]
    totals = {
        name: {"loss": -float(p.log().sum()), "right": 0.0, "weight": float(len(p))} for name, p in levels.items()
    }
    return {name: task.metrics(total)[task.metric] for name, total in totals.items()}


def labelled(task: Task, count: int) -> dict[str, float]:
    """The share of right labels by naive Bayes: the one under which the tokens, or the pairs of them, are likeliest.

    Of joined documents also with every stretch's own label known: no reader can be better.
    """
    train, valid = task.examples("train"), task.examples("valid")
    known = order(len(train), 0, 0, min(EXAMPLES, len(train)))
    seen = [train.item(index, generator_for("train", 0, draw)) for draw, index in enumerate(known)]
    new = [valid.item(index, generator_for("valid", 0, index)) for index in range(min(count, len(valid)))]
    size = 1 + max(int(one["tokens"].max()) for one in [*seen, *new])
    labels = 1 + max(int(one["label"]) for one in [*seen, *new])
    levels = {}
    for name, width in (("frequencies", 1), ("pairs", 2)):
        table = torch.full((labels, size**width), 0.1, dtype=torch.double)
        for one in (one for one in seen if len(one["tokens"]) >= width):
            table[one["label"]] += torch.bincount(_joined(one["tokens"], width, size), minlength=size**width)
        scores = (table / table.sum(-1, keepdim=True)).log()
        readable = [one for one in new if len(one["tokens"]) >= width]
        right = [scores[:, _joined(one["tokens"], width, size)].sum(-1).argmax() == one["label"] for one in readable]
        levels[name] = sum(map(float, right)) / len(new)  # what is too short to say anything is wrong
    if isinstance(task, Documents) and task.stretch:
        levels["stretches known"] = stretches_known(task.length // task.stretch, task.share, labels)
    return levels


def stretches_known(count: int, share: float, labels: int, draws: int = 100_000) -> float:
    """How often label 0, which has each of `count` stretches with chance `share`, has most of them; ties count by half,
    a third, ...

    >>> round(stretches_known(1, 0.6, 3), 2), stretches_known(64, 0.6, 3) > 0.99
    (0.6, True)
    """
    chances = torch.tensor([share] + [(1 - share) / (labels - 1)] * (labels - 1))
    drawn = torch.multinomial(chances, draws * count, True, generator=torch.Generator().manual_seed(0))
    counts = torch.nn.functional.one_hot(drawn.view(draws, count), labels).sum(1)
    first = counts == counts.amax(-1, keepdim=True)
    return float((first[:, 0] / first.sum(-1)).mean())


def _joined(tokens: Tensor, width: int, size: int) -> Tensor:
    """Every `width` tokens in a row as one number."""
    return (tokens.unfold(0, width, 1) * size ** torch.arange(width)).sum(-1)
