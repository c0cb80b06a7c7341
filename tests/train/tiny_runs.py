"""Runs that take a second: a tiny copy task, without event files."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from subquad.train import Run, Running

QUICK = Running(tensorboard=False, log_every=1, save_every=2, keep=100)


def tiny(mechanism: Any = "linear", *, model: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Copying four symbols; `settings` over 6 steps of 4 examples."""
    given = {"steps": 6, "batch": 4, "valid_examples": 4, "valid_every": 3, "warmup": 2, **settings}
    return Run.of("copy", mechanism, model={"dim": 16, **(model or {})}, settings=given, length=4)


def tensors(folder: Path, step: int, name: str = "model") -> dict[str, Tensor]:
    """What a checkpoint holds."""
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")
