"""What should I use: mechanisms and settings ranked for given queries and keys, on this machine.

1. errors of uniform attention, degree 1 and Hermite degree 2 on a sample: what must be beaten;
2. random features: the closed form gives the error at every number of features; the smallest number that meets the
   target is confirmed by measuring, and where the formula breaks it is measured instead (`DRAWS` draws);
3. everything else is computed (polynomials) or measured on a contiguous piece of the sequence; what a window or a
   cluster leaves out grows with length, so the growth from half the piece to the whole is carried on to the length
   asked for;
4. what meets the target is timed, and ranked by its time at the length asked for. Softmax attention is always there.

Nothing that is worse than the mean of the values is recommended, whatever the target: then the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..features.calibration import Calibration
from ..mechanisms import MECHANISMS, create
from ..mechanisms.base import Mechanism
from ..mechanisms.kernelised import Kernelised
from ..mechanisms.taylor import Taylor
from .baselines import means_of
from .candidates import Ladder, ladders, least_tokens
from .cost import attention_costs
from .measuring import Piece
from .prediction import Curve, baseline_errors, calibrated, check_inputs
from .recommendation import Choice, Plan
from .sampling import CANDIDATES, blocks, evenly

__all__ = ["plan"]

DRAWS = 10
MOST_HEADS = 8
ROWS_PER_HEAD = 16
KEYS_PER_ROW = 256
RANDOM_TOKENS = 1024  # random features: ten draws of each setting
PIECE_TOKENS = 2048  # windows and clusters: one run of each setting, and the longer the more they leave out
EXTRAPOLATE_BELOW = 0.1  # above it the error does not fall as 1/M


def _with_seed(name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The same options with `seed` wherever something is drawn, also in a far field."""
    options = dict(options)
    far = options.get("far")
    if isinstance(far, dict):
        options["far"] = _with_seed(far["mechanism"], far, seed)
    if "seed" in MECHANISMS[name].options():
        options["seed"] = seed
    return options


