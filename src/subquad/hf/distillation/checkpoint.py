"""Checkpoints of a distillation: one safetensors file, written to the side and then renamed, nothing pickled.

It holds the tensors that learn, their Adam moments, and as JSON in the header the settings, the step and all losses.
Settings are what must be the same for a run to go on: numbers, and fingerprints of models, mechanisms and batches.
The tensors of a finished first stage stay in it while the second one runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ...files import replacing

__all__ = ["STUDENT", "Checkpoint", "Stage"]

_FORMAT = "subquad distillation 1"
STUDENT = "weights of the student"
_MERGED = (
    ". A run that was stopped by seconds= in its LoRA stage has merged what it learned into its student: go on with "
    "the student as it was before"
)
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Stage:
    """One stage: its name ("attention", "model"), its steps and its learning rate."""

    name: str
    steps: int
    lr: float


class Checkpoint:
    """The file of one run, or none (path None): where it stands, and how it goes on.

    >>> Checkpoint(None, {"steps": 3}, 10).losses
    {'attention': [], 'model': []}
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], every: int) -> None:
        self.path, self.settings, self.every = path, settings, every
        self.losses: dict[str, list[float]] = {"attention": [], "model": []}
        self.kept: dict[str, Tensor] = {}
        self.stage, self.finished = "attention", False
        if path is not None and path.exists():
            self._read(path)

    @property
    def done(self) -> int:
        """Steps that a former run has done."""
        return sum(len(losses) for losses in self.losses.values())

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("subquad", "{}"))
                self.kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path} is no checkpoint of a distillation ({error}); remove it to start anew") from None
        if header.get("format") != _FORMAT:
            raise ValueError(f"{path} is no checkpoint of a distillation; choose another file")
        if header["settings"] != self.settings:
            differs = sorted(k for k in self.settings if header["settings"].get(k) != self.settings[k])
            raise ValueError(
                f"{path} was written with other settings ({', '.join(differs)}); use those, or remove it to start anew"
                + (_MERGED if differs == [STUDENT] else "")
            )
        self.losses, self.stage, self.finished = header["losses"], header["stage"], header["finished"]

    def begin(self, stage: Stage, tensors: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Put back what the file holds of this stage; returns the first step to do."""
        if not self.kept:
            return 0
        begun = stage.name in ("attention", self.stage)  # what the second stage adds is not there before it
        absent = [name for name in tensors if f"value:{name}" not in self.kept]
        if begun and absent:
            raise ValueError(f"{self.path} lacks the tensor {absent[0]!r}, which learns; remove it to start anew")
        with torch.no_grad():
            for name, parameter in tensors.items():
                if name not in absent:
                    parameter.copy_(self.kept[f"value:{name}"])
        if self.stage != stage.name:
            # This stage is over (its result was just put back), or has not begun.
            return stage.steps if stage.name == "attention" else 0
        for name, parameter in tensors.items():
            if f"exp_avg:{name}" in self.kept:
                optimizer.state[parameter] = {m: self.kept[f"{m}:{name}"].clone() for m in _MOMENTS}
        return stage.steps if self.finished else len(self.losses[stage.name])

    def step(self, stage: Stage, done: int, tensors: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """After a step: save if it is time."""
        if done % self.every == 0 and done < stage.steps:
            self.save(stage, tensors, optimizer)

    def finish(self, stage: Stage, tensors: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """After the last step of a stage."""
        self.save(stage, tensors, optimizer, finished=True)

    def save(
        self,
        stage: Stage,
        tensors: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        finished: bool = False,
    ) -> None:
        """Write the file: the old one or the new one is there at any time, never half of one."""
        if self.path is None:
            return
        kept = {name: value for name, value in self.kept.items() if name.startswith("value:")}
        for name, parameter in tensors.items():
            kept[f"value:{name}"] = parameter.detach().cpu().contiguous().clone()
            for moment, value in optimizer.state.get(parameter, {}).items():
                kept[f"{moment}:{name}"] = value.detach().cpu().contiguous().clone()
        self.kept, self.stage, self.finished = kept, stage.name, finished
        header = {
            "format": _FORMAT, "settings": self.settings, "stage": stage.name, "finished": finished,
            "losses": self.losses,
        }  # fmt: skip
        with replacing(self.path) as draft:
            save_file(kept, draft, metadata={"subquad": json.dumps(header)})

    def remove(self) -> None:
        """The run is complete: the file has served."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
