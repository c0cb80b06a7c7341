"""Peak memory of one attention call, measured in a process of its own.

A process that has already run something keeps freed memory and its high-water mark: only a fresh one tells what a call
needs. The child makes its inputs, warms up on a short sequence (libraries, threads), resets the mark, runs the call
once and reports how far the mark rose above what was resident before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subquad.plain_text import first_line

__all__ = [
    "NO_ATTENTION",
    "available_memory",
    "high_water",
    "peak_memories",
    "peak_memory",
    "reset_high_water",
    "resident_memory",
]

NO_ATTENTION = "no attention"  # in place of a mechanism: the values are handed through

_DEFAULTS: dict[str, Any] = {
    "options": {}, "batch": 1, "heads": 8, "head_dim": 64, "is_causal": False, "backward": False, "backend": None,
    "threads": None,
}  # fmt: skip


# What a container may use, what it uses, and where the part of that is which the kernel gives back when it is asked for
# (pages of files that were read), in both versions of control groups.
_CONTAINER = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or "max"
        return None


def _file_pages(path: str, name: str) -> int:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def available_memory() -> int | None:
    """Bytes that this process may still use: what the system has left, or the container's limit; None if unknown.

    >>> found = available_memory()
    >>> found is None or found > 0
    True
    """
    free: int | None = None
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    except OSError:
        with contextlib.suppress(ModuleNotFoundError):  # not Linux: the lab extra has it
            import psutil

            free = int(psutil.virtual_memory().available)
    for *pair, stat, name in _CONTAINER:
        limit, used = (_number(f"/sys/fs/cgroup/{file}") for file in pair)
        if limit is not None and used is not None:
            # Data that were only read through a memory map count as used, and would fill any container.
            inside = limit - used + min(_file_pages(f"/sys/fs/cgroup/{stat}", name), used)
            free = inside if free is None else min(free, inside)
    return free


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

    Returns `extra_bytes` (peak above the resident size before the call, output and gradients included) and
    `tensor_bytes` (q, k, v and out together), or `error` with the last line of what the child said.
    """
    job = {
        "mechanism": mechanism, "length": length, "options": options or {}, "batch": batch, "heads": heads,
        "head_dim": head_dim, "is_causal": is_causal, "backward": backward, "backend": backend, "threads": threads,
    }  # fmt: skip
    return peak_memories([job], timeout=timeout)[0]


def peak_memories(jobs: Sequence[Mapping[str, Any]], *, timeout: float = 600.0) -> list[dict[str, Any]]:
    """`peak_memory` of several calls, each a mapping of its arguments, in the time of one start of Python.

    One process loads the libraries and runs nothing; each call gets a fork of it, which is as fresh as a new process.
    Where forking is not safe (macOS, Windows) every call gets a new process.
    """
    if sys.platform != "linux" and len(jobs) > 1:
        return [found for job in jobs for found in peak_memories([job], timeout=timeout)]
    full = [{**_DEFAULTS, **job} for job in jobs]
    command = [sys.executable, "-m", "subquad.lab.peak_memory", json.dumps(full)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        said = done.stderr.strip().splitlines()
        out, status = done.stdout, said[-1] if said else f"ended with status {done.returncode} (out of memory?)"
    except subprocess.TimeoutExpired as late:
        # What the children before the slow one said still counts.
        out, status = (late.stdout or b"").decode(), f"took longer than {timeout:.0f} s"
    lines = [line for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return found + [{"error": status}] * (len(full) - len(found))


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    """The job in a fork of this process, which must not have computed anything yet."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            try:
                found = _child(job)
            except Exception as error:
                found = {"error": first_line(error)}
            os.write(write, json.dumps(found).encode())
            status = 0
        finally:
            os._exit(status)  # no cleanup of what belongs to the parent
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text) if text else {"error": f"ended with status {status} (out of memory?)"}
    return result


def _status(field: str) -> int:
    """Bytes of one line of /proc/self/status; OSError where the system keeps none."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def resident_memory() -> int:
    """Bytes of this process that are in memory now (Linux)."""
    return _status("VmRSS")


def high_water() -> int:
    """Peak resident bytes since the last reset (Linux), or since the start of the process (elsewhere)."""
    with contextlib.suppress(OSError):
        return _status("VmHWM")
    import resource  # not on Windows, where a reading is refused by this import

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_high_water() -> int:
    """Start the mark anew where the system allows it; returns the level to compare with."""
    with contextlib.suppress(OSError, AttributeError):
        # What the warm-up freed would be used again, unseen; hand it back first (glibc).
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        return resident_memory()
    except OSError:
        return high_water()


def _child(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    import subquad

    if job["threads"]:
        torch.set_num_threads(job["threads"])

    def inputs(length: int) -> list[torch.Tensor]:
        shape = (job["batch"], job["heads"], length, job["head_dim"])
        return [(0.5 * torch.randn(shape)).requires_grad_(job["backward"]) for _ in range(3)]

    attend = None
    if job["mechanism"] != NO_ATTENTION:
        attend = subquad.create(job["mechanism"], job["head_dim"], job["heads"], **job["options"])
        if attend.uses_calibration:
            attend.calibrate(*(x.detach() for x in inputs(256)[:2]))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        form = {"is_causal": job["is_causal"], "backend": job["backend"]}
        out: torch.Tensor = v.clone() if attend is None else attend(q, k, v, **form)
        if job["backward"]:
            out.backward(torch.ones_like(out))
        return out

    with torch.set_grad_enabled(job["backward"]):
        run(*inputs(128))
        q, k, v = inputs(job["length"])
        before = reset_high_water()
        out = run(q, k, v)
    extra = high_water() - before
    return {"extra_bytes": extra, "tensor_bytes": sum(x.nbytes for x in (q, k, v, out))}


if __name__ == "__main__":
    import subquad  # noqa: F401 - and torch with it: loaded once, before the forks

    asked = json.loads(sys.argv[1])
    if any(one["backward"] for one in asked):
        import torch._dynamo  # the first backward would load it, seconds in every fork

    for one in asked:
        print(json.dumps(_forked(one) if sys.platform == "linux" else _child(one)), flush=True)
