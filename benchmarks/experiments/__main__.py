"""The sources' experiments at a size that shows something: a queue of training runs that can be stopped at any time.

    python benchmarks/experiments list             every run in its order, its limit, and how far it is
    python benchmarks/experiments try --steps 3    each for a few steps, in a folder of its own: does it work?
    python benchmarks/experiments run              the queue: one run at a time, in the background of other work
    python benchmarks/experiments time             seconds per step of each, on a quiet machine, for time axes
    python benchmarks/experiments pages            results and pages of what is there
    python benchmarks/experiments keep             finished runs, without their training curves, to docs/data, and
                                                      their curves and samples to docs/figures/experiments

Which runs there are stands in runs.py. `run` skips what is finished, here or in docs/data (`--again` trains those
anew), resumes what was interrupted, and ends after the step at Ctrl-C. Every run has one thread and a low priority
(`--nice`), so that the machine can be used meanwhile; that is why time axes are steps times the seconds that `time`
measured apart. Several queues can run at once: start `run` once per core. `--only` and `--rows` pick experiments and
rows by name, `--seeds 1` takes the first seed of each, `--hours` ends the queue after so long. Data lie below `--data`
(data.py gets them).

Below `--out` (default results/experiments) every experiment has a folder with its runs, `results.json` (commands,
seeds, curves, dates, machine) and a page, `index.html`.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from baselines import baselines
from figures import DOCS, draw_documents, draw_kept, draw_recall, draw_samples
from jobs import Experiment, Job
from runs import EXPERIMENTS

import subquad as sq
from subquad.lab import interleave, machine, write_json
from subquad.lab.measure import CLOCKS
from subquad.tasks.base import Task
from subquad.train import Run
from subquad.train.collection import collect, comparison_table
from subquad.train.curves import draw_page
from subquad.train.data import batches
from subquad.train.optimizers import make_optimizer

DONE = ("finished", "stopped", "diverged")
KEPT = DOCS / "data/experiments.json"


def status(folder: Path) -> str:
    """How far a run is: new, begun, or what its result says."""
    if not (folder / "run.json").is_file():
        return "new"
    path = folder / "result.json"
    found: str = json.loads(path.read_text(encoding="utf-8"))["status"] if path.is_file() else "begun"
    return found if found in DONE else "begun"


def missing(job: Job, args: argparse.Namespace) -> str | None:
    """Why a run cannot be started now."""
    names = [name for name in job.mechanism_names() if name not in (*sq.list_mechanisms(), "bilstm")]
    if names:
        return f"no mechanism {names[0]}"
    if job.data is not None and not (args.data / job.data).exists():
        return f"no {args.data / job.data}"
    if job.start is not None and status(args.out / job.start) not in ("finished", "stopped"):
        return f"{job.start} is not trained yet"
    return None


def starts_file(job: Job, args: argparse.Namespace) -> Path:
    """How and when a run was started, beside its folder: it may be resumed several times."""
    return Path(args.out / f"{job.folder}.starts.json")


def refuse_others(job: Job, args: argparse.Namespace) -> None:
    """End where a run's folder holds one with other options: it must not pass for this one."""
    starts = starts_file(job, args)
    if status(args.out / job.folder) != "new" and starts.is_file():
        (first, *_) = json.loads(starts.read_text(encoding="utf-8"))["starts"]
        if described(first["command"]) != described(shlex.join(beginning(job, args))):
            raise SystemExit(
                f"{args.out / job.folder} holds a run with other options; remove it, or give another --out"
            )


def described(command: str) -> list[str]:
    """The words of a command that say what is trained, not where, or how it runs."""
    words = shlex.split(command)
    return words[: words.index("--seed") + 2]


def beginning(job: Job, args: argparse.Namespace) -> list[str]:
    """What starts a run, as one would type it."""
    data = [] if job.data is None else ["--data", str(args.data / job.data)]
    start = [] if job.start is None else ["--from", str(args.out / job.start)]
    return ["subquad", "train", job.task, "--mechanism", job.mechanism, *data, *start, *job.options,
            "--seed", str(job.seed)]  # fmt: skip


def command(job: Job, args: argparse.Namespace, folder: Path, steps: int | None = None) -> list[str]:
    """What starts or continues a run: `subquad train`, without the need for it to be on the path."""
    if status(folder) == "begun":
        return [*_program(), "--resume", "--out", str(folder), *_running(job)]
    few: list[str] = []
    if steps is not None:  # without the samples of a finished run, which may take longer than all of it
        few = [
            "--steps",
            str(steps),
            "--valid-examples",
            "2",
            *(["--set", "samples=0"] if job.task == "images" else []),
        ]
    return [*_program(), *beginning(job, args)[2:], *few, "--out", str(folder), *_running(job)]


