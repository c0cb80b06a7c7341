"""Is the plan right? Predicted against measured errors, and the first choice against an exhaustive search.

    python benchmarks/planning.py --json results/planning.json --page docs/planning-results.md

`planning_kinds.py` has the inputs: those that the planner was developed with and those held out. Batch 1, float32.
Targets are set by rule before anything is measured: a half, a tenth and a fiftieth of the error of uniform attention on
that input. For every kind and target the plan is made on one sample, with an empty table of times; then, on four fresh
inputs of the same kind, its first choice, created with the seed that it names and calibrated on the sample, must have a
mean error of at most 1.2 times the target and take at most 1.5 times as long as the fastest of all settings whose mean
over draws meets it there (softmax attention is one of them). That one is found by measuring every setting in the order
of their times, until one meets the target: what comes later is slower. Times are measured within this run, in turn,
once for each shape and form, because they do not depend on the data.

Beside it stands a harder comparison: the fastest setting that meets the target on the fresh inputs with the draw that
was best on the sample, of as many as the plan tries. It is the best of all plans in hindsight, since it needs no margin
for inputs that differ.

`--model DIR --text FILE` adds the layers of a pretrained model (`planning_model.py`): the sample from the first fifth
of the text, the fresh inputs from the others, with the errors of the outputs.

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
from pathlib import Path
from typing import Any

import torch
from planning_kinds import DEVELOPED, HELD_OUT, KINDS, Kind
from planning_model import captured_kinds
from planning_page import HEADING, groups, page, show, summary
from planning_search import FRESH, SOFTMAX, Errors, label, make, settings, times

import subquad as sq
from subquad.files import write_text
from subquad.lab import machine, write_json
from subquad.planning.measuring import Piece

FRACTIONS = (2, 10, 50)  # of the error of uniform attention: the targets
ASKED = {"fractions": list(FRACTIONS), "fresh": list(FRESH)}
PREDICTED_TOKENS, PREDICTED_KEYS = 640, 256


def predictions(kind: Kind) -> list[dict[str, Any]]:
    """Closed form and measurement of every random-feature map, at a small and a large number of features."""
    sample, (q, k, _) = kind.draw(1, PREDICTED_TOKENS), kind.draw(2, PREDICTED_TOKENS)
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
    answer = sq.plan(
        *errors.sample, target_error=target, length=kind.length, is_causal=kind.is_causal, scale=kind.scale
    )
    seconds = time.perf_counter() - start
    best = answer.best or answer.exact  # nothing meets the target: the plan names softmax
    name = SOFTMAX if best.mechanism == "softmax" else label(best.mechanism, best.options)
    fastest, fastest_draw = errors.fastest(target, clock)
    row = {
        "fraction": fraction, "target": target, "uniform": answer.baselines["uniform"], "plan_seconds": seconds,
        "first": best.label, "verdict": answer.verdict, "attainable": answer.attainable, "fastest": fastest,
        "said": best.error, "said_high": best.error_high, "said_over_draws": best.error_over_draws,
        "error_over_target": errors.of(best) / target,
        "time_over_fastest": clock[name] / clock[fastest], "fastest_draw": fastest_draw,
        "time_over_fastest_draw": clock[name] / clock[fastest_draw],
        "softmax_over_first": clock[SOFTMAX] / clock[name],
    }  # fmt: skip
    return {**row, "good": row["error_over_target"] <= 1.2 and row["time_over_fastest"] <= 1.5}


def study(name: str, kind: Kind, clock: dict[str, float]) -> dict[str, Any]:
    start = time.perf_counter()
    sample = kind.draw(1)
    errors = Errors(kind, sample)
    # The targets come from the input alone, before any mechanism has been looked at.
    q, k, v = sample
    said = sq.predict_error(q, k, "taylor", v=v, degree=1, is_causal=kind.is_causal, scale=kind.scale)
    uniform = (said.baselines if v is None else said.baselines_output)["uniform"]
    rows = [judge(kind, fraction, uniform / fraction, errors, clock) for fraction in FRACTIONS]
    record = {"kind": name, "group": kind.group, "length": kind.length, "head_dim": kind.head_dim,
              "heads": kind.heads, "kv_heads": kind.kv_heads, "is_causal": kind.is_causal}  # fmt: skip
    record |= {"plans": rows, "predictions": predictions(kind) if v is None else []}
    return {**record, "seconds": time.perf_counter() - start}


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
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument(
        "--kinds", default=None, help="names separated by ; or 'developed', 'held out', 'model' (default: all)"
    )
    parser.add_argument("--model", default=None, help="folder of a pretrained model: adds its layers")
    parser.add_argument("--model-name", default=None, help="what the page calls it")
    parser.add_argument("--text", default=None, help="what the model reads: a sample and four fresh inputs are cut off")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text belong together")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    every = dict(KINDS)
    if arguments.model:
        every |= captured_kinds(Path(arguments.model), Path(arguments.text), arguments.model_name)
    captured = [name for name in every if name not in KINDS]
    known = {"developed": list(DEVELOPED), "held out": list(HELD_OUT), "model": captured, None: list(every)}
    kinds = known[arguments.kinds] if arguments.kinds in known else arguments.kinds.split(";")
    if unknown := [name for name in kinds if name not in every]:
        parser.error(f"--kinds: {unknown} not among {list(every)}")
    start = time.perf_counter()
    record: dict[str, Any] = {"machine": machine(), **ASKED, "complete": False, "seconds": 0.0}
    record["kinds"] = [kind for kind in started(arguments.json) if kind["kind"] in kinds]
    done = [kind["kind"] for kind in record["kinds"]]
    clocks: dict[tuple[Any, ...], dict[str, float]] = {}
    print(HEADING)
    for kind in record["kinds"]:
        show(kind)

    def save() -> None:
        record["seconds"] = sum(kind["seconds"] for kind in record["kinds"]) + sum(clock["seconds"] for clock in timed)
        if arguments.json:
            write_json(arguments.json, record)
        if arguments.page:
            write_text(arguments.page, page(record))

    timed: list[dict[str, float]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["SUBQUAD_CACHE"] = folder  # the plan knows nothing of this machine yet
            for name in kinds:
                if name in done:
                    continue
                kind = every[name]
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
    for title, some in groups(record).items():
        print(f"\n{title}: {summary(some)}")
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
