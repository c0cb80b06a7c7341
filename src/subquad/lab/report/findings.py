"""What the numbers say, in a few sentences and a table: crossovers, gains, and what to use."""

from __future__ import annotations

from typing import Any

from subquad.planning.crossover import faster_from

from . import generation, speed
from .figures import milliseconds
from .machine import gemm_rate
from .notebook import Notebook
from .recommendation import recommend
from .settings import Settings

__all__ = ["FORMS", "findings", "headline", "star", "tokens"]

FORMS = {
    "forward, full": ("forward", False),
    "forward, causal": ("forward", True),
    "forward + backward, full": ("training", False),
    "forward + backward, causal": ("training", True),
}


def tokens(length: float) -> str:
    """A length in words, rounded as far as a crossover can be known.

    >>> tokens(487.2), tokens(1312), tokens(16384)
    ('490', '1,300', '16,000')
    """
    digits = 10 ** max(0, len(str(int(length))) - 2)
    return f"{round(length / digits) * digits:,}"


def star(settings: Settings) -> str | None:
    """The mechanism that the headline is about: the performer where it was measured."""
    others = [name for name in settings.names if name != "softmax"]
    return "performer" if "performer" in others else next(iter(others), None)


def findings(notebook: Notebook, settings: Settings) -> dict[str, Any]:
    """Crossovers by form, the gain at the longest length, the limit, generation, and the recommendations."""
    crossovers: dict[str, dict[str, float | None]] = {}
    gains: dict[str, dict[str, Any]] = {}
    for words, (kind, causal) in FORMS.items():
        softmax = speed.points(notebook, "softmax", kind, causal)
        if not softmax:
            continue
        rows: dict[str, float | None] = {}
        for name in settings.names[1:]:
            mine = speed.points(notebook, name, kind, causal)
            if set(mine) & set(softmax):
                rows[name] = faster_from(mine, softmax)
                longest = max(set(mine) & set(softmax))
                gains.setdefault(words, {})[name] = {"length": longest, "gain": softmax[longest] / mine[longest]}
        crossovers[words] = rows
    decode = {}
    for name in settings.names:
        mine = generation.points(notebook, name, "us_per_token")
        if mine:
            decode[name] = {"context": max(mine), "us_per_token": mine[max(mine)]}
    return {
        "crossovers": crossovers,
        "gains": gains,
        "gemm_gflops": gemm_rate(notebook),
        "generation": decode,
        "shortest": settings.lengths[0],
        "recommendations": recommend(notebook, settings.lengths, settings.budgets),
    }


def _crossover_words(found: dict[str, Any], name: str, form: str) -> str:
    rows = found["crossovers"].get(form, {})
    if name not in rows:
        return "was not measured"
    if rows[name] is None:
        return "does not overtake softmax at the lengths measured"
    where = "already at" if rows[name] <= found["shortest"] else "from about"
    gain = found["gains"][form][name]
    return (
        f"overtakes softmax {where} {tokens(rows[name])} tokens and is {gain['gain']:.1f} times as fast at "
        f"{gain['length']:,}"
    )


def headline(found: dict[str, Any], settings: Settings) -> list[str]:
    """The first sentence is the finding; the others what it leaves open."""
    name = star(settings)
    if name is None:
        return ["Softmax attention alone was measured; name a mechanism to compare it with."]
    lines = [f"Here, {name} {_crossover_words(found, name, 'forward, full')}."]
    causal = _crossover_words(found, name, "forward, causal")
    if "not" not in causal:
        lines.append(f"Causal, it {causal}.")
    decode = found["generation"]
    if name in decode and "softmax" in decode:
        mine, cache = decode[name]["us_per_token"], decode["softmax"]["us_per_token"]
        lines.append(
            f"Generating after {decode[name]['context']:,} tokens it needs {milliseconds(mine / 1e3)} per token and "
            f"layer, a key cache {milliseconds(cache / 1e3)}."
        )
    rows = found["recommendations"]
    if rows:
        longest, middle = max(row["length"] for row in rows), settings.budgets[len(settings.budgets) // 2]
        kept = [row for row in rows if row["length"] == longest and row["budget"] == middle]
        exact = [row["kind"] for row in kept if row["mechanism"] == "softmax"]
        if exact and len(exact) < len(kept):
            lines.append(
                f"Speed is not the whole question: within an error of {middle:g}, {len(exact)} of {len(kept)} kinds of "
                f"input still need softmax at {longest:,} tokens."
            )
    return lines
