"""What should I use: mechanisms and settings ranked for given queries and keys, on this machine.

Every candidate runs on the input itself, first as segments of a quarter of the length, then on the whole, against
exact softmax rows. That gives its error, how it differs between segments, and how it grows with length: what lies
beyond the input is extrapolated from there, with an interval that widens. Of each row of `candidates.py` the cheapest
setting that meets the target is found, from cheap to expensive; what meets it is timed and ranked by its time at the
length asked for. Softmax attention is always among them; nothing that is no better than the mean of the values is.
"""

from __future__ import annotations

import bisect
import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..features.calibration import Calibration
from ..mechanisms import create
from ..mechanisms.base import Mechanism
from ..mechanisms.kernelised import Kernelised
from .answer import ROUNDING, WORTH, Choice, Plan, limit_of
from .baselines import uniform_error
from .candidates import Sweep, error_keeping, least_tokens, make_candidate, sweeps, with_seed
from .cost import TimeEstimate, attention_costs, clock
from .piece import Piece, check_inputs, evenly

__all__ = ["plan", "with_times"]

DRAWS, MOST_DRAWS, DRAWN_FEATURES = 4, 12, 2048  # to choose from: the fewer features, the more they differ
AVERAGED = 2  # where the mean over draws counts
SLOWER = 3.0  # times softmax, or what has met the target, in two runs: such a setting is not looked at any further
TELLING = 2e-3  # seconds: shorter runs are mostly overhead and luck, and nothing is called slow for them
HOPELESS = 3.0  # times the target, on segments: no run on the whole
CLEAR = 0.25  # times the target: no need for a better draw
MOST_HEADS, LEAST_HEADS = 8, 2
HEAD_TOKENS = 1 << 14  # heads times tokens that every setting runs on: 8 heads of 2048 tokens, 4 of 4096
MOST_TOKENS = 1 << 14  # of one sequence, which has at least two heads
RUNS = 10  # of softmax attention on at most 1024 tokens, in whose time a row of settings is judged
MOST_SCORES = 1 << 24  # of exact attention: all rows of 1 head of 4096 tokens, 512 rows of 2 heads of 16384


