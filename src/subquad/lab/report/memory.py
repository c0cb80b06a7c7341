"""Section 2, continued: peak memory against length, each reading from a process that has run nothing else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from subquad.lab.making import options_for
from subquad.lab.memory import peak_memories

from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings
from .speed import attention_bytes

__all__ = ["jobs", "points"]

NAME = "memory"


def _measure(settings: Settings, length: int, clock: Clock) -> dict[str, Any]:
    asked = [
        {
            "mechanism": name, "length": length, "options": options_for(name, seed=settings.seed, length=length),
            "heads": settings.heads, "head_dim": settings.head_dim, "backward": backward,
            "threads": torch.get_num_threads(),
        }
        for backward in ((False, True) if length <= settings.longest_training else (False,))
        for name in settings.names
    ]  # fmt: skip
    found = peak_memories(asked, timeout=max(20.0, 2.0 * clock.left))
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

        found.append(Job(f"L={length}", asked, run, attention_bytes(settings, length, training=True)))
    return found


def points(notebook: Notebook, name: str, kind: str) -> dict[int, float]:
    """MiB by length of one mechanism, on top of its inputs."""
    found = {}
    for asked, result in notebook.of(NAME):
        for reading in result["readings"]:
            if reading["mechanism"] == name and reading["pass"] == kind and "extra_bytes" in reading:
                found[asked["length"]] = reading["extra_bytes"] / 2**20
    return dict(sorted(found.items()))
