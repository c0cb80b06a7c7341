"""The training loop: one pass of the batches, updates, metrics, checkpoints; the same on one process or many.

Accelerate places the model, wraps it for DDP or FSDP, and handles mixed precision. What a step computes depends on the
settings only: the loss of a batch is its sum over all examples divided by their weight, whichever process or part they
are in, so the numbers of processes and of accumulated parts change rounding and nothing else.
"""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..features.seeded import mix
from ..files import locked, read_object, write_json
from ..mechanisms import Mechanism
from ..nn.schedule import RedrawSchedule
from ..plain_text import first_line
from ..tasks.base import Batch, DataError, Progress, SequentialExamples, TaskModel
from . import checkpoint
from .clock import Clock, paced
from .data import batches, check_examples, data_fingerprint, validation_batches
from .distributed import Workers, lost_process
from .memory import MemoryEstimate, estimate_memory, is_out_of_memory, out_of_memory, refuse_batch
from .optimizers import make_optimizer
from .records import Records
from .rng import restore_rng, rng_state, seed_all
from .run import Run
from .settings import Running, learning_rate
from .snapshot import Snapshot
from .start import check_same_model, take_weights

__all__ = ["Outcome", "train"]

# Examples that mechanisms with centring or fitted scales are calibrated on before the first step.
CALIBRATION_EXAMPLES = 8


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `metrics` of the last validation, `seconds` on the wall and `training_seconds` in steps alone.

    status: finished, stopped (its time was up), interrupted or diverged
    signalled: whether Ctrl-C or a termination came; with the last step it was too late to interrupt this run
    """

    status: str
    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    artefacts: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    tokens_per_second: float = 0.0
    reason: str = ""
    signalled: bool = False


def train(
    run: Run,
    folder: str | Path,
    *,
    resume: bool = False,
    running: Running | None = None,
    on_log: Progress | None = None,
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
    with checkpoint.one_report(), Workers(run.settings.precision, running.device) as workers:
        try:
            return _Training(run, folder, running, workers, on_log or (lambda *_: None)).start(resume)
        except RuntimeError as error:
            if (lost := lost_process(error, workers, folder)) is not None:
                raise lost from error
            raise
        except (OSError, SafetensorError) as error:
            if (full := checkpoint.disk_error(error, folder)) is not None:
                raise full from error
            raise


def _kept_outcome(path: Path) -> Outcome | None:
    """How a run ended that needs no step more; None where that is not known."""
    if not path.is_file():
        return None
    found = read_object(path)
    names = [one.name for one in fields(Outcome) if one.name != "signalled"]
    if found.get("status") != "finished" or any(name not in found for name in names):
        return None
    metrics = {name: math.nan if value is None else value for name, value in found["metrics"].items()}
    return Outcome(**{**{name: found[name] for name in names}, "metrics": metrics})


def _where(step: int, steps: int) -> str:
    """What a resumed run says first."""
    if step >= steps:
        return "finished before, nothing is left to train"
    return f"resumed at step {step}" if step else "no step of this run was kept, it starts at step 0"


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

    def __init__(self, run: Run, folder: Path, running: Running, workers: Workers, on_log: Progress) -> None:
        self.run, self.folder, self.running, self.workers = run, folder, running, workers
        self.on_log: Progress = on_log if workers.is_main else lambda *_: None
        self.settings = run.settings
        self.share = self.settings.share(workers.processes)
        self.estimate: MemoryEstimate | None = None
        self.metrics: dict[str, float] = {}
        self.records: Records | None = None
        self.signalled = False

    # -- before the first step ----------------------------------------------------------------------------------------

    def start(self, resume: bool) -> Outcome:
        # Data and model first: what is wrong with them must not leave a folder behind.
        self.examples = {split: self.run.task.examples(split) for split in ("train", "valid")}
        check_examples(self.run.task, self.examples["valid"])
        self.fingerprint = data_fingerprint(self.examples)
        seed_all(mix(self.settings.seed, 0) >> 1)
        module = self.run.build()
        fitted = False
        if self.run.start is not None and not checkpoint.latest(self.folder / "checkpoints"):
            source = Path(self.run.start)
            theirs, mine = (one.to_dict()["model"] for one in (Run.read(source.parent.parent), self.run))
            check_same_model(theirs, mine, source)
            fitted = theirs["mechanism"] == mine["mechanism"]
            take_weights(module, source, same_mechanism=fitted)
        parameters = sum(p.numel() for p in module.parameters())
        if self.running.checkpoint_activations:
            backbone = getattr(module, "backbone", None)
            if not callable(getattr(backbone, "checkpoint_activations", None)):
                raise ValueError(f"checkpoint_activations: {type(module).__name__} has no blocks to compute again")
            backbone.checkpoint_activations()  # type: ignore[union-attr]
        module.to(self.workers.device)
        self._prepare_module(module, fitted)
        with ExitStack() as held:
            if self.workers.is_main:
                self.run.claim(self.folder, resume=resume)
                held.enter_context(locked(self.folder))
                self.running.write(self.folder)
            self.workers.wait()
            return self._claimed(module, parameters, resume)

    def _claimed(self, module: TaskModel, parameters: int, resume: bool) -> Outcome:
        self.model, self.optimizer = self.workers.prepare(module, make_optimizer(module, self.settings))
        self.redraw = RedrawSchedule(module, self.settings.redraw_every) if self.settings.redraw_every else None
        self.snapshot = Snapshot(self.folder / "checkpoints", module, self.model, self.optimizer, self.workers)
        step = self._restore()
        if self.redraw is not None and not any(one.is_random for one in module.modules() if isinstance(one, Mechanism)):
            # Not refused: it may be one of several that are compared.
            self.on_log("redraw_every changes nothing, the mechanism draws no features", step, None)
        if resume:
            self.on_log(_where(step, self.settings.steps), step, None)
        return self._loop(step, module, parameters)

    def _first_batch(self, count: int) -> Batch:
        """The first training examples: the same ones for every process, however the batch is cut."""
        settings, task = self.settings, self.run.task
        with batches(
            task, self.examples["train"], seed=settings.seed, batch=count, share=count, accumulate=1, process=0,
            steps=range(1), workers=0,
        ) as stream:  # fmt: skip
            return self.workers.place(next(stream))

    def _prepare_module(self, module: TaskModel, fitted: bool) -> None:
        try:
            if not fitted:  # features of another run are kept as its weights were trained with them
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
        hours = self.running.hours
        self.clock = Clock(
            state, valid_seconds=self.running.valid_seconds, limit=None if hours is None else 3600 * hours
        )
        if state is None:
            seed_all(mix(self.settings.seed, 1 + self.workers.process) >> 1)
            self._save(0)
            return 0
        if state["data"].get("fingerprint", self.fingerprint) != self.fingerprint:
            raise DataError(
                f"{str(self.folder)!r} was trained on other data than the task {self.run.task.name!r} reads now, "
                "nothing was changed: bring back what was there (--data), or start another run with these weights "
                f"(--from {self.folder} and another --out)"
            )
        self.metrics = {name: value for name, value in state["metrics"].items() if value is not None}  # NaN is null
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

    def _save(self, step: int) -> None:
        position, stream = step * self.settings.batch, self.examples["train"]
        kept = {"stream": stream.position(position)} if isinstance(stream, SequentialExamples) else {}
        state = {
            "data": {"position": position, "fingerprint": self.fingerprint, **kept},
            "redraw": None if self.redraw is None else self.redraw.state_dict(),
            "rng": self.workers.gather(rng_state()),
            "metrics": self.metrics,
            **self.clock.spent(),
        }
        self.snapshot.save(step, state, self.running.keep)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _loop(self, first: int, module: TaskModel, parameters: int) -> Outcome:
        settings, running = self.settings, self.running
        kept = self.folder / "result.json"
        if first >= settings.steps and (before := _kept_outcome(kept)) is not None:
            return before
        if self.workers.is_main:
            kept.unlink(missing_ok=True)  # it told of an earlier step
            self.records = Records(self.folder, first, tensorboard=running.tensorboard)
        plan = batches(
            self.run.task, self.examples["train"], seed=settings.seed, batch=settings.batch, share=self.share,
            accumulate=settings.accumulate, process=self.workers.process, steps=range(first, settings.steps),
            workers=running.workers,
        )  # fmt: skip
        try:
            with _interrupts(self.workers.processes == 1) as caught, plan as stream:
                status, step, reason = self._steps(first, stream, caught)
            if self.records and reason:
                self.records.write(status, step, {})
        finally:
            if self.records:
                self.records.close()
        return self._finish(status, step, reason, parameters, module)

    def _steps(self, step: int, stream: Iterator[Batch], caught: list[int]) -> tuple[str, int, str]:
        """(status, step, reason) after the steps from `step` on."""
        settings, running, clock = self.settings, self.running, self.clock
        self.model.train()
        if step == 0 and self.run.start is not None:
            self._validate(0, at_once=True)  # what the weights of the other run are worth here
        over = step < settings.steps and self._together(clock.over)
        while step < settings.steps and not over:
            began = time.perf_counter()
            with self._data_at_fault(step):
                figures, tokens = self._step(step, stream)
            clock.step(time.perf_counter() - began, tokens * self.workers.processes)
            if not math.isfinite(figures["loss"]) or not math.isfinite(figures["gradient_norm"]):
                return "diverged", step, self._why(step, figures)
            step += 1
            over = step < settings.steps and self._together(clock.over)
            last = over or step == settings.steps
            if step % running.log_every == 0 or last:
                if self.records:
                    self.records.write("train", step, {**figures, **clock.figures()})
                self.on_log(f"loss {figures['loss']:.4f}{self._headline()}", step, settings.steps)
            if self._together(clock.due()) or step % settings.valid_every == 0 or last:
                with self._data_at_fault(step):
                    self._validate(step, at_once=last)
            if step % running.save_every == 0 or last or caught:
                self._save(step)
            self.signalled = bool(caught)
            if caught and step < settings.steps:
                return "interrupted", step, f"interrupted after step {step}; {self._again()}"
        if over:
            return "stopped", step, f"stopped after step {step}: its time of {running.hours:g} hours is up"
        return "finished", step, ""

    @contextmanager
    def _data_at_fault(self, step: int) -> Iterator[None]:
        """Keep what was trained up to `step` where data that cannot be read end the run."""
        try:
            yield
        except DataError:
            if self.workers.processes == 1 and step:  # else the others would wait for this one
                self._save(step)
            raise

    def _together(self, mine: bool) -> bool:
        """Whether any process says so; clocks differ, and all have to do the same."""
        if self.workers.processes == 1 or (self.running.valid_seconds is None and self.running.hours is None):
            return mine
        return bool(self.workers.sum(torch.tensor(float(mine), device=self.workers.device)) > 0)

    def _step(self, step: int, stream: Iterator[Batch]) -> tuple[dict[str, float], int]:
        """One update -> its figures and tokens; a loss or gradient that is not finite is reported and not applied."""
        settings, workers = self.settings, self.workers
        rate = learning_rate(settings, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts = [workers.place(next(stream)) for _ in range(settings.accumulate)]
        if self.redraw is not None:
            self.redraw.step()  # after the data, which may be at fault: then this step was not begun
        tokens = sum(self.run.task.tokens(part) for part in parts)
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
        elif not math.isfinite(figures["loss"]) or not math.isfinite(figures["gradient_norm"]):
            return figures, tokens
        self.optimizer.step()
        self.optimizer.zero_grad()
        return figures, tokens

    def _why(self, step: int, figures: dict[str, float]) -> str:
        what = "loss" if not math.isfinite(figures["loss"]) else "gradient"
        kept = self.snapshot.latest()
        return (
            f"the {what} of step {step + 1} is not finite; the run is stopped and {kept} is kept as the last good "
            f"checkpoint. Try a lower --lr (now {self.settings.lr:g}), a longer --warmup, or a smaller --clip (now "
            f"{self.settings.clip:g})"
        )

    def _again(self) -> str:
        return f"go on with: subquad train --resume --out {shlex.quote(str(self.folder))}"

    def _headline(self) -> str:
        name = self.run.task.metric
        return f", valid {name} {self.metrics[name]:.4f}" if name in self.metrics else ""

    @torch.no_grad()
    def _validate(self, step: int, *, at_once: bool) -> None:
        self.model.eval()
        totals: dict[str, Tensor] = {}
        examples, processes = self.examples["valid"], self.workers.processes
        count = min(self.settings.valid_examples, len(examples))
        progress = paced(self.on_log, at_once=at_once)
        for number, (batch, counts) in enumerate(
            validation_batches(
                self.run.task, examples, count=count, share=self.share, process=self.workers.process,
                processes=processes,
            )
        ):  # fmt: skip
            progress("validating", min(number * self.share * processes, count), count)
            placed = self.workers.place(batch)
            sums = {**self.model(placed), "weight": placed["weight"].sum()}
            for name, value in sums.items():
                totals[name] = totals.get(name, 0) + value.double() * counts
        self.model.train()
        self.metrics = self.run.task.metrics({name: float(self.workers.sum(totals[name])) for name in sorted(totals)})
        if self.records:
            self.records.write("valid", step, {**self.metrics, **self.clock.spent()})

    def _finish(self, status: str, step: int, reason: str, parameters: int, module: TaskModel) -> Outcome:
        artefacts: dict[str, Any] = {}
        if status in ("finished", "stopped") and self.workers.is_main and not self.workers.sharded:
            progress = paced(self.on_log, at_once=True)
            try:
                artefacts = self.run.task.finish(module.eval(), self.folder, self.settings.seed, progress)
            except (ValueError, RuntimeError, ImportError) as error:  # samples are worth less than what was trained
                artefacts = {"failed": f"samples of the trained model: {first_line(error)}"}
        clock = self.clock
        outcome = Outcome(
            status, step, self.metrics, artefacts, parameters, clock.seconds, clock.training,
            clock.tokens / clock.training if clock.training else 0.0, reason, self.signalled,
        )  # fmt: skip
        if self.workers.is_main:
            write_json(self.folder / "result.json", {**outcome.__dict__, "run": self.run.to_dict()})
        self.workers.wait()
        return outcome
