"""Timing that can be compared: warm-up, interleaved rounds, best and spread, and the machine it ran on.

Competitors are timed in turn (a b c, a b c, ...), never one after the other's last run: a clock that changes, a
neighbour that wakes up or memory that warms then meets all of them. The *best* time is the cost of the work itself
(noise only ever adds); the *spread*, median over best minus one, says how far to trust it.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from subquad import checks
from subquad.planning.cost import clock as seconds_here

__all__ = ["CLOCKS", "Timing", "interleave", "machine"]


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timing:
    """The seconds of every measured run of one competitor, in the order in which they ran."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.seconds:
            raise ValueError("Timing(seconds=()): at least one measured run is expected")

    @property
    def best(self) -> float:
        """The fastest run, in seconds."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle run, in seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Median over best, minus one: 0.05 means that the usual run was 5 % slower than the best.

        >>> round(Timing((1.0, 1.1, 3.0)).spread, 3)
        0.1
        """
        return self.median / self.best - 1.0

    def as_dict(self) -> dict[str, Any]:
        """Milliseconds, for a record: `best_ms`, `median_ms`, `spread`, `runs_ms`."""
        return {
            "best_ms": self.best * 1e3,
            "median_ms": self.median * 1e3,
            "spread": self.spread,
            "runs_ms": [second * 1e3 for second in self.seconds],
        }


def _wait_for(device: torch.device) -> None:
    """Accelerators return before they have computed; a clock read without waiting would time the launch."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "xpu":
        torch.xpu.synchronize(device)


def interleave(
    calls: Mapping[str, Callable[[], object]],
    *,
    runs: int = 5,
    warmup: int = 1,
    seconds: float = float("inf"),
    device: str | torch.device = "cpu",
    once: frozenset[str] = frozenset(),
    clock: str | None = None,
) -> dict[str, Timing]:
    """Time `calls` in turn, `runs` rounds of all of them after `warmup` unmeasured ones.

    calls: what to time, by name; each takes no arguments.
    runs: measured rounds.
    warmup: rounds that are run and thrown away (allocation, threads starting, caches filling).
    seconds: stop after the round in which the measured time exceeds this; at least two rounds are run.
    device: where the calls compute; accelerators are waited for on both sides of the clock.
    once: names so slow that they run a single time, without warm-up.
    clock: one of CLOCKS: `wall`, or `cpu` for the time of the process on all its threads, which is what can be
        compared (on one thread) where other processes share the machine. None: `cpu` where torch has one thread.

    Returns a `Timing` per name, in the order of `calls`.

    >>> timings = interleave({"sum": lambda: torch.ones(10).sum()}, runs=3)
    >>> len(timings["sum"].seconds), timings["sum"].best > 0
    (3, True)
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least 1 measured run is expected")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: 0 or more unmeasured rounds are expected")
    if unknown := once - calls.keys():
        raise ValueError(f"once={sorted(unknown)}: expected names among calls, {sorted(calls)}")
    if clock is not None:
        checks.check_option("clock", clock, CLOCKS)
    where = torch.device(device)
    now = CLOCKS[clock] if clock else seconds_here if where.type == "cpu" else time.perf_counter
    repeated = [name for name in calls if name not in once]
    for _ in range(warmup):
        for name in repeated:
            calls[name]()
    measured: dict[str, list[float]] = {name: [] for name in calls}
    spent = 0.0
    for turn in range(runs):
        for name in calls if turn == 0 else repeated:
            _wait_for(where)
            start = now()
            calls[name]()
            _wait_for(where)
            measured[name].append(now() - start)
            spent += measured[name][-1]
        if spent > seconds and turn >= 1:
            break
    return {name: Timing(tuple(values)) for name, values in measured.items()}


def _processor() -> str:
    """The processor's name; `platform.processor()` is empty or just 'x86_64' on most Linux systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What a timing depends on besides the code: processor, threads, versions, and how busy the machine was.

    >>> sorted(machine())
    ['cores', 'cpu_capability', 'load_1min', 'platform', 'processor', 'python', 'threads', 'torch']
    """
    try:
        load: float | None = os.getloadavg()[0]
    except (AttributeError, OSError):  # not every system keeps one
        load = None
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load_1min": load,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
