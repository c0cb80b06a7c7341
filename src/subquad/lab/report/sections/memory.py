"""Peak memory against length, each reading from a process that has run nothing else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from subquad.lab.calibrated import options_for
from subquad.lab.peak_memory import peak_memories

from ..figure import Figure, Line, only_measured
from ..formatting import megabytes
from ..notebook import Notebook
from ..running import REST, Clock, Job
from ..section import Section
from ..settings import NO_ATTENTION, Settings
from .speed import PASS, attention_bytes

__all__ = ["SECTION", "points"]

NAME = "memory"


def _options(name: str, settings: Settings, length: int) -> dict[str, Any]:
    return {} if name == NO_ATTENTION else options_for(name, seed=settings.seed, length=length)


def _measure(settings: Settings, length: int, clock: Clock) -> dict[str, Any]:
    asked = [
        {
            "mechanism": name, "length": length, "options": _options(name, settings, length),
            "heads": settings.heads, "head_dim": settings.head_dim, "backward": backward,
            "threads": torch.get_num_threads(),
        }
        for backward in ((False, True) if length <= settings.longest_training else (False,))
        for name in [*settings.names, NO_ATTENTION]
    ]  # fmt: skip
    found = peak_memories(asked, timeout=max(20.0, 4.0 * clock.seconds))
    readings = [
        {"mechanism": job["mechanism"], "pass": "training" if job["backward"] else "forward", **reading}
        for job, reading in zip(asked, found, strict=True)
    ]
    return {"readings": readings}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per length. Where the system does not keep a high-water mark there is nothing to measure."""
    if sys.platform == "win32":
        return []
    found = []
    for length in settings.memory_lengths:
        asked = {
            "length": length, "heads": settings.heads, "head_dim": settings.head_dim, "names": settings.names,
            "training": length <= settings.longest_training,
        }  # fmt: skip

        def run(clock: Clock, length: int = length) -> Mapping[str, Any]:
            return _measure(settings, length, clock)

        memory, training = attention_bytes(settings, length, training=True), length <= settings.longest_training
        quiet = 1.5 + 0.17 * len(settings.names) * (2 if training else 1) * (1 + length / 4096)
        cells = (len(settings.names) + 1) * (2 if training else 1)
        found.append(Job(f"L={length}", asked, run, quiet, REST, memory, cells=cells))
    return found


def points(notebook: Notebook, name: str, kind: str) -> dict[int, float]:
    """MiB by length of one mechanism, on top of its inputs."""
    found = {}
    for asked, result in notebook.of(NAME):
        for reading in result["readings"]:
            if reading["mechanism"] == name and reading["pass"] == kind and "extra_bytes" in reading:
                found[asked["length"]] = reading["extra_bytes"] / 2**20
    return dict(sorted(found.items()))


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Peak memory on top of the inputs."""
    lines = []
    for kind in ("forward", "training"):
        for name in [*settings.names, NO_ATTENTION]:
            mine = points(notebook, name, kind)
            if mine:
                notes = [f"{megabytes(mib)} beyond the inputs" for mib in mine.values()]
                lines.append(Line(name, name, list(mine), list(mine.values()), name, {"pass": kind}, notes))
    caption = (
        "Peak memory beyond the inputs, each reading in a process that has run nothing else. Torch’s fused softmax "
        "does not store the attention matrix, so on a CPU memory is not what separates the methods: time is. The "
        "dotted line only copies the values: no mechanism can do with less than its output."
    )
    return [[Figure("memory", "Peak memory against length", caption, "tokens", "MiB beyond the inputs", lines,
                    [only_measured(PASS, lines)])]]  # fmt: skip


SECTION = Section(NAME, "Memory", "", jobs, figures)
