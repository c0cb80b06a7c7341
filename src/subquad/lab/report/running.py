"""Who measures when: sections take turns, each within its share of the time and of the memory there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from subquad.lab.memory import available_memory
from subquad.plain_text import first_line

from .notebook import Notebook

__all__ = ["Clock", "Job", "Section", "measure", "too_long"]

# Estimates are rough, and a machine that swaps measures nothing.
MEMORY_SHARE = 0.6


@dataclass(frozen=True)
class Clock:
    """How long the section may still take."""

    deadline: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()


@dataclass(frozen=True)
class Job:
    """One cell to be measured.

    asked:  everything the result depends on; the cell is found again by it
    run:    the measurement, given the clock of its section
    memory: bytes it will need, roughly
    first:  runs even when the time of the section is used up: without it there is nothing to show
    """

    label: str
    asked: Mapping[str, Any]
    run: Callable[[Clock], Mapping[str, Any]]
    memory: int = 0
    first: bool = False


@dataclass(frozen=True)
class Section:
    """Jobs and their share of the whole time."""

    name: str
    share: float
    jobs: Sequence[Job]


def too_long(seconds: float) -> str:
    """Why something that is expected to take `seconds` is left out.

    >>> too_long(0.06), too_long(25.4)
    ('would take about 0.06 s, more than the time left', 'would take about 25 s, more than the time left')
    """
    return f"would take about {seconds:.{0 if seconds >= 10 else 2}f} s, more than the time left"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _reason(job: Job, clock: Clock, seconds: float) -> str | None:
    """Why the job is not run now, or None."""
    free = available_memory()
    if free is not None and job.memory > MEMORY_SHARE * free:
        return f"needs about {_gib(job.memory)}, {_gib(free)} of memory are free"
    if clock.left <= 0 and not job.first:
        return f"the section's share of the {seconds:.0f} s was used up; --resume or --seconds gives it more"
    return None


def measure(
    sections: Sequence[Section],
    notebook: Notebook,
    seconds: float,
    on_step: Callable[[str, int, int], None] | None = None,
) -> bool:
    """Run every job that is not in the notebook yet; False if Ctrl-C ended it.

    Deadlines add up: a section that needs less leaves its time to the next ones, and one that overran takes from them.
    """
    total = sum(len(section.jobs) for section in sections)
    whole = sum(section.share for section in sections)
    deadline, done = time.monotonic(), 0
    notebook.skipped.clear()
    notebook.show_only((section.name, job.asked) for section in sections for job in section.jobs)
    try:
        for section in sections:
            deadline += seconds * section.share / whole
            clock = Clock(deadline)
            skipped: dict[str, list[str]] = {}
            for job in section.jobs:
                done += 1
                line = f"{section.name}: {job.label}"
                known = notebook.find(section.name, job.asked)
                if known is None or _left_out(known):
                    reason = _reason(job, clock, seconds)
                    if reason is None:
                        start = time.perf_counter()
                        _run(section.name, job, clock, notebook, start)
                        line += f" ({time.perf_counter() - start:.1f} s)"
                    else:
                        notebook.skip(section.name, job.label, reason)
                        skipped.setdefault(reason, []).append(job.label)
                        continue
                else:
                    line += ": kept"
                if on_step:
                    on_step(line, done, total)
            if on_step:  # a reason is said once, however many cells it holds for
                for reason, labels in skipped.items():
                    on_step(f"{section.name}: skipped, {reason}: {'; '.join(labels)}", done, total)
    except KeyboardInterrupt:
        for section in sections:
            for job in section.jobs:
                missing = notebook.find(section.name, job.asked) is None
                if missing and f"{section.name}: {job.label}" not in notebook.skipped:
                    notebook.skip(section.name, job.label, "interrupted before it was measured")
        return False
    finally:
        for section in sections:
            for job in section.jobs:
                for name, reason in _left_out(notebook.find(section.name, job.asked) or {}).items():
                    notebook.skip(section.name, f"{job.label}, {name}", reason)
    return True


def _left_out(result: Mapping[str, Any]) -> dict[str, str]:
    """Mechanisms that a cell left out for want of time, with the reason; such a cell is measured again on resume."""
    every: Mapping[str, Any] = result.get("mechanisms", {})
    return {name: cell["reason"] for name, cell in every.items() if cell["status"] == "skipped"}


def _run(section: str, job: Job, clock: Clock, notebook: Notebook, start: float) -> None:
    try:
        result = job.run(clock)
    except Exception as error:  # one broken measurement must not take the others with it
        notebook.fail(section, job.label, job.asked, f"{type(error).__name__}: {first_line(error)}")
    else:
        notebook.add(section, job.label, job.asked, result, time.perf_counter() - start)