def fewer_heads(
    q: Tensor, k: Tensor, v: Tensor | None, *, length: int, keep_all: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """On the CPU, some query heads in whole groups: what a plan costs must not grow with the model."""
    group = q.shape[1] // k.shape[1]
    tokens = min(length, max(q.shape[2], k.shape[2]))
    most = min(MOST_HEADS, max(LEAST_HEADS, HEAD_TOKENS // tokens))
    kept = evenly(k.shape[1], k.shape[1] if keep_all else max(1, most // group))
    queries = (kept.unsqueeze(1) * group + torch.arange(group)).flatten()

    def taken(x: Tensor, heads: Tensor) -> Tensor:
        return x.detach()[:, heads.to(x.device)].cpu()

    return taken(q, queries), taken(k, kept), None if v is None else taken(v, kept)


class _Study:
    """One input, and what every candidate does on it."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor | None, *, target: float, length: int, seed: int, **form: Any
    ) -> None:
        self.q, self.k, self.length, self.seed = q, k, length, seed
        padding = form.pop("key_mask")
        alike = q.shape[2] == k.shape[2]
        real = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool) if padding is None else padding
        # A sequence longer than asked for is cut; one of less than half the longest says nothing of the length.
        if alike:
            real = real & (real.cumsum(1) <= length)
        lengths = real.sum(1, keepdim=True)
        real = real & (2 * lengths >= lengths.max())
        # Several short sequences count as one long one.
        tokens = max(1, min(MOST_TOKENS, 2 * HEAD_TOKENS // q.shape[1]))
        self.piece = Piece(q, k, v, tokens=tokens, seed=seed, most_scores=MOST_SCORES, key_mask=real, **form)
        self.folded = self.piece.folded()
        exact = create("softmax", q.shape[-1])
        self._seconds(exact)  # warms up
        self.exact_seconds = self._seconds(exact)
        self.fastest = math.inf  # seconds of one run of what has met the target
        self.statistics = Calibration(self.k.shape[1], self.k.shape[-1])
        self.statistics.update(q, k, padding, padding if alike else None)
        self.uniform = uniform_error(self.piece)
        self.target = limit_of(target, self.uniform)

    def _seconds(self, attend: Mechanism) -> float:
        """One run on the whole piece."""
        start = clock()
        with torch.no_grad():
            attend(self.piece.q, self.piece.k, self.piece.v, **self.piece.call)
        return clock() - start

    def too_slow(self, seconds: float) -> bool:
        """Whether a run on these tokens that took so long is far slower than what has met the target so far, or will be
        than softmax attention at the length."""
        exact = self.exact_seconds * max(1.0, self.length / self.piece.tokens)
        return seconds > max(TELLING, SLOWER * min(exact, self.fastest))

    def make(self, sweep: Sweep, options: dict[str, Any], draw: int) -> Mechanism:
        """The mechanism of one setting, calibrated on the data where it uses calibration."""
        attend = make_candidate(sweep, options, self.seed + draw, self.q, self.k)
        if sweep.given is None:
            # The same statistics for all: gathering them costs more than many a run.
            attend.use_statistics(self.statistics)
        return attend

    def cheapest(self, sweep: Sweep) -> Choice | None:
        """The cheapest setting that meets the target, or the most expensive; None if so few tokens can judge none."""
        tokens, length = self.piece.tokens, self.length
        settings = [o for o in sweep.options if length <= tokens or tokens >= least_tokens(sweep.mechanism, o)]
        if not settings:
            return None
        judge = functools.cache(lambda i: self.judge(sweep, settings[i]))
        last = len(settings) - 1
        while last > 0 and judge(last).slow:
            last //= 2
        # Errors fall from one to the next, but for luck.
        if not judge(last).meets(self.target):
            return judge(last)
        return judge(bisect.bisect_left(range(last), True, key=lambda i: judge(i).meets(self.target)))

    def judge(self, sweep: Sweep, options: dict[str, Any]) -> Choice:
        """One setting: the best of a few draws on segments, its error on the whole, and what that is at the length."""
        first = self.make(sweep, options, 0)
        # A good draw of random features on one input is a good one on the next. Clusters and buckets are made of the
        # data at hand, with starting points as good as any others: there the mean counts.
        random = sweep.given is None and first.is_random
        picks = random and hasattr(getattr(first, "far", first), "num_features")
        draws = AVERAGED if random else 1
        if picks:
            each = getattr(first, "num_features", DRAWN_FEATURES)
            draws = max(DRAWS, min(MOST_DRAWS, DRAWN_FEATURES // each))
        where = self.folded or self.piece
        tried: list[Tensor] = []
        slow = False
        for draw in range(draws):
            attend = first if draw == 0 else self.make(sweep, options, draw)
            start = clock()
            tried.append(where.by_segment(where.squares(attend)))
            took = clock() - start
            # Twice: one run may have met a busy moment.
            slow = self.too_slow(took) and self.too_slow(self._seconds(attend))
            if slow:
                break
            least = min(float(one.sum()) for one in tried) / where.norm
            # One draw five times too large, two three times, four twice.
            if least <= CLEAR * self.target or least > self.target * (1 + 4 / len(tried)):
                break
        squares = torch.stack(tried)  # (draws, P, Hq)
        total = squares.sum((1, 2))
        best = int(total.argmin()) if picks else 0
        mean = float(total.mean()) / where.norm
        short = float(total[best]) / where.norm if picks else mean
        own = squares[best] if picks else squares.mean(0)
        choice = Choice(
            *(sweep.mechanism, options),
            draws=len(tried),
            tokens=where.tokens,
            any_draw=mean if draws > 1 else None,
            given=sweep.given,
        )
        if picks:
            choice = replace(choice, options=with_seed(sweep.mechanism, options, self.seed + best))
        if slow or not short <= HOPELESS * self.target:
            return replace(choice, slow=slow, error=short, low=short, high=math.inf, measured=short)
        flattered = self._selection_bias(squares.sum(-1)) if picks else 1.0
        whole = short
        if self.folded is not None:
            seeds = [best] if picks else range(len(tried))
            runs = [self.piece.error(self.make(sweep, options, draw)) for draw in seeds]
            whole = sum(runs) / len(runs)
            if random and short > 0:
                choice = replace(choice, any_draw=whole * mean / short)
        segment, deviation = where.tokens, where.deviation(own)
        if self.length > self.piece.tokens and short <= ROUNDING and not isinstance(first, Kernelised):
            # Its windows or chunks hold a whole segment, which says nothing of more tokens; halves may.
            halves = self.piece.folded(2)
            own = torch.zeros(0) if halves is None else halves.by_segment(halves.squares(first))
            short = math.inf if halves is None else float(own.sum()) / halves.norm
            segment = self.piece.tokens // 2
            deviation = math.inf if halves is None or short <= ROUNDING else halves.deviation(own)
        choice = replace(choice, tokens=self.piece.tokens, measured=flattered * whole)
        if "error" in options:
            choice = replace(choice, relative=self._relative(first))
        found = self._at_length(choice, short, segment, deviation)
        if found.meets(self.target):
            self.fastest = min(self.fastest, took)
        return found

    def _relative(self, attend: Mechanism) -> float:
        """Seconds over those of softmax attention, carried on to the length: the clusters that a query looks at grow
        with it, its exact keys hardly do, so time grows as its power 1.5, that of softmax attention as its square."""
        exact = create("softmax", self.q.shape[-1])
        mine, softmax = (min(self._seconds(one) for _ in range(2)) for one in (attend, exact))
        return mine / softmax / math.sqrt(self.length / self.piece.tokens)

    @staticmethod
    def _selection_bias(each: Tensor) -> float:
        """The bias of choosing a draw on this data, leave-one-out: the one that is best on the other segments, on the
        one left out, over the best on all; each (draws, P)."""
        total = each.sum(-1)
        least = float(total.min())
        if each.shape[1] < 2 or not 0 < least < math.inf:
            return 1.0
        others = (total.unsqueeze(-1) - each).nan_to_num(nan=math.inf)
        return max(1.0, float(each.gather(0, others.argmin(0, keepdim=True)).sum()) / least)

    def _at_length(self, choice: Choice, short: float, segment: int, deviation: float) -> Choice:
        """The error carried on to the length with its growth from `short` on a segment to the whole, never below 1. The
        interval: segments differ, and so may the growth, by half of that per factor of it. Where segments are too short
        to see any growth (an infinite `deviation`, or none at all) the error stays, with no upper end."""
        tokens, error = self.piece.tokens, choice.measured
        kept = choice.options.get("error")
        if kept is not None and self.length > tokens and error <= kept:
            return replace(choice, error=error, high=kept, extrapolated=True)
        if self.length > tokens and self.folded is None:
            deviation = math.inf
        if self.length > tokens and deviation < math.inf:
            steps = math.log(self.length / tokens) / math.log(tokens / segment)
            offset = 1e-3 * self.target  # keeps two errors that are both nothing from making a factor
            growth = max(1.0, (error + offset) / (short + offset))
            error, deviation = error * growth**steps, deviation * math.hypot(1.0, steps / 2)
            choice = replace(choice, extrapolated=True)
        high = math.inf if deviation == math.inf else error * (1 + 2 * deviation)
        return replace(choice, error=error, low=error * max(0.0, 1 - 2 * min(deviation, 1.0)), high=high)


def _unsure(exact: TimeEstimate, relative: float) -> TimeEstimate:
    return replace(exact.times(relative), low=exact.low * relative / 2, high=exact.high * relative * 2)


def with_times(plan: Plan) -> Plan:
    """A plan with the times of what meets its target, measured together or read from the table, and in their order."""
    target = limit_of(plan.target_error, plan.uniform)
    good = [choice for choice in plan.choices if choice.mechanism != "softmax" and choice.meets(target)]
    rest = [choice for choice in plan.choices if choice.mechanism != "softmax" and not choice.meets(target)]
    fixed = [choice for choice in [*good, plan.exact] if choice.relative is None]
    mechanisms = [choice.create(plan.head_dim, plan.heads, seed=0) for choice in fixed]
    costs = attention_costs(mechanisms, heads=plan.heads, is_causal=plan.is_causal, queries=plan.queries)
    *measured, exact = (replace(choice, time=cost.at(plan.longer)) for choice, cost in zip(fixed, costs, strict=True))
    assert exact.time is not None
    good = [
        *measured,
        *(replace(choice, time=_unsure(exact.time, choice.relative)) for choice in good if choice.relative is not None),
    ]
    order = sorted([*good, exact], key=lambda choice: choice.seconds / (WORTH if choice is exact else 1.0))
    return replace(plan, choices=(*order, *sorted(rest, key=lambda choice: choice.error)), exact=exact)


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
    times: bool = True,
    on_step: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Which mechanism to use for q (B, Hq, L, D), k (B, H, S, D) so that the error stays below `target_error`.

    v:            (B, H, S, E): judge the relative squared error of these outputs; without it that of the attention
                  matrix, which is the same for values of mean 0
    length:       tokens to plan for, padding not counted; None = the keys of the longest sequence. In cross attention
                  keys, with as many queries for each as there are here
    mechanisms:   names to choose from, or objects of your own; None = everything that estimates softmax attention
    time_budget:  seconds for one sequence with all heads; what takes longer is not recommended
    seed:         of everything that is drawn; the draws to choose from have this seed and those after it
    times:        False: errors alone, with the choices in no order; `planning.planner.with_times` adds them
    on_step:      called with what was just judged, how many steps are done and how many there will be; first with how
                  long it will take

    Takes seconds, more the first time on a machine: times are measured once and kept.

    >>> import torch, subquad as sq
    >>> q, k = 0.4 * torch.randn(2, 1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    >>> answer = sq.plan(q, k, target_error=0.05, length=100_000, mechanisms=["taylor"])
    >>> answer.best.mechanism, answer.best.error < 0.05
    ('taylor', True)
    """
    began = time.perf_counter()
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask, scale=scale)
    for argument, value in (("target_error", target_error), ("time_budget", time_budget)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value) and value > 0):
            raise ValueError(f"{argument} must be a positive number, got {value!r}")
    given = k.shape[2] if key_mask is None else int(key_mask.sum(1).max())
    length = given if length is None else length
    checks.check_positive("length", length)
    checks.check_positive("seed", seed, least=0)
    if mechanisms is not None and not isinstance(mechanisms, str | Mechanism):
        if not isinstance(mechanisms, Iterable):
            raise TypeError(f"mechanisms must be names or Mechanism objects, got {mechanisms!r}")
        mechanisms = list(mechanisms)
    cross = q.shape[2] != k.shape[2]
    rows = sweeps(mechanisms, is_causal=is_causal, cross=cross)
    fixed = any(sweep.given is not None and sweep.given.heads is not None for sweep in rows)
    study = _Study(
        *fewer_heads(q, k, v, length=length, keep_all=fixed),
        target=target_error,
        length=length,
        seed=seed,
        is_causal=is_causal,
        scale=scale,
        key_mask=None if key_mask is None else key_mask.cpu(),
    )
    if length > study.piece.tokens and any(row.mechanism == "multipole" and row.given is None for row in rows):
        rows.append(error_keeping(study.target))
    told = on_step or (lambda *_: None)
    steps = len(rows) + 1
    tokens, some = study.piece.tokens, study.q.shape[1]
    told(f"measuring on {tokens} tokens of {some} heads, about {_expected(study, rows):.0f} s", 0, steps)
    choices: list[Choice] = []
    for done, sweep in enumerate(rows, 1):
        found = study.cheapest(sweep)
        if found is not None:
            choices.append(found)
        told(sweep.mechanism if found is None else f"{found.label}: error {found.error:.2g}", done, steps)
    told("timing what meets the target" if times else "times are left out", steps, steps)
    answer = Plan(
        choices=tuple(choices),
        exact=Choice("softmax", {}),
        target_error=target_error,
        length=length,
        heads=q.shape[1],
        head_dim=q.shape[-1],
        time_budget=time_budget,
        is_causal=is_causal,
        uniform=study.uniform,
        criterion="output" if v is not None else "attention matrix",
        tokens=tokens,
        heads_measured=some,
        rows=study.piece.count.shape[2],
        segments=1 if study.folded is None else study.piece.tokens // study.folded.tokens,
        sequences=study.piece.sequences,
        batch=q.shape[0],
        queries=q.shape[2] / given if cross else 1.0,
    )
    return replace(with_times(answer) if times else answer, seconds=time.perf_counter() - began)


def _expected(study: _Study, rows: list[Sweep]) -> float:
    """Seconds that the plan will take, roughly: what a row of settings is a multiple of."""
    return 2.0 + RUNS * len(rows) * study.exact_seconds * min(1.0, 1024 / study.piece.tokens)
