"""What to use, for each length and error budget.

The errors of everything that might do are measured on each kind of input; their times are those of the section speed.
A recommendation is the fastest setting whose error stays within the budget and below that of the mean of the values;
softmax where none is 1.05 times as fast, as in a plan. It needs a time at that very length, or at lengths on both sides
of it, of the setting and of softmax alike: where there is none it says what is missing. An error at more tokens than
were measured is extrapolated from half of them, and says so.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import torch

from subquad.lab.calibrated import options_for
from subquad.mechanisms import Kernelised, create
from subquad.planning.answer import WORTH
from subquad.planning.baselines import uniform_error
from subquad.planning.candidates import calibrated, least_tokens, with_seed
from subquad.planning.cost import time_at
from subquad.planning.piece import Piece

from ..figure import Figure, Line, Selector
from ..formatting import dot, milliseconds, times
from ..kinds import KINDS, sample
from ..notebook import Notebook
from ..running import FIRST, Clock, Job
from ..section import Section
from ..settings import Settings
from ..tried import candidates
from . import speed

__all__ = ["SECTION", "recommend", "tried"]

NAME = "use"
WORST = 10.0  # relative squared error beyond which a setting is not worth a place in the figure


def _errors(settings: Settings, kind: str, clock: Clock) -> dict[str, Any]:
    inputs = sample(kind, settings.recommend_tokens, head_dim=settings.head_dim, seed=settings.seed)
    seen = sample(kind, settings.recommend_tokens, head_dim=settings.head_dim, seed=settings.seed + 1)
    tokens = inputs.k.shape[2]
    piece = Piece(inputs.q, inputs.k, inputs.v, tokens=tokens, seed=settings.seed, most_scores=1 << 23)
    half = Piece(inputs.q, inputs.k, inputs.v, tokens=tokens // 2, seed=settings.seed, most_scores=1 << 23)
    found: dict[str, Any] = {}
    for one in candidates(settings):
        if tokens < least_tokens(one.mechanism, one.options):
            continue  # it would see everything here, and only here
        own = with_seed(one.mechanism, one.options, settings.seed)
        own = options_for(one.mechanism, seed=settings.seed, length=tokens) | own
        attend = create(one.mechanism, inputs.q.shape[-1], inputs.q.shape[1], **own)
        attend = calibrated(attend, seen.q, seen.k, None)
        draws = clock.rounds(settings.recommend_draws) if attend.is_random else 1
        row: dict[str, Any] = {"mechanism": one.mechanism, "options": one.options, "timed_as": one.timed_as}
        row["error"] = piece.mean_error(attend, draws=draws)
        # Of random features the error hardly depends on the length, of all others it does.
        row["half"] = None if isinstance(attend, Kernelised) else half.mean_error(attend, draws=draws)
        found[one.label] = row
    return {"settings": found, "uniform": uniform_error(piece), "tokens": tokens}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """The errors on each kind of input; the times are those of the section speed."""
    found = []
    labels = [one.label for one in candidates(settings)]
    for kind, words in KINDS.items():

        def run(clock: Clock, kind: str = kind) -> Mapping[str, Any]:
            with torch.no_grad():
                return _errors(settings, kind, clock)

        asked = {
            "kind": kind, "tokens": settings.recommend_tokens, "head_dim": settings.head_dim, "seed": settings.seed,
            "draws": settings.recommend_draws, "candidates": labels,
        }  # fmt: skip
        memory = speed.attention_bytes(settings, settings.recommend_tokens)
        quiet = 0.2 + 0.005 * len(labels) * settings.recommend_tokens / 1024 * (1 + settings.recommend_draws)
        found.append(Job(f"errors, {words}", asked, run, quiet, FIRST, memory, first=True, cells=len(labels)))
    return found


def _error_at(row: Mapping[str, Any], tokens: int, length: int) -> tuple[float, bool]:
    """The error at this length, and whether it was extrapolated from fewer tokens."""
    error = math.inf if row["error"] is None else float(row["error"])
    if length <= tokens or error == 0 or not math.isfinite(error):
        return error, False
    if row["half"] is None:
        return error, True
    growth = max(1.0, (error + 1e-6) / (float(row["half"]) + 1e-6))
    return error * math.pow(growth, math.log2(length / tokens)), True


def tried(notebook: Notebook, kind: str, length: int) -> list[dict[str, Any]]:
    """Every setting with its error on that kind of input and its time at that length; `ms` is None where it is missing.

    gain is the time of softmax over that of the setting, and both times are in the section speed.
    """
    softmax = time_at(speed.points(notebook, "softmax"), length)
    rows = [
        {
            "label": "softmax",
            "timed_as": "softmax",
            "mechanism": "softmax",
            "error": 0.0,
            "ms": softmax,
            "gain": 1.0,
            "carried": False,
        }
    ]
    for asked, result in notebook.of(NAME):
        if asked["kind"] != kind:
            continue
        for label, row in result["settings"].items():
            ms = time_at(speed.points(notebook, row["timed_as"]), length)
            if ms is None and _slower(notebook, row["timed_as"], length):
                continue
            error, carried = _error_at(row, result["tokens"], length)
            rows.append(
                {
                    "label": label,
                    "timed_as": row["timed_as"],
                    "mechanism": row["mechanism"],
                    "error": error,
                    "ms": ms,
                    "gain": None if ms is None or softmax is None else softmax / ms,
                    "carried": carried,
                    "tokens": result["tokens"],
                }
            )
    return rows


def _slower(notebook: Notebook, label: str, length: int) -> bool:
    """Whether it was left out at the last length up to this one for being slower than softmax: it is not missing."""
    known = {n: cell["status"] for n, cell in speed.cells(notebook, label).items()}
    before = [n for n in known if n <= length]
    return bool(before) and known[max(before)] == "slower"


def recommend(notebook: Notebook, settings: Settings) -> list[dict[str, Any]]:
    """One row per kind of input, length and budget: the fastest setting that will do, or what is missing.

    A row that says `missing` names how many settings that would do have no time there; a faster one may be among them.
    """
    uniform = {asked["kind"]: result["uniform"] for asked, result in notebook.of(NAME)}
    found = []
    for kind in KINDS:
        for length in settings.lengths:
            rows = tried(notebook, kind, length) if kind in uniform else []
            for budget in settings.budgets:
                about = {"kind": kind, "length": length, "budget": budget}
                if kind not in uniform:
                    found.append({**about, "missing": "errors were not measured"})
                    continue
                good = [row for row in rows if row["error"] <= min(budget, uniform[kind])]
                timed = [row for row in good if row["ms"] is not None]
                if rows[0]["ms"] is None or not timed:
                    found.append({**about, "missing": f"times at {length:,} tokens were not measured"})
                    continue
                best = min(timed, key=lambda row: row["ms"] / (WORTH if row["mechanism"] == "softmax" else 1.0))
                row = {**about, "mean_would_do": uniform[kind] <= budget, **best}
                untimed = len(good) - len(timed)
                found.append({**row, "untimed": untimed})
    return found


# -- what it shows ----------------------------------------------------------------------------------------------------


def _untimed(row: Mapping[str, Any]) -> str:
    count = row["untimed"]
    return f"{count} more meet{'s' if count == 1 else ''} the error; not timed" if count else ""


def in_words(row: Mapping[str, Any]) -> str:
    """A recommendation for the terminal.

    >>> in_words({"missing": "times at 512 tokens were not measured"})
    'not measured'
    """
    if "missing" in row:
        return "not measured"
    more = f" ({_untimed(row)})" if row["untimed"] else ""
    if row["mechanism"] == "softmax":
        return f"softmax{more}"
    return f"{row['label']} ({times(row['gain'])}x){more}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "<td>–</td>"
    if "missing" in row:
        return f'<td class="gap">not measured<small>{html.escape(row["missing"])}</small></td>'
    more = f" · {_untimed(row)}" if row["untimed"] else ""
    if row["mechanism"] == "softmax":
        return f"<td>{dot('softmax')}softmax<small>exact{more}</small></td>"
    note = " · the mean would do" if row["mean_would_do"] else ""
    carried = f" extrapolated from {row['tokens']:,} tokens" if row["carried"] else ""
    return (
        f"<td>{dot(row['mechanism'])}{html.escape(row['label'])}"
        f"<small>{times(row['gain'])}× faster · error {row['error']:.2g}{carried}{note}{more}</small></td>"
    )


def _tables(notebook: Notebook, settings: Settings) -> str:
    """One table per kind of input, behind tabs."""
    rows = recommend(notebook, settings)
    tabs: list[str] = []
    bodies: list[str] = []
    for kind, words in KINDS.items():
        first = not tabs
        tabs.append(
            f'<button type="button" data-table="use-{kind}" aria-pressed="{"true" if first else "false"}">'
            f"{html.escape(words)}</button>"
        )
        mine = {(row["length"], row["budget"]): row for row in rows if row["kind"] == kind}
        head = "".join(f"<th>error ≤ {budget:g}</th>" for budget in settings.budgets)
        lines = "".join(
            f"<tr><td>{length:,}</td>{''.join(_cell(mine.get((length, b))) for b in settings.budgets)}</tr>"
            for length in settings.lengths
        )
        bodies.append(
            f'<div class="scroll" id="use-{kind}"{"" if first else " hidden"}><table class="use">'
            f"<thead><tr><th>tokens</th>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
        )
    return f'<div class="tabs" role="group" aria-label="Kind of input">{"".join(tabs)}</div>{"".join(bodies)}'


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Every setting that a recommendation chose from: error against time."""
    lines = []
    done = [kind for kind in KINDS if any(asked["kind"] == kind for asked, _ in notebook.of(NAME))]
    timed = speed.points(notebook, "softmax")
    lengths = [n for n in reversed(settings.lengths) if time_at(timed, n) is not None]
    for kind in done:
        for length in lengths:
            rows = [row for row in tried(notebook, kind, length) if row["ms"] is not None and row["error"] <= WORST]
            choice = {"kind": kind, "length": str(length)}
            for name in dict.fromkeys(row["mechanism"] for row in rows if row["mechanism"] != "softmax"):
                # Softmax is exact: it has no place on a logarithmic axis; the table has it.
                mine = sorted((row for row in rows if row["mechanism"] == name), key=lambda row: row["ms"])
                notes = [
                    f"{row['label']}: error {row['error']:.2g}, {milliseconds(row['ms'])}"
                    + (f", {row['gain']:.2g}× softmax's speed" if row["gain"] else "")
                    for row in mine
                ]
                lines.append(
                    Line(name, name, [row["ms"] for row in mine], [row["error"] for row in mine], name, choice, notes)
                )
    return [[Figure(
        "tradeoff", "Error against time, every setting tried",
        "Each point is one setting. Good is low and left. The recommendation takes the leftmost point below the error "
        f"budget; softmax where that is not {WORTH:g} times as fast. Settings with an error beyond 10 are left out.",
        "milliseconds", "relative squared error", lines,
        [Selector("kind", "Inputs", [(kind, KINDS[kind]) for kind in done] or [("none", "none")]),
         Selector("length", "Tokens", [(str(n), f"{n}") for n in lengths] or [("none", "none")])],
        points=True,
    )]]  # fmt: skip


SECTION = Section(
    NAME,
    "What to use",
    "The fastest setting within an error budget, on a real model and on four synthetic distributions. Error is "
    "relative and squared: 0.01 means that one per cent of the output’s energy is wrong (of the attention matrix’s, "
    "where there are no values). The real heads are 32 wide, times are of the width measured here. Your own data may "
    "be none of these: <code>subquad plan</code> answers for it.",
    jobs,
    figures,
    before=_tables,
)
