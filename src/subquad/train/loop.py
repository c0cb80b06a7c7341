"""The training loop: one pass of the batches, AdamW, metrics, checkpoints; the same on one process or many.

Accelerate places the model, wraps it for DDP or FSDP, and handles mixed precision. What a step computes depends on the
settings only: the loss of a batch is its sum over all examples divided by their weight, whichever process or part they
are in, so the numbers of processes and of accumulated parts change rounding and nothing else.
"""

from __future__ import annotations

import errno
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..features.seeded import mix
from ..files import write_json
from ..nn.schedule import RedrawSchedule
from ..tasks.base import Batch, Examples, SequentialExamples, Task, TaskModel
from .checkpoint import CannotWrite
from .data import batches, validation_batches
from .distributed import Workers, lost_process
from .memory import MemoryEstimate, estimate_memory, is_out_of_memory, out_of_memory, refuse_batch
from .records import Records
from .rng import restore_rng, rng_state, seed_all
from .run import Run
from .settings import Running, Settings, learning_rate
from .snapshot import Snapshot

__all__ = ["OnLog", "Outcome", "train"]

# Examples that mechanisms with centring or fitted scales are calibrated on before the first step.
CALIBRATION_EXAMPLES = 8
PHASE_SECONDS = 5.0  # between two lines about what follows the last step

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

