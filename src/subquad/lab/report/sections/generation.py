"""One more token after a context of n: time and memory, a recurrent state against a cache of all keys."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import subquad
from subquad.lab.calibrated import make_calibrated
from subquad.lab.measure import interleave
from subquad.mechanisms import Kernelised
from subquad.plain_text import first_line
from subquad.state import state_bytes

from ..figure import Figure, Line
from ..formatting import megabytes, milliseconds
from ..notebook import Notebook
from ..running import SPEED, Clock, Job, too_long
from ..section import Section
from ..settings import Settings

__all__ = ["SECTION", "points"]

NAME = "generation"
STEPS = 8  # tokens per timed run: one alone is near the resolution of what disturbs it


def _prefill(notebook: Notebook, name: str, context: int) -> float:
    """Seconds that reading the context should take, from the longest shorter one; 0 where none was read yet."""
    known = points(notebook, name, "prefill_s")
    shorter = [n for n in known if n < context]
    return known[max(shorter)] * context / max(shorter) if shorter else 0.0


def _measure(settings: Settings, notebook: Notebook, context: int, names: list[str], clock: Clock) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (1, settings.heads, context, settings.head_dim)
    q, k, v = (0.5 * torch.randn(shape, generator=generator) for _ in range(3))
    q1, k1, v1 = (x[:, :, -1:] for x in (q, k, v))
    calls: dict[str, Callable[[], object]] = {}
    results: dict[str, Any] = {}
    for name in names:
        expected = _prefill(notebook, name, context)
        if expected > max(2.0 * clock.seconds, 0.2):
            results[name] = {"status": "skipped", "reason": f"reading the context {too_long(expected)}"}
            continue
        start = time.perf_counter()
        try:
            attend = make_calibrated(name, settings.head_dim, settings.heads, context, settings.seed)
            # The quadratic way to a cache would take minutes; a cache is just all keys and values.
            absorbs = name == "softmax" or isinstance(attend, Kernelised)
            state = attend.absorb(k, v) if absorbs else attend.scan(q, k, v)[1]
        except (ValueError, TypeError, NotImplementedError) as error:
            results[name] = {"status": "refused", "reason": first_line(error)}
            continue

        def steps(attend: subquad.Mechanism = attend, state: Any = state, cached: bool = name == "softmax") -> None:
            # For the cache the attention over it alone is timed: a cache made for it in advance need not be copied.
            for _ in range(STEPS):
                if cached:
                    attend.read(q1, state)
                else:
                    state = attend.scan(q1, k1, v1, state)[1]

        calls[name] = steps
        results[name] = {
            "status": "measured",
            "state_bytes": state_bytes(state),
            "prefill_s": time.perf_counter() - start,
        }
    timings = interleave(calls, runs=clock.rounds(settings.runs + 1, 2), warmup=1, seconds=max(0.2, clock.seconds))
    for name, timing in timings.items():
        results[name] |= {"us_per_token": timing.best / STEPS * 1e6, "spread": timing.spread}
    return {"mechanisms": results}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per context."""
    recurrent = set(subquad.list_mechanisms(recurrent=True, causal=True))
    names = [name for name in settings.names if name in recurrent]
    found = []
    for context in settings.contexts:
        asked = {"context": context, "heads": settings.heads, "head_dim": settings.head_dim, "names": names,
                 "runs": settings.runs, "seed": settings.seed}  # fmt: skip

        def run(clock: Clock, context: int = context) -> Mapping[str, Any]:
            with torch.no_grad():
                return _measure(settings, notebook, context, names, clock)

        memory = 4 * context * settings.heads * (10 * settings.head_dim + 1024)
        quiet = 0.3 + 1.6e-4 * context
        first = context == settings.contexts[0]
        found.append(Job(f"context {context}", asked, run, quiet, SPEED, memory, first, cells=len(names)))
    return found


def points(notebook: Notebook, name: str, what: str) -> dict[int, float]:
    """`us_per_token` or `state_bytes` by context."""
    found = {}
    for asked, result in notebook.of(NAME):
        cell = result["mechanisms"].get(name)
        if cell and cell["status"] == "measured" and what in cell:
            found[asked["context"]] = cell[what]
    return dict(sorted(found.items()))


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Time per token and size of the state against context."""
    drawn, sizes = [], []
    for name in settings.names:
        mine = points(notebook, name, "us_per_token")
        label = "softmax with a cache" if name == "softmax" else name
        if mine:
            notes = [milliseconds(us / 1e3) + " per token" for us in mine.values()]
            drawn.append(Line(name, label, list(mine), list(mine.values()), name, notes=notes))
        states = points(notebook, name, "state_bytes")
        if states:
            mib = [size / 2**20 for size in states.values()]
            sizes.append(Line(name, label, list(states), mib, name, notes=[megabytes(x) for x in mib]))
    return [[
        Figure(
            "generation-time", "Time per generated token",
            "One more token after a context of that many. With a state of fixed size the cost does not depend on what "
            "came before; a cache of all keys must be read in full for every token; multipole has all keys and reads "
            "few of them.",
            "tokens of context", "microseconds per token", drawn,
        ),
        Figure(
            "generation-memory", "Memory kept while generating",
            "What one layer has to keep: a state of fixed size, or every key and value so far.",
            "tokens of context", "MiB per layer", sizes,
        ),
    ]]  # fmt: skip


SECTION = Section(NAME, "Generation", "Token by token, what was read before is kept in a state.", jobs, figures)
