"""From a model and its optimiser, wrapped or sharded as they may be, to plain named tensors and back.

Every moment is named by its parameter, `weights.name::exp_avg`, whatever the wrapping: a run may be resumed on another
number of processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from . import checkpoint
from .distributed import Workers

__all__ = ["Snapshot"]

Moments = dict[str, dict[str, Tensor]]

# What torch's optimisers keep per parameter and on the CPU, besides moments.
_COUNTS = ("step", "mu_product")


class Snapshot:
    """Saves and restores the weights and moments of one training."""

    def __init__(self, folder: Path, module: nn.Module, model: nn.Module, optimizer: Any, workers: Workers) -> None:
        self.folder, self.module, self.model, self.workers = folder, module, model, workers
        self.optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)  # inside Accelerate's

    def latest(self) -> Path | None:
        """The newest checkpoint."""
        return checkpoint.latest(self.folder)

    def _gathered(self) -> tuple[dict[str, Any], Moments]:
        """Weights and moments by name; of a sharded model on the main process only."""
        if not self.workers.sharded:
            state = self.optimizer.state
            moments: Any = {name: dict(state[p]) for name, p in self.module.named_parameters() if p in state}
            return self.module.state_dict(), moments
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if not self.optimizer.state:  # torch would take a step to make one
            return weights, {}
        moments = get_optimizer_state_dict(self.model, self.optimizer, options=options).get("state", {})
        return weights, moments

    def save(self, step: int, state: dict[str, Any], keep: int) -> None:
        """Write the checkpoint of `step`; all processes take part, the main one writes."""
        weights, moments = self._gathered()
        if self.workers.is_main:
            flat = {
                f"{name}::{kind}": x
                for name, inside in moments.items()
                for kind, x in inside.items()
                if x is not None  # sgd without momentum
            }
            checkpoint.save(self.folder, step, weights, flat, state)
            checkpoint.prune(self.folder, keep)
        self.workers.wait()

    def load(self) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its other state; None if there is none."""
        newest = self.latest()
        if newest is None:
            return None
        weights, flat, state = checkpoint.load(newest)
        moments: Moments = {}
        for key, x in flat.items():
            name, kind = key.split("::")
            moments.setdefault(name, {})[kind] = x
        if self.workers.sharded:
            self._scatter(weights, moments)
            return state
        self.module.load_state_dict(weights)
        for name, parameter in self.module.named_parameters():
            if name in moments:
                # Optimisers count their steps on the CPU; their moments live beside the weights.
                self.optimizer.state[parameter] = {
                    kind: x.clone() if kind in _COUNTS else x.to(parameter.device) for kind, x in moments[name].items()
                }
        return state

    def _scatter(self, weights: dict[str, Any], moments: Moments) -> None:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, weights, options=options)
        if moments:
            # The rates and betas come from the settings, as they are in the new optimiser; the step that torch takes
            # to make its state is overwritten with the saved one.
            groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
            whole: Any = {"state": moments, "param_groups": groups}
            set_optimizer_state_dict(self.model, self.optimizer, whole, options=options)
