"""Who measures when: cells in the order of their worth, each with as much effort as the time that is left allows.

Every job says what it takes on two quiet cores. Its worth decides the order: what a recommendation needs, then speed
and generation, then errors, then the rest. How much slower this machine is right now is seen from the jobs that have
run; where the rest would not fit, all of it shrinks (fewer rounds, fewer draws) before anything is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.lab.peak_memory import available_memory
from subquad.plain_text import first_line

from .notebook import Notebook

__all__ = ["ERRORS", "FIRST", "REST", "SPEED", "Clock", "Job", "measure", "too_long"]

# Estimates are rough, and a machine that swaps measures nothing.
MEMORY_SHARE = 0.6
FIRST, SPEED, ERRORS, REST = range(4)  # worth
LEAST_EFFORT = 0.2
# What a job of this effort takes, relative to a whole one: some of it (inputs, exact rows, one round) never shrinks.
FIXED = 0.4


@dataclass(frozen=True)
class Clock:
    """How long a job may take.

    effort: of 0 to 1: how much of what it would do on a quiet machine fits
    seconds: that are meant for it
    """

    effort: float = 1.0
    seconds: float = float("inf")

    def rounds(self, count: int, least: int = 1) -> int:
        """As many of `count` rounds or draws as fit.

        >>> Clock(0.5).rounds(4), Clock(0.1).rounds(4, least=2), Clock().rounds(4)
        (2, 2, 4)
        """
        return max(least, min(count, round(self.effort * count)))


@dataclass(frozen=True)
class Job:
    """One cell to be measured.

    asked:   everything the result depends on; the cell is found again by it
    run:     the measurement, given its clock
    quiet:   seconds that it takes on two quiet cores, roughly
    worth:   FIRST, SPEED, ERRORS or REST
    memory:  bytes it will need, roughly
    first:   runs even when the time is used up: without it there is nothing to show
    cells:   how many numbers of the page it stands for
    """

    label: str
    asked: Mapping[str, Any]
    run: Callable[[Clock], Mapping[str, Any]]
    quiet: float = 0.1
    worth: int = REST
    memory: int = 0
    first: bool = False
    cells: int = 1


def too_long(seconds: float) -> str:
    """Why something that is expected to take `seconds` is left out.

    >>> too_long(0.06), too_long(25.4)
    ('would take about 0.06 s, more than the time left', 'would take about 25 s, more than the time left')
    """
    return f"would take about {seconds:.{0 if seconds >= 10 else 2}f} s, more than the time left"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


class _Budget:
    """The time that is left, and how much slower than two quiet cores this machine is."""

    def __init__(self, seconds: float, waiting: float) -> None:
        self.seconds, self.deadline, self.waiting = seconds, time.monotonic() + seconds, waiting
        self.spent, self.expected = 0.5, 0.5  # starts at 1 and learns

    @property
    def pace(self) -> float:
        """Seconds here per second of two quiet cores."""
        return max(0.2, self.spent / self.expected)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def clock(self, job: Job) -> Clock:
        share = self.left / max(1e-9, self.waiting * self.pace)
        effort = min(1.0, max(LEAST_EFFORT, (share - FIXED) / (1 - FIXED)))
        return Clock(effort, max(0.05, share * job.quiet * self.pace))

    def done(self, job: Job, clock: Clock, seconds: float) -> None:
        self.spent += seconds
        self.expected += job.quiet * (FIXED + (1 - FIXED) * clock.effort)

    def refuses(self, job: Job) -> str | None:
        """Why this job is left out, or None."""
        free = available_memory()
        if free is not None and job.memory > MEMORY_SHARE * free:
            return f"needs about {_gib(job.memory)}, {_gib(free)} of memory are free"
        need = job.quiet * self.pace * (FIXED + (1 - FIXED) * LEAST_EFFORT)
        if not job.first and (self.left <= 0 or need > max(self.left, 0.0) + 0.02 * self.seconds):
            return f"the {self.seconds:.0f} s were used up; --resume fills it in, --seconds gives more"
        return None


def measure(
    sections: Sequence[tuple[str, Sequence[Job]]],
    notebook: Notebook,
    seconds: float,
    on_step: Callable[[str, int, int], None] | None = None,
) -> bool:
    """Run every job of every (section, jobs) that is not in the notebook yet; False if Ctrl-C ended it."""
    jobs = [(name, job) for name, every in sections for job in every]
    total = len(jobs)
    notebook.skipped.clear()
    notebook.show_only((name, job.asked, job.cells) for name, job in jobs)
    waiting = [(name, job) for name, job in jobs if _incomplete(notebook.find(name, job.asked))]
    told = on_step or (lambda *_: None)
    done = 0
    for name, job in jobs:
        if (name, job) not in waiting:
            done += 1
            told(f"{name}: {job.label}: kept", done, total)
    budget = _Budget(seconds, sum(job.quiet for _, job in waiting))
    skipped: dict[tuple[str, str], list[str]] = {}
    try:
        for name, job in sorted(waiting, key=_turn):
            done += 1
            reason = budget.refuses(job)
            if reason is not None:
                budget.waiting -= job.quiet
                notebook.skip(name, job.label, reason, job.cells)
                skipped.setdefault((name, reason), []).append(job.label)
                continue
            clock, start = budget.clock(job), time.perf_counter()
            _run(name, job, clock, notebook, start)
            took = time.perf_counter() - start
            budget.waiting -= job.quiet
            budget.done(job, clock, took)
            told(f"{name}: {job.label} ({took:.1f} s)", done, total)
        for (name, reason), labels in skipped.items():  # a reason is said once, however many cells it holds for
            told(f"{name}: skipped, {reason}: {'; '.join(labels)}", total, total)
    except KeyboardInterrupt:
        for name, job in waiting:
            if notebook.find(name, job.asked) is None and f"{name}: {job.label}" not in notebook.skipped:
                notebook.skip(name, job.label, "interrupted before it was measured", job.cells)
        return False
    finally:
        for name, job in jobs:
            for mechanism, reason in _left_out(notebook.find(name, job.asked) or {}).items():
                notebook.skip(name, f"{job.label}, {mechanism}", reason)
    return True


def _turn(each: tuple[str, Job]) -> tuple[int, bool, float]:
    """What a recommendation needs, then the least that every section has to show, then the others by their worth; of
    those of least worth first what gives most numbers in its time."""
    job = each[1]
    return (FIRST if job.first else job.worth, job.worth != FIRST, job.quiet / job.cells if job.worth == REST else 0.0)


def _left_out(result: Mapping[str, Any]) -> dict[str, str]:
    """Mechanisms that a cell left out for want of time, with the reason; such a cell is measured again on resume."""
    every: Mapping[str, Any] = result.get("mechanisms", {})
    return {name: cell["reason"] for name, cell in every.items() if cell["status"] == "skipped"}


def _incomplete(result: Mapping[str, Any] | None) -> bool:
    return result is None or bool(_left_out(result))


def _run(section: str, job: Job, clock: Clock, notebook: Notebook, start: float) -> None:
    try:
        result = job.run(clock)
    except Exception as error:  # one broken measurement must not take the others with it
        notebook.fail(section, job.label, job.asked, f"{type(error).__name__}: {first_line(error)}")
    else:
        notebook.add(section, job.label, job.asked, result, time.perf_counter() - start)
