"""What else the machine is doing, and with how many threads to measure beside it.

Where another process takes a core, torch's threads wait for the one that shares it: small operations become ten times
slower, matrix products twice, and no ratio of the two means anything. With as many threads as there are free cores
everything slows down alike. So a report counts the cores that others take before it starts, leaves them to them, counts
again over the whole run, and says both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BUSY", "Watch", "free_threads", "others", "sentence", "warnings"]

BUSY = 0.35  # cores taken by others: below it a machine counts as quiet
SAMPLE = 0.6  # seconds


@dataclass(frozen=True)
class _Reading:
    when: float
    machine: float  # core-seconds of all processes
    own: float  # of this one and its children


def _read() -> _Reading:
    import psutil

    every = psutil.cpu_times()
    busy = sum(getattr(every, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    mine = os.times()
    return _Reading(time.perf_counter(), busy, mine.user + mine.system + mine.children_user + mine.children_system)


class Watch:
    """Cores that other processes have taken since it was made."""

    def __init__(self) -> None:
        self.start = _read()

    @property
    def others(self) -> float:
        """On average; 0 where the clock has not moved."""
        now = _read()
        seconds = now.when - self.start.when
        if seconds <= 0:
            return 0.0
        taken = (now.machine - self.start.machine) - (now.own - self.start.own)
        return max(0.0, taken / seconds)


def others(seconds: float = SAMPLE) -> float:
    """Cores that other processes take right now: this one sleeps for so long and looks."""
    watch = Watch()
    time.sleep(seconds)
    return watch.others


def free_threads(taken: float, threads: int, cores: int) -> int:
    """Threads to measure with where others take so many of the cores.

    >>> free_threads(0.1, 2, 2), free_threads(0.9, 2, 2), free_threads(1.9, 2, 2), free_threads(1.0, 2, 8)
    (2, 1, 1, 2)
    """
    return max(1, min(threads, cores - round(taken))) if taken > BUSY else threads


def sentence(load: dict[str, Any]) -> str:
    """What the page and the terminal say; "" on a quiet machine.

    >>> sentence({"others": 0.9, "cores": 2, "threads": 1, "usual_threads": 2})
    'Other processes took 0.9 of 2 cores: measured with 1 thread instead of 2, times are up to 2x too long.'
    >>> sentence({"others": 0.1, "cores": 2, "threads": 2, "usual_threads": 2})
    ''
    """
    taken, cores = float(load.get("others", 0.0)), int(load.get("cores") or 1)
    threads, usual = load.get("threads", 1), load.get("usual_threads", 1)
    if taken <= BUSY and threads == usual:
        return ""
    free = max(0.5, cores - taken)
    factor = max(cores / free, usual / threads)
    how = (
        "" if threads == usual else f" measured with {threads} thread{'' if threads == 1 else 's'} instead of {usual},"
    )
    return f"Other processes took {taken:.1f} of {cores} cores:{how} times are up to {factor:.2g}x too long."


def warnings(machine: Mapping[str, Any], load: dict[str, Any]) -> list[str]:
    """All that a reader must know before the times, for the page and the terminal.

    >>> warnings({"native_kernels": True}, {})
    []
    >>> warnings({"native_kernels": False}, {})[0][:40]
    'Measured without the native kernels: tor'
    """
    without = (
        "Measured without the native kernels: torch computes everything, and multipole above all takes many times as "
        "long as with them. They are compiled on installation where there is a C++ compiler (GCC 12 or Clang)."
    )
    return [*([] if machine.get("native_kernels", True) else [without]), *filter(None, [sentence(load)])]
