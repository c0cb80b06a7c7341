"""Is the plan right? Its first choice against a search over all candidates, on inputs that it was not developed with.

    python benchmarks/planning.py errors --json results/planning.json \
        --model MiniLM FOLDER TEXT 4096 --model ... FOLDER TOKENS.json 510
    python benchmarks/planning.py times --json results/planning.json --page docs/planning-results.md
    python benchmarks/planning.py before OLD_SRC --json results/planning.json --model ...

`planning_kinds.py` has the inputs: synthetic ones, and with `--model` (repeat it) the layers of pretrained models on a
text. For every kind the plan for an error of 0.05 is made on one sample. On two fresh inputs of the same kind its first
choice, created with the seed that it names and calibrated on the sample, must have a mean error of at most 1.2 times
the target, and take at most 1.5 times as long as the fastest of all settings that meet the target there; softmax
attention is one of them.

errors   everything that does not depend on times, may run beside other work, and goes on where it stopped: the errors
         that plans find, those of their choices on fresh inputs, and of each row of candidates the cheapest setting
         that meets the target there. Settings of a row stand in the order of their times and, but for luck, of their
         errors: the cheapest is found by bisection
times    on a quiet machine, minutes, goes on where it stopped: each setting that came up is timed once for each shape
         and form, because times depend on them and not on the data; plans are ranked with a table of times that starts
         empty
before   the planner of other sources on the same inputs: how often its answer is softmax attention, at 4096 and 16384
         tokens and a target of 0.05
"""

import argparse
import bisect
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from planning_kinds import LAWS, Kind, Sample, captured_once

import subquad as sq
from subquad.files import write_text
from subquad.lab import interleave, machine, write_json
from subquad.planning.answer import Choice, Plan, limit_of
from subquad.planning.baselines import uniform_error
from subquad.planning.candidates import calibrated, make_candidate, sweeps, with_seed
from subquad.planning.cost import attention_costs, clock
from subquad.planning.piece import Piece
from subquad.planning.planner import with_times

TARGET = 0.05
FRESH = (2, 3)  # seeds
DRAWS = 2
SLOWER = 3.0  # seconds of one thread, so that other work beside it hardly counts
MOST_SCORES = 1 << 21
LENGTHS = (4096, 16384)  # at which softmax answers are counted
SOFTMAX = Choice("softmax", {})


# -- plans as plain data ----------------------------------------------------------------------------------------------


def stored(plan: Plan) -> dict[str, Any]:
    choices = [{name: value for name, value in vars(c).items() if name not in ("given", "time")} for c in plan.choices]
    for choice in choices:
        choice |= {name: None for name in ("error", "low", "high", "measured") if not math.isfinite(choice[name])}
    return {**{name: value for name, value in vars(plan).items() if name != "exact"}, "choices": choices}


def restored(data: dict[str, Any]) -> Plan:
    def choice(plain: dict[str, Any]) -> Choice:
        plain = plain | {n: math.inf for n in ("error", "low", "high", "measured") if plain[n] is None}
        return Choice(**plain)

    return Plan(**{**data, "choices": tuple(map(choice, data["choices"]))}, exact=SOFTMAX)


def key_of(mechanism: str, options: dict[str, Any]) -> str:
    return json.dumps([mechanism, options], sort_keys=True)


def without_seed(choice: Choice) -> tuple[str, dict[str, Any]]:
    return choice.mechanism, dict(with_seed(choice.mechanism, choice.options, 0))


# -- errors -----------------------------------------------------------------------------------------------------------