def _program() -> list[str]:
    return [sys.executable, "-m", "subquad.cli.train"]


def _running(job: Job) -> list[str]:
    return ["--hours", f"{job.hours:g}", "--save-every", "50", "--log-every", "10", "--keep", "1", "--no-tensorboard",
            "--cpu"]  # fmt: skip


def environment(args: argparse.Namespace) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(args.threads)}


def chosen(args: argparse.Namespace) -> list[Experiment]:
    known = [one.name for one in EXPERIMENTS]
    unknown = sorted(set(args.only or ()) - set(known))
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such experiment; there are {', '.join(known)}")
    found = [one for one in EXPERIMENTS if not args.only or one.name in args.only]
    rows = list(dict.fromkeys(label for one in found for label in one.rows))
    if wrong := sorted(set(args.rows or ()) - set(rows)):
        raise SystemExit(f"--rows {wrong[0]}: no such row; there are {', '.join(rows)}")
    return found


def queue(args: argparse.Namespace) -> list[Job]:
    """All runs in their order: the first seed of every experiment before the second of any, slow rows later."""
    jobs = (job for one in chosen(args) for job in one.jobs() if not args.rows or job.label in args.rows)
    return sorted((job for job in jobs if job.seed < args.seeds), key=lambda job: job.turn)


def waiting(args: argparse.Namespace) -> list[Job]:
    """What `run` has to train: not what docs/data holds, unless another run starts from its weights."""
    kept = {} if args.again else read_kept()
    for job in queue(args):
        refuse_others(job, args)
    jobs = [job for job in queue(args) if status(args.out / job.folder) not in DONE]
    needed = {job.start for job in jobs if not is_kept(job, kept)}
    return [job for job in jobs if not is_kept(job, kept) or job.folder in needed]


def read_kept() -> dict[str, Any]:
    """What `keep` wrote: a run by its folder."""
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    return found


def is_kept(job: Job, kept: dict[str, Any]) -> bool:
    """Whether the run was kept as it is described now; with other options it is another run."""
    where = argparse.Namespace(data=Path("data"), out=Path("results/experiments"))
    same = described(shlex.join(beginning(job, where)))
    return job.folder in kept and described(kept[job.folder]["command"]) == same


# -- commands ---------------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> None:
    """One line per run; the hours are limits, most end before."""
    kept = read_kept()
    for job in queue(args):
        state = status(args.out / job.folder)
        reason = missing(job, args) if state == "new" else None
        if state == "new" and is_kept(job, kept):
            state, reason = "kept", None
        print(f"{job.folder:60} {job.hours:5.2f} h  {state}{f' ({reason})' if reason else ''}")


def attempt(args: argparse.Namespace) -> None:
    """Every run of the first seed for a few steps; what fails is said and does not end the others."""
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for job in queue(args):
            folder = Path(scratch) / job.folder
            if job.seed:
                continue
            reason = missing(replace(job, start=None), args)
            if reason is None and job.start is not None:
                source = Path(scratch) / job.start
                reason = None if source.is_dir() else f"{job.start} was not tried, or failed"
            if reason is not None:
                print(f"{job.folder:60} not tried: {reason}", flush=True)
                continue
            where = argparse.Namespace(**{**vars(args), "out": Path(scratch)})
            line = [*command(job, where, folder, args.steps), "--save-every", str(args.steps)]
            done = subprocess.run(line, env=environment(args), capture_output=True, text=True, check=False)
            if done.returncode:
                failed.append(job.folder)
                print(f"{job.folder:60} FAILED\n  {shlex.join(line)}\n{done.stderr}", flush=True)
                continue
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            pace = result["training_seconds"] / result["step"]
            print(
                f"{job.folder:60} {pace:7.2f} s/step  {result['parameters']:>9,} parameters, "
                f"{pace * job.steps / 3600:.2f} h for {job.steps} steps",
                flush=True,
            )
            if not any(other.start == job.folder for other in queue(args)):
                shutil.rmtree(folder)
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def run(args: argparse.Namespace) -> None:
    """Until nothing is left, the hours are over, or Ctrl-C; a run that fails is said and left out."""
    began, failed = time.monotonic(), set()
    while args.hours is None or time.monotonic() - began <= 3600 * args.hours:
        ready = [job for job in waiting(args) if job.folder not in failed and missing(job, args) is None]
        with first_free(ready, args) as (job, lock):
            if job is None:
                break
            folder = args.out / job.folder
            line = command(job, args, folder)
            note(args, job, line)
            print(f"{datetime.now():%H:%M} {len(ready)} left: {shlex.join(line)}", flush=True)
            code = started(line, args, folder.parent / f"{folder.name}.log", lock)
        if code == 130:
            print("interrupted; the same command goes on", flush=True)
            return
        if code and status(folder) not in DONE:
            failed.add(job.folder)
            print(f"{job.folder} failed with status {code}; see {folder.parent / folder.name}.log", flush=True)
        pages(argparse.Namespace(**{**vars(args), "only": [job.experiment]}), quiet=True)
    left = [job.folder for job in waiting(args)]
    print(f"not finished: {', '.join(left)}" if left else "everything is finished", flush=True)


