"""Is the plan right? Its first choice against an exhaustive search, on inputs that it was not developed with.

    python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md \
        --model MiniLM FOLDER TEXT --model ... FOLDER TOKENS.json

`planning_kinds.py` has the inputs: laws, and with `--model` (repeat it) the layers of pretrained models on a text.
Batch 1 or 2, float32. Targets are set by rule: 0.05, and a tenth of the error of uniform attention. For every kind and
target the plan is made on one sample, with an empty table of times; then, on two fresh inputs of the same kind, its
first choice, created with the seed that it names and calibrated on the sample, must have a mean error of at most 1.2
times the target and take at most 1.5 times as long as the fastest of all settings that meet it there (softmax
attention is one of them). That one is found by measuring every setting in the order of their times until one meets the
target. Times are measured within this run, in turn, once for each shape and form, because they do not depend on the
data.

`softmax` counts how often the answer for a target of 0.05 is softmax attention, at 4096 and at 16384 tokens. A run that
was interrupted goes on where it stopped: --json names its file.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from planning_kinds import LAWS, Kind, Sample, captured_kinds

import subquad as sq
from subquad.files import write_text
from subquad.lab import interleave, machine, write_json
from subquad.planning.answer import Choice, setting_in_words
from subquad.planning.baselines import uniform_error
from subquad.planning.candidates import Ladder, calibrated, ladders, made
from subquad.planning.piece import Piece
from subquad.planning.prediction import draws_something

FRESH = (2, 3)  # seeds
DRAWS = 3
MOST_SCORES = 1 << 22
ASKED = {"target": 0.05, "fraction": 10, "fresh": list(FRESH), "draws": DRAWS}
SOFTMAX = "softmax"
LENGTHS = (4096, 16384)  # at which softmax answers are counted


def settings(is_causal: bool) -> dict[str, tuple[Ladder, dict[str, Any]]]:
    return {
        setting_in_words(ladder.mechanism, options): (ladder, options)
        for ladder in ladders(None, is_causal=is_causal, cross=False)
        for options in ladder.steps
    }


def times(kind: Kind, runs: int) -> dict[str, float]:
    """Best time of every setting, and of softmax, from fast to slow."""
    generator = torch.Generator().manual_seed(0)
    shape = (kind.length, kind.head_dim)
    q = 0.5 * torch.randn(1, kind.heads, *shape, generator=generator)
    k, v = 0.5 * torch.randn(2, 1, kind.kv_heads, *shape, generator=generator)
    calls: dict[str, Any] = {}
    for name, attend in [(SOFTMAX, sq.create("softmax", kind.head_dim))] + [
        (name, calibrated(made(ladder, options, 0, q, k), q, k, None))
        for name, (ladder, options) in settings(kind.is_causal).items()
    ]:
        calls[name] = lambda attend=attend: attend(q, k, v, is_causal=kind.is_causal)
    with torch.no_grad():
        found = {name: timing.best for name, timing in interleave(calls, runs=1, warmup=0).items()}
        # What is far slower than softmax attention is no answer, and needs no second run.
        near = {name: call for name, call in calls.items() if found[name] <= 2 * found[SOFTMAX]}
        again = interleave(near, runs=runs, warmup=0)
    found |= {name: min(timing.best, found[name]) for name, timing in again.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


class Errors:
    """Errors on fresh inputs, each setting measured once."""

    def __init__(self, kind: Kind, sample: Sample) -> None:
        self.sample, self.every = sample, settings(kind.is_causal)
        form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": kind.scale, "most_scores": MOST_SCORES}
        self.pieces = [Piece(*kind.draw(seed), tokens=kind.length * len(sample[0]), seed=7, **form) for seed in FRESH]
        self.found: dict[str, float] = {SOFTMAX: 0.0}

    def of(self, choice: Choice) -> float:
        """The draw that was recommended, as it is; the mean over draws of what is made of the data at hand."""
        q, k, _ = self.sample
        attend = calibrated(choice.create(q.shape[-1], q.shape[1], k.shape[1]), q, k, None)
        draws = DRAWS if draws_something(attend) and not hasattr(attend, "num_features") else 1
        return statistics.fmean(piece.mean_error(attend, draws=draws) for piece in self.pieces)

    def mean(self, name: str, target: float) -> float:
        """The mean over draws; one draw where it is far above the target."""
        if name not in self.found:
            q, k, _ = self.sample
            ladder, options = self.every[name]
            attend = calibrated(made(ladder, options, 1000, q, k), q, k, None)
            first = self.pieces[0].error(attend)
            if first > 3 * target:
                return first
            draws = DRAWS if draws_something(attend) else 1
            self.found[name] = statistics.fmean(piece.mean_error(attend, draws=draws) for piece in self.pieces)
        return self.found[name]

    def fastest(self, target: float, clock: dict[str, float]) -> str:
        """Of all settings in the order of their times, the first whose mean over draws meets the target."""
        return next(name for name in clock if self.mean(name, target) <= target)


def study(name: str, kind: Kind, clock: dict[str, float]) -> dict[str, Any]:
    start = time.perf_counter()
    sample = kind.draw(1)
    errors = Errors(kind, sample)
    form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": kind.scale}
    uniform = uniform_error(Piece(*sample, tokens=kind.length, most_scores=MOST_SCORES, **form))
    rows = []
    for target in (ASKED["target"], uniform / ASKED["fraction"]):
        began = time.perf_counter()
        answer = sq.plan(*sample, target_error=target, length=kind.length, **form)
        seconds = time.perf_counter() - began
        best = answer.best or answer.exact  # nothing meets the target: the plan names softmax
        chosen = SOFTMAX if best.mechanism == SOFTMAX else best.label
        fastest = errors.fastest(target, clock)
        error = 0.0 if chosen == SOFTMAX else errors.of(best)
        row = {
            "target": target, "uniform": uniform, "plan_seconds": seconds, "first": chosen, "verdict": answer.verdict,
            "fastest": fastest, "said": best.error, "said_high": best.high, "error_over_target": error / target,
            "time_over_fastest": clock[chosen] / clock[fastest], "softmax_over_first": clock[SOFTMAX] / clock[chosen],
        }  # fmt: skip
        rows.append({**row, "good": row["error_over_target"] <= 1.2 and row["time_over_fastest"] <= 1.5})
    softmax = {}
    for length in LENGTHS:
        answer = sq.plan(*sample, target_error=ASKED["target"], length=length, **form)
        softmax[str(length)] = answer.best is None or answer.best.mechanism == SOFTMAX
    record = {"kind": name, "group": kind.group, "length": kind.length, "head_dim": kind.head_dim,
              "heads": kind.heads, "kv_heads": kind.kv_heads, "is_causal": kind.is_causal}  # fmt: skip
    return {**record, "plans": rows, "softmax": softmax, "seconds": time.perf_counter() - start}


# -- what it shows ----------------------------------------------------------------------------------------------------


def show(record: dict[str, Any]) -> None:
    for i, row in enumerate(record["plans"]):
        print(
            f"{record['kind'] if i == 0 else '':41s} {row['target']:8.2g} {row['error_over_target']:6.2f} "
            f"{row['time_over_fastest']:6.2f} {row['softmax_over_first']:7.1f}x {row['plan_seconds']:5.1f} s "
            f"{'good' if row['good'] else 'BAD '} {row['first']}"
            + ("" if row["good"] else f"   [fastest: {row['fastest']}]"),
            flush=True,
        )


def summary(kinds: list[dict[str, Any]]) -> str:
    plans = [row for kind in kinds for row in kind["plans"]]
    good = sum(row["good"] for row in plans)
    counts = ", ".join(f"{sum(kind['softmax'][str(n)] for kind in kinds)} at {n}" for n in LENGTHS)
    return (
        f"{good} of {len(plans)} plans good ({good / len(plans):.0%}); the answer for {ASKED['target']} is softmax on "
        f"{counts} tokens, of {len(kinds)} kinds"
    )


def page(record: dict[str, Any]) -> str:
    """The results as a page of the documentation."""
    host = record["machine"]
    lines = [
        "# Results of the planner",
        "",
        "Written by `python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md`, with",
        "`--model` for every model below; the script says what is measured. A plan is good if, on fresh inputs, its",
        "first choice has an error of at most 1.2 times the target and takes at most 1.5 times as long as the fastest",
        "of all settings that meet it there.",
        "",
        f"Machine: {host['processor']}, {host['cores']} cores, threads: {host['threads']}, torch {host['torch']},",
        f"load at the start {host['load_1min']:.1f}." + ("" if record["complete"] else " The run was not complete."),
        "",
        f"All: {summary(record['kinds'])}.",
        "",
    ]
    for group in dict.fromkeys(kind["group"] for kind in record["kinds"]):
        kinds = [kind for kind in record["kinds"] if kind["group"] == group]
        lines += [f"## {group[0].upper()}{group[1:]}", "", summary(kinds) + ".", ""]
        lines += [
            "| input | target | first choice | error / target | time / fastest | softmax / time |",
            "|---|---|---|---|---|---|",
        ]
        for kind in kinds:
            for i, row in enumerate(kind["plans"]):
                first = row["first"] if row["good"] else f"{row['first']} (fastest: {row['fastest']})"
                shown = " | ".join(
                    f"{row[name]:.2f}" for name in ("error_over_target", "time_over_fastest", "softmax_over_first")
                )
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
    asked = all(before.get(name) == value for name, value in ASKED.items())
    same = asked and {**before.get("machine", {}), "load_1min": None} == here
    return before["kinds"] if same and not before.get("complete") else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=None)
    parser.add_argument("--page", default=None, help="write the results as a page of the documentation")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", default=None, help="names separated by ; (default: all)")
    parser.add_argument(
        "--model", nargs=3, action="append", default=[], metavar=("NAME", "FOLDER", "TEXT"),
        help="adds layers of a pretrained model on a text, or on a JSON list of token numbers",
    )  # fmt: skip
    arguments = parser.parse_args()
    every = dict(LAWS)
    for name, folder, text in arguments.model:
        every |= captured_kinds(name, Path(folder), Path(text))
    kinds = list(every) if arguments.kinds is None else arguments.kinds.split(";")
    if unknown := [name for name in kinds if name not in every]:
        parser.error(f"--kinds: {unknown} not among {list(every)}")
    record: dict[str, Any] = {"machine": machine(), **ASKED, "complete": False}
    record["kinds"] = [kind for kind in started(arguments.json) if kind["kind"] in kinds]
    done = [kind["kind"] for kind in record["kinds"]]
    clocks: dict[tuple[Any, ...], dict[str, float]] = {}

    def save() -> None:
        if arguments.json:
            write_json(arguments.json, record)
        if arguments.page:
            write_text(arguments.page, page(record))

    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SUBQUAD_CACHE"] = folder  # the plan knows nothing of this machine yet
            for name in kinds:
                if name in done:
                    continue
                kind = every[name]
                if kind.clock not in clocks:
                    clocks[kind.clock] = times(kind, arguments.runs)
                record["kinds"].append(study(name, kind, clocks[kind.clock]))
                show(record["kinds"][-1])
                save()
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    record["complete"] = True
    save()
    for group in dict.fromkeys(kind["group"] for kind in record["kinds"]):
        print(f"{group}: {summary([kind for kind in record['kinds'] if kind['group'] == group])}")
    print(f"all: {summary(record['kinds'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
