"""Is the plan right? Predicted against measured errors, and the first choice against an exhaustive search.

    python benchmarks/planning.py --json results/planning.json

B1 H4 D64 float32. For every kind of input: the plan's first choice (made on one sample), its error measured on fresh
data of the same kind with other draws, and the fastest of all settings whose error on that fresh data meets the target,
found by measuring every one of them. Times are measured at the length of the data, once for all kinds (they do not
depend on the data), in turn. A plan is good where its first choice has an error of at most 1.2 times the target and
takes at most 1.5 times as long as the fastest setting. `predicted` compares the closed form with the same measurements
where it calls itself reliable.
"""

import argparse
import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.planning.candidates import Ladder, ladders
from subquad.planning.measuring import Piece

H, D = 4, 64


def spectrum(power: float) -> Tensor:
    return torch.arange(1, D + 1).float() ** -power


def sharp(q: Tensor, k: Tensor, weights: Tensor, deviation: float) -> tuple[Tensor, Tensor]:
    """Scores q.k / sqrt(D) of this standard deviation."""
    factor = (deviation * D**0.5 / float(weights.pow(4).sum().sqrt())) ** 0.5
    return factor * weights * q, factor * weights * k


def kind_of_input(kind: str, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor | None, bool]:
    """q, k, v or None, is_causal. What belongs to the kind (means, centres, paths) is the same for every seed."""
    own = torch.Generator().manual_seed(12345)
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, H, length, D, generator=generator)
    v: Tensor | None = None
    causal = kind.startswith("causal")
    kind = kind.removeprefix("causal ")
    if kind.startswith("isotropic"):
        size = float(kind.split()[1])
        q, k = size * q, size * k
    elif kind == "shifted":
        means = torch.randn(2, 1, H, 1, D, generator=own)
        means = 3.0 * means / means.norm(dim=-1, keepdim=True)
        q, k = 0.4 * q + means[0], 0.4 * k + means[1]
    elif kind.startswith("spectrum"):
        _, power, deviation = kind.split()
        q, k = sharp(q, k, spectrum(float(power)), float(deviation))
    elif kind.startswith("rank"):
        _, rank, deviation = kind.split()
        q, k = sharp(q, k, (torch.arange(D) < int(rank)).float(), float(deviation))
    elif kind == "neighbours":
        angles = torch.arange(length)[:, None] * (0.02 + torch.rand(1, H, 1, D // 2, generator=own))
        path = 2.6 * torch.cat([angles.cos(), angles.sin()], -1)
        q, k = path + 0.1 * q, path + 0.1 * k
    elif kind == "clusters":
        centres = 1.3 * torch.randn(H, 20, D, generator=own)
        member = torch.randint(0, 20, (length,), generator=generator)
        q, k = centres[:, member] + 0.3 * q, 0.6 * k
    elif kind == "uneven heads":
        size = torch.tensor([0.1, 0.3, 0.5, 0.8]).view(1, H, 1, 1)
        q, k = size * q, size * k
    elif kind == "values":
        q, k = 0.6 * q, 0.6 * k
        v = torch.randn(1, H, length, D, generator=generator) + 0.05 * torch.randn(1, H, 1, D, generator=own)
    else:
        raise ValueError(f"kind={kind!r} is not known")
    return q, k, v, causal


KINDS: dict[str, float] = {  # with the target
    "isotropic 0.3": 0.004,
    "isotropic 0.5": 0.05,
    "isotropic 0.7": 0.05,
    "isotropic 1.0": 0.1,
    "isotropic 1.5": 0.1,
    "shifted": 0.02,
    "spectrum 0.5 0.6": 0.02,
    "spectrum 1 1.0": 0.1,
    "spectrum 1 2.0": 0.2,
    "rank 2 1.5": 0.1,
    "rank 4 1.0": 0.05,
    "neighbours": 0.1,
    "clusters": 0.05,
    "uneven heads": 0.05,
    "values": 0.01,
    "causal isotropic 0.5": 0.05,
    "causal spectrum 1 2.0": 0.2,
    "causal neighbours": 0.1,
}


def label(mechanism: str, options: dict[str, Any]) -> str:
    return f"{mechanism} {sorted(options.items(), key=str)}"


def make(ladder: Ladder, options: dict[str, Any], sample: tuple[Tensor, Tensor], seed: int) -> Any:
    options = dict(options)
    if isinstance(options.get("far"), dict) and options["far"]["mechanism"] == "performer":
        options["far"] = {**options["far"], "seed": seed}
    if "seed" in sq.describe(ladder.mechanism)["options"]:
        options["seed"] = seed
    attend = sq.create(ladder.mechanism, D, H, **options)
    far = getattr(attend, "far", attend)
    if getattr(getattr(far, "feature_map", None), "calibration", None) is not None:
        attend.calibrate(*sample)
    return attend


def times(length: int, is_causal: bool, runs: int) -> dict[str, float]:
    """Best time of every setting at this length, and of softmax."""
    q, k, v = 0.5 * torch.randn(3, 1, H, length, D)
    calls = {}
    for ladder in ladders(None, is_causal=is_causal, cross=False):
        for options in ladder.steps:
            attend = make(ladder, options, (q, k), 0)
            calls[label(ladder.mechanism, options)] = lambda attend=attend: attend(q, k, v, is_causal=is_causal)
    softmax = sq.create("softmax", D)
    calls["softmax []"] = lambda: softmax(q, k, v, is_causal=is_causal)
    with torch.no_grad():
        return {name: timing.best for name, timing in interleave(calls, runs=runs, seconds=120.0).items()}


def study(kind: str, target: float, length: int, clock: dict[str, float], draws: int) -> dict[str, Any]:
    q, k, v, is_causal = kind_of_input(kind, length, seed=1)
    start = time.perf_counter()
    answer = sq.plan(q, k, v, target_error=target, length=length, is_causal=is_causal)
    seconds = time.perf_counter() - start
    fresh_q, fresh_k, fresh_v, _ = kind_of_input(kind, length, seed=2)
    form: dict[str, Any] = {"is_causal": is_causal, "scale": None, "key_mask": None, "seed": 7}
    piece = Piece(fresh_q, fresh_k, fresh_v, tokens=length, **form)
    errors: dict[str, float] = {"softmax []": 0.0}
    ratios = []
    for ladder in ladders(None, is_causal=is_causal, cross=False):
        for options in ladder.steps:
            name = label(ladder.mechanism, options)
            attend = make(ladder, options, (q, k), 1000)
            random = ladder.mechanism != "taylor" and "seed" in sq.describe(ladder.mechanism)["options"]
            errors[name] = piece.error(attend, draws=draws if random else 1, enough=2 * target)
            if ladder.random_features and options["num_features"] in (64, 256, 1024):
                prediction = sq.predict_error(
                    fresh_q, fresh_k, attend, v=fresh_v, is_causal=is_causal, max_queries=24, max_keys=256
                )
                if prediction.reliable:
                    predicted = prediction.error if v is None else prediction.output_error
                    ratios.append(errors[name] / predicted)
    good = {name: clock[name] for name, error in errors.items() if error <= target and name != "softmax []"}
    beats = {name: t for name, t in good.items() if errors[name] < answer.baselines["uniform"]}
    fastest = min({**beats, "softmax []": clock["softmax []"]}.items(), key=lambda item: item[1])
    best = answer.best
    row: dict[str, Any] = {
        "kind": kind,
        "target": target,
        "plan_seconds": seconds,
        "uniform": answer.baselines["uniform"],
        "verdict": answer.verdict,
        "first": None if best is None else best.label,
        "ratios": ratios,
        "attainable": bool(beats),
        "fastest": fastest[0],
    }
    if best is None:
        # Right if nothing else meets the target: softmax is what the plan names.
        row["error_over_target"], row["time_over_fastest"] = 0.0, clock["softmax []"] / fastest[1]
    else:
        name = label(best.mechanism, best.options)
        row["error_over_target"], row["time_over_fastest"] = errors[name] / target, clock[name] / fastest[1]
    row["good"] = row["error_over_target"] <= 1.2 and row["time_over_fastest"] <= 1.5
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",")
    clocks = {
        causal: times(arguments.length, causal, arguments.runs)
        for causal in {kind.startswith("causal") for kind in kinds}
    }
    record: dict[str, Any] = {"machine": machine(), "length": arguments.length, "rows": []}
    print(f"{'kind':24s} target  uniform  error/target  time/fastest  predicted: n, measured/predicted   first choice")
    for kind in kinds:
        row = study(kind, KINDS[kind], arguments.length, clocks[kind.startswith("causal")], arguments.draws)
        record["rows"].append(row)
        ratios = row["ratios"]
        spread = f"{len(ratios):2d}  " + (
            f"{min(ratios):.2f} {statistics.median(ratios):.2f} {max(ratios):.2f}" if ratios else "-"
        )
        print(
            f"{kind:24s} {row['target']:6.3f}  {row['uniform']:7.3f}  {row['error_over_target']:12.2f}  "
            f"{row['time_over_fastest']:12.2f}  {spread:32s} {'   ' if row['good'] else '!! '}"
            f"{row['first'] or 'unattainable'}   [{row['fastest']}]",
            flush=True,
        )
        if arguments.json:
            write_json(arguments.json, record)
    every = [ratio for row in record["rows"] for ratio in row["ratios"]]
    within = sum(abs(math.log(ratio)) <= math.log(1.2) for ratio in every)
    good = sum(row["good"] for row in record["rows"])
    print(f"{good} of {len(record['rows'])} plans good; {within} of {len(every)} predictions within 20 %")


if __name__ == "__main__":
    main()
