"""What a run is: task, model and settings, kept as `run.json` in its folder and compared before a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_object, write_json
from ..nn.config import mechanism_data
from ..tasks import get_task
from ..tasks.base import Task, TaskModel
from ..tasks.hub import is_hub
from . import checkpoint
from .settings import Settings
from .start import source_checkpoint

__all__ = ["RUN_VERSION", "Run", "differences", "load_trained", "nothing_to_resume"]

RUN_VERSION = 1
# Fields of a model's config that something else says.
_NOT_FIELDS = {
    "mechanism": "name it with --mechanism",
    "kind": "it follows from the task",
    "vocab": "it follows from the task's data",
}


@dataclass(frozen=True)
class Run:
    """A task, the fields of its model, and settings; `model` needs `mechanism`, the rest has the task's defaults.

    start: a checkpoint of another run that the first weights come from; None = they are drawn
    """

    task: Task
    model: Mapping[str, Any]
    settings: Settings
    start: str | None = None

    @classmethod
    def of(
        cls,
        task: Task | str,
        mechanism: Any = "multipole",
        *,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        start: str | Path | None = None,
        **options: Any,
    ) -> Run:
        """A run from a task (or its name and options) with the task's own defaults for all that is not given.

        start: the folder of another run, whose newest weights are taken, or one of its checkpoints

        >>> Run.of("copy", "linear", settings={"steps": 5}, length=8).settings.steps
        5
        """
        if options and not isinstance(task, str):
            raise TypeError(
                f"options {sorted(options)} belong to a task's name; {type(task).__name__} has its own already"
            )
        _check_fields(model or {}, mechanism)
        made = get_task(task).from_options(options) if isinstance(task, str) else task
        chosen = Settings.from_dict({**made.training, **(settings or {})})
        # A seed for the mechanisms: without one they would take it from torch's generator, and resume with another.
        fields = {"seed": chosen.seed, **made.model, **(model or {}), "mechanism": mechanism}
        return cls(made, fields, chosen, None if start is None else str(source_checkpoint(start)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; refuses what has no JSON form."""
        model = {key: mechanism_data(key, value) for key, value in self.model.items()}
        return {
            "version": RUN_VERSION,
            "task": self.task.name,
            "options": self.task.to_dict(),
            "model": model,
            "settings": self.settings.to_dict(),
            "start": self.start,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Run:
        """What `to_dict` gave."""
        if data.get("version") != RUN_VERSION:
            raise ValueError(f"the run has version {data.get('version')!r}, this subquad reads version {RUN_VERSION}")
        if missing := [name for name in ("task", "options", "model", "settings") if name not in data]:
            raise ValueError(f"the run has no {missing[0]!r}: its run.json is damaged")
        task = get_task(data["task"]).from_options(data["options"])
        return cls(task, dict(data["model"]), Settings.from_dict(data["settings"]), data.get("start"))

    def changed(
        self,
        *,
        mechanism: Any = None,
        mechanism_options: Mapping[str, Any] | None = None,
        model: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        start: str | Path | None = None,
        **options: Any,
    ) -> Run:
        """This run with what is given in place of its own; the folder that `start` is in names it as well.

        mechanism_options: of the mechanism that is given, or else of the run's own

        >>> Run.of("copy", "linear", length=8).changed(settings={"steps": 5}).settings.steps
        5
        """
        task = type(self.task).from_options({**self.task.to_dict(), **options})
        choice = self.model["mechanism"] if mechanism is None else mechanism
        _check_fields(model or {}, choice)
        if mechanism_options:
            if not isinstance(choice, (str, Mapping)):
                raise ValueError(f"--option belongs to one mechanism; this run has one per layer: {choice}")
            choice = {**({"mechanism": choice} if isinstance(choice, str) else choice), **mechanism_options}
        fields = {**self.model, **(model or {}), "mechanism": choice}
        chosen = Settings.from_dict({**self.settings.to_dict(), **(settings or {})})
        if "seed" in (settings or {}) and "seed" not in (model or {}):
            fields["seed"] = chosen.seed  # as in `of`
        if start is None or (self.start is not None and Path(start) in (Path(self.start), *Path(self.start).parents)):
            return Run(task, fields, chosen, self.start)
        return Run(task, fields, chosen, str(source_checkpoint(start)))

    @classmethod
    def read(cls, folder: Path) -> Run:
        """The run that was kept in `folder`."""
        kept = _read(folder)
        try:
            return cls.from_dict(kept)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{folder / 'run.json'}: {error}") from error

    def build(self) -> TaskModel:
        """The model with its first weights, drawn from torch's generator."""
        return self.task.build(self.model)

    def claim(self, folder: Path, *, resume: bool) -> None:
        """Make `folder` this run's, or make sure that it is; nothing is written where it is another's.

        `resume` needs a run there: one that starts anew because of a mistyped folder is noticed hours later.
        """
        path = folder / "run.json"
        if path.is_file():
            self.check_same(folder)
            if not resume:
                raise ValueError(
                    f"{str(folder)!r} holds this run already, nothing was changed; say --resume to continue it, or "
                    "give another --out"
                )
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{str(folder)!r} exists and is not a run's folder, nothing was changed; give another --out"
            )
        if resume:
            raise ValueError(nothing_to_resume(folder))
        write_json(path, self.to_dict())

    def changes(self, other: Run) -> list[str]:
        """What is otherwise in the run `other`, as text. Its data may have moved."""
        theirs, mine = (json.loads(json.dumps(one.to_dict())) for one in (other, self))
        found = [(name, old, new) for name, old, new in differences(theirs, mine) if not _moved(name, old, new)]
        return [f"{name}: {old!r} there, {new!r} now" for name, old, new in found]

    def check_same(self, folder: Path) -> None:
        """Refuse to go on with the run in `folder` if it is not this one."""
        wrong = self.changes(Run.read(folder))  # with defaults of settings it has not heard of
        if wrong:
            raise ValueError(
                f"{str(folder)!r} holds a run with another configuration, nothing was changed: {'; '.join(wrong)}. "
                "Use the same options to resume it, or another --out for a new run, which may begin with its weights "
                f"(--from {folder})"
            )


