"""Keeping numbers: JSON files that are either the old one or the new one, never half of each."""

import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["write_json", "write_text"]


def _plain(value: Any) -> Any:
    """NaN and infinities become null: they are not JSON, and other languages refuse a file that holds them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write ``data`` to ``path`` as JSON, atomically.

    See `write_text`. NaN and infinities are written as null.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(pathlib.Path(folder) / "a.json", {"best_ms": 1.5, "error": float("nan")})
    ...     print((pathlib.Path(folder) / "a.json").read_text().strip())
    {
      "best_ms": 1.5,
      "error": null
    }
    """
    write_text(path, json.dumps(_plain(data), indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in one step: a reader, or whoever comes after a crash or Ctrl-C, sees the old one or the new one.

    The text goes to a temporary file in the same folder, reaches the disk, and then takes the name. Missing folders
    are made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; a result is meant to be read like any other new file.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
