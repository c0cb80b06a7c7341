"""Limits and validations by the clock, throughput, and what is said while nothing is trained."""

import json
from pathlib import Path

import pytest

from subquad.train import Running, loop, train
from subquad.train.clock import Clock, paced
from subquad.train.records import read_records

from .tiny_runs import QUICK, tensors, tiny


class Ticking:
    """A clock for `perf_counter` that goes on by one second per reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_time_limit_ends_the_run_with_a_checkpoint_and_metrics_and_more_time_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticking()
    monkeypatch.setattr("time.perf_counter", ticks)
    running = Running(tensorboard=False, log_every=1, hours=20 / 3600)
    first = train(tiny(), tmp_path / "run", running=running)
    assert first.status == "stopped"
    assert 0 < first.step < 6
    assert "its time of 0.00555556 hours is up" in first.reason
    assert first.metrics["accuracy"] >= 0
    assert (tmp_path / "run/checkpoints" / f"step-{first.step:08d}").is_dir()
    # The same limit again: its time was up before.
    again = train(tiny(), tmp_path / "run", running=running, resume=True)
    assert (again.status, again.step) == ("stopped", first.step)
    assert train(tiny(), tmp_path / "run", running=QUICK, resume=True).status == "finished"
    train(tiny(), tmp_path / "whole", running=QUICK)
    whole = tensors(tmp_path / "whole", 6)
    assert all(bool((x == whole[name]).all()) for name, x in tensors(tmp_path / "run", 6).items())


def test_validation_at_fixed_times_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", Ticking())  # every step takes one second
    train(tiny(valid_every=100), tmp_path, running=Running(tensorboard=False, log_every=1, valid_seconds=2.0))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "valid"] == [2, 4, 6]
    assert [r["training_seconds"] for r in records if r["kind"] == "valid"] == [2.0, 4.0, 6.0]
    training = [r for r in records if r["kind"] == "train"]
    assert [r["tokens"] for r in training] == [36 * n for n in range(1, 7)]  # 4 examples of 9 tokens
    assert all(r["tokens_per_second"] == 36.0 for r in training)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["tokens_per_second"], result["training_seconds"]) == (36.0, 6.0)


def test_the_clock_goes_on_where_it_was() -> None:
    clock = Clock({"seconds": 50.0, "training_seconds": 9.0, "tokens": 90}, valid_seconds=5.0, limit=1000.0)
    assert not clock.due() and not clock.over
    clock.step(2.0, 20)
    assert clock.due() and not clock.due()
    figures = clock.figures()
    assert (figures["training_seconds"], figures["tokens"], figures["tokens_per_second"]) == (11.0, 110, 10.0)


def test_a_phase_speaks_at_once_or_when_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", Ticking())
    for at_once, expected in ((True, [0, 3, 6]), (False, [2, 5])):
        said: list[int] = []
        report = paced(lambda what, done, total, said=said: said.append(done), at_once=at_once, pace=3.0)  # type: ignore[misc]
        for done in range(8):
            report("sampling", done, 8)
        assert said == expected


def test_what_follows_the_last_step_is_said(tmp_path: Path) -> None:
    from subquad.train import Run

    run = Run.of("images", "linear", model={"layers": 1, "heads": 1, "dim": 8}, settings={"steps": 1, "batch": 2,
                 "valid_examples": 4}, size=4, samples=1)  # fmt: skip
    said: list[tuple[str, int, int]] = []
    train(run, tmp_path, running=QUICK, on_log=lambda *line: said.append(line))
    assert [text.split()[0] for text, _, _ in said] == ["loss", "validating", "sampling"]
    assert said[1][1:] == (0, 4)
    assert said[2][1:] == (0, 16)


def test_one_process_does_not_ask_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: object, x: object) -> object:
        raise AssertionError("a collective per step costs time")

    run = tiny(steps=2)
    assert train(run, tmp_path, running=Running(tensorboard=False, hours=1.0)).status == "finished"
    monkeypatch.setattr(loop.Workers, "sum", never)
    workers = type("", (), {"processes": 2, "is_main": True})()
    training = loop._Training(run, tmp_path, QUICK, workers, lambda *_: None)
    assert training._together(True) and not training._together(False)
