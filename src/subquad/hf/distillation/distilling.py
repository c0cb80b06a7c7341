"""Win back what a conversion lost, in minutes on a CPU, with the exact model as the teacher.

1. attention: every layer's mechanism is shown the teacher's own q, k, v and learns to give the teacher's output,

       loss = sum over layers of |W_o (out - exact)|^2 / |W_o exact|^2

   Layers do not disturb each other, no gradient leaves a layer, and only mechanisms learn (centres, scales, learned
   maps). Zhang et al., "LoLCATs: On Low-Rank Linearizing of Large Language Models", 2025.
2. model (optional): LoRA on q, k, v and the output projection (Hu et al., 2022; the peft library), and the mechanisms
   again, against what the whole teacher gives: KL of its logits, or its last hidden states. Merged at the end: the
   student keeps its shape and its parameters.

The order of batches and the learning rate are functions of the step, nothing random is drawn, and a checkpoint holds
parameters and moments: a run that was stopped goes on exactly as it would have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ... import checks
from ...files import fingerprint
from ..conversion.attachment import saved_config
from ..conversion.interface import mechanism_of
from ..conversion.layers import find_layers, known_layers
from ..conversion.output_projections import projection_names
from .checkpoint import STUDENT, Checkpoint, Stage
from .losses import attention_loss, model_loss
from .teacher_cache import TeacherCache
from .trainable import attention_tensors, bounded, gradients_off, learning, learns, trainable_buffers

__all__ = ["DistillationReport", "distill"]


class Progress(Protocol):
    """Called after every step: what is being done and its loss, steps done, steps in all."""

    def __call__(self, line: str, done: int, total: int, /) -> None: ...


@dataclass(frozen=True)
class DistillationReport:
    """Losses of every step of both stages, and how long it took in this process."""

    attention_losses: tuple[float, ...]
    model_losses: tuple[float, ...]
    seconds: float
    resumed_at: int = 0
    trained: tuple[str, ...] = field(default=(), repr=False)
    stopped: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def _order(count: int, step: int, seed: int) -> int:
    """The batch of a step: every batch once per round, in an order of its own in each round."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step // count)
    return int(torch.randperm(count, generator=generator)[step % count])