class _Study:
    """One input: its sample, its pieces and the mechanisms made for it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, target: float, length: int, seed: int, **form: Any
    ) -> None:
        self.q, self.k, self.length, self.seed = q, k, length, seed
        self.key_mask: Tensor | None = form["key_mask"]
        self.with_values = v is not None
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if form["scale"] is None else float(form["scale"])
        self.short = Piece(q, k, v, tokens=RANDOM_TOKENS, seed=seed, **form)
        longer = max(q.shape[2], k.shape[2]) > RANDOM_TOKENS
        self.long = Piece(q, k, v, tokens=PIECE_TOKENS, seed=seed, **form) if longer else self.short
        # Whether a window's error grows with length can only be seen at two lengths; cross attention has no windows.
        half = self.long.tokens // 2
        self.half = Piece(q, k, v, tokens=half, seed=seed, **form) if q.shape[2] == k.shape[2] and half else None
        self.sample = list(blocks(q, k, v, max_queries=CANDIDATES, **{**form, "scale": self.scale}))
        if not self.sample:
            raise ValueError("key_mask leaves no query with a key; at least one real key per sequence is expected")
        statistics = Calibration(k.shape[1], k.shape[-1])
        statistics.update(q, k, self.key_mask)
        weights, outs = baseline_errors(self.sample, means_of(statistics, self.scale))
        self.baselines = outs if self.with_values else weights
        # What is worse than the mean of the values is of no use, however generous the target.
        self.target = min(target, self.baselines["uniform"])

    def make(self, ladder: Ladder, options: dict[str, Any]) -> Mechanism:
        """The mechanism of one step, calibrated on the data where it uses calibration."""
        if ladder.given is not None:
            return ladder.given
        made = create(
            *(ladder.mechanism, self.q.shape[-1], self.q.shape[1], self.k.shape[1]),
            **_with_seed(ladder.mechanism, options, self.seed),
        )
        return calibrated(made, self.q, self.k, self.key_mask)

    def climb(self, ladder: Ladder) -> Choice | None:
        """The cheapest step that meets the target, or the best one: computed or measured, one after the other.

        None where no step can be judged on so few tokens: a window that covers them all is exact there and only there.
        """
        best: Choice | None = None
        for options in ladder.steps:
            if self.length > self.long.tokens and self.long.tokens < least_tokens(ladder.mechanism, options):
                continue
            attend = self.make(ladder, options)
            computed = self._computed(attend)
            if computed is None:
                found = self._measured(attend, Choice(ladder.mechanism, options, given=ladder.given))
            else:
                found = Choice(ladder.mechanism, options, predicted_error=computed, given=ladder.given)
            if best is None or found.error < best.error:
                best = found
            if found.error <= self.target:
                break
        return best

    def _measured(self, attend: Mechanism, choice: Choice) -> Choice:
        """With the error on the piece and, if that would do, what its growth with length makes of it."""
        far: Mechanism = getattr(attend, "far", attend)
        draws = 3 if "seed" in attend.options() or "seed" in far.options() else 1
        error = self.long.error(attend, draws=draws)
        tokens = self.long.tokens
        if error > self.target or self.half is None or self.length <= tokens or isinstance(attend, Kernelised):
            return replace(choice, measured_error=error)
        # The factor per doubling, never below 1: the keys left out double, their squared share may grow fourfold. The
        # offset keeps two errors that are both nothing from making a factor.
        offset = 1e-3 * self.target
        growth = max(1.0, (error + offset) / (self.half.error(attend, draws=draws) + offset))
        at_length = error * growth ** math.log2(self.length / tokens)
        return replace(choice, measured_error=error, error_at_length=at_length)

    def _computed(self, attend: Mechanism) -> float | None:
        """The error without a run, where it has no randomness."""
        if not isinstance(attend, Taylor):
            return None
        curve = Curve(attend, self.sample, scale=self.scale, max_keys=KEYS_PER_ROW)
        return curve.error(None, output=self.with_values)

    def search(self, ladder: Ladder) -> Choice:
        """The smallest number of random features that meets the target, by prediction and then by measurement."""
        first = self.make(ladder, ladder.steps[0])
        curve = Curve(first, self.sample, scale=self.scale, max_rows=ROWS_PER_HEAD, max_keys=KEYS_PER_ROW)
        predicted = [curve.error(step["num_features"], output=self.with_values) for step in ladder.steps]
        trusted = [curve.trust(step["num_features"])[0] for step in ladder.steps]
        found: dict[int, float] = {}

        def measure(i: int) -> float:
            if i not in found:
                attend = self.make(ladder, ladder.steps[i])
                found[i] = self.short.error(attend, draws=DRAWS, enough=self.target)
            return found[i]

        last = len(ladder.steps) - 1
        i = next((i for i in range(last + 1) if trusted[i] and predicted[i] <= self.target), last)
        while measure(i) > self.target and i < last:
            i += 1
        # A prediction beyond its range is too high for positive features: fewer of them may do.
        while i > 0 and found[i] * 1.5 < self.target and measure(i - 1) <= self.target:
            i -= 1
        note = ""
        if self.target < found[i] < EXTRAPOLATE_BELOW:
            needed = math.ceil(ladder.steps[i]["num_features"] * found[i] / self.target)
            note = f"would need about {needed} features"
        return Choice(
            *(ladder.mechanism, ladder.steps[i]),
            predicted_error=predicted[i],
            predicted_reliable=trusted[i],
            measured_error=found[i],
            note=note,
        )


def _fewer_heads(q: Tensor, k: Tensor, v: Tensor | None, keep_all: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """On the CPU, at most MOST_HEADS query heads in whole groups: what a plan costs must not grow with the model."""
    group = q.shape[1] // k.shape[1]
    kept = evenly(k.shape[1], k.shape[1] if keep_all else max(1, MOST_HEADS // group))
    queries = (kept.unsqueeze(1) * group + torch.arange(group)).flatten()

    def taken(x: Tensor, heads: Tensor) -> Tensor:
        return x.detach()[:, heads.to(x.device)].cpu()

    return taken(q, queries), taken(k, kept), None if v is None else taken(v, kept)


def _timed(choices: list[Choice], study: _Study, heads: int, length: int, is_causal: bool) -> list[Choice]:
    """Those choices with their times, measured together."""
    mechanisms = [
        choice.given
        or create(choice.mechanism, study.q.shape[-1], heads, **_with_seed(choice.mechanism, choice.options, 0))
        for choice in choices
    ]
    costs = attention_costs(mechanisms, heads=heads, is_causal=is_causal)
    return [replace(choice, time=cost.at(length)) for choice, cost in zip(choices, costs, strict=True)]


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    target_error: float = 0.05,
    length: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    mechanisms: Iterable[str | Mechanism] | None = None,
    time_budget: float | None = None,
    seed: int = 0,
    on_step: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Which mechanism to use for q (B, Hq, L, D), k (B, H, S, D) so that the error stays below `target_error`.

    v:            (B, H, S, E): judge the relative squared error of these outputs; without it that of the attention
                  matrix, which is the same for values of mean 0
    length:       tokens to rank times for; None = the keys given
    mechanisms:   names to choose from, or objects of your own; None = everything that estimates softmax attention
    time_budget:  seconds for one sequence with all heads; what takes longer is not recommended
    seed:         of everything that is drawn
    on_step:      called with what was just judged, how many steps are done and how many there will be

    Takes seconds, more the first time on a machine: times are measured once and kept.

    >>> import torch, subquad as sq
    >>> q, k = 0.4 * torch.randn(2, 1, 2, 300, 16)
    >>> answer = sq.plan(q, k, target_error=0.05, length=100_000, mechanisms=["taylor"])
    >>> answer.best.mechanism, answer.best.error < 0.05
    ('taylor', True)
    """
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask)
    for argument, value in (("target_error", target_error), ("time_budget", time_budget)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{argument} must be a positive number, got {value!r}")
    length = k.shape[2] if length is None else length
    checks.check_positive("length", length)
    if mechanisms is not None and not isinstance(mechanisms, str | Mechanism):
        mechanisms = list(mechanisms)
    candidates = ladders(mechanisms, is_causal=is_causal, cross=q.shape[2] != k.shape[2])
    heads = q.shape[1]
    fixed = any(ladder.given is not None and ladder.given.heads is not None for ladder in candidates)
    mask = None if key_mask is None else key_mask.cpu()
    study = _Study(
        *_fewer_heads(q, k, v, keep_all=fixed),
        *(target_error, length, seed),
        is_causal=is_causal,
        scale=scale,
        key_mask=mask,
    )
    steps = len(candidates) + 1
    choices: list[Choice] = []
    for done, each in enumerate(candidates, 1):
        found = study.search(each) if each.random_features else study.climb(each)
        if found is not None:
            choices.append(found)
        if on_step:
            on_step(each.mechanism if found is None else f"{found.label}: error {found.error:.2g}", done, steps)
    good = [choice for choice in choices if choice.error <= study.target]
    rest = [choice for choice in choices if not choice.error <= study.target]
    *good, exact = _timed([*good, Choice("softmax", {}, predicted_error=0.0)], study, heads, length, is_causal)
    if on_step:
        on_step("times", steps, steps)
    return Plan(
        choices=tuple(sorted([*good, exact], key=lambda c: c.seconds)) + tuple(sorted(rest, key=lambda c: c.error)),
        exact=exact,
        target_error=target_error,
        length=length,
        heads=heads,
        time_budget=time_budget,
        is_causal=is_causal,
        baselines=study.baselines,
        criterion="output" if v is not None else "attention matrix",
        measured_tokens=study.long.tokens,
    )
