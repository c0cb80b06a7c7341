"""Is the plan right? Predicted against measured errors, and the first choice against an exhaustive search.

    python benchmarks/planning.py --json results/planning.json

B1 H2 float32; KINDS are the inputs, with their length and head width. Targets are set by rule before anything is
measured: a fifth and a fiftieth of the error of uniform attention on that input. For every kind and target the plan is
made on one sample; then, on fresh data of the same kind with other draws, its first choice must have an error of at
most 1.2 times the target and take at most 1.5 times as long as the fastest of all settings that meet it there (softmax
attention is one of them). That one is found by measuring the error of every setting in the order of their times, until
one meets the target: what comes later is slower. Times are measured within this run, in turn, once for each length,
width and form, because they do not depend on the data.

`predicted` compares the closed form, where it calls itself reliable, with the mean of as many draws as make its
standard error 5 %, at most 60.
"""

import argparse
import collections
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.planning.candidates import Ladder, ladders
from subquad.planning.measuring import Piece
from subquad.planning.prediction import calibrated

H = 2
FRACTIONS = (5, 50)  # of the error of uniform attention: the targets
PREDICTED_TOKENS = 768
Pair = tuple[Tensor, Tensor]
Make = Callable[[Tensor, Tensor, torch.Generator], Pair]  # standard normal q, k and what belongs to the kind -> q, k


def isotropic(size: float) -> Make:
    return lambda q, k, own: (size * q, size * k)


def weighted(q: Tensor, k: Tensor, weights: Tensor, deviation: float) -> Pair:
    """Scores q.k / sqrt(D) of this standard deviation."""
    factor = (deviation * q.shape[-1] ** 0.5 / float(weights.pow(4).sum().sqrt())) ** 0.5
    return factor * weights * q, factor * weights * k


def spectrum(power: float, deviation: float) -> Make:
    return lambda q, k, own: weighted(q, k, torch.arange(1, q.shape[-1] + 1).float() ** -power, deviation)


def rank(directions: int, deviation: float) -> Make:
    return lambda q, k, own: weighted(q, k, (torch.arange(q.shape[-1]) < directions).float(), deviation)


