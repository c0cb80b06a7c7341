"""Numbers into figures: speed, memory and generation, where every line is a mechanism."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import generation, memory, speed
from .figure import Figure, Line, Selector
from .machine import gemm_rate
from .notebook import Notebook
from .settings import NO_ATTENTION, Settings

__all__ = ["generation_figures", "memory_figure", "milliseconds", "speed_figure"]

PASS = Selector("pass", "Pass", (("forward", "forward"), ("training", "forward + backward")))
MASK = Selector("mask", "Mask", (("full", "full"), ("causal", "causal")))


def milliseconds(ms: float) -> str:
    """A time in words.

    >>> milliseconds(0.0123), milliseconds(12.34), milliseconds(2500)
    ('12 µs', '12.3 ms', '2.50 s')
    """
    if ms < 0.1:
        return f"{ms * 1e3:.0f} µs"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.2f} s"


def _size(mib: float) -> str:
    return f"{mib:.3g} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


def _options(found: Sequence[str], selector: Selector) -> Selector:
    """Only what has been measured can be chosen."""
    kept = tuple(option for option in selector.options if option[0] in found)
    return Selector(selector.name, selector.title, kept or selector.options[:1])


def _spreads(notebook: Notebook, name: str, kind: str, causal: bool) -> Mapping[int, float]:
    return {
        asked["length"]: result["mechanisms"][name]["spread"]
        for asked, result in notebook.of(speed.NAME)
        if asked["pass"] == kind and asked["causal"] == causal and "spread" in result["mechanisms"].get(name, {})
    }


def _shares(notebook: Notebook, name: str, causal: bool) -> dict[int, float]:
    """Per cent of the matrix-product rate, forward."""
    limit = gemm_rate(notebook)
    found = {}
    for asked, result in notebook.of(speed.NAME):
        cell = result["mechanisms"].get(name, {})
        if limit and asked["pass"] == "forward" and asked["causal"] == causal and cell.get("operations"):
            found[asked["length"]] = 100.0 * cell["operations"] / (cell["best_ms"] * 1e6) / limit
    return dict(sorted(found.items()))


def speed_figure(notebook: Notebook, settings: Settings) -> Figure:
    """Time, gain over softmax and share of the limit against length."""
    lines = []
    for kind in ("forward", "training"):
        for causal in (False, True):
            softmax = speed.points(notebook, "softmax", kind, causal)
            choice = {"pass": kind, "mask": "causal" if causal else "full"}
            for name in [*settings.names, NO_ATTENTION]:
                mine = speed.points(notebook, name, kind, causal)
                if not mine:
                    continue
                spread = _spreads(notebook, name, kind, causal)
                gains = {n: softmax[n] / ms for n, ms in mine.items() if n in softmax}
                notes = [
                    f"{milliseconds(ms)}, usual run +{100 * spread.get(n, 0):.0f} %"
                    + (f", {gains[n]:.3g}× softmax's speed" if n in gains else "")
                    for n, ms in mine.items()
                ]
                lines.append(Line(name, name, list(mine), list(mine.values()), name, {**choice, "show": "time"}, notes))
                if gains and name != NO_ATTENTION:
                    words = [f"{gain:.3g}× softmax's speed" for gain in gains.values()]
                    lines.append(
                        Line(name, name, list(gains), list(gains.values()), name, {**choice, "show": "gain"}, words)
                    )
                shares = _shares(notebook, name, causal) if kind == "forward" else {}
                if shares:
                    words = [f"{share:.0f} % of the matrix-product rate" for share in shares.values()]
                    lines.append(
                        Line(name, name, list(shares), list(shares.values()), name, {**choice, "show": "share"}, words)
                    )
    show = Selector(
        "show", "Show", (("time", "time"), ("gain", "speed-up over softmax"), ("share", "share of the limit"))
    )
    passes = [line.choice["pass"] for line in lines]
    masks = [line.choice["mask"] for line in lines]
    caption = (
        "Each line is the best of interleaved runs. Softmax (torch’s fused attention) quadruples with every doubling "
        "of the length, the others double; where a line passes below it, that mechanism pays. The dotted line only "
        "copies the values: nothing can be faster. The share of the limit counts the operations a method needs against "
        "the rate of a plain matrix product measured in the same run."
    )
    return Figure(
        "speed", "Time against length", caption, "tokens", "milliseconds", lines,
        [show, _options(passes, PASS), _options(masks, MASK)],
        y_titles={"time": "milliseconds", "gain": "times as fast as softmax", "share": "% of the matrix-product rate"},
    )  # fmt: skip


def memory_figure(notebook: Notebook, settings: Settings) -> Figure:
    """Peak memory on top of the inputs."""
    lines = []
    for kind in ("forward", "training"):
        for name in settings.names:
            mine = memory.points(notebook, name, kind)
            if mine:
                notes = [f"{_size(mib)} beyond the inputs" for mib in mine.values()]
                lines.append(Line(name, name, list(mine), list(mine.values()), name, {"pass": kind}, notes))
    caption = (
        "Peak memory beyond the inputs, each reading in a process that has run nothing else. Torch’s fused softmax "
        "does not store the attention matrix, so on a CPU memory is not what separates the methods: time is."
    )
    passes = [line.choice["pass"] for line in lines]
    return Figure(
        "memory", "Peak memory against length", caption, "tokens", "MiB beyond the inputs", lines,
        [_options(passes, PASS)],
    )  # fmt: skip


def generation_figures(notebook: Notebook, settings: Settings) -> list[Figure]:
    """Time per token and size of the state against context."""
    times, sizes = [], []
    for name in settings.names:
        mine = generation.points(notebook, name, "us_per_token")
        label = "softmax with a cache" if name == "softmax" else name
        if mine:
            notes = [milliseconds(us / 1e3) + " per token" for us in mine.values()]
            times.append(Line(name, label, list(mine), list(mine.values()), name, notes=notes))
        states = generation.points(notebook, name, "state_bytes")
        if states:
            mib = [size / 2**20 for size in states.values()]
            sizes.append(Line(name, label, list(states), mib, name, notes=[_size(x) for x in mib]))
    return [
        Figure(
            "generation-time", "Time per generated token",
            "One more token after a context of that many. With a recurrent state the cost does not depend on what came "
            "before; a cache of all keys must be read in full for every token.",
            "tokens of context", "microseconds per token", times,
        ),
        Figure(
            "generation-memory", "Memory kept while generating",
            "What one layer has to keep: a state of fixed size, or every key and value so far.",
            "tokens of context", "MiB per layer", sizes,
        ),
    ]  # fmt: skip
