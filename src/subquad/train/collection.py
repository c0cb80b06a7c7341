"""Several runs side by side: read from their folders, grouped so that seeds are together; as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import read_object
from ..plain_text import columns
from .choices import label_of
from .records import read_records
from .run import Run, differences

__all__ = ["collect", "comparison_rows", "comparison_table", "figure_of", "mark_best", "summary"]


# Of a run without a result; other figures are 0.
_UNKNOWN: dict[str, Any] = {"status": "unfinished", "metrics": {}, "artefacts": {}}


def summary(folder: str | Path) -> dict[str, Any]:
    """What a run's folder says about it, as JSON data; `status` is "unfinished" where it has no result yet."""
    folder = Path(folder)
    run = Run.read(folder)
    path = folder / "result.json"
    result = read_object(path) if path.is_file() else {}
    records = read_records(folder / "metrics.jsonl")
    kept = ("status", "step", "parameters", "seconds", "training_seconds", "tokens_per_second", "metrics", "artefacts")
    return {
        "folder": str(folder),
        "seed": run.settings.seed,
        **{name: result.get(name, _UNKNOWN.get(name, 0)) for name in kept},
        "valid": [record for record in records if record["kind"] == "valid"],
        "train": [record for record in records if record["kind"] == "train"],
        "run": run.to_dict(),
    }


def _without_seed(run: Mapping[str, Any]) -> dict[str, Any]:
    copy = json.loads(json.dumps(run))
    del copy["settings"]["seed"]
    copy["model"].pop("seed", None)
    return dict(copy)


def _runs_in(folder: Path) -> list[Path]:
    if (folder / "run.json").is_file():
        return [folder]
    # A folder without any is refused by the one who reads it.
    return sorted(path.parent for path in folder.rglob("run.json")) or [folder]


def collect(folders: Sequence[str | Path]) -> dict[str, Any]:
    """Runs of one task as `compare` returns them: those that differ in their seed alone are one line with a band.

    Each is named by its mechanism, and by what else tells it from another with the same. A folder that holds several
    runs, as a comparison does, stands for all of them.
    """
    places = [place for folder in folders for place in _runs_in(Path(folder))]
    found = [summary(place) for place in {place.resolve(): place for place in places}.values()]
    tasks = sorted({one["run"]["task"] for one in found})
    if len(tasks) != 1:
        raise ValueError(f"runs of one task can be drawn together, got {tasks or 'none'}; name folders with a run.json")
    groups: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for one in found:
        kind = _without_seed(one["run"])
        match = next((members for other, members in groups if other == kind), None)
        if match is None:
            groups.append((kind, [one]))
        elif twin := next((other for other in match if other["seed"] == one["seed"]), None):
            raise ValueError(
                f"{twin['folder']} and {one['folder']} are the same run with seed {one['seed']}, which would count "
                "twice; leave one of them out"
            )
        else:
            match.append(one)
    names = [label_of(kind["model"]["mechanism"]) for kind, _ in groups]
    runs: dict[str, list[dict[str, Any]]] = {}
    for name, (kind, members) in zip(names, groups, strict=True):
        alike = [other for label, (other, _) in zip(names, groups, strict=True) if label == name]
        apart = {field for other in alike for field, _, _ in differences(alike[0], other)}
        values = [f"{field.split('.')[-1]}={_at(kind, field)}" for field in sorted(apart)]
        runs[" ".join([name, *values])] = sorted(members, key=lambda one: one["seed"])
    task = Run.from_dict(found[0]["run"]).task
    result = {"task": task.name, "metric": task.metric, "larger_is_better": task.larger_is_better, "runs": runs}
    return mark_best(result)


def _at(data: Any, field: str) -> Any:
    for part in field.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _values(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A metric of each seed that has it."""
    return [one["metrics"][name] for one in runs if one["metrics"].get(name) is not None]


def mark_best(result: dict[str, Any]) -> dict[str, Any]:
    """`result` with `best`: which mechanism has the best mean of the task's metric so far; None while none has one."""
    metric = result["metric"]
    known = {
        label: sum(found) / len(found) for label, runs in result["runs"].items() if (found := _values(runs, metric))
    }
    choose = max if result["larger_is_better"] else min
    return {**result, "best": choose(known, key=lambda label: known[label]) if known else None}


def figure_of(values: Sequence[float]) -> str:
    """A mean, and how far seeds lie from it.

    >>> figure_of([1.0, 1.2]), figure_of([0.5]), figure_of([])
    ('1.1000 ± 0.1000', '0.5000', '-')
    """
    if not values:
        return "-"
    spread = f" ± {(max(values) - min(values)) / 2:.4f}" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.4f}{spread}"


def comparison_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """A header and one row per mechanism: its metrics (mean and half the range over seeds), parameters, time, speed."""
    every = [one for runs in result["runs"].values() for one in runs]
    names = sorted({name for one in every for name in one["metrics"]})
    names = [result["metric"], *(name for name in names if name != result["metric"])]
    rows = [["mechanism", *names, "parameters", "seconds", "tokens/s", ""]]
    for label, runs in result["runs"].items():
        figures = [figure_of(_values(runs, name)) for name in names]
        # What is not known of an unfinished run is 0 there.
        known = [[one[key] for one in runs if one[key]] for key in ("training_seconds", "tokens_per_second")]
        means = [f"{sum(values) / len(values):.0f}" if values else "-" for values in known]
        parameters = max(one["parameters"] for one in runs) or "-"
        states = sorted({one["status"] for one in runs} - {"finished"})
        rows.append([label, *figures, str(parameters), *means, ", ".join(states)])
    return rows


def comparison_table(result: Mapping[str, Any]) -> str:
    """`comparison_rows` in plain text."""
    return "\n".join(columns(comparison_rows(result)))
