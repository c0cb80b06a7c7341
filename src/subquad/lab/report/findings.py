"""What the numbers say, in a few sentences and a table: crossovers, gains, and what to use."""

from __future__ import annotations

from typing import Any

from .formatting import crossing, milliseconds
from .notebook import Notebook
from .sections import generation, speed, use
from .sections.machine import gemm_rate
from .settings import Settings

__all__ = ["findings", "headline", "star"]


def star(settings: Settings) -> str | None:
    """The mechanism that the headline is about: multipole, or the performer, where it was measured."""
    others = [name for name in settings.names if name != "softmax"]
    return next((name for name in ("multipole", "performer", *others) if name in others), None)


def findings(notebook: Notebook, settings: Settings) -> dict[str, Any]:
    """Crossovers by form, the gain at the longest length, the limit, generation, and the recommendations."""
    crossovers, gains = speed.crossovers(notebook, settings)
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
        "recommendations": use.recommend(notebook, settings),
    }


def _crossover_words(found: dict[str, Any], name: str, form: str) -> str:
    rows = found["crossovers"].get(form, {})
    if name not in rows:
        return "was not measured"
    gain = found["gains"][form][name]
    if rows[name] is None:
        return f"does not overtake softmax up to {gain['length']:,} tokens, the longest measured"
    where = "already at" if rows[name] <= found["shortest"] else "from about"
    shown = crossing(rows[name], found["shortest"]).removeprefix("≤ ")
    return f"overtakes softmax {where} {shown} tokens and is {gain['gain']:.1f} times as fast at {gain['length']:,}"


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
    # What a state of fixed size is worth.
    steady = "performer" if "performer" in decode else name
    both = steady in decode and "softmax" in decode
    if both and decode[steady]["context"] == decode["softmax"]["context"]:
        mine, cache = decode[steady]["us_per_token"], decode["softmax"]["us_per_token"]
        lines.append(
            f"Generating after {decode[steady]['context']:,} tokens {steady} needs {milliseconds(mine / 1e3)} per "
            f"token and layer, a key cache {milliseconds(cache / 1e3)}."
        )
    longest, middle = settings.lengths[-1], settings.budgets[len(settings.budgets) // 2]
    kept = [
        row
        for row in found["recommendations"]
        if row["length"] == longest and row["budget"] == middle and "missing" not in row
    ]
    exact = [row["kind"] for row in kept if row["mechanism"] == "softmax"]
    if exact and len(exact) < len(kept):
        lines.append(
            f"Speed is not the whole question: within an error of {middle:g}, {len(exact)} of {len(kept)} kinds of "
            f"input still need softmax at {longest:,} tokens."
        )
    return lines
