"""What a run says about itself: `metrics.jsonl`, one JSON object per line, and TensorBoard event files beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from .. import checks
from ..files import write_text

__all__ = ["Records", "read_records"]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a line that is none, as a killed run may leave at the end, is dropped."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and isinstance(record.get("kind"), str):
            found.append(record)
    return found


class Records:
    """Appends metrics; after a resume the lines of steps that are computed again are dropped first."""

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        # A run that starts over at step 0 says again what it says before its first step.
        kept = [record for record in read_records(self.path) if step and record["step"] <= step]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in kept))
        self.file = self.path.open("a", encoding="utf-8")
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter
            except ModuleNotFoundError:
                raise checks.missing_package(
                    "--tensorboard (or say --no-tensorboard)", "tensorboard", "train"
                ) from None
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, figures: dict[str, float]) -> None:
        """One line, on the disk at once as far as this process is concerned."""
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}  # NaN is not JSON
        self.file.write(json.dumps({"kind": kind, "step": step, **finite}, allow_nan=False) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close both."""
        self.file.close()
        if self.board is not None:
            self.board.close()
