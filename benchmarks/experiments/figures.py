"""Figures of docs/experiments.md: curves of the kept runs, images that models drew, recall by pairs and state, long
documents by length and time."""

from pathlib import Path
from typing import Any

from cycler import cycler
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
    """Curves of an experiment's kept runs; time is that of the steps measured apart, where every row has it.

    Rows that take more steps than the experiment are left out. The run whose weights others begin with is a level.
    Long documents have a figure of their own.
    """
    runs = {label: found for label, found in by_row(one, kept).items() if not one.is_longer(label)}
    if not runs or one.task == "documents":
        return
    task = one.jobs()[0].run(Path("data")).task
    paces = {label: found[0]["step_seconds"] for label, found in runs.items() if "step_seconds" in found[0]}
    levels = dict(next(iter(runs.values()))[0].get("baselines", {}))
    for start in {job.start for job in one.jobs() if job.start in kept}:
        levels[f"{start.split('/')[1]} they start from"] = kept[start]["metrics"][task.metric]
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
    runs = by_row(one, kept)
    if one.task != "recall" or not runs:
        return
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    # More rows than the usual ten colours, and several with the same state.
    left.set_prop_cycle(cycler(color=colormaps["tab20"](range(20))) + cycler(marker="osD^v<>PXph*8dH1234+"))
    for label, found in runs.items():
        pairs = sorted(int(name.removeprefix("accuracy_")) for name in found[0]["metrics"] if name[-1].isdigit())
        means = [sum(run["metrics"][f"accuracy_{count}"] for run in found) / len(found) for count in pairs]
        (line,) = left.plot(pairs, means, label=label)
        look = {"color": line.get_color(), "marker": line.get_marker(), "linestyle": "none", "markersize": 8}
        right.plot(found[0]["artefacts"]["state_bytes"] / 1024, means[-1], **look)
    left.set(xlabel="pairs", ylabel="accuracy", xticks=pairs, ylim=(0, 1.05))
    sizes = [10, 20, 50, 100, 200, 500]
    right.set(xlabel="KiB of state after 64 tokens", xscale="log", ylim=(0, 1.05))
    right.set(ylabel=f"accuracy with {pairs[-1]} pairs")
    right.set_xticks(sizes, [str(size) for size in sizes])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=7, fontsize=8)
    figure.savefig(FIGURES / f"{one.name}-pairs.svg", metadata={"Date": None})


def draw_documents(experiments: list[Experiment], kept: dict[str, Any]) -> None:
    """Accuracy of each mechanism on long documents against their length, and against the time of its training."""
    found = {one.options["length"]: (one, by_row(one, kept)) for one in experiments if one.task == "documents"}
    if not found:
        return
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for label in dict.fromkeys(label for _, runs in found.values() for label in runs):
        points = []
        for length, (one, runs) in found.items():
            for run in runs.get(label, [])[:1]:
                values = [seed["metrics"]["accuracy"] for seed in runs[label]]
                minutes = run["step_seconds"] * one.settings["steps"] / 60
                points.append((length, minutes, sum(values) / len(values), min(values), max(values)))
        lengths, minutes, means, least, most = zip(*points, strict=True)
        (line,) = left.plot(lengths, means, marker="o", label=label)
        left.fill_between(lengths, least, most, color=line.get_color(), alpha=0.15, linewidth=0)
        right.plot(minutes, means, marker="o", color=line.get_color())
    left.set(xlabel="bytes of a document", ylabel="accuracy", xscale="log")
    left.set_xticks(sorted(found), [f"{length:,}" for length in sorted(found)])
    left.set_xticks([], minor=True)
    right.set(xlabel="minutes of training on one core", xscale="log")
    right.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    right.set_xticks([], minor=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(FIGURES / "documents.svg", metadata={"Date": None})
