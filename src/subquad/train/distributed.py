"""The processes of a run: Accelerate's view of them, and what to say when one of them is gone."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..plain_text import first_line
from ..tasks.base import Batch

__all__ = ["LostProcess", "Workers", "is_first_process", "lost_process"]

# How the collectives of gloo and NCCL say that the other side is gone.
_SIGNS = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "nccl", "gloo")


def is_first_process() -> bool:
    """Whether this is the one that speaks and writes; torchrun and accelerate launch number them.

    >>> is_first_process()
    True
    """
    return os.environ.get("RANK", "0") == "0"


class LostProcess(RuntimeError):
    """Another process of the run has ended or does not answer."""


def lost_process(error: BaseException, workers: Workers, folder: Path) -> LostProcess | None:
    """The error to raise instead where a collective failed because a process is gone, else None."""
    text = str(error)
    if workers.processes == 1 or not any(sign in text.lower() for sign in _SIGNS):
        return None
    return LostProcess(
        f"process {workers.process} of {workers.processes} lost another one ({first_line(error)}); the run is "
        f"stopped. Its checkpoints are in {folder / 'checkpoints'}: start it again with --resume"
    )


class Workers:
    """One Accelerator, and the few collectives that training needs; use it in a `with` block."""

    def __init__(self, precision: str, device: str | None) -> None:
        try:
            from accelerate import Accelerator  # type: ignore[import-untyped]
            from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
        except ModuleNotFoundError:
            raise checks.missing_package("training", "accelerate", "train") from None

        cpu = device == "cpu" or not torch.accelerator.is_available()
        if precision == "fp16" and cpu:
            raise ValueError("precision='fp16' needs an accelerator; on a CPU use 'bf16' or 'no'")
        # Accelerate keeps one state per process, and would refuse this run its own precision after another one.
        self.others = dict(AcceleratorState._shared_state)
        AcceleratorState._shared_state.clear()
        self.accelerator = Accelerator(cpu=cpu, mixed_precision=precision)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        from accelerate.state import AcceleratorState

        self.accelerator.free_memory()
        AcceleratorState._reset_state(reset_partial_state=not self.others and not torch.distributed.is_initialized())
        AcceleratorState._shared_state.update(self.others)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return torch.device(self.accelerator.device)

    @property
    def processes(self) -> int:
        """How many there are."""
        return int(self.accelerator.num_processes)

    @property
    def process(self) -> int:
        """Which one this is, from 0."""
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        """Whether this one writes the files."""
        return bool(self.accelerator.is_main_process)

    @property
    def sharded(self) -> bool:
        """Whether weights are cut over the processes (FSDP)."""
        return str(self.accelerator.distributed_type).endswith("FSDP")

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Model and optimiser, wrapped for DDP or FSDP and mixed precision."""
        model, wrapped = self.accelerator.prepare(module, optimizer)
        return model, wrapped

    def place(self, batch: Batch) -> Batch:
        """A batch on this process's device."""
        return {name: x.to(self.device, non_blocking=True) for name, x in batch.items()}

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, on each."""
        return x if self.processes == 1 else self.accelerator.reduce(x.clone(), reduction="sum")

    def gather(self, value: Any) -> list[Any]:
        """Each process's value, in order, on each."""
        if self.processes == 1:
            return [value]
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        return list(gather_object([value]))

    def wait(self) -> None:
        """Until all are here."""
        self.accelerator.wait_for_everyone()