@contextlib.contextmanager
def first_free(jobs: list[Job], args: argparse.Namespace) -> Iterator[tuple[Job | None, int]]:
    """The first run that no other queue is at, and the descriptor of its lock; (None, -1) where there is none."""
    for job in jobs:
        path = args.out / f"{job.folder}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if status(args.out / job.folder) in DONE:  # another queue has finished it meanwhile
                continue
            yield job, file.fileno()
            return
    yield None, -1


def started(line: list[str], args: argparse.Namespace, log: Path, lock: int) -> int:
    """Run a command with its output in `log`; Ctrl-C and termination reach it and are waited for. It holds the lock
    too: should the queue be killed, no other takes a run that goes on."""
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            line, env=environment(args), stdout=file, stderr=file, start_new_session=True, pass_fds=(lock,),
            preexec_fn=lambda: os.nice(args.nice) and None,
        )  # fmt: skip
        stopped = []

        def stop(number: int, frame: object) -> None:
            stopped.append(number)
            process.send_signal(signal.SIGINT)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 130 if stopped else code


def note(args: argparse.Namespace, job: Job, line: list[str]) -> None:
    """Add this start to the others of the same run."""
    path = starts_file(job, args)
    again = status(args.out / job.folder) != "new" and path.is_file()
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if again else []
    starts.append({"command": shlex.join(["subquad", "train", *line[3:]]), "date": _now(), "machine": machine()})
    write_json(path, {"starts": starts})


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def pages(args: argparse.Namespace, quiet: bool = False) -> None:
    """results.json and a page per experiment."""
    paces = _step_seconds(args)
    for one in chosen(args):
        groups: dict[str, list[dict[str, Any]]] = {}
        for job in one.jobs():
            folder = args.out / job.folder
            if not (folder / "run.json").is_file():
                continue
            (found,) = collect([folder])["runs"].values()
            kept = starts_file(job, args)
            starts = json.loads(kept.read_text(encoding="utf-8"))["starts"] if kept.is_file() else []
            groups.setdefault(job.label, []).append({**found[0], "starts": starts})
        if not groups:
            continue
        whole = collect([runs[0]["folder"] for runs in groups.values()])
        apart = {label: paces[one.name][label] for label in groups if label in paces.get(one.name, {})}
        result = {
            **{name: whole[name] for name in ("task", "metric", "larger_is_better")},
            "experiment": one.name, "claim": one.claim, "date": _now(), "runs": groups,
            "step_seconds": apart if len(apart) == len(groups) else {},
            "baselines": baselines(Run.from_dict(next(iter(groups.values()))[0]["run"])),
        }  # fmt: skip
        write_json(args.out / one.name / "results.json", result)
        draw_page(result, args.out / one.name)
        if not quiet:
            print(f"{one.name}: {one.claim}\n{comparison_table(result)}\n", flush=True)


