"""Checkpoints: a folder per step that is either complete or not there, and never holds code.

    step-00000100/model.safetensors        weights and buffers
                  optimizer.safetensors    the optimiser's moments and step counts, by parameter name
                  state.json               step, position in the data, generators, redraw counter

The folder is written under another name, reaches the disk, and takes its name in one step: `kill -9` at any moment
leaves the one before. Nothing is pickled, so loading a checkpoint never runs what somebody put into it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..files import make_shared, replacing, write_json

__all__ = ["CHECKPOINT_VERSION", "DiskError", "disk_error", "latest", "load", "one_report", "prune", "save"]

# Raised when a field changes its meaning.
CHECKPOINT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
# What writing fails with when a disk or a quota is full, or the disk itself fails.
_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EIO, errno.EROFS, getattr(errno, "EDQUOT", errno.ENOSPC)}


class DiskError(OSError):
    """The files of a run cannot be written any more; those that were complete before are still there."""


def _no_space(error: BaseException | None) -> int | None:
    """The number of the system's error where writing failed for want of space, else None."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError) and (match := re.search(r"os error (\d+)", str(error))):
        number = int(match[1])  # the format's own writer has no other way to say it
    return number if number in _NO_SPACE else None


@contextmanager
def one_report() -> Iterator[None]:
    """A full disk is reported once: the thread that writes event files meets it too, and hands it on to this one."""
    before = threading.excepthook

    def hook(caught: threading.ExceptHookArgs) -> None:
        if _no_space(caught.exc_value) is None:
            before(caught)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def disk_error(error: BaseException, folder: Path) -> DiskError | None:
    """The error to raise instead where writing into `folder` failed for want of space, else None."""
    number = _no_space(error)
    if number is None:
        return None
    kept = latest(folder / "checkpoints")
    there = "no checkpoint is complete yet" if kept is None else f"its newest complete checkpoint is {kept}"
    return DiskError(
        f"the run in {str(folder)!r} cannot be written ({os.strerror(number)}) and is stopped; {there}. Free some "
        f"space, then go on with: subquad train --resume --out {folder}"
    )


def _sync(folder: Path) -> None:
    """Make sure that the names in a folder have reached the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in `folder`, or None."""
    found = _steps(folder)
    return found[-1][1] if found else None


def save(
    folder: Path, step: int, weights: dict[str, Tensor], moments: dict[str, Tensor], state: dict[str, Any]
) -> Path:
    """Write the checkpoint of `step` into `folder`; an existing one of that step is left alone."""
    target = folder / f"step-{step:08d}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        for name, tensors in (("model", weights), ("optimizer", moments)):
            # Copies: tied weights share memory, which the format refuses.
            whole = {key: x.detach().cpu().contiguous().clone() for key, x in tensors.items()}
            with replacing(draft / f"{name}.safetensors") as file:
                save_file(whole, file)
        write_json(draft / "state.json", {"version": CHECKPOINT_VERSION, "step": step, **state})
        make_shared(draft)
        _sync(draft)
        os.rename(draft, target)
        _sync(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed runs left half-written."""
    for _, path in _steps(folder)[:-keep]:
        # Renamed first: a folder that is half removed must not pass for a checkpoint.
        gone = path.with_name(f".{path.name}.old")
        os.rename(path, gone)
        shutil.rmtree(gone)
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the checkpoint file {path} cannot be read ({error}); it is missing or damaged. Remove the folder "
            f"{path.parent.name} to go on from the checkpoint before it"
        ) from None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """(weights, moments, state) of a checkpoint folder."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the checkpoint file {path / 'state.json'} cannot be read ({error}); remove the folder {path.name} to go "
            "on from the checkpoint before it"
        ) from None
    known = state if isinstance(state, dict) else {}
    if missing := [name for name in ("version", "step", "metrics", "rng") if name not in known]:
        raise ValueError(
            f"the checkpoint file {path / 'state.json'} is damaged: it has no {missing[0]!r}; remove the folder "
            f"{path.name} to go on from the checkpoint before it"
        )
    version = state["version"]
    if version != CHECKPOINT_VERSION:
        raise ValueError(
            f"the checkpoint {path} has version {version!r}, this subquad reads version {CHECKPOINT_VERSION}"
        )
    return _tensors(path / "model.safetensors"), _tensors(path / "optimizer.safetensors"), state
