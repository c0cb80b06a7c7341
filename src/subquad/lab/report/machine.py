"""Section 1: the machine, the versions, and the limit that this machine sets: the rate of its matrix product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import subquad
from subquad.kernels.native import library
from subquad.lab.measure import interleave, machine

from .notebook import Notebook
from .running import Clock, Job
from .settings import Settings

__all__ = ["describe", "gemm_rate", "jobs"]

NAME = "machine"
SIZES = (512, 1024, 2048)


def describe() -> dict[str, Any]:
    """What every number of the report depends on."""
    import psutil

    return {
        **machine(),
        "subquad": subquad.__version__,
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "native_kernels": not library.missing(),
    }


def _limits(runs: int) -> dict[str, Any]:
    """GFLOP/s of a square float32 product at several sizes, and GB/s of a copy (read + write)."""
    generator = torch.Generator().manual_seed(0)
    rates = {}
    for size in SIZES:
        a, b = torch.randn(2, size, size, generator=generator)
        timing = interleave({"mm": lambda a=a, b=b: a @ b}, runs=runs, warmup=1)["mm"]  # type: ignore[misc]
        rates[str(size)] = 2.0 * size**3 / timing.best / 1e9
    source = torch.randn(2**24, generator=generator)
    target = torch.empty_like(source)
    copy = interleave({"copy": lambda: target.copy_(source)}, runs=runs, warmup=1)["copy"]
    return {"gemm_gflops": rates, "copy_gb_per_s": 8.0 * source.numel() / copy.best / 1e9}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """The limit is measured in the same run as everything that is compared with it."""

    def run(clock: Clock) -> Mapping[str, Any]:
        return _limits(max(3, settings.runs))

    return [Job("matrix product", {"sizes": list(SIZES)}, run, first=True)]


def gemm_rate(notebook: Notebook) -> float | None:
    """The best rate measured, in GFLOP/s."""
    rates = [max(result["gemm_gflops"].values()) for _, result in notebook.of(NAME)]
    return max(rates, default=None)