def keep(args: argparse.Namespace) -> None:
    """Commands, dates, seeds and validation curves of finished runs, added to those in docs/data/experiments.json."""
    kept = read_kept()
    for one in chosen(args):
        for job in one.jobs():
            folder = args.out / job.folder
            if status(folder) not in DONE:
                continue
            ((found,),) = collect([folder])["runs"].values()
            starts = json.loads(starts_file(job, args).read_text(encoding="utf-8"))["starts"]
            line = starts[0]["command"].replace(str(args.out), "results/experiments").replace(str(args.data), "data")
            figures = ("status", "step", "parameters", "metrics", "artefacts")
            curve = [{k: v for k, v in row.items() if k not in ("kind", "seconds")} for row in found["valid"]]
            timed = {name: x for name, x in kept.get(job.folder, {}).items() if name == "step_seconds"}
            kept[job.folder] = {
                "command": line, "date": starts[-1]["date"], "machine": starts[-1]["machine"],
                **{name: found[name] for name in figures}, "valid": curve, **timed,
            }  # fmt: skip
            print(f"{job.folder}: {found['metrics']}", flush=True)
        paces = _step_seconds(args).get(one.name, {})
        levels = args.out / one.name / "results.json"
        for job in one.jobs():
            if job.folder in kept and job.label in paces:
                kept[job.folder]["step_seconds"] = paces[job.label]
            if job.folder in kept and levels.is_file():
                kept[job.folder]["baselines"] = json.loads(levels.read_text(encoding="utf-8"))["baselines"]
    write_json(KEPT, dict(sorted(kept.items())))
    for one in chosen(args):
        draw_kept(one, kept)
        draw_samples(one, kept, args.out)
        draw_recall(one, kept)
    draw_documents(list(EXPERIMENTS), kept)


def _step_seconds(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What `time` measured: seconds by experiment and row."""
    path = args.out / "step_seconds.json"
    found: dict[str, dict[str, float]] = {}
    return json.loads(path.read_text(encoding="utf-8"))["step_seconds"] if path.is_file() else found


def measure(args: argparse.Namespace) -> None:
    """Forward, backward and update of every run, those of an experiment in turn; best of `--rounds`."""
    torch.set_num_threads(args.threads)
    path, found = args.out / "step_seconds.json", _step_seconds(args)
    for one in chosen(args):
        calls = {}
        for job in one.jobs():
            if job.label not in calls and missing(replace(job, start=None), args) is None:
                calls[job.label] = stepper(job, args)
        if calls:
            timings = interleave(calls, runs=args.rounds, warmup=1, clock=args.clock)
            count = timed_steps(one.jobs()[0].run(args.data).task)
            found[one.name] = {label: timing.best / count for label, timing in timings.items()}
            spreads = ", ".join(f"{label} {t.best / count:.2f} s (+{t.spread:.0%})" for label, t in timings.items())
            print(f"{one.name}: {spreads}", flush=True)
            how = {"threads": args.threads, "clock": args.clock, "machine": machine(), "date": _now()}
            write_json(path, {"step_seconds": found, **how})


def timed_steps(task: Task) -> int:
    """How many steps are timed together: several where examples differ in length, and so do their steps."""
    return 8 if task.padded else 1


def stepper(job: Job, args: argparse.Namespace) -> Any:
    """A function that takes the first training steps of a run, `timed_steps` of them, always with the same batches."""
    described = job.run(args.data)
    task, settings = described.task, described.settings
    count = timed_steps(task)
    with batches(
        task, task.examples("train"), seed=0, batch=settings.batch, share=settings.batch // settings.accumulate,
        accumulate=settings.accumulate, process=0, steps=range(count), workers=0,
    ) as stream:  # fmt: skip
        parts = list(stream)
    torch.manual_seed(0)
    model = described.build()
    model.calibrate(parts[0])
    model.train()
    optimizer = make_optimizer(model, settings)

    def steps() -> None:
        for number, part in enumerate(parts, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=settings.precision == "bf16"):
                loss = model(part)["loss"] / part["weight"].sum()
            loss.backward()
            if number % settings.accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
                optimizer.step()
                optimizer.zero_grad()

    return steps


COMMANDS = {"list": show, "try": attempt, "run": run, "time": measure, "pages": pages, "keep": keep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("results/experiments"))
    parser.add_argument("--only", nargs="+", help="experiments by name")
    parser.add_argument("--rows", nargs="+", help="rows of them by label")
    parser.add_argument("--seeds", type=int, default=99, help="the first so many seeds of each")
    parser.add_argument("--steps", type=int, default=3, help="of try")
    parser.add_argument("--rounds", type=int, default=5, help="of time")
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="of time; cpu where others use the machine"
    )
    parser.add_argument("--again", action="store_true", help="train what docs/data holds as well (run)")
    parser.add_argument("--hours", type=float, help="end the queue after so long (run)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=10)
    args = parser.parse_args()
    COMMANDS[args.command](args)


if __name__ == "__main__":
    main()
