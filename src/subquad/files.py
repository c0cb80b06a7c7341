"""Writing files: at any moment the old one or the new one is there, never half of one. And what a file was made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "check_writable",
    "fingerprint",
    "locked",
    "make_shared",
    "read_object",
    "replacing",
    "write_json",
    "write_text",
]


def check_writable(argument: str, path: str | os.PathLike[str], *, folder: bool = False) -> None:
    """Refuse a target that cannot be written before minutes are spent on what it is to hold. Nothing is made.

    >>> check_writable("--json", ".")
    Traceback (most recent call last):
    ...
    ValueError: --json . is a folder; a file is expected, new or existing
    """
    target = Path(path)
    if target.exists() and not target.is_dir() and not target.is_file() and not folder:
        if os.access(target, os.W_OK):  # a pipe or a device, which is written to as it is
            return
        raise ValueError(f"{argument} {target} cannot be written to; name a file")
    if target.exists() and target.is_dir() != folder:
        found, expected = ("a file", "a folder") if folder else ("a folder", "a file")
        raise ValueError(f"{argument} {target} is {found}; {expected} is expected, new or existing")
    place = target if folder else target.parent
    while not place.exists():
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".subquad-"):
            pass
    except OSError as error:
        raise ValueError(
            f"{argument} {target}: nothing can be written there ({error.strerror or error}); name a place that you may "
            "write to"
        ) from error


def make_shared(path: Path) -> None:
    """Give what `tempfile` made, which is private, the permissions of any other new file or folder."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """The path of an empty draft in the same folder, which takes the name `path` at the end of the block.

    A reader, or whoever comes after a crash or Ctrl-C, sees the old file or the new one: the draft reaches the disk
    before it takes the name, and after an exception it is removed. Missing folders are made. A link is followed, an
    existing file keeps its permissions, and what is no file (a pipe, /dev/stdout) is written to.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     target = Path(folder) / "kept" / "a.bin"
    ...     with replacing(target) as draft:
    ...         _ = draft.write_bytes(b"whole")
    ...         there = target.exists()
    ...     print(there, target.read_bytes())
    False b'whole'
    """
    special = Path(path).exists() and not Path(path).is_file()
    target = Path(path if special else os.path.realpath(path))  # of a pipe behind /dev/stdout that would be no path
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=None if special else target.parent, prefix=f".{target.name}.", suffix=".tmp")
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        if special:
            target.write_bytes(draft.read_bytes())
            draft.unlink()
            return
        if target.exists():
            draft.chmod(target.stat().st_mode)
        else:
            make_shared(draft)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path` in one step; see `replacing`."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Refuse a folder that another process has locked; the lock ends with the block, or with the process.

    >>> with tempfile.TemporaryDirectory() as folder, locked(folder), locked(folder):
    ...     pass
    Traceback (most recent call last):
    ...
    ValueError: ... is in use by process ... wait for it, or end it
    """
    with (Path(folder) / ".run.lock").open("a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(f"{folder} is in use by {file.read().strip()}; wait for it, or end it") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file; ValueError with its name where there is none.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.json").write_text("[1]")
    ...     read_object(Path(folder) / "a.json")
    Traceback (most recent call last):
    ...
    ValueError: ...a.json must hold a JSON object, got list
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): it is damaged") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(data).__name__}")
    return data


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write `data` to `path` as JSON in one step, NaN and infinities as null; see `replacing`.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder) / "a.json", {"best_ms": 1.5, "error": float("nan")})
    ...     print((Path(folder) / "a.json").read_text().strip())
    {
      "best_ms": 1.5,
      "error": null
    }
    """
    write_text(path, json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """NaN and infinities become null: they are not JSON, and other languages refuse a file that holds them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def fingerprint(*parts: Any) -> str:
    """SHA-256 of tensors, plain values, and lists and mappings of them; of anything else its type alone counts.

    >>> one, other = ([{"input_ids": torch.tensor([[1, x]])}] for x in (2, 3))
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
    (True, False)
    """
    digest = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, Tensor):
            flat = (x.int_repr() if x.is_quantized else x).detach().cpu().contiguous()
            digest.update(f"{x.dtype} {tuple(flat.shape)}".encode())
            digest.update(flat.view(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        elif isinstance(x, Mapping | list | tuple):
            digest.update(f"{len(x)} in one;".encode())
            for one in x.items() if isinstance(x, Mapping) else x:
                add(one)
        else:
            plain = x is None or isinstance(x, str | int | float)
            digest.update(f"{x!r};".encode() if plain else f"{type(x).__name__};".encode())

    add(parts)
    return digest.hexdigest()