def _check_fields(model: Mapping[str, Any], mechanism: Any) -> None:
    for field, how in _NOT_FIELDS.items():
        # The model of another run names its mechanism as well.
        if field in model and (field, model[field]) != ("mechanism", mechanism):
            raise ValueError(f"model: {field}={model[field]!r} is not taken there; {how}")


def _moved(field: str, old: Any, new: Any) -> bool:
    """Whether this is a file or folder of the same name in another place."""
    paths = isinstance(old, str) and isinstance(new, str) and field == "options.data"
    return paths and not (is_hub(old) or is_hub(new)) and Path(old).name == Path(new).name


def nothing_to_resume(folder: Path) -> str:
    """What to tell someone who wants to resume where no run is; names the runs beside it."""
    beside = sorted({path.parent.name for path in folder.parent.glob("*/run.json")})
    some = ", ".join(repr(name) for name in beside[:8]) + (", ..." if len(beside) > 8 else "")
    return (
        f"--resume: {str(folder)!r} holds no run, nothing was started; give the --out of the run (or the --mechanism "
        "it was started with, which names its folder), or leave out --resume to start one at step 0"
        + (f". Runs beside it: {some}" if some else "")
    )


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    try:
        return read_object(path)
    except OSError as error:
        raise ValueError(
            f"{str(folder)!r} holds no run ({error}); expected a folder that `subquad train` wrote"
        ) from None


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field, old value, new value) of everything in which two configurations differ.

    >>> list(differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2}))
    [('a.b', 1, 3)]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def load_trained(folder: str | Path) -> tuple[Run, TaskModel, int]:
    """(run, model, step) of the newest checkpoint in a run's folder, on the CPU, in evaluation mode."""
    folder = Path(folder)
    run = Run.read(folder)
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise ValueError(f"{str(folder)!r} holds no checkpoint yet; train it first")
    weights, _, state = checkpoint.load(newest)
    model = run.build()
    model.load_state_dict(weights)
    return run, model.eval(), int(state["step"])