class Errors:
    """Errors on fresh inputs, each setting measured once.

    found: setting -> error and seconds of one run, of the mean over draws;  chosen: the same of single draws
    """

    def __init__(self, kind: Kind, sample: Sample, known: dict[str, Any]) -> None:
        self.sample, self.is_causal = sample, kind.is_causal
        form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": kind.scale, "most_scores": MOST_SCORES}
        self.pieces = [Piece(*kind.draw(seed), tokens=kind.length * len(sample[0]), seed=7, **form) for seed in FRESH]
        self.found: dict[str, list[float]] = dict(known.get("fresh", {}))
        self.chosen: dict[str, float] = dict(known.get("chosen", {}))

    def of(self, choice: Choice) -> float:
        """The draw that was recommended, as it is; the mean over draws of what is made of the data at hand."""
        key = key_of(choice.mechanism, choice.options)
        if key not in self.chosen:
            q, k, _ = self.sample
            attend = calibrated(choice.create(q.shape[-1], q.shape[1], k.shape[1]), q, k, None)
            draws = DRAWS if attend.is_random and not hasattr(attend, "num_features") else 1
            self.chosen[key] = statistics.fmean(piece.mean_error(attend, draws=draws) for piece in self.pieces)
        return self.chosen[key]

    def mean(self, sweep: Any, options: dict[str, Any], enough: float) -> tuple[float, float]:
        """The mean over draws, one draw where it is far above `enough`; and the seconds of a run."""
        key = key_of(sweep.mechanism, options)
        if key not in self.found:
            q, k, _ = self.sample
            attend = calibrated(make_candidate(sweep, options, 1000, q, k), q, k, None)
            start = clock()
            error = self.pieces[0].error(attend)
            seconds = clock() - start
            if error <= 3 * enough:
                draws = DRAWS if attend.is_random else 1
                error = statistics.fmean(piece.mean_error(attend, draws=draws) for piece in self.pieces)
            self.found[key] = [error, seconds]
        error, seconds = self.found[key]
        return error, seconds

    def cheapest(self, target: float) -> list[tuple[str, dict[str, Any]]]:
        """Of each row of candidates the cheapest setting that meets the target. A row whose cheapest setting is three
        times as slow as one that does holds no fastest setting."""
        found = []
        limit = math.inf
        for sweep in sweeps(None, is_causal=self.is_causal, cross=False):
            if self.mean(sweep, sweep.options[0], target)[1] > SLOWER * limit:
                continue
            if self.mean(sweep, sweep.options[-1], target)[0] > target:
                continue
            first = bisect.bisect_left(
                sweep.options, True, hi=len(sweep.options) - 1,
                key=lambda options: self.mean(sweep, options, target)[0] <= target,
            )  # fmt: skip
            options = sweep.options[first]
            limit = min(limit, self.mean(sweep, options, target)[1])
            found.append((sweep.mechanism, dict(with_seed(sweep.mechanism, options, 0))))
        return found


def errors_of(kind: Kind, known: dict[str, Any]) -> dict[str, Any]:
    """Plans for one kind, and what is right there; errors on fresh inputs that are `known` are kept."""
    start = time.perf_counter()
    sample = kind.draw(1)
    form: dict[str, Any] = {"is_causal": kind.is_causal, "scale": kind.scale}
    uniform = uniform_error(Piece(*sample, tokens=kind.length, most_scores=MOST_SCORES, **form))
    plan = sq.plan(*sample, target_error=TARGET, length=kind.length, times=False, **form)
    longer = [n for n in LENGTHS if n != kind.length]
    others = [sq.plan(*sample, target_error=TARGET, length=n, times=False, **form) for n in longer]
    errors = Errors(kind, sample, known)
    cheapest = errors.cheapest(TARGET)
    found = {key_of(choice.mechanism, choice.options): errors.of(choice) for choice in good_choices(plan)}
    return {
        "group": kind.group, "clock": kind.clock, "uniform": uniform, "plan": stored(plan), "errors": found,
        "cheapest": cheapest, "others": [stored(plan) for plan in others], "fresh": errors.found,
        "chosen": errors.chosen, "planning_seconds": [one.seconds for one in [plan, *others]],
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


# -- times ------------------------------------------------------------------------------------------------------------


def good_choices(plan: Plan) -> list[Choice]:
    return [choice for choice in plan.choices if choice.meets(limit_of(plan.target_error, plan.uniform))]


def settings_by_clock(kinds: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, tuple[str, dict[str, Any]]]]:
    """What must be timed: settings by their names, for each shape and form."""
    found: dict[tuple[Any, ...], dict[str, tuple[str, dict[str, Any]]]] = {}
    for kind in kinds:
        here = found.setdefault(tuple(kind["clock"]), {key_of("softmax", {}): ("softmax", {})})
        chosen = [without_seed(choice) for choice in good_choices(restored(kind["plan"]))]
        here |= {key_of(*setting): tuple(setting) for setting in [*chosen, *kind["cheapest"]]}
    return found


