"""How long it takes on this machine: a few measured lengths, a curve through them, and how far to trust it.

    linear      t = a + b L          kernelised and windowed mechanisms, and the layers around attention
    quadratic   t = b L + c L^2      softmax attention, strided patterns, multipole (clusters of all keys: a small c)
    power       t = c L^p            mechanisms from outside, of which nothing is known

Between two measured lengths the time is interpolated; beyond the longest one the curve speaks, fitted to relative
errors that count in proportion to length, with coefficients that are not negative, at the lengths from 256 on: shorter
ones are mostly overhead. The range given with a time holds what the fit says with any one of these points left out,
widened by the spread between runs. Points are measured once per mechanism, shape and machine and kept in `costs.json`
beside the crossovers; delete it to measure again. What is added to it later is scaled by softmax attention, timed again
beside it: a busy hour must not make one mechanism look slower than another. Times are of the CPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..mechanisms import COMBINED, MECHANISMS, create
from ..mechanisms.base import Mechanism
from .tables import measurement_key, read_json_table, write_json_table

__all__ = [
    "CostModel",
    "Points",
    "TimeEstimate",
    "attention_costs",
    "clock",
    "predict_time",
    "seconds_of",
    "time_at",
]

FILE = "costs.json"
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
FITTED = 256  # the shortest length that a curve is fitted to
ROUNDS = 3  # up to three times as many while the usual run is more than QUIET times as slow as the best
QUIET = 1.25
PATIENCE = 0.15  # seconds of one run beyond which no longer length is measured
BASES = {"linear": (0, 1), "quadratic": (1, 2)}

Points = dict[int, tuple[float, ...]]  # length -> seconds of each run


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds, and the range that the measurements allow."""

    seconds: float
    low: float
    high: float

    def __add__(self, other: TimeEstimate) -> TimeEstimate:
        return TimeEstimate(self.seconds + other.seconds, self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> TimeEstimate:
        """`factor` of these, one after the other."""
        return TimeEstimate(factor * self.seconds, factor * self.low, factor * self.high)

    @property
    def brief(self) -> str:
        """The seconds alone."""
        return f"{1e3 * self.seconds:.3g} ms" if self.seconds < 1 else f"{self.seconds:.3g} s"

    def __str__(self) -> str:
        unit, factor = ("ms", 1e3) if self.seconds < 1 else ("s", 1.0)
        return f"{factor * self.seconds:.3g} {unit} ({factor * self.low:.3g} to {factor * self.high:.3g})"


def _solve(rows: list[tuple[float, float]], target: list[float]) -> tuple[float, float]:
    """The two coefficients >= 0 for which their sum over each row is nearest to `target`: least squares."""
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab = sum(a * b for a, b in rows)
    at, bt = (sum(row[i] * t for row, t in zip(rows, target, strict=True)) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        both = ((at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant)
        if min(both) >= 0:
            return both
    # One of them would be negative: the best with that one at 0.
    single = ((at / aa, 0.0), (0.0, bt / bb))
    return min(
        single, key=lambda c: sum((c[0] * a + c[1] * b - t) ** 2 for (a, b), t in zip(rows, target, strict=True))
    )


def time_at(known: Mapping[int, float], length: int) -> float | None:
    """The time at this length: measured, or between measured lengths on both sides; None where there is no such pair.

    >>> time_at({256: 1.0, 1024: 16.0}, 512), time_at({256: 1.0, 1024: 16.0}, 2048)
    (4.0, None)
    """
    below, above = [n for n in known if n <= length], [n for n in known if n >= length]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    if low == high:
        return known[low]
    return known[low] * math.pow(known[high] / known[low], math.log(length / low) / math.log(high / low))


@dataclass(frozen=True)
class CostModel:
    """Measured points of one mechanism and the curve through them.

    >>> model = CostModel("linear", {256: (0.003, 0.0031), 1024: (0.009,), 4096: (0.033,)})
    >>> model.at(8192)
    TimeEstimate(seconds=0.065..., low=..., high=...)
    """

    form: str
    points: Points

    def _fit(self, lengths: Sequence[int]) -> Callable[[float], float]:
        seconds = [min(self.points[n]) for n in lengths]
        if len(lengths) == 1:
            power = 2.0 if self.form == "quadratic" else 1.0
            return lambda n: seconds[0] * math.pow(n / lengths[0], power)
        if self.form == "power":
            slope, start = statistics.linear_regression([math.log(n) for n in lengths], [math.log(t) for t in seconds])
            return lambda n: math.exp(start + slope * math.log(n))
        low, high = BASES[self.form]
        # A short run is mostly overhead and noise: what is asked for lies at the long end.
        counts = [n / max(lengths) for n in lengths]
        rows = [(c * n**low / t, c * n**high / t) for c, n, t in zip(counts, lengths, seconds, strict=True)]
        first, second = _solve(rows, counts)
        return lambda n: first * n**low + second * n**high

    @property
    def spread(self) -> float:
        """How much slower the usual run was than the best: the median over the points of median / best - 1."""
        return statistics.median(statistics.median(runs) / min(runs) - 1.0 for runs in self.points.values())

    def at(self, length: int) -> TimeEstimate:
        """The time at this length; below the shortest measured one that one's, since what is left is overhead."""
        shortest = min(self.points)
        if length < shortest:
            known = min(self.points[shortest])
            return TimeEstimate(known, known * length / shortest / (1.0 + self.spread), known * (1.0 + self.spread))
        lengths = sorted(n for n in self.points if n >= FITTED) or sorted(self.points)
        inside = time_at({n: min(runs) for n, runs in self.points.items()}, length)
        found = [] if inside is None else [inside]
        if length >= lengths[0]:
            found.append(self._fit(lengths)(length))
        if inside is None and len(lengths) > 1:
            found += [self._fit([n for n in lengths if n != left])(length) for left in lengths]
        return TimeEstimate(found[0], min(found) / (1.0 + self.spread), max(found) * (1.0 + self.spread))


def _form(attend: Mechanism) -> str:
    if attend.quadratic:
        return "quadratic"
    return "linear" if {**MECHANISMS, **COMBINED}.get(attend.name) is type(attend) else "power"


def clock() -> float:
    """Seconds, to be subtracted: of the processor where one thread computes, so that what other processes take does not
    count; with several threads, of the wall."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(call: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor], training: bool) -> float:
    """Seconds of one call with tensors of the content of `inputs`; with the backward where `training`."""
    inputs = [x.detach().requires_grad_(training) for x in inputs]
    start = clock()
    with torch.set_grad_enabled(training):
        out = call(inputs)
        if training:
            out.sum().backward()
    return clock() - start


def _measure(
    calls: Sequence[Callable[[Sequence[Tensor]], Tensor]],
    make: Callable[[int], Sequence[Tensor]],
    training: bool,
) -> list[Points]:
    """Points of several calls, run in turn so that a busy moment of the machine meets all of them."""
    points: list[Points] = [{} for _ in calls]
    waiting = list(range(len(calls)))
    for length in LENGTHS:
        inputs = make(length)
        runs: list[list[float]] = [[] for _ in calls]
        for turn in range(3 * ROUNDS + 1):
            for i in waiting:
                seconds = seconds_of(calls[i], inputs, training)
                if turn:  # the first round warms up
                    runs[i].append(seconds)
            # On a busy machine the best of a few runs is still luck.
            if turn >= ROUNDS and all(statistics.median(runs[i]) <= QUIET * min(runs[i]) for i in waiting):
                break
        for i in waiting:
            points[i][length] = tuple(runs[i])
        waiting = [i for i in waiting if min(runs[i]) < PATIENCE]
    return points


def _stored(value: Any) -> Points | None:
    try:
        points = {int(length): tuple(float(s) for s in runs) for length, runs in value.items()}
    except (AttributeError, TypeError, ValueError):
        return None
    # Earlier versions did not measure short lengths.
    return points if LENGTHS[0] in points and all(runs and min(runs) > 0 for runs in points.values()) else None


def _cached(keys: Sequence[str], measure: Callable[[list[int]], list[Points]]) -> list[Points]:
    """Points by key, those missing measured together and kept."""
    table = read_json_table(FILE)
    found = [_stored(table.get(key)) for key in keys]
    missing = [i for i, points in enumerate(found) if points is None]
    if missing:
        for i, points in zip(missing, measure(missing), strict=True):
            found[i] = points
        fresh = {keys[i]: {str(n): list(runs) for n, runs in (found[i] or {}).items()} for i in missing}
        write_json_table(FILE, {**read_json_table(FILE), **fresh})
    return [points for points in found if points is not None]


def _as_on(stored: Points, again: Points, found: list[Points]) -> list[Points]:
    """Points `found` today as they would have been when `stored` was measured, of which `again` is today's run."""
    common = sorted(stored.keys() & again.keys())
    if not common:
        return found
    # The median: at single lengths one of the two may have met a busy moment.
    ratio = statistics.median(min(stored[n]) / min(again[n]) for n in common)
    return [{n: tuple(ratio * seconds for seconds in runs) for n, runs in points.items()} for points in found]


def _ready(attend: Mechanism, heads: int, kv_heads: int) -> Mechanism:
    """A twin of `attend` with so many heads that can run on made-up data: what it costs does not depend on the data."""
    try:
        config = attend.config()
    except TypeError:  # it holds a callable
        return attend
    name = config.pop("mechanism")
    if MECHANISMS.get(name) is not type(attend):
        return attend
    made = create(name, **{**config, "heads": heads, "kv_heads": kv_heads})
    far = getattr(made, "far", made)
    if getattr(getattr(far, "feature_map", None), "calibration", None) is not None:
        generator = torch.Generator().manual_seed(0)
        q, k = (_drawn(1, n, 4 * made.head_dim, made.head_dim, generator) for n in (heads, kv_heads))
        made.calibrate(q, k)
    return made


def _drawn(batch: int, heads: int, length: int, width: int, generator: torch.Generator) -> Tensor:
    return 0.5 * torch.randn(batch, heads, length, width, generator=generator)


def attention_costs(
    mechanisms: Sequence[Mechanism],
    *,
    heads: int = 8,
    kv_heads: int | None = None,
    is_causal: bool = False,
    training: bool = False,
    queries: float = 1.0,
) -> list[CostModel]:
    """The cost of each mechanism with `heads` heads of one sequence; measured in turn where it is not known yet.

    queries: per key; lengths are those of the longer of the two
    """
    kv_heads = heads if kv_heads is None else kv_heads
    keys = []
    for attend in mechanisms:
        try:
            config = attend.config()
        except TypeError:
            config = {"mechanism": attend.name, "options": repr(attend)}
        keys.append(measurement_key(config, heads, is_causal, training, kv_heads, queries))

    def measure(missing: list[int]) -> list[Points]:
        # Times of different days can only be compared through something that ran on both: softmax attention.
        known = next((i for i, attend in enumerate(mechanisms) if attend.name == "softmax" and i not in missing), None)
        twins = [_ready(mechanisms[i], heads, kv_heads) for i in missing]
        if known is not None:
            twins.append(_ready(mechanisms[known], heads, kv_heads))
        calls = [lambda x, attend=attend: attend(*x, is_causal=is_causal) for attend in twins]
        widths = {attend.head_dim for attend in twins}
        if len(widths) > 1:
            raise ValueError(f"mechanisms of one comparison must share head_dim, got {sorted(widths)}")
        width = widths.pop()
        generator = torch.Generator().manual_seed(0)
        query, key = (heads, min(1.0, queries)), (kv_heads, min(1.0, 1 / queries))
        found = _measure(
            calls,
            lambda n: [_drawn(1, h, max(1, round(share * n)), width, generator) for h, share in (query, key, key)],
            training,
        )
        stored = None if known is None else _stored(read_json_table(FILE).get(keys[known]))
        return found if stored is None else _as_on(stored, found.pop(), found)

    points = _cached(keys, measure)
    return [CostModel(_form(attend), p) for attend, p in zip(mechanisms, points, strict=True)]


def _block_cost(dim: int, mlp_ratio: float, training: bool) -> CostModel:
    """What a transformer layer does besides attention: two norms, four projections, a two-layer MLP."""
    hidden = round(mlp_ratio * dim)

    def measure(missing: list[int]) -> list[Points]:
        with torch.random.fork_rng(devices=[]):
            norms = [nn.LayerNorm(dim) for _ in range(2)]
            mix, back = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            up, down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

        def layer(inputs: Sequence[Tensor]) -> Tensor:
            x = inputs[0]
            x = x + back(mix(norms[0](x))[..., :dim])
            return x + down(torch.nn.functional.gelu(up(norms[1](x))))  # type: ignore[no-any-return]

        generator = torch.Generator().manual_seed(0)
        return _measure([layer], lambda length: [torch.randn(1, length, dim, generator=generator)], training)

    key = measurement_key({"layer": "without attention", "dim": dim, "hidden": hidden}, 1, False, training)
    return CostModel("linear", _cached([key], measure)[0])


def predict_time(
    mechanism: str | Mechanism,
    length: int,
    *,
    layers: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    is_causal: bool = False,
    training: bool = False,
    mlp_ratio: float = 4.0,
    rest_per_token: float | None = None,
    **options: Any,
) -> TimeEstimate:
    """How long a transformer with this mechanism would take at `length`, here, with the range to expect.

        batch x layers x (attention(length) + the rest of a layer(length))

    The rest of a layer is measured as well (norms, projections, an MLP of `mlp_ratio`), or given in seconds per token
    and layer as `rest_per_token` (0 for attention alone). Embeddings and the output layer are not counted.

    >>> from subquad.planning.cost import predict_time
    >>> estimate = predict_time("linear", 100_000, heads=1, head_dim=8, layers=2)
    >>> 0 < estimate.low <= estimate.seconds <= estimate.high
    True
    """
    for argument, value in (("length", length), ("layers", layers), ("heads", heads), ("batch", batch)):
        checks.check_positive(argument, value)
    attend = create(mechanism, head_dim, **({} if isinstance(mechanism, Mechanism) else {"heads": heads}), **options)
    attention = attention_costs([attend], heads=heads, is_causal=is_causal, training=training)[0].at(length)
    if rest_per_token is None:
        rest = _block_cost(heads * head_dim, mlp_ratio, training).at(length)
    elif not math.isfinite(rest_per_token) or rest_per_token < 0:
        raise ValueError(f"rest_per_token must be seconds per token and layer, 0 or more, got {rest_per_token!r}")
    else:
        rest = TimeEstimate(*[rest_per_token * length] * 3)
    return (attention + rest).times(batch * layers)
