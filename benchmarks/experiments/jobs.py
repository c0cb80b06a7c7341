"""What a run of the experiments is: a row of an experiment with a seed, as a command and as a `Run`."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from subquad.train import Run

# Weights stay float32; on a CPU with bfloat16 products a step takes 0.6 to 0.75 of the time, if the model is not tiny.
PRECISION = {"precision": "bf16"}


@dataclass(frozen=True)
class Row:
    """One line of an experiment's figure; dicts are added to those of the experiment.

    start: EXPERIMENT/LABEL of the run (its first seed) whose weights it begins with
    seeds: None = as many as the experiment has.   later: takes its turn as if its seeds were so many higher
    """

    mechanism: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    seeds: int | None = None
    later: int = 0


@dataclass(frozen=True)
class Job:
    """One run: a row of an experiment with one seed."""

    experiment: str
    label: str
    task: str
    choice: Any
    task_options: Mapping[str, Any]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    seed: int
    hours: float
    data: str | None
    start: str | None
    turn: int

    @property
    def folder(self) -> str:
        return f"{self.experiment}/{self.label}/seed-{self.seed}"

    @property
    def steps(self) -> int:
        return int(self.settings["steps"])

    @property
    def mechanism(self) -> str:
        """As `--mechanism` takes it."""
        return self.choice if isinstance(self.choice, str) else json.dumps(self.choice)

    @property
    def options(self) -> list[str]:
        """Of the command line: everything but mechanism, data, seed and folder."""
        given = [part for name, value in self.task_options.items() for part in ("--set", f"{name}={_text(value)}")]
        given += [part for name, value in self.model.items() for part in ("--model", f"{name}={_text(value)}")]
        for name, value in self.settings.items():
            given += [f"--{name.replace('_', '-')}", _text(value)]
        return given

    def mechanism_names(self) -> list[str]:
        """Every mechanism that the choice names, those inside others too."""
        return list(_names(self.choice))

    def run(self, data: Path) -> Run:
        """The same run for use in Python, with drawn weights."""
        more = {} if self.data is None else {"data": str(data / self.data)}
        settings = {**self.settings, "seed": self.seed}
        return Run.of(self.task, self.choice, model=self.model, settings=settings, **{**self.task_options, **more})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _names(choice: Any) -> Iterator[str]:
    if isinstance(choice, str):
        yield choice
    elif isinstance(choice, Mapping):
        yield from _names(choice["mechanism"])
        if "far" in choice:
            yield from _names(choice["far"])
    else:  # one per layer
        for one in choice:
            yield from _names(one)


@dataclass(frozen=True)
class Experiment:
    """Rows that are compared: the same task, data and settings but for what a row names; `hours` per run at most:
    a run that shares its core with others takes several times as long as alone."""

    name: str
    claim: str
    task: str
    rows: Mapping[str, Row]
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    seeds: int = 1
    hours: float = 6.0

    def is_longer(self, label: str) -> bool:
        """Whether a row takes more steps than the others."""
        steps = self.settings.get("steps")
        return steps is not None and self.rows[label].settings.get("steps", steps) > steps

    def jobs(self) -> list[Job]:
        return [
            Job(
                experiment=self.name,
                label=label,
                task=self.task,
                choice=row.mechanism,
                task_options={**self.options, **row.options},
                model={**self.model, **row.model},
                settings={**PRECISION, **self.settings, **row.settings},
                seed=seed,
                hours=self.hours,
                data=self.data,
                start=None if row.start is None else f"{row.start}/seed-0",
                turn=seed + row.later,
            )
            for label, row in self.rows.items()
            for seed in range(self.seeds if row.seeds is None else row.seeds)
        ]