def shifted(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    means = torch.randn(2, 1, H, 1, q.shape[-1], generator=own)
    means = 3.0 * means / means.norm(dim=-1, keepdim=True)
    return 0.4 * q + means[0], 0.4 * k + means[1]


def encoder(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """As in trained encoders: small norms that differ between tokens, common means, a falling spectrum."""
    weights = torch.arange(1, q.shape[-1] + 1).float() ** -0.5
    means = 0.2 * torch.randn(2, 1, H, 1, q.shape[-1], generator=own)
    lengths = torch.exp(0.15 * torch.randn(2, 1, H, q.shape[2], 1, generator=own))
    q, k = weighted(q, k, weights, 0.4)
    return lengths[0] * q + means[0], lengths[1] * k + means[1]


def neighbours(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """A smooth path through space: every token sees those beside it."""
    turns = 0.02 + torch.rand(1, H, 1, q.shape[-1] // 2, generator=own)
    angles = torch.arange(q.shape[2])[:, None] * turns
    path = 2.6 * torch.cat([angles.cos(), angles.sin()], -1)
    return path + 0.1 * q, path + 0.1 * k


def clusters(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    centres = 1.3 * torch.randn(H, 20, q.shape[-1], generator=own)
    member = torch.randint(0, 20, (q.shape[2],), generator=own)
    return centres[:, member] + 0.3 * q, 0.6 * k


def uneven(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    size = torch.tensor([0.2, 0.8]).view(1, H, 1, 1)
    return size * q, size * k


@dataclasses.dataclass(frozen=True)
class Kind:
    """A law of inputs; what belongs to the kind (means, centres, paths) is the same for every seed."""

    make: Make
    head_dim: int = 64
    is_causal: bool = False
    length: int = 4096

    @property
    def clock(self) -> tuple[int, int, bool]:
        return self.length, self.head_dim, self.is_causal

    def draw(self, seed: int, length: int | None = None) -> Pair:
        generator = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(12345)
        shape = (1, H, self.length if length is None else length, self.head_dim)
        return self.make(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), own)


KINDS: dict[str, Kind] = {
    "isotropic 0.3": Kind(isotropic(0.3)),
    "isotropic 0.7": Kind(isotropic(0.7)),
    "isotropic 1.2": Kind(isotropic(1.2)),
    "shifted": Kind(shifted),
    "like an encoder": Kind(encoder),
    "spectrum 1/2, scores 0.6": Kind(spectrum(0.5, 0.6)),
    "spectrum 1, scores 1": Kind(spectrum(1.0, 1.0)),
    "spectrum 1, scores 2": Kind(spectrum(1.0, 2.0)),
    "2 directions, scores 1.5": Kind(rank(2, 1.5)),
    "4 directions, scores 1": Kind(rank(4, 1.0)),
    "neighbours": Kind(neighbours),
    "clusters of queries": Kind(clusters),
    "uneven heads": Kind(uneven),
    "D32 isotropic 0.5": Kind(isotropic(0.5), 32),
    "D32 spectrum 1, scores 1.5": Kind(spectrum(1.0, 1.5), 32),
    "D16 isotropic 0.8": Kind(isotropic(0.8), 16),
    "D16 spectrum 1, scores 1": Kind(spectrum(1.0, 1.0), 16),
    "causal isotropic 0.5": Kind(isotropic(0.5), is_causal=True),
    "causal spectrum 1, scores 2": Kind(spectrum(1.0, 2.0), is_causal=True),
    "causal neighbours": Kind(neighbours, is_causal=True),
    "16k spectrum 1, scores 1": Kind(spectrum(1.0, 1.0), length=16384),
    "16k 2 directions, scores 1.5": Kind(rank(2, 1.5), length=16384),
}
SOFTMAX = "softmax []"


def label(mechanism: str, options: dict[str, Any]) -> str:
    return f"{mechanism} {sorted(options.items(), key=str)}"


def settings(is_causal: bool) -> dict[str, tuple[Ladder, dict[str, Any]]]:
    return {
        label(ladder.mechanism, options): (ladder, options)
        for ladder in ladders(None, is_causal=is_causal, cross=False)
        for options in ladder.steps
    }


def make(ladder: Ladder, options: dict[str, Any], sample: Pair, seed: int) -> Any:
    options = dict(options)
    if isinstance(options.get("far"), dict) and options["far"]["mechanism"] == "performer":
        options["far"] = {**options["far"], "seed": seed}
    if "seed" in sq.describe(ladder.mechanism)["options"]:
        options["seed"] = seed
    return calibrated(sq.create(ladder.mechanism, sample[0].shape[-1], H, **options), *sample, None)


def times(length: int, head_dim: int, is_causal: bool, runs: int) -> dict[str, float]:
    """Best time of every setting, and of softmax."""
    q, k, v = 0.5 * torch.randn(3, 1, H, length, head_dim, generator=torch.Generator().manual_seed(0))
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, (ladder, options) in settings(is_causal).items():
        attend = make(ladder, options, (q, k), 0)
        calls[name] = lambda attend=attend: attend(q, k, v, is_causal=is_causal)
    softmax = sq.create("softmax", head_dim)
    calls[SOFTMAX] = lambda: softmax(q, k, v, is_causal=is_causal)
    with torch.no_grad():
        found = {name: timing.best for name, timing in interleave(calls, runs=runs, seconds=20.0).items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


class Errors:
    """Errors on fresh data, each measured once."""

    def __init__(self, kind: Kind, sample: Pair, draws: int) -> None:
        self.sample, self.draws = sample, draws
        self.every = settings(kind.is_causal)
        self.piece = Piece(
            *kind.draw(2), None, tokens=kind.length, is_causal=kind.is_causal, scale=None, key_mask=None, seed=7
        )
        self.found: dict[str, float] = {SOFTMAX: 0.0}

    def of(self, name: str) -> float:
        if name not in self.found:
            ladder, options = self.every[name]
            attend = make(ladder, options, self.sample, 1000)
            far = getattr(attend, "far", attend)
            random = "seed" in attend.options() or "seed" in far.options()
            self.found[name] = self.piece.error(attend, draws=self.draws if random else 1)
        return self.found[name]

    def fastest(self, target: float, clock: dict[str, float]) -> str:
        """Of all settings, the first in the order of their times that meets the target."""
        return next(name for name in clock if self.of(name) <= target)


def predictions(kind: Kind) -> list[dict[str, Any]]:
    """Closed form and measurement of every random-feature map, at a small and a large number of features."""
    sample, fresh = kind.draw(1, PREDICTED_TOKENS), kind.draw(2, PREDICTED_TOKENS)
    form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": None, "key_mask": None}
    piece = Piece(*fresh, None, tokens=PREDICTED_TOKENS, seed=7, **form)
    rows = []
    for name, (ladder, options) in settings(kind.is_causal).items():
        if not ladder.random_features or options["num_features"] not in (64, 512):
            continue
        attend = make(ladder, options, sample, 1000)
        predicted = sq.predict_error(*fresh, attend, is_causal=kind.is_causal, max_queries=32, max_keys=256)
        row: dict[str, Any] = {"setting": name, "predicted": predicted.error, "reliable": predicted.reliable}
        if predicted.reliable:
            found: list[float] = []
            while len(found) < 60:
                found += piece.errors(attend, draws=10)
                attend.redraw()
                mean = statistics.fmean(found)
                error = statistics.stdev(found) / math.sqrt(len(found)) / mean
                if error <= 0.05:
                    break
            row |= {"measured": mean, "standard_error": error, "ratio": mean / predicted.error, "draws": len(found)}
        rows.append(row)
    return rows


def judge(kind: Kind, fraction: int, target: float, errors: Errors, clock: dict[str, float]) -> dict[str, Any]:
    start = time.perf_counter()
    answer = sq.plan(*errors.sample, target_error=target, length=kind.length, is_causal=kind.is_causal)
    seconds = time.perf_counter() - start
    best = answer.best or answer.exact  # nothing meets the target: the plan names softmax
    name = SOFTMAX if best.mechanism == "softmax" else label(best.mechanism, best.options)
    fastest = errors.fastest(target, clock)
    row = {
        "fraction": fraction, "target": target, "uniform": answer.baselines["uniform"], "plan_seconds": seconds,
        "first": best.label, "verdict": answer.verdict, "attainable": answer.attainable, "fastest": fastest,
        "error_over_target": errors.of(name) / target, "time_over_fastest": clock[name] / clock[fastest],
        "softmax_over_first": clock[SOFTMAX] / clock[name],
    }  # fmt: skip
    return {**row, "good": row["error_over_target"] <= 1.2 and row["time_over_fastest"] <= 1.5}


def study(name: str, kind: Kind, clock: dict[str, float], draws: int) -> dict[str, Any]:
    sample = kind.draw(1)
    errors = Errors(kind, sample, draws)
    # The targets come from the input alone, before any mechanism has been looked at.
    uniform = sq.predict_error(*sample, "taylor", degree=1, is_causal=kind.is_causal).baselines["uniform"]
    rows = [judge(kind, fraction, uniform / fraction, errors, clock) for fraction in FRACTIONS]
    record = {"kind": name, "length": kind.length, "head_dim": kind.head_dim, "is_causal": kind.is_causal}
    return {**record, "plans": rows, "predictions": predictions(kind)}


def show(record: dict[str, Any]) -> None:
    ratios = [row["ratio"] for row in record["predictions"] if row["reliable"]]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
    for i, row in enumerate(record["plans"]):
        predicted = f"{len(ratios):2d} of {len(record['predictions'])}: {spread}" if i == 0 else ""
        print(
            f"{record['kind'] if i == 0 else '':29s} {row['target']:8.2g} {row['error_over_target']:6.2f} "
            f"{row['time_over_fastest']:6.2f} {row['softmax_over_first']:7.1f}x  {predicted:24s} "
            f"{'good' if row['good'] else 'BAD '} {row['first']}"
            + ("" if row["good"] else f"   [fastest: {row['fastest']}]"),
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kinds", default=None, help="names separated by ; (all of them if absent)")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kinds = arguments.kinds.split(";") if arguments.kinds else list(KINDS)
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--kinds: {unknown} not among {list(KINDS)}")
    start = time.perf_counter()
    record: dict[str, Any] = {"machine": machine(), "heads": H, "complete": False, "kinds": []}
    clocks: dict[tuple[int, int, bool], dict[str, float]] = {}
    print(f"{'kind':29s} {'target':>8s} {'error':>6s} {'time':>6s} {'softmax':>8s}  {'predicted':24s} verdict")
    print(
        f"{'':29s} {'':8s} {'/target':>6s} {'/best':>6s} {'/time':>8s}  {'reliable: meas./pred.':24s} and first choice"
    )
    try:
        for name in kinds:
            kind = KINDS[name]
            if kind.clock not in clocks:
                clocks[kind.clock] = times(*kind.clock, arguments.runs)
            record["kinds"].append(study(name, kind, clocks[kind.clock], arguments.draws))
            show(record["kinds"][-1])
            if arguments.json:
                write_json(arguments.json, record)
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    record |= {"complete": True, "seconds": time.perf_counter() - start}
    if arguments.json:
        write_json(arguments.json, record)
    plans = [row for kind in record["kinds"] for row in kind["plans"]]
    every = [row for kind in record["kinds"] for row in kind["predictions"]]
    ratios = [row for row in every if row["reliable"]]
    within = sum(1 / 1.2 <= row["ratio"] <= 1.2 for row in ratios)
    good = sum(row["good"] for row in plans)
    whole = sum(all(row["good"] for row in kind["plans"]) for kind in record["kinds"])
    named = dict(collections.Counter(row["first"].split(" ")[0] for row in plans))
    print(f"\n{good} of {len(plans)} plans good, both targets on {whole} of {len(record['kinds'])} kinds")
    print(f"first choices: {', '.join(f'{name} {count}' for name, count in named.items())}")
    print(f"{within} of {len(ratios)} reliable predictions within 20 % ({len(every)} made); {record['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
