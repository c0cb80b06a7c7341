"""The machine, the versions, and the limit that this machine sets: the rate of its matrix product."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import torch

import subquad
from subquad.kernels.native import library
from subquad.lab.measure import interleave, machine

from ..notebook import Notebook
from ..running import FIRST, Clock, Job
from ..section import Section
from ..settings import Settings

__all__ = ["SECTION", "describe", "gemm_rate"]

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
        return _limits(max(3, clock.rounds(settings.runs)))

    return [Job("matrix product", {"sizes": list(SIZES)}, run, 1.0, FIRST, first=True)]


def gemm_rate(notebook: Notebook) -> float | None:
    """The best rate measured, in GFLOP/s."""
    rates = [max(result["gemm_gflops"].values()) for _, result in notebook.of(NAME)]
    return max(rates, default=None)


def _facts(notebook: Notebook, settings: Settings) -> str:
    """What the numbers depend on."""
    where, load = notebook.machine, notebook.load
    rate = gemm_rate(notebook)
    busy = f"other processes took {load['others']:.1f} of {load['cores']} cores" if load else "not measured"
    facts = {
        "processor": f"{where.get('processor')}, {where.get('cores')} cores, threads used: {where.get('threads')}",
        "instructions": where.get("cpu_capability"),
        "memory": f"{where.get('memory_gib', 0):.1f} GiB",
        "matrix-product limit": "not measured" if rate is None else f"{rate:.0f} GFLOP/s in float32, in this run",
        "load": f"{busy} while it ran; below 0.35 counts as quiet",
        "cells": f"{notebook.cells_measured} of {notebook.cells_total} measured",
        "versions": f"subquad {where.get('subquad')}, torch {where.get('torch')}, Python {where.get('python')}",
        "native kernels": "yes" if where.get("native_kernels") else "no: torch computes everything",
        "system": where.get("platform"),
        "shapes": f"batch 1, {settings.heads} heads of width {settings.head_dim}, float32, on the CPU",
        "timing": f"up to {settings.runs} interleaved rounds after a warm-up; the best counts, the usual run is in the "
        "hover text; what takes longer than half a second at the longest lengths runs once",
        "settings": "every mechanism with its defaults (performer: 256 hyperbolic features, orthogonal rows); "
        "what must be calibrated saw other data of the same kind (on the real heads: the same)",
        "error": "‖A′ − A‖² / ‖A‖² of the normalised attention matrix, measured with random ±1 values; with values, of "
        "the output",
    }
    rows = "".join(f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>" for key, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


SECTION = Section(NAME, "Machine and method", "", jobs, before=_facts)
