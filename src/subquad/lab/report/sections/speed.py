"""Time against length, forward and forward + backward, full and causal, everything in turn.

*no attention* hands the values through (one copy of them): the least that any mechanism must do, the optimum line of
Choromanski et al., "Rethinking Attention with Performers", 2021. The cells of the full forward pass also time what the
recommendations choose from, in the same rounds as softmax: a ratio of two times is always of one cell.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.lab.calibrated import INPUT_STD
from subquad.lab.measure import interleave
from subquad.mechanisms import MECHANISMS, Kernelised
from subquad.plain_text import first_line
from subquad.planning.crossover import faster_from

from ..figure import Figure, Line, Selector, only_measured
from ..formatting import crossing, dot, milliseconds, times
from ..notebook import Notebook
from ..running import FIRST, SPEED, Clock, Job, too_long
from ..section import Section
from ..settings import NO_ATTENTION, Settings
from ..tried import Tried, candidates, defaults, make
from .machine import gemm_rate

__all__ = ["FORMS", "PASS", "SECTION", "attention_bytes", "cells", "crossovers", "operations", "points"]

NAME = "speed"
FORMS = {
    "forward, full": ("forward", False),
    "forward, causal": ("forward", True),
    "forward + backward, full": ("training", False),
    "forward + backward, causal": ("training", True),
}
PASS = Selector("pass", "Pass", (("forward", "forward"), ("training", "forward + backward")))
MASK = Selector("mask", "Mask", (("full", "full"), ("causal", "causal")))
SLOW = 0.5  # seconds: what takes longer runs once


def attention_bytes(settings: Settings, length: int, training: bool = False) -> int:
    """Roughly what the hungriest mechanism needs at this length: inputs, features of 1024 rows, and their gradients."""
    per_token = 4 * settings.heads * (6 * settings.head_dim + 2 * 1024)
    return length * per_token * (3 if training else 1)


def _call(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], causal: bool, training: bool
) -> Callable[[], object]:
    if not training:
        return lambda: attend(*inputs, is_causal=causal)
    ones = torch.ones_like(inputs[2])

    def both() -> None:
        for x in inputs:
            x.grad = None
        attend(*inputs, is_causal=causal).backward(ones)

    return both


def _hand_through(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    return v.clone()


def _expected(notebook: Notebook, asked: Mapping[str, Any], name: str) -> float | None:
    """Seconds from the longest shorter length measured: fourfold per doubling where cost is quadratic."""
    known = points(notebook, name, asked["pass"], asked["causal"])
    shorter = [length for length in known if length < asked["length"]]
    if not shorter:
        return None
    ratio = float(asked["length"]) / max(shorter)
    return known[max(shorter)] / 1e3 * math.pow(ratio, 2 if name in MECHANISMS and MECHANISMS[name].quadratic else 1)


def _measure(settings: Settings, notebook: Notebook, asked: Mapping[str, Any], clock: Clock) -> dict[str, Any]:
    length, causal, training = asked["length"], asked["causal"], asked["pass"] == "training"
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (1, settings.heads, length, settings.head_dim)
    inputs = [torch.randn(shape, generator=generator) * s for s in (INPUT_STD, INPUT_STD, 1.0)]
    if training:
        inputs = [x.requires_grad_() for x in inputs]
    calls: dict[str, Callable[[], object]] = {}
    results: dict[str, Any] = {}
    slow: set[str] = set()
    counts: dict[str, float | None] = {}
    # Where the speed-up of a setting is not worth its time, softmax's expected one says so.
    softmax = _expected(notebook, asked, "softmax")
    named = [*defaults(settings), Tried(NO_ATTENTION, NO_ATTENTION, {})]
    every = named + [tried for tried in candidates(settings) if tried.label in asked["candidates"]]
    for tried in every:
        expected = _expected(notebook, asked, tried.label)
        if expected is not None and tried.options and softmax is not None and expected > 1.5 * softmax:
            results[tried.label] = {"status": "slower", "reason": "slower than softmax attention"}
            continue
        # One run of one setting may take at most twice what is meant for all of them together.
        if expected is not None and expected > max(2.0 * clock.seconds, 0.05):
            results[tried.label] = {"status": "skipped", "reason": too_long(expected)}
            continue
        try:
            attend: Callable[..., Tensor] = (
                _hand_through
                if tried.label == NO_ATTENTION
                else make(tried, settings.head_dim, settings.heads, length, settings.seed)
            )
            call = _call(attend, inputs, causal, training)
            counts[tried.label] = None if training else operations(attend, length, settings.heads, causal)
            # One run will do where time is short: what it is compared with runs in the same round.
            if expected is not None and expected > SLOW * clock.effort**2:
                slow.add(tried.label)
            else:
                call()  # shows who refuses, and warms up
            calls[tried.label] = call
        except (ValueError, TypeError, NotImplementedError) as error:
            results[tried.label] = {"status": "refused", "reason": first_line(error)}
    runs = clock.rounds(_runs(settings, length))
    for label, timing in interleave(calls, runs=runs, warmup=0, seconds=clock.seconds, once=frozenset(slow)).items():
        results[label] = {"status": "measured", "operations": counts[label], **timing.as_dict()}
    return {"mechanisms": results}


def _runs(settings: Settings, length: int) -> int:
    """Rounds at this length: the longer one takes, the less disturbs it."""
    return settings.runs if length <= 4096 else -(-2 * settings.runs // 3)


def _quiet(settings: Settings, length: int, training: bool, causal: bool) -> float:
    """Seconds of a cell on two quiet cores: 4 heads of width 64, all mechanisms, scaled to what is asked."""
    scale = settings.heads * settings.head_dim / 256 * (len(settings.names) + 4) / 20
    each = 3.0 if training else 1.0
    linear = 9e-5 * length * each * (1 + _runs(settings, length))
    if not training and not causal and length in (*settings.lengths[::2], settings.lengths[-1]):
        linear *= 1 + 0.5 * settings.recommend_steps
    softmax = 9e-9 * length**2 * each * (0.5 if causal else 1.0) * (settings.runs if length <= 4096 else 1)
    return 0.2 + scale * (linear + softmax)


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """By length first: if the time runs out, the longest lengths are what is missing."""
    found = []
    # At every other length and the last: between two of them a time is interpolated, beyond them there is none.
    others = [tried.label for tried in candidates(settings) if tried.timed_as == tried.label]
    extra = [label for label in others if label not in settings.names]
    ends = {*settings.lengths[::2], settings.lengths[-1]}
    for length in settings.lengths:
        for words, (kind, causal) in FORMS.items():
            training = kind == "training"
            if training and length > settings.longest_training:
                continue
            # What a recommendation needs: the full forward pass times its settings too.
            recommending = kind == "forward" and not causal
            asked = {
                "length": length, "pass": kind, "causal": causal, "heads": settings.heads,
                "head_dim": settings.head_dim, "names": settings.names, "runs": settings.runs, "seed": settings.seed,
                "candidates": extra if recommending and length in ends else [],
            }  # fmt: skip

            def run(clock: Clock, asked: Mapping[str, Any] = asked) -> Mapping[str, Any]:
                with torch.set_grad_enabled(asked["pass"] == "training"):
                    return _measure(settings, notebook, asked, clock)

            quiet = _quiet(settings, length, training, causal)
            found.append(
                Job(
                    *(f"{words}, L={length}", asked, run),
                    quiet=quiet,
                    worth=FIRST if recommending else SPEED,
                    memory=attention_bytes(settings, length, training),
                    first=length == settings.lengths[0],
                    cells=len(settings.names) + 1 + len(asked["candidates"]),  # type: ignore[arg-type]
                )
            )
    return found


def cells(notebook: Notebook, name: str, kind: str = "forward", causal: bool = False) -> dict[int, dict[str, Any]]:
    """What was found of one mechanism or setting, by length."""
    found = {
        asked["length"]: result["mechanisms"][name]
        for asked, result in notebook.of(NAME)
        if asked["pass"] == kind and asked["causal"] == causal and name in result["mechanisms"]
    }
    return dict(sorted(found.items()))


def points(notebook: Notebook, name: str, kind: str = "forward", causal: bool = False) -> dict[int, float]:
    """Milliseconds by length of one mechanism or setting."""
    known = cells(notebook, name, kind, causal)
    return {length: cell["best_ms"] for length, cell in known.items() if cell["status"] == "measured"}


def operations(attend: object, length: int, heads: int, causal: bool) -> float | None:
    """Multiplications and additions of one forward call, where the method says how many are needed; else None.

    softmax: 4 L^2 D per head, half of it causal. A feature map of M features: the products with keys and values, and
    for random features the projection of every token on each of its directions.

    >>> operations(subquad.create("softmax", 64), 1024, heads=1, causal=False) == 4 * 1024**2 * 64
    True
    """
    if not isinstance(attend, subquad.Mechanism):
        return None
    dim, tokens = attend.head_dim, heads * length
    if attend.name == "softmax":
        return 4.0 * tokens * length * dim * (0.5 if causal else 1.0)
    if not isinstance(attend, Kernelised):
        return None
    rows = getattr(getattr(attend.feature_map, "projection", None), "rows", 0)
    return tokens * 2.0 * (2 * rows * dim + 2 * attend.feature_map.num_features * (dim + 1))


# -- what it shows ----------------------------------------------------------------------------------------------------


def crossovers(notebook: Notebook, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """By form and mechanism: the length from which it is faster than softmax, and the gain at the longest length."""
    found: dict[str, dict[str, float | None]] = {}
    gains: dict[str, dict[str, Any]] = {}
    for words, (kind, causal) in FORMS.items():
        softmax = points(notebook, "softmax", kind, causal)
        for name in settings.names[1:] if softmax else ():
            mine = points(notebook, name, kind, causal)
            both = set(mine) & set(softmax)
            if both:
                found.setdefault(words, {})[name] = faster_from(mine, softmax)
                longest = max(both)
                gains.setdefault(words, {})[name] = {"length": longest, "gain": softmax[longest] / mine[longest]}
    return found, gains


def _table(notebook: Notebook, settings: Settings) -> str:
    """From which length each mechanism is faster than softmax, and by how much at the longest one."""
    found, gains = crossovers(notebook, settings)
    if not found:
        return ""
    shortest = settings.lengths[0]

    def cell(form: str, name: str) -> str:
        if name not in found[form]:
            return "<td>–</td>"
        gain = gains[form][name]
        where = f'<span class="wide"> at {gain["length"]:,}</span>'
        return f"<td>{crossing(found[form][name], shortest)}<small>{times(gain['gain'])}×{where}</small></td>"

    names = [name for name in settings.names[1:] if any(name in found[form] for form in found)]
    head = "".join(f"<th>{html.escape(form)}</th>" for form in found)
    rows = "".join(
        f"<tr><td>{dot(name)}{html.escape(name)}</td>{''.join(cell(form, name) for form in found)}</tr>"
        for name in names
    )
    return (
        '<figure><h3>Crossovers: tokens from which each is faster than softmax</h3><div class="scroll"><table><thead>'
        f"<tr><th>mechanism</th>{head}</tr></thead><tbody>{rows}</tbody></table></div><figcaption>Interpolated between "
        "measured lengths. Below, the speed against softmax at the longest length measured. A dash: the mechanism "
        "cannot do it, or it was not measured.</figcaption></figure>"
    )


def _shares(notebook: Notebook, name: str, causal: bool) -> dict[int, float]:
    """Per cent of the matrix-product rate, forward."""
    limit = gemm_rate(notebook)
    known = cells(notebook, name, "forward", causal) if limit else {}
    return {n: 100.0 * x["operations"] / (x["best_ms"] * 1e6) / limit for n, x in known.items() if x.get("operations")}


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Time, gain over softmax and share of the limit against length."""
    lines = []
    for kind, causal in FORMS.values():
        softmax = points(notebook, "softmax", kind, causal)
        choice = {"pass": kind, "mask": "causal" if causal else "full"}
        for name in [*settings.names, NO_ATTENTION]:
            mine = points(notebook, name, kind, causal)
            if not mine:
                continue
            spread = {n: cell.get("spread", 0) for n, cell in cells(notebook, name, kind, causal).items()}
            gains = {n: softmax[n] / ms for n, ms in mine.items() if n in softmax}
            shares = _shares(notebook, name, causal) if kind == "forward" else {}
            notes = [
                f"{milliseconds(ms)}, usual run +{100 * spread.get(n, 0):.0f} %"
                + (f", {gains[n]:.3g}× softmax's speed" if n in gains else "")
                for n, ms in mine.items()
            ]
            shown = [("time", mine, notes)]
            if gains and name != NO_ATTENTION:
                shown.append(("gain", gains, [f"{gain:.3g}× softmax's speed" for gain in gains.values()]))
            shown.append(("share", shares, [f"{share:.0f} % of the matrix-product rate" for share in shares.values()]))
            for what, found, words in shown:
                if found:
                    y = list(found.values())
                    lines.append(Line(name, name, list(found), y, name, {**choice, "show": what}, words))
    show = Selector(
        "show", "Show", (("time", "time"), ("gain", "speed-up over softmax"), ("share", "share of the limit"))
    )
    caption = (
        "Each line is the best of interleaved runs. Softmax (torch’s fused attention) quadruples with every doubling "
        "of the length, mechanisms of linear time double, multipole and sparse lie between; where a line passes below "
        "it, that mechanism pays. The dotted line only copies the values: nothing can be faster. The share of the "
        "limit counts the operations a method needs against the rate of a plain matrix product measured in the same "
        "run."
    )
    chosen = [only_measured(PASS, lines), only_measured(MASK, lines)]
    titles = {"time": "milliseconds", "gain": "times as fast as softmax", "share": "% of the matrix-product rate"}
    return [
        [Figure("speed", "Time against length", caption, "tokens", "milliseconds", lines, [show, *chosen],
                y_titles=titles)]
    ]  # fmt: skip


SECTION = Section(
    NAME,
    "Speed",
    "Everything that is compared ran in turn, on the same inputs, in the same minute.",
    jobs,
    figures,
    after=_table,
)
