"""The training loop: it learns, stops, refuses, and says the same whatever the parts are."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.tasks import get_task
from subquad.train import Run, Running, Settings, load_trained, train
from subquad.train import memory as memory_module
from subquad.train.compare import compare
from subquad.train.data import batches, order, validation_batches
from subquad.train.records import read_records
from subquad.train.settings import learning_rate

from .tiny_runs import QUICK, tensors, tiny


def test_it_learns_and_keeps_its_records(tmp_path: Path) -> None:
    run = Run.of(
        "copy", "softmax", model={"dim": 32}, settings={"steps": 160, "batch": 32, "lr": 5e-3, "warmup": 10}, length=4
    )
    outcome = train(run, tmp_path, running=Running(log_every=40))
    assert outcome.status == "finished"
    assert outcome.metrics["accuracy"] > 0.8  # chance is 0.1
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [40, 80, 120, 160]
    assert [r["step"] for r in records if r["kind"] == "valid"] == [100, 160]
    assert records[0]["lr"] == pytest.approx(learning_rate(run.settings, 39))
    assert any((tmp_path / "tensorboard").iterdir())
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["metrics"] == outcome.metrics
    assert Run.from_dict(result["run"]) == run
    again, model, step = load_trained(tmp_path)
    assert (again, step, model.training) == (run, 160, False)
    batch, _ = next(
        validation_batches(run.task, run.task.examples("valid"), count=128, share=128, process=0, processes=1)
    )
    with torch.no_grad():
        right = float(model(batch)["right"]) / float(batch["weight"].sum())
    assert right == pytest.approx(outcome.metrics["accuracy"])


def test_parts_of_a_batch_change_nothing_but_rounding(tmp_path: Path) -> None:
    # Different weights per example, as for masked text: a mean of means would differ.
    def run(accumulate: int) -> Run:
        settings = {"steps": 3, "batch": 8, "accumulate": accumulate, "valid_examples": 4}
        return Run.of("text", "linear", model={"dim": 16, "layers": 1}, settings=settings, masked=True, length=32)

    for parts in (1, 4):
        train(run(parts), tmp_path / str(parts), running=QUICK)
    losses = [
        [r["loss"] for r in read_records(tmp_path / p / "metrics.jsonl") if r["kind"] == "train"] for p in ("1", "4")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    whole, parts4 = tensors(tmp_path / "1", 3), tensors(tmp_path / "4", 3)
    for name, x in whole.items():
        torch.testing.assert_close(parts4[name], x, rtol=0, atol=2e-5)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    "mechanism",
    [
        "softmax",
        {"mechanism": "performer", "num_features": 8, "features": "sderf"},  # needs calibration
        {"mechanism": "hedgehog"},
        {"mechanism": "lsh", "rounds": 1, "buckets": 4, "bucket_size": 4},
    ],
    ids=lambda choice: choice if isinstance(choice, str) else choice["mechanism"],
)
def test_every_kind_of_mechanism_trains(mechanism: Any, precision: str, tmp_path: Path) -> None:
    outcome = train(tiny(mechanism, precision=precision), tmp_path, running=QUICK)
    assert outcome.status == "finished"
    assert math.isfinite(outcome.metrics["loss"])


def test_redraw_counts_and_is_in_the_checkpoint(tmp_path: Path) -> None:
    run = tiny({"mechanism": "performer", "num_features": 8}, redraw_every=2)
    train(run, tmp_path, running=QUICK)
    state = json.loads((tmp_path / "checkpoints/step-00000006/state.json").read_text())
    assert state["redraw"] == {"every": 2, "steps": 6}
    assert state["data"]["position"] == 24
    draws = {name: x for name, x in tensors(tmp_path, 6).items() if name.endswith("draws")}
    assert [int(x) for x in draws.values()] == [2]  # before steps 3 and 5; the last two steps trained what is saved


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    outcome = train(tiny(lr=1e30, warmup=0), tmp_path, running=Running(tensorboard=False, save_every=1, log_every=1))
    assert outcome.status == "diverged"
    assert outcome.step < 6
    assert "is not finite" in outcome.reason
    assert "--lr" in outcome.reason
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept[-1] == f"step-{outcome.step:08d}"
    assert all(bool(x.isfinite().all()) for x in tensors(tmp_path, outcome.step).values())
    assert read_records(tmp_path / "metrics.jsonl")[-1]["kind"] == "diverged"


def test_ctrl_c_finishes_the_step_and_saves(tmp_path: Path) -> None:
    def interrupt(text: str, done: int, total: int) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    outcome = train(tiny(), tmp_path, running=Running(tensorboard=False, log_every=1), on_log=interrupt)
    assert (outcome.status, outcome.step) == ("interrupted", 3)
    assert (tmp_path / "checkpoints/step-00000003").is_dir()
    assert signal.getsignal(signal.SIGINT) is before
    assert train(tiny(), tmp_path, running=QUICK, resume=True).status == "finished"


def test_resuming_where_no_run_is_starts_nothing_and_names_the_runs_beside(tmp_path: Path) -> None:
    train(tiny(steps=1), tmp_path / "copy-linear", running=QUICK)
    with pytest.raises(ValueError, match=r"copy-linea' holds no run.*leave out --resume.*beside it: 'copy-linear'$"):
        train(tiny(steps=1), tmp_path / "copy-linea", running=QUICK, resume=True)
    with pytest.raises(ValueError, match=r"both' holds no run"):
        compare(tiny(steps=1), ["linear", "softmax"], tmp_path / "both", running=QUICK, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["copy-linear"]


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path) -> None:
    said: list[tuple[str, int, int | None]] = []

    def resume() -> tuple[str, int, int | None]:
        said.clear()
        train(tiny(), tmp_path, running=QUICK, resume=True, on_log=lambda *line: said.append(line))
        return said[0]

    train(tiny(), tmp_path, running=QUICK)
    assert resume() == ("finished before, nothing is left to train", 6, None)
    shutil.rmtree(tmp_path / "checkpoints/step-00000006")
    assert resume() == ("resumed at step 4", 4, None)
    shutil.rmtree(tmp_path / "checkpoints")  # killed before the first was complete
    assert resume() == ("no step of this run was kept, it starts at step 0", 0, None)


def test_redrawing_where_nothing_is_drawn_is_a_note(tmp_path: Path) -> None:
    said: list[tuple[str, int, int | None]] = []
    train(tiny("linear", steps=1, redraw_every=1), tmp_path, running=QUICK, on_log=lambda *line: said.append(line))
    assert said[0] == ("redraw_every changes nothing, the mechanism draws no features", 0, None)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_configuration_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    before = everything(tmp_path)
    for other, field in (
        (tiny(lr=0.5), "settings.lr: 0.002 there, 0.5 now"),
        (tiny("softmax"), "model.mechanism: 'linear' there, 'softmax' now"),
        (tiny(model={"dim": 32}), "model.dim: 16 there, 32 now"),
    ):
        with pytest.raises(ValueError, match=field):
            train(other, tmp_path, running=QUICK, resume=True)
    with pytest.raises(ValueError, match="--resume"):
        train(tiny(), tmp_path, running=QUICK)
    assert everything(tmp_path) == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match="not a run's folder"):
        train(tiny(), tmp_path, running=QUICK)
    assert everything(tmp_path) == {"thesis.txt": b"all of it"}


def test_bad_data_leave_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        train(Run.of("text", "linear", data=str(tmp_path / "no.txt")), tmp_path / "out", running=QUICK)
    assert not (tmp_path / "out").exists()


def test_a_batch_that_does_not_fit_names_its_size_and_the_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 3 << 20
    monkeypatch.setattr(memory_module, "free_memory", lambda device: free)
    with pytest.raises(
        ValueError, match=r"need about \d+\.\d+ GiB.*at most \d+ examples.*--batch.*--accumulate"
    ) as caught:
        train(tiny(batch=4096), tmp_path / "a", running=QUICK)
    assert not (tmp_path / "a").exists()
    fits = int(str(caught.value).split("at most ")[1].split()[0])
    assert train(tiny(batch=fits, steps=1), tmp_path / "b", running=QUICK).status == "finished"


def test_unknown_free_memory_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: None)
    huge, cpu = memory_module.MemoryEstimate(1 << 60, 1 << 60), torch.device("cpu")
    memory_module.refuse_batch(huge, 1, cpu)
    assert "free is unknown" in str(memory_module.out_of_memory(huge, 1, cpu, "no"))
    monkeypatch.setattr(memory_module, "available_memory", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"1\.00 GiB are free; not even one"):
        memory_module.refuse_batch(huge, 1, cpu)


def test_the_memory_estimate_is_what_autograd_keeps() -> None:
    task = get_task("text")(length=64)  # type: ignore[call-arg]
    model = task.build({"layers": 2, "heads": 2, "dim": 32, "mechanism": "linear", "seed": 0})
    examples = task.examples("valid")
    one, four = (
        memory_module.estimate_memory(
            model, next(validation_batches(task, examples, count=n, share=n, process=0, processes=1))[0]
        )
        for n in (1, 4)
    )
    assert one.fixed == four.fixed == 16 * sum(p.numel() for p in model.parameters())
    assert four.example == pytest.approx(one.example, rel=0.2)
    # At the least: logits and their softmax, 64 x 256 floats each, and the activations of each block's feed-forward.
    assert one.example > 4 * 64 * (2 * 256 + 2 * 2 * 128)


def test_memory_that_runs_out_later_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.tasks.heads import CausalModel

    def fail(self: CausalModel, batch: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    monkeypatch.setattr(CausalModel, "forward", fail)
    with pytest.raises(ValueError, match=r"out of memory.*--batch"):
        train(tiny(), tmp_path, running=QUICK)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
def test_workers_give_the_same_batches_and_end_with_the_run(tmp_path: Path) -> None:
    for workers in (0, 2):
        running = Running(tensorboard=False, workers=workers)
        train(tiny(), tmp_path / str(workers), running=running)
        assert multiprocessing.active_children() == []
    alone, helped = tensors(tmp_path / "0", 6), tensors(tmp_path / "2", 6)
    assert all(torch.equal(x, helped[name]) for name, x in alone.items())


def fail_with_workers(run: Run) -> None:
    with batches(
        run.task, run.task.examples("train"), seed=0, batch=4, share=4, accumulate=1, process=0, steps=range(1000),
        workers=2,
    ) as stream:  # fmt: skip
        next(stream)
        assert len(multiprocessing.active_children()) == 2
        raise RuntimeError("stop here")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on one core
def test_workers_end_when_the_run_fails() -> None:
    with pytest.raises(RuntimeError, match="stop here"):
        fail_with_workers(tiny())
    assert multiprocessing.active_children() == []


def test_two_processes_see_together_what_one_sees() -> None:
    run = tiny()

    def seen(processes: int, process: int) -> list[torch.Tensor]:
        with batches(
            run.task, run.task.examples("train"), seed=3, batch=8, share=8 // processes // 2, accumulate=2,
            process=process, steps=range(2, 4), workers=0,
        ) as stream:  # fmt: skip
            return [batch["tokens"] for batch in stream]

    one = torch.cat(seen(1, 0))
    first, second = (torch.cat(seen(2, process)).view(2, 4, -1) for process in (0, 1))
    torch.testing.assert_close(torch.cat([first, second], 1).view(16, -1), one, rtol=0, atol=0)


def test_order_is_a_permutation_per_pass_and_differs_between_them() -> None:
    passes = [order(50, 7, 50 * turn, 50) for turn in range(3)]
    assert all(sorted(one) == list(range(50)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert order(50, 8, 0, 50) != passes[0]
    large = order(1 << 40, 7, 0, 1000)
    assert len(set(large)) == 1000
    assert max(large) > 1 << 39


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"precision": "int3"}, "precision='int3'"),
        ({"beta1": 2}, "beta1 must be a number in 0..1"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"lr": math.inf}, "lr must be a number"),
        ({"clip": math.inf}, "clip must be a number at least 0"),
        ({"stepz": 3}, "did you mean 'steps'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Settings.from_dict(settings)


def test_a_batch_that_cannot_be_divided_says_so() -> None:
    with pytest.raises(ValueError, match=r"batch=10 .* multiple of 4"):
        Settings(batch=10, accumulate=2).share(2)


def test_fp16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="use 'bf16'"):
        train(tiny(precision="fp16"), tmp_path, running=Running(device="cpu"))


def test_training_outside_of_the_main_thread(tmp_path: Path) -> None:
    outcomes: list[Any] = []
    thread = threading.Thread(target=lambda: outcomes.append(train(tiny(), tmp_path, running=QUICK)))
    thread.start()
    thread.join()
    assert outcomes[0].status == "finished"


def test_an_accelerator_of_someone_else_keeps_its_state(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    theirs = Accelerator(cpu=True, mixed_precision="no")
    try:
        assert train(tiny("linear", precision="bf16"), tmp_path, running=QUICK).status == "finished"
        assert theirs.mixed_precision == "no" and theirs.num_processes == 1
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_redrawing_where_nothing_is_drawn_is_said(tmp_path: Path) -> None:
    for mechanism, said in (("linear", True), ({"mechanism": "performer", "num_features": 8}, False)):
        lines: list[str] = []
        folder = tmp_path / str(said)
        train(tiny(mechanism, redraw_every=2), folder, running=QUICK, on_log=lambda text, *_, to=lines: to.append(text))
        assert any("draws no features" in line for line in lines) == said


def test_bad_data_in_the_middle_keep_what_was_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from subquad.tasks.base import DataError
    from subquad.train.loop import _Training

    run, taken = tiny(steps=9), _Training._step

    def step(self: _Training, number: int, stream: Any) -> Any:
        if number == 5:
            raise DataError("record 7 is bad")
        return taken(self, number, stream)

    monkeypatch.setattr(_Training, "_step", step)
    with pytest.raises(DataError, match="record 7"):
        train(run, tmp_path, running=QUICK)
    assert load_trained(tmp_path)[2] == 5
