"""Section 7: what to use, for each length and error budget.

Every setting of the planner's ladders is measured on each kind of input (its error) and at a few lengths (its time);
the recommendation is the fastest one whose error stays within the budget and below that of the mean of the values. The
planner itself (`sq.plan`, `subquad plan`) does the same for your own queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from subquad.lab.making import INPUT_STD, made
from subquad.lab.measure import interleave
from subquad.mechanisms import Kernelised
from subquad.planning.baselines import uniform_attention
from subquad.planning.candidates import PLANNABLE, calibrated, ladders, least_tokens, with_seed
from subquad.planning.cost import CostModel
from subquad.planning.piece import Piece

from .inputs import KINDS, sample
from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings
from .speed import attention_bytes

__all__ = ["candidates", "jobs", "recommend", "short", "tried"]

NAME = "recommendation"
FEATURES = ("hyperbolic", "oprf", "sderf")  # of the performer; the others are never much better
STEPS = {"window": (16, 64, 256), "clusters": (25, 100), "landmarks": (32, 128)}  # of finer ladders
DRAWS = 2
LONGEST = 4096  # of the lengths that are timed
Options = Mapping[str, Any]


def short(mechanism: str, options: Options) -> str:
    """A setting in a few words.

    >>> short("performer", {"features": "sderf", "antithetic": True, "center": True, "num_features": 256})
    'performer sderf 256'
    """
    words = [mechanism]
    if mechanism == "taylor":
        words.append("Hermite 2" if options.get("hermite") else f"degree {options.get('degree', 2)}")
    if "features" in options:
        words.append(str(options["features"]))
    words += [str(options[name]) for name in ("num_features", "window", "clusters", "landmarks") if name in options]
    if "rounds" in options:
        words.append(f"{options['rounds']} round{'s' if options['rounds'] > 1 else ''}")
    if isinstance(far := options.get("far"), Mapping):
        words.append("+ " + short(far["mechanism"], {k: v for k, v in far.items() if k != "mechanism"}))
    return " ".join(words)


def candidates(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """(mechanism, options) of everything that is tried."""
    names = [name for name in settings.names if name in PLANNABLE]
    found = []
    for ladder in ladders(names, is_causal=False, cross=False):
        for step in ladder.steps:
            if ladder.mechanism == "performer":
                centred = step.get("center") and step["features"] != "sderf"
                if step["features"] not in FEATURES or centred or step["num_features"] not in settings.recommend_steps:
                    continue
            if any(step[name] not in sizes for name, sizes in STEPS.items() if name in step):
                continue
            found.append((ladder.mechanism, dict(step)))
    return found


def _made(settings: Settings, name: str, options: Options, heads: int) -> Any:
    own = with_seed(name, dict(options), settings.seed)
    own.pop("seed", None)  # `made` has it already
    return made(name, settings.head_dim, heads, 0, settings.seed, **own)


def _times(settings: Settings, length: int, clock: Clock) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (1, settings.heads, length, settings.head_dim)
    q, k, v = (INPUT_STD * torch.randn(shape, generator=generator) for _ in range(3))
    calls: dict[str, Callable[[], object]] = {}
    for name, options in [("softmax", {}), *candidates(settings)]:
        attend = _made(settings, name, options, settings.heads)
        calls[short(name, options)] = lambda attend=attend: attend(q, k, v)  # type: ignore[misc]
    short_one = length <= 1024
    timings = interleave(
        calls, runs=2 if length <= 2048 else 1, warmup=1 if short_one else 0, seconds=max(0.5, 0.2 * clock.left)
    )
    return {"times": {name: timing.as_dict() for name, timing in timings.items()}}


def _errors(settings: Settings, kind: str, clock: Clock) -> dict[str, Any]:
    tokens = settings.recommend_tokens
    q, k = sample(kind, tokens, head_dim=settings.head_dim, seed=settings.seed)
    seen = sample(kind, tokens, head_dim=settings.head_dim, seed=settings.seed + 1)
    form: dict[str, Any] = {"is_causal": False, "scale": None, "key_mask": None, "seed": settings.seed}
    piece = Piece(q, k, None, tokens=tokens, **form)
    half = Piece(q, k, None, tokens=tokens // 2, **form)
    mean = uniform_attention(piece.q, piece.k, piece.v) - piece.exact
    found: dict[str, Any] = {}
    for name, options in candidates(settings):
        if tokens < least_tokens(name, options):
            continue  # it would see everything here, and only here
        attend = calibrated(_made(settings, name, options, q.shape[1]), *seen, None)
        far = getattr(attend, "far", attend)
        draws = DRAWS if "seed" in attend.options() or "seed" in far.options() else 1
        row = {"mechanism": name, "options": options, "error": piece.mean_error(attend, draws=draws), "half": None}
        if not isinstance(attend, Kernelised):
            row["half"] = half.mean_error(attend, draws=draws)
        found[short(name, options)] = row
    return {"settings": found, "uniform": float(mean.double().square().sum()) / piece.norm}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """Times at a few lengths, then errors on each kind of input."""
    base = {"heads": settings.heads, "head_dim": settings.head_dim, "seed": settings.seed,
            "candidates": [short(*each) for each in candidates(settings)]}  # fmt: skip
    found = []
    # Longer ones are extrapolated, as the planner does: a dozen settings at 16384 tokens would take all the time.
    lengths = [length for length in settings.lengths if length <= LONGEST] or settings.lengths[:1]
    for length in sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]}):

        def run(clock: Clock, length: int = length) -> Mapping[str, Any]:
            with torch.no_grad():
                return _times(settings, length, clock)

        memory = attention_bytes(settings, length)
        found.append(Job(f"times at L={length}", {"times": length, **base}, run, memory, first=length == lengths[0]))
    for kind, words in KINDS.items():

        def study(clock: Clock, kind: str = kind) -> Mapping[str, Any]:
            with torch.no_grad():
                return _errors(settings, kind, clock)

        asked = {"kind": kind, "tokens": settings.recommend_tokens, **base}
        memory = attention_bytes(settings, settings.recommend_tokens)
        found.append(Job(f"errors, {words}", asked, study, memory, first=kind == next(iter(KINDS))))
    return found


def _costs(notebook: Notebook) -> dict[str, CostModel]:
    points: dict[str, dict[int, tuple[float, ...]]] = {}
    for asked, result in notebook.of(NAME):
        for name, timing in result.get("times", {}).items():
            points.setdefault(name, {})[asked["times"]] = tuple(ms / 1e3 for ms in timing["runs_ms"])
    return {name: CostModel("quadratic" if name == "softmax" else "linear", rows) for name, rows in points.items()}


def _error_at(row: Mapping[str, Any], tokens: int, length: int) -> float:
    """What a window or a cluster leaves out grows with length: its growth from half the tokens on is carried on."""
    error = math.inf if row["error"] is None else float(row["error"])
    if row["half"] is None or length <= tokens or error == 0:
        return error
    growth = max(1.0, (error + 1e-6) / (float(row["half"]) + 1e-6))
    return error * math.pow(growth, math.log2(length / tokens))


def tried(notebook: Notebook, kind: str, length: int) -> list[dict[str, Any]]:
    """Every setting with its error on that kind of input and its time at that length."""
    costs = _costs(notebook)
    if "softmax" not in costs:
        return []
    softmax = costs["softmax"].at(length).seconds
    rows = [{"label": "softmax", "mechanism": "softmax", "error": 0.0, "ms": softmax * 1e3, "gain": 1.0}]
    for asked, result in notebook.of(NAME):
        if asked.get("kind") != kind:
            continue
        for name, row in result["settings"].items():
            if name in costs:
                seconds = costs[name].at(length).seconds
                error = _error_at(row, asked["tokens"], length)
                rows.append({"label": name, "mechanism": row["mechanism"], "error": error, "ms": seconds * 1e3,
                             "gain": softmax / seconds})  # fmt: skip
    return rows


def recommend(notebook: Notebook, lengths: Sequence[int], budgets: Sequence[float]) -> list[dict[str, Any]]:
    """The fastest setting within each budget, per kind of input and length; softmax where nothing else qualifies."""
    uniform = {asked["kind"]: result["uniform"] for asked, result in notebook.of(NAME) if "kind" in asked}
    found = []
    for kind in (kind for kind in KINDS if kind in uniform):
        for length in lengths:
            rows = tried(notebook, kind, length)
            for budget in budgets:
                limit = min(budget, uniform[kind])
                good = [row for row in rows if row["error"] <= limit]
                if good:
                    best = min(good, key=lambda row: row["ms"])
                    mean = uniform[kind] <= budget
                    found.append({"kind": kind, "length": length, "budget": budget, "mean_would_do": mean, **best})
    return found