def times(clock: tuple[Any, ...], settings: dict[str, tuple[str, dict[str, Any]]], runs: int) -> dict[str, float]:
    """Best time of every setting, all run in turn."""
    length, head_dim, is_causal, heads, kv_heads = clock
    generator = torch.Generator().manual_seed(0)
    q = 0.5 * torch.randn(1, heads, length, head_dim, generator=generator)
    k, v = 0.5 * torch.randn(2, 1, kv_heads, length, head_dim, generator=generator)
    calls: dict[str, Any] = {}
    for key, (mechanism, options) in settings.items():
        attend = calibrated(sq.create(mechanism, head_dim, heads, kv_heads, **options), q, k, None)
        calls[key] = lambda attend=attend: attend(q, k, v, is_causal=is_causal)
    with torch.no_grad():
        return {key: timing.best for key, timing in interleave(calls, runs=runs, warmup=1).items()}


def warm(kinds: Iterable[dict[str, Any]]) -> None:
    """Fill the table that plans read their times from, all settings of one shape in turn."""
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for kind in kinds:
        for plan in map(restored, [kind["plan"], *kind["others"]]):
            here = shapes.setdefault((plan.head_dim, plan.heads, plan.is_causal), {})
            fixed = [choice for choice in good_choices(plan) if choice.relative is None]
            for choice in [*fixed, SOFTMAX]:
                mechanism, options = without_seed(choice)
                here[key_of(mechanism, options)] = sq.create(mechanism, plan.head_dim, plan.heads, **options)
    for (_, heads, is_causal), mechanisms in shapes.items():
        attention_costs(list(mechanisms.values()), heads=heads, is_causal=is_causal)


def answers(kind: dict[str, Any], clock: dict[str, float]) -> dict[str, Any]:
    """What the plans of one kind say with these times, and what was right."""
    plan = with_times(restored(kind["plan"]))
    first = plan.best or plan.exact
    fastest = min([*(tuple(s) for s in kind["cheapest"]), ("softmax", {})], key=lambda s: clock[key_of(*s)])
    took, least = clock[key_of(*without_seed(first))], clock[key_of(*fastest)]
    error = 0.0 if first.mechanism == "softmax" else kind["errors"][key_of(first.mechanism, first.options)]
    found = {
        "first": first.label, "verdict": plan.verdict, "said": first.error, "fastest": Choice(*fastest).label,
        "error_over_target": error / plan.target_error, "time_over_fastest": took / least,
        "softmax_over_first": clock[key_of("softmax", {})] / took,
    }  # fmt: skip
    others = [plan, *(with_times(restored(data)) for data in kind["others"])]
    at = {str(one.length): (one.best or one.exact).label for one in others if one.length in LENGTHS}
    good = found["error_over_target"] <= 1.2 and found["time_over_fastest"] <= 1.5
    return {**found, "good": good, "at": at}


# -- what it shows ----------------------------------------------------------------------------------------------------


def show(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:45s} {row['error_over_target']:6.2f} {row['time_over_fastest']:6.2f} {row['softmax_over_first']:7.1f}x "
        f"{'good' if row['good'] else 'BAD '} {row['first']}"
        + ("" if row["good"] else f"   [fastest: {row['fastest']}]"),
        flush=True,
    )