def _rate(step: int, steps: int, share: float) -> float:
    """Of the learning rate: a short rise, then a cosine to a twentieth; `share` of a time limit has passed."""
    rise = min(10, max(1, steps // 10))
    if step < rise:
        return (step + 1) / rise
    done = max((step - rise) / max(1, steps - rise), share)
    return 0.05 + 0.475 * (1 + math.cos(math.pi * min(1.0, done)))


def distill(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 100,
    lr: float = 1e-2,
    lora_steps: int = 0,
    lora_rank: int = 8,
    lora_lr: float = 1e-3,
    loss: Callable[[Tensor, Tensor, Any], Tensor] | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 25,
    seed: int = 0,
) -> DistillationReport:
    """Train a converted `student` in place to behave like the exact `teacher`; see the top of this file.

    batches:     as both models take them; gone through again and again, in an order that `seed` decides
    steps, lr:   of the first stage (Adam); 0 skips it
    lora_steps, lora_rank, lora_lr: of the second stage; 0 steps skip it
    loss:        of the second stage instead of the built-in one: loss(student output, teacher output, batch)
    seconds:     stop after this time (checked between steps); what was learned is kept. The learning rate then falls
                 with the time where that is ahead of the steps, so such a run depends on the machine
    progress:    called as progress(line, done, total) after every step
    checkpoint:  a file, written atomically every `checkpoint_every` steps and on interruption; if it exists the run
                 continues from it, and it is removed when the run is complete. Another teacher, student, mechanism or
                 batch than it was begun with is refused. An interruption takes the LoRA of the second stage out of the
                 student again, so that the same student can go on

    >>> import copy, torch, subquad as sq
    >>> from subquad.hf.distillation.distilling import distill
    >>> teacher = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1).eval()
    >>> batches = [torch.randn(2, 30, 16) for _ in range(2)]
    >>> student, _ = sq.hf.convert(copy.deepcopy(teacher), "hedgehog")
    >>> report = distill(teacher, student, batches, steps=12)
    >>> report.attention_losses[-1] < report.attention_losses[0]
    True
    """
    for argument, value in (("steps", steps), ("lora_steps", lora_steps), ("seed", seed)):
        checks.check_positive(argument, value, 0)
    for argument, value in (("lora_rank", lora_rank), ("checkpoint_every", checkpoint_every)):
        checks.check_positive(argument, value)
    given = list(batches)
    if not given:
        raise ValueError("batches is empty: at least one is needed, a dict of tensors as the models take them")
    if any(mechanism_of(module) is not None for module in teacher.modules()):
        raise ValueError("the teacher is converted itself; pass the exact model (subquad.hf.revert, or a fresh copy)")
    if not any(mechanism_of(module) is not None for module in student.modules()):
        raise ValueError("the student is not converted: call subquad.hf.convert on a copy of the teacher first")
    if lora_steps and any(".lora_" in name for name, _ in student.named_parameters()):
        raise ValueError(
            "lora_steps: the student has LoRA adapters of its own, which further ones would be merged with; merge them "
            "first, student = student.merge_and_unload(), or leave out lora_steps"
        )
    layers = [len(find_layers(model)) for model in (teacher, student)]
    if layers[0] != layers[1]:
        raise ValueError(
            f"the teacher has {layers[0]} attention layers, the student {layers[1]}: the student must be a converted "
            "copy of the teacher"
        )
    if not lora_steps and not learns(student):
        name = next(one.name for one in map(mechanism_of, student.modules()) if one is not None)
        raise ValueError(
            f"there is nothing to train: {name!r} has no parameters and no calibration. lora_steps= trains the "
            "projections around it"
        )
    settings = {"steps": steps, "lr": lr, "lora_steps": lora_steps, "lora_rank": lora_rank, "lora_lr": lora_lr,
                "seed": seed}  # fmt: skip
    if checkpoint is not None:
        settings |= _fingerprints(teacher, student, given)
    keeper = Checkpoint(None if checkpoint is None else Path(checkpoint), settings, checkpoint_every)
    clock = _Clock(seconds)
    modes = [(module, module.training) for model in (teacher, student) for module in model.modules()]
    flags = {model: gradients_off(model) for model in (teacher, student)}
    teacher.eval()
    student.eval()
    resumed = keeper.done
    try:
        with trainable_buffers(student):
            first = attention_tensors(student)
            if steps and first:
                kept = TeacherCache()

                def of_attention(step: int) -> Tensor:
                    index = _order(len(given), step, seed)
                    return attention_loss(teacher, student, given[index], index, kept)

                _train(
                    Stage("attention", steps, lr),
                    *(first, keeper, clock, progress, steps + lora_steps, 0),
                    of_attention,
                )
            if lora_steps and not clock.stopped:
                _lora(
                    teacher, student, given, keeper, clock, progress, steps, lora_steps, lora_rank, lora_lr, loss, seed
                )
            names = tuple(first)
    finally:
        for module, training in modes:
            module.training = training
        for model, before in flags.items():
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(before.get(name, parameter.requires_grad))
    if not clock.stopped:
        keeper.remove()
    losses = keeper.losses
    return DistillationReport(
        *(tuple(losses["attention"]), tuple(losses["model"])),
        seconds=clock.elapsed,
        resumed_at=resumed,
        trained=names,
        stopped=clock.stopped,
    )


def _fingerprints(teacher: nn.Module, student: nn.Module, batches: Sequence[Any]) -> dict[str, Any]:
    """What must not change between the parts of one run, beside its settings."""
    mechanisms = {name: mechanism_of(module) for name, module in student.named_modules()}
    with trainable_buffers(student):
        learned = attention_tensors(student)
        fixed = {name: x for name, x in student.state_dict().items() if name not in learned}
        shapes = {name: tuple(x.shape) for name, x in learned.items()}
    # Why a config cannot be saved may name an object of this process.
    configs = {name: {**saved_config(one), "unsaveable": ""} for name, one in mechanisms.items() if one is not None}
    return {
        "batches": fingerprint(batches), "mechanisms": fingerprint(configs, shapes),
        "weights of the teacher": fingerprint(teacher.state_dict()), STUDENT: fingerprint(fixed),
    }  # fmt: skip


class _Clock:
    def __init__(self, limit: float | None) -> None:
        self.limit, self.start, self.stopped = limit, time.perf_counter(), ""

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def share(self) -> float:
        """How much of the limit has passed, 0 without one: a run that will be cut short still ends with small steps."""
        return 0.0 if self.limit is None else self.elapsed / self.limit

    def over(self) -> bool:
        if self.limit is not None and self.elapsed >= self.limit and not self.stopped:
            self.stopped = f"after {self.limit:g} seconds"
        return bool(self.stopped)


def _lora(
    teacher: nn.Module,
    student: nn.Module,
    batches: Sequence[Any],
    keeper: Checkpoint,
    clock: _Clock,
    progress: Progress | None,
    before: int,
    steps: int,
    rank: int,
    lr: float,
    loss: Callable[[Tensor, Tensor, Any], Tensor] | None,
    seed: int,
) -> None:
    """The second stage: adapters in, trained, merged; taken out again where it is interrupted, for a checkpoint has
    them beside the weights that they change."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    names = projection_names(student, known_layers(student))
    if not names:
        raise ValueError("lora_steps: the model's attention layers have no linear maps q, k, v, o that are known")
    # The adapters' random halves must be the same when a run is resumed, and nothing else may be disturbed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=names,
            lora_dropout=0.0,
            # GPT-2's Conv1D holds its weight the other way round.
            fan_in_fan_out=all(isinstance(student.get_submodule(name), Conv1D) for name in names),
        )
        adapted = LoraModel(student, config, "default")
    try:
        tensors = {name: p for name, p in student.named_parameters() if ".lora_" in name}
        tensors.update(attention_tensors(student))
        kept = TeacherCache()

        def of_model(step: int) -> Tensor:
            index = _order(len(batches), step, seed + 1)
            return model_loss(teacher, student, batches[index], index, kept, loss)

        _train(Stage("model", steps, lr), *(tensors, keeper, clock, progress, before + steps, before), of_model)
    except BaseException:
        adapted.unload()
        raise
    adapted.merge_and_unload()


def _train(
    stage: Stage,
    tensors: dict[str, nn.Parameter],
    keeper: Checkpoint,
    clock: _Clock,
    progress: Progress | None,
    total: int,
    before: int,
    loss_of: Callable[[int], Tensor],
) -> None:
    with learning(tensors.values()):
        optimizer = torch.optim.Adam(tensors.values(), lr=stage.lr)
        start = keeper.begin(stage, tensors, optimizer)
        if start >= stage.steps:
            return  # a former run has done this stage, and its result was just put back
        try:
            for step in range(start, stage.steps):
                if clock.over():
                    break
                for group in optimizer.param_groups:
                    group["lr"] = stage.lr * _rate(step, stage.steps, clock.share)
                with torch.enable_grad():
                    loss = loss_of(step)
                    # Inputs that fit into an exact window leave nothing to learn from.
                    gradients: Sequence[Tensor | None] = [None] * len(tensors)
                    if loss.requires_grad:
                        gradients = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
                norm = math.sqrt(sum(float(g.square().sum()) for g in gradients if g is not None))
                if not (math.isfinite(norm) and math.isfinite(float(loss.detach()))):
                    raise FloatingPointError(
                        f"the {stage.name} loss or its gradient is not finite at step {step}; lower the learning rate "
                        f"({stage.lr:g})"
                    )
                for parameter, gradient in zip(tensors.values(), gradients, strict=True):
                    parameter.grad = None if gradient is None else gradient * min(1.0, 1.0 / max(norm, 1e-12))
                optimizer.step()
                optimizer.zero_grad()
                bounded(tensors)
                keeper.losses[stage.name].append(float(loss.detach()))
                keeper.step(stage, step + 1, tensors, optimizer)
                if progress is not None:
                    progress(f"{stage.name} loss {float(loss.detach()):.5f}", before + step + 1, total)
        except KeyboardInterrupt:
            keeper.save(stage, tensors, optimizer)
            raise
        if clock.stopped:
            keeper.save(stage, tensors, optimizer)
        else:
            keeper.finish(stage, tensors, optimizer)