OnLog = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `status` is finished, interrupted or diverged; `metrics` of the last validation."""

    status: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    artefacts: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    seconds: float = 0.0
    reason: str = ""


def train(
    run: Run, folder: str | Path, *, resume: bool = False, running: Running | None = None, on_log: OnLog | None = None
) -> Outcome:
    """Train `run` in `folder`, or continue it there.

    The folder gets `run.json` (what is trained), `metrics.jsonl`, `tensorboard/`, `checkpoints/` and, at the end,
    `result.json`. A run that was killed continues from its last checkpoint with `resume=True`, to the same weights bit
    for bit as if it had not been (on one CPU process; elsewhere as far as the device's own operations repeat
    themselves). A loss that is not finite ends the run and leaves the last checkpoint as it is.

    >>> import tempfile
    >>> run = Run.of("copy", "linear", settings={"steps": 3, "batch": 4}, length=4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(run, folder, running=Running(tensorboard=False)).status
    'finished'
    """
    folder, running = Path(folder), running or Running()
    with _one_report(), Workers(run.settings.precision, running.device) as workers:
        try:
            training = _Training(run, folder, running, workers, on_log or (lambda *_: None))
            return training.start(resume)
        except (OSError, SafetensorError) as error:
            # safetensors has its own name for a write that failed; data that cannot be read is another matter.
            full = isinstance(error, SafetensorError) or error.errno in FULL
            if training.step is None or not full:
                raise
            kept = training.snapshot.latest()
            reason = getattr(error, "strerror", None) or error
            raise CannotWrite(
                f"{folder}: writing failed after step {training.step} ({reason}); "
                + (f"{kept.name} is kept. " if kept else "no checkpoint was kept. ")
                + f"Make room there and continue with: subquad train --resume --out {folder}"
            ) from error
        except RuntimeError as error:
            if (lost := lost_process(error, workers, folder)) is not None:
                raise lost from error
            raise


def _parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Weight decay on matrices only: shrinking a norm's scale or an embedding's row is no regularisation."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.dim() >= 2 and id(parameter) not in embeddings].append(parameter)
    decays = {True: settings.weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decays[kind]} for kind, params in groups.items() if params]


def _where(step: int, steps: int) -> str:
    """What a resumed run says first."""
    if step >= steps:
        return "finished before, nothing is left to train"
    return f"resumed at step {step}" if step else "no step of this run was kept, it starts at step 0"


@contextmanager
def _one_report() -> Iterator[None]:
    """A full disk is reported once: TensorBoard's thread meets it too, and hands it on to this one."""
    before = threading.excepthook

    def hook(caught: threading.ExceptHookArgs) -> None:
        if not (isinstance(caught.exc_value, OSError) and caught.exc_value.errno in FULL):
            before(caught)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _interrupts(enabled: bool) -> Iterator[list[int]]:
    """A list that Ctrl-C and termination put their number into, instead of stopping in the middle of a step.

    The second one does stop there: a step may take long.
    """
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    if not enabled or threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Training:
    """One call of `train`: what all its parts need."""

    def __init__(self, run: Run, folder: Path, running: Running, workers: Workers, on_log: OnLog) -> None:
        self.run, self.folder, self.running, self.workers, self.on_log = run, folder, running, workers, on_log
        self.settings = run.settings
        self.share = self.settings.share(workers.processes)
        self.estimate: MemoryEstimate | None = None
        self.metrics: dict[str, float] = {}
        self.step: int | None = None  # None until the folder is this run's
        self.elapsed = 0.0  # seconds that earlier starts of the run took

    # -- before the first step ----------------------------------------------------------------------------------------

    def start(self, resume: bool) -> Outcome:
        # Data and model first: what is wrong with them must not leave a folder behind.
        self.examples = {split: self.run.task.examples(split) for split in ("train", "valid")}
        seed_all(mix(self.settings.seed, 0) >> 1)
        module = self.run.build()
        parameters = sum(p.numel() for p in module.parameters())
        if self.running.checkpoint_activations:
            backbone = getattr(module, "backbone", None)
            if not callable(getattr(backbone, "checkpoint_activations", None)):
                raise ValueError(f"checkpoint_activations: {type(module).__name__} has no blocks to compute again")
            backbone.checkpoint_activations()  # type: ignore[union-attr]
        module.to(self.workers.device)
        self._prepare_module(module)
        if self.workers.is_main:
            self.run.claim(self.folder, resume=resume)
        self.workers.wait()
        optimizer = torch.optim.AdamW(
            _parameter_groups(module, self.settings), betas=(self.settings.beta1, self.settings.beta2)
        )
        self.model, self.optimizer = self.workers.prepare(module, optimizer)
        self.redraw = RedrawSchedule(module, self.settings.redraw_every) if self.settings.redraw_every else None
        self.snapshot = Snapshot(self.folder / "checkpoints", module, self.model, self.optimizer, self.workers)
        self.step = 0
        step = self.step = self._restore()
        if resume and self.workers.is_main:
            self.on_log(_where(step, self.settings.steps), step, self.settings.steps)
        return self._loop(step, module, parameters)

    def _first_batch(self, count: int) -> Batch:
        """The first training examples: the same ones for every process, however the batch is cut."""
        settings, task = self.settings, self.run.task
        with batches(
            task, self.examples["train"], seed=settings.seed, batch=count, share=count, accumulate=1, process=0,
            steps=range(1), workers=0,
        ) as stream:  # fmt: skip
            return self.workers.place(next(stream))

    def _prepare_module(self, module: TaskModel) -> None:
        try:
            module.calibrate(self._first_batch(min(CALIBRATION_EXAMPLES, self.settings.batch)))
            if self.running.check_memory:
                self.estimate = estimate_memory(module.train(), self._first_batch(1))
                refuse_batch(self.estimate, self.share, self.workers.device)
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory(self.estimate, self.share, self.workers.device, error) from None
            raise

    def _restore(self) -> int:
        state = self.snapshot.load()
        if state is None:
            seed_all(mix(self.settings.seed, 1 + self.workers.process) >> 1)
            self._save(0)
            return 0
        self.elapsed, self.metrics = state["seconds"], state["metrics"]
        if self.redraw is not None:
            self.redraw.load_state_dict(state["redraw"])
        step = int(state["step"])
        stream = self.examples["train"]
        if isinstance(stream, SequentialExamples):
            stream.seek(state["data"]["stream"])
        if len(state["rng"]) == self.workers.processes:
            restore_rng(state["rng"][self.workers.process])
        else:  # another number of processes than before: dropout cannot be the same, but must not repeat itself
            seed_all(mix(mix(self.settings.seed, step), self.workers.process) >> 1)
        return step

    def _save(self, step: int, seconds: float = 0.0) -> None:
        position, stream = step * self.settings.batch, self.examples["train"]
        kept = {"stream": stream.position(position)} if isinstance(stream, SequentialExamples) else {}
        state = {
            "data": {"position": position, **kept},
            "redraw": None if self.redraw is None else self.redraw.state_dict(),
            "rng": self.workers.gather(rng_state()),
            "metrics": self.metrics,
            "seconds": seconds,
        }
        self.snapshot.save(step, state, self.running.keep)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _loop(self, first: int, module: TaskModel, parameters: int) -> Outcome:
        settings, running, began = self.settings, self.running, time.perf_counter()
        records = Records(self.folder, first, tensorboard=running.tensorboard) if self.workers.is_main else None
        status, reason, step = "finished", "", first

        def seconds() -> float:
            return self.elapsed + time.perf_counter() - began

        plan = batches(
            self.run.task, self.examples["train"], seed=settings.seed, batch=settings.batch, share=self.share,
            accumulate=settings.accumulate, process=self.workers.process, steps=range(first, settings.steps),
            workers=running.workers,
        )  # fmt: skip
        try:
            with _interrupts(self.workers.processes == 1) as caught, plan as stream:
                self.model.train()
                for step in range(first, settings.steps):
                    figures = self._step(step, stream)
                    if not math.isfinite(figures["loss"]) or not math.isfinite(figures["gradient_norm"]):
                        status, reason = "diverged", self._why(step, figures)
                        break
                    done = self.step = step + 1
                    if records and (done % running.log_every == 0 or done == settings.steps):
                        records.write("train", done, {**figures, "seconds": seconds()})
                        self.on_log(f"loss {figures['loss']:.4f}{self._headline()}", done, settings.steps)
                    if done % settings.valid_every == 0 or done == settings.steps:
                        self.metrics = self._validate(self.examples["valid"], done)
                        if records:
                            records.write("valid", done, {**self.metrics, "seconds": seconds()})
                    if done % running.save_every == 0 or done == settings.steps or caught:
                        self._save(done, seconds())
                    if caught and done < settings.steps:
                        status, reason = "interrupted", f"interrupted after step {done}; resume it with --resume"
                        break
            step = step + (status != "diverged") if first < settings.steps else settings.steps
            if records and reason:
                records.write(status, step, {})
        finally:
            if records:
                records.close()
        return self._finish(status, step, reason, parameters, seconds(), module)

    def _step(self, step: int, stream: Iterator[Batch]) -> dict[str, float]:
        """One update; a loss or gradient that is not finite is reported and not applied."""
        settings, workers = self.settings, self.workers
        rate = learning_rate(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = [workers.place(next(stream)) for _ in range(settings.accumulate)]
        weight = workers.sum(torch.stack([part["weight"].sum() for part in parts]).sum()).clamp(min=1e-9)
        total = torch.zeros((), device=workers.device)
        try:
            for place, part in enumerate(parts):
                last = place + 1 == len(parts)
                with nullcontext() if last else workers.accelerator.no_sync(self.model):
                    # DDP and FSDP average gradients over processes, the loss is a sum over them.
                    loss = self.model(part)["loss"] * (workers.processes / weight)
                    workers.accelerator.backward(loss)
                total += loss.detach()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                raise out_of_memory(self.estimate, self.share, workers.device, error) from None
            raise
        figures = {"loss": float(workers.sum(total)) / workers.processes, "lr": rate}
        norm = workers.accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or float("inf"))
        figures["gradient_norm"] = float(norm)
        if settings.precision == "fp16" and math.isfinite(figures["loss"]):
            # Overflow is how the loss scale finds its size; that step is left out, and says so by a norm of 0.
            figures["gradient_norm"] = figures["gradient_norm"] if math.isfinite(figures["gradient_norm"]) else 0.0
        elif not all(math.isfinite(value) for value in figures.values()):
            return figures
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.redraw is not None:
            self.redraw.step()
        return figures

    def _why(self, step: int, figures: dict[str, float]) -> str:
        what = "loss" if not math.isfinite(figures["loss"]) else "gradient"
        kept = self.snapshot.latest()
        return (
            f"the {what} of step {step + 1} is not finite; the run is stopped and {kept} is kept as the last good "
            f"checkpoint. Try a lower --lr (now {self.settings.lr:g}), a longer --warmup, or a smaller --clip (now "
            f"{self.settings.clip:g})"
        )

    def _headline(self) -> str:
        name = self.run.task.metric
        return f", valid {name} {self.metrics[name]:.4f}" if name in self.metrics else ""

    @torch.no_grad()
    def _validate(self, examples: Examples, step: int) -> dict[str, float]:
        self.model.eval()
        last, seen, told = step == self.settings.steps, 0, time.perf_counter()
        if last and self.workers.is_main:
            self.on_log("validating", step, step)
        totals: dict[str, Tensor] = {}
        share, process, processes = self.share, self.workers.process, self.workers.processes
        for batch, counts in validation_batches(
            self.run.task, examples, count=self.settings.valid_examples, share=share, process=process,
            processes=processes,
        ):  # fmt: skip
            placed = self.workers.place(batch)
            sums = {**self.model(placed), "weight": placed["weight"].sum()}
            for name, value in sums.items():
                totals[name] = totals.get(name, 0) + value.double() * counts
            seen += len(placed["weight"])
            if last and self.workers.is_main and time.perf_counter() - told > PHASE_SECONDS:
                self.on_log(f"validating, {seen} examples", step, step)
                told = time.perf_counter()
        self.model.train()
        return self.run.task.metrics({name: float(self.workers.sum(totals[name])) for name in sorted(totals)})

    def _finish(
        self, status: str, step: int, reason: str, parameters: int, seconds: float, module: TaskModel
    ) -> Outcome:
        artefacts: dict[str, Any] = {}
        if status == "finished" and self.workers.is_main and not self.workers.sharded:
            if type(self.run.task).finish is not Task.finish:
                self.on_log("sampling from the trained model", step, step)
            artefacts = self.run.task.finish(module.eval(), self.folder, self.settings.seed)
        outcome = Outcome(status, step, self.metrics, artefacts, parameters, seconds, reason)
        if self.workers.is_main:
            write_json(self.folder / "result.json", {**outcome.__dict__, "run": self.run.to_dict()})
        self.workers.wait()
        return outcome