def summary(record: dict[str, Any], names: Iterable[str]) -> str:
    names = list(names)
    rows = [record["answers"][name] for name in names]
    good = sum(row["good"] for row in rows)
    counts = ", ".join(f"{sum(row['at'][str(n)] == 'softmax' for row in rows)} at {n}" for n in LENGTHS)
    text = f"{good} of {len(rows)} plans are good ({good / len(rows):.0%}). The answer is softmax for {counts} tokens"
    known = [name for name in names if name in record.get("before", {})]
    if known:

        def counted(softmax: Any) -> str:
            return ", ".join(f"{sum(softmax(name, str(n)) for name in known)} at {n}" for n in LENGTHS)

        before = counted(lambda name, n: record["before"][name][n])
        now = counted(lambda name, n: record["answers"][name]["at"][n] == "softmax")
        text += (
            f". On {len(known)} of these inputs an older planner without `multipole` was also run: it answered softmax "
            f"for {before} tokens; the present one for {now}"
        )
    return text + "."


INTRODUCTION = """\
# Results of the planner

The first choice of `sq.plan` for an error of 0.05 against a search over all its candidates, on synthetic
inputs (`benchmarks/planning_kinds.py` says what their names mean) and on layers captured from pretrained
models, none of them used to build it. A plan is good if, on fresh inputs, its first choice has an error of at
most 1.2 times the target and takes at most 1.5 times as long as the fastest of all settings that meet it there.
Plans for 4096 and 16384 tokens from a shorter input are extrapolated from it.

```sh
python benchmarks/planning.py errors --json results/planning.json --model NAME FOLDER TEXT LENGTH
python benchmarks/planning.py times --json results/planning.json --page docs/planning-results.md
```

Each row is one kind of input. *First choice* is the plan's answer; *error / target* should be at most 1.2,
*time / fastest* at most 1.5; *softmax / time* is how many times as fast as softmax attention it is. Bold: the
plan is not good, and the fastest setting that meets the target follows in brackets. (*time / fastest* below 1:
a choice that misses the target may be faster than all that meet it.)
"""


