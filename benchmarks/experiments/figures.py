"""Figures of docs/experiments.md: curves of the kept runs, images that models drew, recall by pairs and state."""

from pathlib import Path
from typing import Any

from jobs import Experiment
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.image import imread

from subquad.train.curves import draw_curves

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "figures/experiments"


def by_row(one: Experiment, kept: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The kept runs of each row, a run per seed."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for job in one.jobs():
        if job.folder in kept:
            runs.setdefault(job.label, []).append(kept[job.folder])
    return runs


def draw_kept(one: Experiment, kept: dict[str, Any]) -> None:
    """Curves of an experiment's kept runs; time is that of the steps measured apart, where every row has it."""
    runs = by_row(one, kept)
    if not runs:
        return
    task = one.jobs()[0].run(Path("data")).task
    paces = {label: found[0]["step_seconds"] for label, found in runs.items() if "step_seconds" in found[0]}
    levels = next(iter(runs.values()))[0].get("baselines", {})
    result = {
        "metric": task.metric, "larger_is_better": task.larger_is_better, "runs": runs,
        "step_seconds": paces if len(paces) == len(runs) else {}, "baselines": levels,
    }  # fmt: skip
    FIGURES.mkdir(exist_ok=True)
    draw_curves(result, FIGURES / f"{one.name}.svg")


def draw_samples(one: Experiment, kept: dict[str, Any], out: Path) -> None:
    """Grids of drawn images of all kept rows beside each other; the figure stays as it is where some are elsewhere."""
    found = {job.label: out / job.folder / "samples.png" for job in one.jobs() if job.seed == 0 and job.folder in kept}
    if not found or not all(path.is_file() for path in found.values()):
        return
    figure = Figure(figsize=(1.9 * len(found), 2.2), layout="constrained")
    for axes, (label, path) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        axes.imshow(imread(path), cmap="gray", interpolation="nearest")
        axes.set_title(label, fontsize=9)
        axes.axis("off")
    figure.savefig(FIGURES / f"{one.name}-samples.png", dpi=110)


def draw_recall(one: Experiment, kept: dict[str, Any]) -> None:
    """Accuracy against the number of pairs, and with the most pairs against the bytes of the state, mean over seeds."""
    if one.task != "recall":
        return
    runs = by_row(one, kept)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_prop_cycle(color=colormaps["tab20"](range(20)))  # more rows than the usual ten colours
    for label, found in runs.items():
        pairs = sorted(int(name.removeprefix("accuracy_")) for name in found[0]["metrics"] if name[-1].isdigit())
        means = [sum(run["metrics"][f"accuracy_{count}"] for run in found) / len(found) for count in pairs]
        (line,) = left.plot(pairs, means, marker="o", label=label)
        right.plot(found[0]["artefacts"]["state_bytes"] / 1024, means[-1], marker="o", color=line.get_color())
    left.set(xlabel="pairs", ylabel="accuracy", xticks=pairs, ylim=(0, 1.05))
    sizes = [10, 20, 50, 100, 200, 500]
    right.set(xlabel="KiB of state after 64 tokens", xscale="log", ylim=(0, 1.05), title=f"{pairs[-1]} pairs")
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(FIGURES / f"{one.name}-pairs.svg", metadata={"Date": None})
