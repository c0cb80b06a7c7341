"""Is the plan right? Predicted against measured errors, and the first choice against an exhaustive search.

    python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md

`planning_kinds.py` has the inputs: those that the planner was developed with and those held out. Batch 1, float32.
Targets are set by rule before anything is measured: a half, a tenth and a fiftieth of the error of uniform attention on
that input. For every kind and target the plan is made on one sample, with an empty table of times; then, on two fresh
inputs of the same kind with other draws, its first choice must have an error of at most 1.2 times the target and take
at most 1.5 times as long as the fastest of all settings that meet it there (softmax attention is one of them). That one
is found by measuring the error of every setting in the order of their times, until one meets the target: what comes
later is slower. Times are measured within this run, in turn, once for each shape and form, because they do not depend
on the data.

`predicted` compares the closed form, where it calls itself reliable, with the mean of as many draws as make its
standard error 5 %, at most 40, and the outputs likewise, with normal values. A run that was interrupted goes on where
it stopped: --json names its file.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from planning_kinds import DEVELOPED, HELD_OUT, KINDS, Kind, Pair
from torch import Tensor

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.planning.candidates import Ladder, ladders
from subquad.planning.measuring import Piece
from subquad.planning.prediction import calibrated
from subquad.planning.study import with_seed

FRACTIONS = (2, 10, 50)  # of the error of uniform attention: the targets
FRESH = (2, 3)  # seeds
MOST_DRAWS = 6  # of each fresh input
MOST_SCORES = 1 << 24
PREDICTED_TOKENS, PREDICTED_KEYS = 640, 256
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
    q, k = sample
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
        attend = make(ladder, options, (q, k), 0)
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

    def __init__(self, kind: Kind, sample: Pair) -> None:
        self.sample = sample
        self.every = settings(kind.is_causal)
        form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": None, "key_mask": None, "seed": 7}
        self.pieces = [
            Piece(*kind.draw(seed), None, tokens=kind.length, most_scores=MOST_SCORES, **form) for seed in FRESH
        ]
        self.found: dict[str, list[float]] = {SOFTMAX: [0.0]}
        self.made: dict[str, Any] = {}

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
        far = getattr(attend, "far", attend)
        random = "seed" in attend.options() or "seed" in far.options()
        if len(self.found[name]) >= len(FRESH) * (MOST_DRAWS if random else 1):
            return False
        self.found[name] += [piece.error(attend) for piece in self.pieces]
        return True

    def of(self, name: str) -> float:
        """The mean over all draws."""
        while self._more(name):
            pass
        return statistics.fmean(self.found[name])

    def meets(self, name: str, target: float) -> bool:
        """Whether the mean is within the target; no more draws than it takes."""
        while True:
            found = self.found.get(name, [])
            if found and min(found) > 2 * target:
                return False
            if len(found) >= 6:
                error = 2 * statistics.stdev(found) / math.sqrt(len(found))
                if abs(statistics.fmean(found) - target) > 1.5 * error:
                    break
            if not self._more(name):
                break
        return statistics.fmean(self.found[name]) <= target

    def fastest(self, target: float, clock: dict[str, float]) -> str:
        """Of all settings, the first in the order of their times that meets the target."""
        return next(name for name in clock if self.meets(name, target))


def predictions(kind: Kind) -> list[dict[str, Any]]:
    """Closed form and measurement of every random-feature map, at a small and a large number of features."""
    sample, (q, k) = kind.draw(1, PREDICTED_TOKENS), kind.draw(2, PREDICTED_TOKENS)
    v = torch.randn(*k.shape[:3], 32, generator=torch.Generator().manual_seed(5))
    form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": None, "key_mask": None, "seed": 7}
    pieces = {
        "": Piece(q, k, None, tokens=PREDICTED_TOKENS, **form),
        "_out": Piece(q, k, v, tokens=PREDICTED_TOKENS, **form),
    }
    rows = []
    for name, (ladder, options) in settings(kind.is_causal).items():
        if not ladder.random_features or options["num_features"] not in (64, 512):
            continue
        attend = make(ladder, options, sample, 1000)
        said = sq.predict_error(q, k, attend, v=v, is_causal=kind.is_causal, max_queries=32, max_keys=PREDICTED_KEYS)
        row: dict[str, Any] = {"setting": name, "predicted": said.error, "predicted_out": said.output_error,
                               "reliable": said.reliable, "reason": said.reason}  # fmt: skip
        if said.reliable:
            found: dict[str, list[float]] = {which: [] for which in pieces}
            for _ in range(4):
                for which, piece in pieces.items():
                    found[which] += piece.errors(attend, draws=10)
                    attend.redraw()
                error = max(statistics.stdev(x) / math.sqrt(len(x)) / statistics.fmean(x) for x in found.values())
                if error <= 0.05:
                    break
            for which, values in found.items():
                row |= {f"measured{which}": statistics.fmean(values),
                        f"ratio{which}": statistics.fmean(values) / row[f"predicted{which}"]}  # fmt: skip
            row |= {"draws": len(found[""]), "standard_error": error}
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
        "said": best.error, "error_over_target": errors.of(name) / target,
        "time_over_fastest": clock[name] / clock[fastest], "softmax_over_first": clock[SOFTMAX] / clock[name],
    }  # fmt: skip
    return {**row, "good": row["error_over_target"] <= 1.2 and row["time_over_fastest"] <= 1.5}


def study(name: str, kind: Kind, clock: dict[str, float]) -> dict[str, Any]:
    start = time.perf_counter()
    sample = kind.draw(1)
    errors = Errors(kind, sample)
    # The targets come from the input alone, before any mechanism has been looked at.
    uniform = sq.predict_error(*sample, "taylor", degree=1, is_causal=kind.is_causal).baselines["uniform"]
    rows = [judge(kind, fraction, uniform / fraction, errors, clock) for fraction in FRACTIONS]
    record = {"kind": name, "held_out": name in HELD_OUT, "length": kind.length, "head_dim": kind.head_dim,
              "heads": kind.heads, "kv_heads": kind.kv_heads, "is_causal": kind.is_causal}  # fmt: skip
    record |= {"plans": rows, "predictions": predictions(kind)}
    return {**record, "seconds": time.perf_counter() - start}


def show(record: dict[str, Any]) -> None:
    ratios = [row["ratio"] for row in record["predictions"] if row["reliable"]]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "-"
    for i, row in enumerate(record["plans"]):
        predicted = f"{len(ratios):2d} of {len(record['predictions'])}: {spread}" if i == 0 else ""
        print(
            f"{record['kind'] if i == 0 else '':41s} {row['target']:8.2g} {row['error_over_target']:6.2f} "
            f"{row['time_over_fastest']:6.2f} {row['softmax_over_first']:7.1f}x  {predicted:24s} "
            f"{'good' if row['good'] else 'BAD '} {row['first']}"
            + ("" if row["good"] else f"   [fastest: {row['fastest']}]"),
            flush=True,
        )


def summary(kinds: list[dict[str, Any]]) -> str:
    """The figures of some kinds, in words."""
    plans = [row for kind in kinds for row in kind["plans"]]
    every = [row for kind in kinds for row in kind["predictions"]]
    trusted = [row for row in every if row["reliable"]]
    good = sum(row["good"] for row in plans)
    whole = sum(all(row["good"] for row in kind["plans"]) for kind in kinds)
    words = [f"{good} of {len(plans)} plans good, all targets on {whole} of {len(kinds)} kinds"]
    for which, what in (("ratio", "predictions"), ("ratio_out", "predicted outputs")):
        ratios = [row[which] for row in trusted]
        within = sum(1 / 1.2 <= ratio <= 1.2 for ratio in ratios)
        span = f" (measured / predicted {min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        words.append(f"{within} of {len(ratios)} reliable {what} within 20 %{span}")
    words.append(f"{len(trusted)} of {len(every)} predictions reliable")
    return "; ".join(words)


def page(record: dict[str, Any]) -> str:
    """The results as a page of the documentation."""
    host = record["machine"]
    lines = [
        "# Results of the planner",
        "",
        "Written by `python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md`;",
        "the script says what is measured. A plan is good if, on fresh inputs, its first choice has an error of at",
        "most 1.2 times the target and takes at most 1.5 times as long as the fastest of all settings that meet it.",
        "",
        f"Machine: {host['processor']}, {host['cores']} cores, threads: {host['threads']}, torch {host['torch']},",
        f"load at the start {host['load_1min']:.1f}." + ("" if record["complete"] else " The run was not complete."),
        "",
    ]
    for title, held_out in (("Held out", True), ("Developed with", False)):
        kinds = [kind for kind in record["kinds"] if kind["held_out"] == held_out]
        if not kinds:
            continue
        lines += [f"## {title}", "", summary(kinds) + ".", ""]
        lines += [
            "| input | target | first choice | error / target | time / fastest | softmax / time |",
            "|---|---|---|---|---|---|",
        ]
        for kind in kinds:
            for i, row in enumerate(kind["plans"]):
                first = row["first"] if row["good"] else f"{row['first']} (fastest: `{row['fastest']}`)"
                figures = [row["error_over_target"], row["time_over_fastest"], row["softmax_over_first"]]
                shown = " | ".join(f"{figure:.2f}" for figure in figures)
                lines.append(f"| {kind['kind'] if i == 0 else ''} | {row['target']:.2g} | {first} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def started(path: str | None) -> list[dict[str, Any]]:
    """What an interrupted run has left; a complete one is measured again."""
    try:
        before = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return []
    here = {**machine(), "load_1min": None}
    same = {**before.get("machine", {}), "load_1min": None} == here and before.get("fractions") == list(FRACTIONS)
    return before["kinds"] if same and not before.get("complete") else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--page", default=None, help="write the results as a page of the documentation")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--kinds", default=None, help="names separated by ; or 'developed' or 'held out' (default: all)"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    groups = {"developed": list(DEVELOPED), "held out": list(HELD_OUT), None: list(KINDS)}
    kinds = groups[arguments.kinds] if arguments.kinds in groups else arguments.kinds.split(";")
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--kinds: {unknown} not among {list(KINDS)}")
    start = time.perf_counter()
    record: dict[str, Any] = {"machine": machine(), "fractions": list(FRACTIONS), "complete": False, "seconds": 0.0}
    record["kinds"] = [kind for kind in started(arguments.json) if kind["kind"] in kinds]
    done = [kind["kind"] for kind in record["kinds"]]
    clocks: dict[tuple[Any, ...], dict[str, float]] = {}
    print(f"{'kind':41s} {'target':>8s} {'error':>6s} {'time':>6s} {'softmax':>8s}  {'predicted':24s} verdict")
    print(
        f"{'':41s} {'':8s} {'/target':>6s} {'/best':>6s} {'/time':>8s}  {'reliable: meas./pred.':24s} and first choice"
    )
    for kind in record["kinds"]:
        show(kind)

    def save() -> None:
        record["seconds"] = sum(kind["seconds"] for kind in record["kinds"]) + sum(clock["seconds"] for clock in timed)
        if arguments.json:
            write_json(arguments.json, record)
        if arguments.page:
            Path(arguments.page).write_text(page(record), encoding="utf-8")

    timed: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SUBQUAD_CACHE"] = folder  # the plan knows nothing of this machine yet
            for name in kinds:
                if name in done:
                    continue
                kind = KINDS[name]
                if kind.clock not in clocks:
                    began = time.perf_counter()
                    clocks[kind.clock] = times(kind, arguments.runs)
                    timed.append({"seconds": time.perf_counter() - began})
                record["kinds"].append(study(name, kind, clocks[kind.clock]))
                show(record["kinds"][-1])
                save()
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    record["complete"] = True
    save()
    for title, held_out in (("developed with", False), ("held out", True)):
        some = [kind for kind in record["kinds"] if kind["held_out"] == held_out]
        if some:
            print(f"\n{title}: {summary(some)}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