def page(record: dict[str, Any]) -> str:
    """The results as a page of the documentation."""
    host, kinds = record["machine"], record["kinds"]
    groups = dict.fromkeys(kind["group"] for kind in kinds.values())
    lines = [
        INTRODUCTION,
        f"Machine: {host['processor']}, {host['cores']} cores, threads: {host['threads']}, torch {host['torch']}.",
        "",
        f"All: {summary(record, kinds)}",
        "",
    ]
    for group in groups:
        names = [name for name, kind in kinds.items() if kind["group"] == group]
        lines += [f"## {group[0].upper()}{group[1:]}", "", summary(record, names), ""]
        lines += [
            "| input | first choice | error / target | time / fastest | softmax / time | for 4096 tokens | for 16384 |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in names:
            row = record["answers"][name]
            first = row["first"] if row["good"] else f"**{row['first']}** (fastest: {row['fastest']})"
            ratios = ("error_over_target", "time_over_fastest", "softmax_over_first")
            shown = [first, *(f"{row[ratio]:.2f}" for ratio in ratios), *(row["at"][str(n)] for n in LENGTHS)]
            lines.append(f"| {name} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


# -- the planner of other sources -------------------------------------------------------------------------------------

OTHER = """
import json, sys, torch, subquad
q, k, v, form, lengths, target = torch.load(sys.argv[1])
found = {}
for length in lengths:
    answer = subquad.plan(q, k, v, target_error=target, length=length, **form)
    found[str(length)] = answer.best is None or answer.best.mechanism == "softmax"
print(json.dumps(found))
"""


def softmax_before(kind: Kind, sources: Path, folder: str) -> dict[str, bool]:
    """Whether another planner answers softmax attention, by length."""
    path = os.path.join(folder, "sample.pt")
    form = {"is_causal": kind.is_causal, "scale": kind.scale}
    torch.save([*kind.draw(1), form, LENGTHS, TARGET], path)
    environment = {**os.environ, "PYTHONPATH": str(sources.resolve()), "SUBQUAD_CACHE": os.path.join(folder, "cache")}
    done = subprocess.run(
        [sys.executable, "-c", OTHER, path], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, bool] = json.loads(done.stdout)
    return found


# -- the three parts --------------------------------------------------------------------------------------------------


def read(path: str) -> dict[str, Any]:
    file = Path(path)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"kinds": {}}
    return found


def alternating(every: dict[str, Kind]) -> list[str]:
    """Groups in turn, so that an interrupted run has some of each."""
    place: dict[str, int] = {}
    order = {}
    for name, kind in every.items():
        order[name] = place[kind.group] = place.get(kind.group, -1) + 1
    return sorted(every, key=lambda name: order[name] / (place[every[name].group] + 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("errors", "times", "before"))
    parser.add_argument("sources", nargs="?", type=Path, help="of `before`: the folder src of another revision")
    parser.add_argument("--json", required=True)
    parser.add_argument("--page", default=None, help="write the results as a page of the documentation")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="what is known too; errors of settings are kept")
    parser.add_argument("--kinds", default=None, help="names separated by ; (default: all)")
    parser.add_argument(
        "--model", nargs=4, action="append", default=[], metavar=("NAME", "FOLDER", "TEXT", "LENGTH"),
        help="adds layers of a pretrained model on a text, or on a JSON list of token numbers",
    )  # fmt: skip
    arguments = parser.parse_args()
    if (arguments.part == "before") != (arguments.sources is not None):
        parser.error("before takes the folder src of another revision; errors and times take none")
    record = read(arguments.json)
    wanted = None if arguments.kinds is None else arguments.kinds.split(";")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SUBQUAD_CACHE"] = folder  # nothing is known of this machine yet
        if arguments.part == "times":
            if not record["kinds"]:
                parser.error(f"--json {arguments.json}: it has no errors yet; run `errors` first")
            kinds = {name: kind for name, kind in record["kinds"].items() if wanted is None or name in wanted}
            record |= {"machine": machine()}
            record.setdefault("answers", {})
            for clock, settings in settings_by_clock(kinds.values()).items():
                here = {name: kind for name, kind in kinds.items() if tuple(kind["clock"]) == clock}
                if not arguments.again and here.keys() <= record["answers"].keys():
                    continue
                warm(here.values())
                measured = times(clock, settings, arguments.runs)
                for name, kind in here.items():
                    record["answers"][name] = answers(kind, measured)
                    show(name, record["answers"][name])
                write_json(arguments.json, record)
            done = {**record, "kinds": kinds}
            for group in dict.fromkeys(kind["group"] for kind in kinds.values()):
                print(f"{group}: {summary(done, [name for name in kinds if kinds[name]['group'] == group])}")
            print(f"all: {summary(done, kinds)}")
            if arguments.page:
                write_text(arguments.page, page(done))
            return 0
        every = dict(LAWS)
        for name, model, text, length in arguments.model:
            file = Path(arguments.json).with_suffix(f".{name.replace(' ', '-')}.pt")
            every |= captured_once(file, name, Path(model), Path(text), int(length))
        if unknown := [name for name in wanted or [] if name not in every]:
            parser.error(f"--kinds: {unknown} not among {list(every)}")
        part = record["kinds"] if arguments.part == "errors" else record.setdefault("before", {})
        for name in alternating(every):
            known = part.get(name)
            if (known and not arguments.again) or (wanted is not None and name not in wanted):
                continue
            if arguments.part == "errors":
                part[name] = errors_of(every[name], known or {})
                print(f"{name}: {part[name]['seconds']:.0f} s", flush=True)
            else:
                part[name] = softmax_before(every[name], arguments.sources, folder)
                print(f"{name}: {part[name]}", flush=True)
            write_json(arguments.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
