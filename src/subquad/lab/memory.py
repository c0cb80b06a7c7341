"""Peak memory of one attention call, measured in a process of its own.

A process that has already run something keeps freed memory and its high-water mark: only a fresh one tells what a call
needs. The child makes its inputs, warms up on a short sequence (libraries, threads), resets the mark, runs the call
once and reports how far the mark rose above what was resident before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["peak_memory"]


def peak_memory(
    mechanism: str,
    length: int,
    *,
    options: dict[str, Any] | None = None,
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    is_causal: bool = False,
    backward: bool = False,
    backend: str | None = None,
    threads: int | None = None,
    timeout: float = 600.0,
) -> dict[str, Any]:
    """Bytes that attention at this length needs on top of its inputs.

    Returns ``extra_bytes`` (peak above the resident size before the call, output and gradients included) and
    ``tensor_bytes`` (q, k, v and out together), or ``error`` with the last line of what the child said.
    """
    job = {
        "mechanism": mechanism,
        "length": length,
        "options": options or {},
        "batch": batch,
        "heads": heads,
        "head_dim": head_dim,
        "is_causal": is_causal,
        "backward": backward,
        "backend": backend,
        "threads": threads,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "subquad.lab.memory", json.dumps(job)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with status {done.returncode} (out of memory?)"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _resident() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def _high_water() -> int:
    """Peak resident bytes since the last reset (Linux), or since the start of the process (elsewhere)."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # not on Windows, where a reading is refused by this import

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_high_water() -> int:
    """Start the mark anew where the system allows it; returns the level to compare with."""
    with contextlib.suppress(OSError, AttributeError):
        # What the warm-up freed would be used again, unseen; hand it back first (glibc).
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return _resident()
    except OSError:
        return _high_water()


def _child(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    import subquad

    if job["threads"]:
        torch.set_num_threads(job["threads"])

    def inputs(length: int) -> list[torch.Tensor]:
        shape = (job["batch"], job["heads"], length, job["head_dim"])
        return [(0.5 * torch.randn(shape)).requires_grad_(job["backward"]) for _ in range(3)]

    attend = subquad.create(job["mechanism"], job["head_dim"], job["heads"], **job["options"])
    with contextlib.suppress(ValueError):  # nothing to calibrate
        attend.calibrate(*(x.detach() for x in inputs(256)[:2]))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, is_causal=job["is_causal"], backend=job["backend"])
        if job["backward"]:
            out.backward(torch.ones_like(out))
        return out

    with torch.set_grad_enabled(job["backward"]):
        run(*inputs(128))
        q, k, v = inputs(job["length"])
        before = _reset_high_water()
        out = run(q, k, v)
    extra = _high_water() - before
    return {"extra_bytes": extra, "tensor_bytes": sum(x.numel() * x.element_size() for x in (q, k, v, out))}


if __name__ == "__main__":
    print(json.dumps(_child(json.loads(sys.argv[1]))))
