"""What all tasks promise: examples that repeat themselves, a model that trains, sums that add up, a metric."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.tasks import TASKS, get_task
from subquad.tasks.base import Task, generator_for
from subquad.train import Run, Running, train
from subquad.train.data import validation_batches

SMALL: dict[str, dict[str, Any]] = {
    "copy": {"length": 4},
    "recall": {"length": 32, "pairs": 8, "vocab": 24},
    "images": {"size": 6, "samples": 2},
    "speech": {"digits": 3, "fewest": 1, "bins": 16},
    "text": {"length": 24},
    "protein": {"length": 40},
    "listops": {"length": 30},
    "documents": {"length": 70},
}
VARIANTS = [
    *SMALL.items(),
    ("text", {"length": 24, "masked": True}),
    ("protein", {"length": 40, "causal": True}),
    ("speech", {**SMALL["speech"], "nearby": 0}),
]


def small(name: str, options: dict[str, Any]) -> Task:
    return get_task(name).from_options(options)


def test_every_task_is_tested() -> None:
    assert set(SMALL) == set(TASKS)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_examples_depend_on_split_seed_and_draw_only(name: str, options: dict[str, Any]) -> None:
    task = small(name, options)
    for split in ("train", "valid"):
        examples = task.examples(split)
        assert len(examples) > 10
        one, again = (examples.item(3, generator_for(split, 0, 9)) for _ in range(2))
        assert one.keys() == again.keys()
        assert all(torch.equal(one[key], again[key]) for key in one)
        assert one["weight"].dim() == 0
        assert float(one["weight"]) > 0
        others = [examples.item(3, generator_for(split, 0, draw)) for draw in range(10, 16)]
        first = next(iter(one))
        assert any(x[first].shape != one[first].shape or not torch.equal(x[first], one[first]) for x in others) or (
            name == "text" and split == "valid" and not options.get("masked")
        )


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_it_trains_and_reports_its_metric(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    task = small(name, options)
    settings = {"steps": 3, "batch": 4, "valid_examples": 4, "valid_every": 3}
    run = Run.of(
        task,
        {"mechanism": "performer", "num_features": 8},
        model={"layers": 1, "heads": 2, "dim": 16, "head_dim": None},
        settings=settings,
    )
    assert Run.from_dict(run.to_dict()) == run
    outcome = train(run, tmp_path, running=Running(tensorboard=False))
    assert outcome.status == "finished"
    assert math.isfinite(outcome.metrics[task.metric])
    for file in ("samples", "completions", "sample"):
        if file in outcome.artefacts:
            assert (tmp_path / outcome.artefacts[file]).stat().st_size > 0


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_sums_of_a_batch_are_the_sums_of_its_examples(name: str, options: dict[str, Any]) -> None:
    # Padding, masks and weights: an example counts the same alone as beside longer ones.
    task = small(name, options)
    torch.manual_seed(0)
    model = task.build(
        {**task.model, "layers": 1, "dim": 16, "heads": 2, "head_dim": None, "mechanism": "softmax", "seed": 0}
    )
    model.eval()
    whole, _ = next(validation_batches(task, task.examples("valid"), count=4, share=4, process=0, processes=1))
    with torch.no_grad():
        together = model(whole)
        alone = [
            model(batch)
            for batch, _ in validation_batches(task, task.examples("valid"), count=4, share=1, process=0, processes=1)
        ]
    for key, total in together.items():
        torch.testing.assert_close(sum(one[key] for one in alone), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_unknown_and_wrong_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match="has no option 'colour'"):
        get_task(name).from_options({"colour": 3})
    number = next(f.name for f in fields(get_task(name)) if f.name in ("length", "size", "digits"))
    with pytest.raises((TypeError, ValueError), match=f"{number} must be"):
        get_task(name).from_options({number: -1})


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'protein'"):
        get_task("proteins")
