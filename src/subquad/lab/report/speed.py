"""Section 2: time against length, forward and forward + backward, full and causal, every mechanism in turn.

*no attention* hands the values through (one copy of them): the least that any mechanism must do, the optimum line of
Choromanski et al., "Rethinking Attention with Performers", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.lab.making import INPUT_STD, made
from subquad.lab.measure import interleave
from subquad.mechanisms import Kernelised
from subquad.plain_text import first_line
from subquad.planning.cost import QUADRATIC

from .notebook import Notebook
from .running import Clock, Job, too_long
from .settings import NO_ATTENTION, Settings

__all__ = ["attention_bytes", "jobs", "operations", "points"]

NAME = "speed"
FORMS = (("forward", False), ("forward", True), ("training", False), ("training", True))
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
    return known[max(shorter)] / 1e3 * math.pow(ratio, 2 if name in QUADRATIC else 1)


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
    for name in [*settings.names, NO_ATTENTION]:
        expected = _expected(notebook, asked, name)
        # One run of one mechanism may take at most half of what is left for all of them.
        if expected is not None and expected > max(0.5 * clock.left, 0.05):
            results[name] = {
                "status": "skipped",
                "reason": too_long(expected),
            }
            continue
        try:
            attend: Callable[..., Tensor] = (
                _hand_through
                if name == NO_ATTENTION
                else made(name, settings.head_dim, settings.heads, length, settings.seed)
            )
            call = _call(attend, inputs, causal, training)
            counts[name] = None if training else operations(attend, length, settings.heads, causal)
            if expected is not None and expected > SLOW:
                slow.add(name)
            else:
                call()  # shows who refuses, and warms up
            calls[name] = call
        except (ValueError, TypeError, NotImplementedError) as error:
            results[name] = {"status": "refused", "reason": first_line(error)}
    seconds = max(0.3, 0.12 * clock.left)
    for name, timing in interleave(calls, runs=settings.runs, warmup=0, seconds=seconds, once=frozenset(slow)).items():
        results[name] = {"status": "measured", "operations": counts[name], **timing.as_dict()}
    return {"mechanisms": results}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """By length first: if the time runs out, the longest lengths are what is missing."""
    found = []
    for length in settings.lengths:
        for name, causal in FORMS:
            training = name == "training"
            if training and length > settings.longest_training:
                continue
            asked = {
                "length": length, "pass": name, "causal": causal, "heads": settings.heads,
                "head_dim": settings.head_dim, "names": settings.names, "runs": settings.runs, "seed": settings.seed,
            }  # fmt: skip

            def run(clock: Clock, asked: Mapping[str, Any] = asked) -> Mapping[str, Any]:
                with torch.set_grad_enabled(asked["pass"] == "training"):
                    return _measure(settings, notebook, asked, clock)

            words = f"{'forward + backward' if training else 'forward'}, {'causal' if causal else 'full'}, L={length}"
            memory = attention_bytes(settings, length, training)
            found.append(Job(words, asked, run, memory, first=length == settings.lengths[0]))
    return found


def points(notebook: Notebook, name: str, kind: str, causal: bool) -> dict[int, float]:
    """Milliseconds by length of one mechanism."""
    found = {}
    for asked, result in notebook.of(NAME):
        cell = result["mechanisms"].get(name)
        if asked["pass"] == kind and asked["causal"] == causal and cell and cell["status"] == "measured":
            found[asked["length"]] = cell["best_ms"]
    return dict(sorted(found.items()))


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
