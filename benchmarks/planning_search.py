"""The exhaustive search of `planning.py`: the time of every setting, and its error on fresh inputs."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from planning_kinds import Kind, Sample
from torch import Tensor

import subquad as sq
from subquad.lab import interleave
from subquad.planning.candidates import Ladder, ladders
from subquad.planning.judging import keeps_its_draw, seeds_tried, with_seed
from subquad.planning.measuring import Piece
from subquad.planning.prediction import calibrated
from subquad.planning.recommendation import Choice

FRESH = (2, 3, 4, 5)  # seeds
MOST_DRAWS = 6  # of each fresh input
MOST_SCORES = 1 << 23  # of each input: 1024 rows of 2 heads of 4096 tokens, with the tenth of largest norm
HOPELESS = 1.5  # times the target, of the draw that is best on the sample: the mean over draws is no better
SOFTMAX = "softmax []"


def without_seed(options: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in options.items() if name != "seed"}
    return {name: without_seed(value) if isinstance(value, dict) else value for name, value in kept.items()}


def label(mechanism: str, options: dict[str, Any]) -> str:
    return f"{mechanism} {sorted(without_seed(options).items(), key=str)}"


def settings(is_causal: bool) -> dict[str, tuple[Ladder, dict[str, Any]]]:
    return {
        label(ladder.mechanism, options): (ladder, options)
        for ladder in ladders(None, is_causal=is_causal, cross=False)
        for options in ladder.steps
    }


def make(ladder: Ladder, options: dict[str, Any], sample: Sample, seed: int) -> Any:
    q, k, _ = sample
    own = with_seed(ladder.mechanism, options, seed)
    return calibrated(sq.create(ladder.mechanism, q.shape[-1], q.shape[1], k.shape[1], **own), q, k, None)


def times(kind: Kind, runs: int) -> dict[str, float]:
    """Best time of every setting, and of softmax, from fast to slow."""
    generator = torch.Generator().manual_seed(0)
    shape = (kind.length, kind.head_dim)
    q = 0.5 * torch.randn(1, kind.heads, *shape, generator=generator)
    k, v = 0.5 * torch.randn(2, 1, kind.kv_heads, *shape, generator=generator)
    softmax = sq.create("softmax", kind.head_dim)
    calls: dict[str, Callable[[], Tensor]] = {SOFTMAX: lambda: softmax(q, k, v, is_causal=kind.is_causal)}
    for name, (ladder, options) in settings(kind.is_causal).items():
        attend = make(ladder, options, (q, k, None), 0)
        calls[name] = lambda attend=attend: attend(q, k, v, is_causal=kind.is_causal)
    with torch.no_grad():
        found = {name: timing.best for name, timing in interleave(calls, runs=1, warmup=0).items()}
        # What is far slower than softmax attention is no answer, and needs no second run.
        near = {name: call for name, call in calls.items() if found[name] <= 2 * found[SOFTMAX]}
        again = interleave(near, runs=runs, warmup=0)
    found |= {name: min(timing.best, found[name]) for name, timing in again.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


class Errors:
    """Errors on fresh inputs, each draw measured once."""

    def __init__(self, kind: Kind, sample: Sample) -> None:
        self.sample = sample
        self.every = settings(kind.is_causal)
        form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": kind.scale, "key_mask": None, "seed": 7}

        def piece(inputs: Sample) -> Piece:
            q, k, v = inputs
            tokens = kind.length * q.shape[0]
            return Piece(q, k, v, tokens=tokens, most_scores=q.shape[0] * MOST_SCORES, **form)

        self.seen = piece(sample)
        self.pieces = [piece(kind.draw(seed)) for seed in FRESH]
        self.found: dict[str, list[float]] = {SOFTMAX: [0.0]}
        self.made: dict[str, Any] = {}
        self.tries: dict[str, list[float]] = {}  # errors on the sample, by seed
        self.picked: dict[str, float] = {}

    def _more(self, name: str) -> bool:
        """One more draw on every fresh input; False if there is nothing more to learn."""
        if name == SOFTMAX:
            return False
        if name not in self.made:
            self.made[name] = make(*self.every[name], self.sample, 1000)
            self.found[name] = []
        else:
            self.made[name].redraw()
        attend = self.made[name]
        if len(self.found[name]) >= len(FRESH) * (MOST_DRAWS if seeds_tried(attend) > 1 else 1):
            return False
        self.found[name] += [piece.error(attend) for piece in self.pieces]
        return True

    def of(self, choice: Choice) -> float:
        """The draw that was recommended, as it is; of clusters and buckets, which have none, the mean over draws."""
        q, k, _ = self.sample
        attend = choice.create(q.shape[-1], q.shape[1], k.shape[1])
        if not keeps_its_draw(attend):
            name = label(choice.mechanism, choice.options)
            while self._more(name):
                pass
            return statistics.fmean(self.found[name])
        attend = calibrated(attend, q, k, None)
        return statistics.fmean(piece.error(attend) for piece in self.pieces)

    def _picked_meets(self, name: str, target: float) -> bool:
        """Whether the draw that is best on the sample meets the target on the fresh inputs."""
        if name not in self.picked:
            ladder, options = self.every[name]
            tries = self.tries.setdefault(name, [])
            count = seeds_tried(make(ladder, options, self.sample, 0))
            while len(tries) < count:
                # One draw five times too large, two three times, four twice.
                if tries and min(tries) > target * (1 + 4 / len(tries)):
                    return False
                tries.append(self.seen.error(make(ladder, options, self.sample, len(tries))))
            best = make(ladder, options, self.sample, min(range(count), key=tries.__getitem__))
            self.picked[name] = statistics.fmean(piece.error(best) for piece in self.pieces)
        return self.picked[name] <= target

    def _mean_meets(self, name: str, target: float) -> bool:
        """Whether the mean over draws is within the target; no more draws than it takes."""
        while True:
            found = self.found.get(name, [])
            if found and min(found) > 2 * target:
                return False
            if len(found) >= 12:
                error = 2 * statistics.stdev(found) / math.sqrt(len(found))
                if abs(statistics.fmean(found) - target) > 1.5 * error:
                    break
            if not self._more(name):
                break
        return statistics.fmean(self.found[name]) <= target

    def fastest(self, target: float, clock: dict[str, float]) -> tuple[str, str]:
        """Of all settings in the order of their times, the first whose mean over draws meets the target, and the first
        that meets it with the draw that is best on the sample."""
        drawn = None
        for name in clock:
            if name == SOFTMAX:
                return name, drawn or name
            if self._picked_meets(name, target):
                drawn = drawn or name
            if self.picked.get(name, math.inf) <= HOPELESS * target and self._mean_meets(name, target):
                return name, drawn or name
        raise AssertionError("softmax attention meets every target")
