"""Several mechanisms, one after the other, on the same data in the same order, with one seed or several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..files import write_json
from ..lab.measure import machine
from ..tasks.base import Progress, SequentialExamples, generator_for
from .choices import label_of
from .collection import mark_best, summary
from .curves import check_drawing, draw_page
from .distributed import is_first_process
from .loop import train
from .run import Run, nothing_to_resume
from .settings import Running

__all__ = ["compare", "read_plan"]


def read_plan(folder: Path) -> tuple[Run, list[Any], int] | None:
    """(run, mechanisms, seeds) of the comparison that was begun in `folder`; None if there is none."""
    path = folder / "comparison.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "plan" not in found:  # a page of runs that were drawn together
            return None
        plan = found["plan"]
        return Run.from_dict(plan["run"]), plan["mechanisms"], plan["seeds"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} cannot be read ({reason}); the comparison cannot be resumed from it") from None


def compare(
    run: Run,
    mechanisms: Sequence[Any],
    folder: str | Path,
    *,
    seeds: int = 1,
    resume: bool = False,
    running: Running | None = None,
    on_log: Progress | None = None,
) -> dict[str, Any]:
    """Train `run` with each mechanism in a folder of its own under `folder`; everything else is the same.

    seeds: so many of each, from the run's seed on, in folders `seed-N`

    Settings, seed, first weights (where shapes agree) and the order of the data are shared, because they depend on the
    seed only. After each run `comparison.json` is written anew, after all seeds of a mechanism the page of curves: an
    interrupted comparison keeps what it has; one that diverges is reported and does not end the others.
    `interrupted` says whether Ctrl-C ended it before all were trained, or as the last one ended.
    """
    check_drawing()
    folder = Path(folder)
    labels = [label_of(choice) for choice in mechanisms]
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"--compare needs one or more different mechanisms, got {labels}")
    first = run.settings.seed
    plan: list[tuple[str, Path, Run]] = []
    # All seeds of one after the other: the first lines of the page are complete soon.
    for label, choice in zip(labels, mechanisms, strict=True):
        for seed in range(first, first + seeds):
            model, settings = {**run.model, "mechanism": choice, "seed": seed}, replace(run.settings, seed=seed)
            place = folder / label if seeds == 1 else folder / label / f"seed-{seed}"
            plan.append((label, place, replace(run, model=model, settings=settings)))
    begun = [place for _, place, _ in plan if (place / "run.json").is_file()]
    known = read_plan(folder)
    if (folder / "run.json").is_file():
        raise ValueError(f"{str(folder)!r} holds a single run, not a comparison; give another --out")
    if not resume and (begun or known is not None):
        where = begun[0] if begun else folder
        raise ValueError(f"{str(where)!r} holds a run already; say --resume to continue, or give another --out")
    if resume and not begun and known is None:
        raise ValueError(nothing_to_resume(folder))
    # Before anything is written, and all of them before the first: a wrong name in the fifth must not cost the time of
    # four.
    if known is not None and (seeds != known[2] or any(one not in mechanisms for one in known[1])):
        raise ValueError(
            f"{str(folder)!r} holds a comparison of {known[1]} with seeds={known[2]}, not of {list(mechanisms)} with "
            f"seeds={seeds}; nothing was changed. Mechanisms may be added to those that are there; train what else "
            "differs with another --out, and draw all of them together with --draw"
        )
    if known is not None:
        # The mechanism of the plan's run is none of those that are compared.
        same = replace(known[0], model={**known[0].model, "mechanism": run.model["mechanism"]})
        if wrong := run.changes(same):
            raise ValueError(
                f"{str(folder)!r} holds a comparison with other options, nothing was changed: {'; '.join(wrong)}; use "
                "the same to resume it, or another --out"
            )
    for _, place, one in plan:
        if place in begun:
            one.check_same(place)
    for _, _, one in plan:
        if one.settings.seed == first:
            _try(one)
    result: dict[str, Any] = {
        "task": run.task.name, "metric": run.task.metric, "larger_is_better": run.task.larger_is_better,
        "machine": machine(), "plan": {"run": run.to_dict(), "mechanisms": list(mechanisms), "seeds": seeds},
        "runs": {}, "best": None,
    }  # fmt: skip
    if is_first_process():
        if known is None and not begun and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{str(folder)!r} is not empty, nothing was changed; give another --out")
        write_json(folder / "comparison.json", result)
        (running or Running()).write(folder)
    for label, place, one in plan:
        try:
            outcome = train(
                one,
                place,
                resume=resume and place in begun,
                running=running,
                on_log=None if on_log is None else _labelled(on_log, str(place.relative_to(folder))),
            )
        except Exception:
            if is_first_process() and not any((place / "run.json").is_file() for _, place, _ in plan):
                # Refused before anything was trained: the corrected command must not find a comparison here.
                for name in ("comparison.json", "running.json"):
                    (folder / name).unlink(missing_ok=True)
            raise
        result["runs"].setdefault(label, []).append(summary(place))
        result = mark_best(result)
        if is_first_process():
            write_json(folder / "comparison.json", result)
            if one.settings.seed == first + seeds - 1 or outcome.status != "finished":
                draw_page(result, folder)
        if outcome.signalled:
            break
    return {**result, "interrupted": outcome.signalled}


def _try(run: Run) -> None:
    """One example through the model, so that a mechanism that does not fit says so."""
    model, examples = run.build().eval(), run.task.examples("train")
    if isinstance(examples, SequentialExamples):  # a stream has no first example to look at without reading on
        return
    batch = run.task.collate([examples.item(0, generator_for("train", run.settings.seed, 0))])
    model.calibrate(batch)
    with torch.no_grad():
        model(batch)


def _labelled(on_log: Progress, label: str) -> Progress:
    return lambda text, done, total: on_log(f"{label}: {text}", done, total)
