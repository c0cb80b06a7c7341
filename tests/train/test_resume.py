"""A run that is killed at any moment goes on to the same weights, bit for bit; damaged files are named."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from subquad.files import locked
from subquad.train import Run, Running, checkpoint, load_trained, train
from subquad.train.collection import summary
from subquad.train.records import read_records

from .tiny_runs import QUICK, tensors, tiny

# What can go wrong on resume is all here: dropout, redrawn features, momentum, a schedule, several workers.
SETTINGS = {"steps": 150, "batch": 4, "redraw_every": 7, "valid_every": 40}
TIMES = ("seconds", "training_seconds", "tokens_per_second")
MECHANISM = {"mechanism": "performer", "num_features": 8}
CHILD = """
import json, sys
from subquad.train import Run, Running, train
run = Run.from_dict(json.loads(sys.argv[2]))
train(run, sys.argv[1], running=Running(tensorboard=False, log_every=1, save_every=5, keep=3))
"""


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_kill_minus_nine_and_resume_gives_the_same_bits(tmp_path: Path) -> None:
    run = tiny(MECHANISM, model={"dropout": 0.2}, **SETTINGS)
    running = Running(tensorboard=False, log_every=1, save_every=100)
    train(run, tmp_path / "whole", running=running)

    killed_at = random.SystemRandom().randrange(3, 90)  # any step: the message of a failure shows it
    folder = tmp_path / "killed"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), json.dumps(run.to_dict())], env=environment)
    try:
        deadline = time.monotonic() + 300
        while lines(folder / "metrics.jsonl") < killed_at:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    assert newest.name < "step-00000150", f"killed too late, after {killed_at}"

    train(run, folder, running=running, resume=True)
    for name in ("model", "optimizer"):
        whole, resumed = tensors(tmp_path / "whole", 150, name), tensors(folder, 150, name)
        assert whole.keys() == resumed.keys()
        different = [key for key, x in whole.items() if not torch.equal(x, resumed[key])]
        assert different == [], f"killed after {killed_at} records, resumed from {newest.name}"
    # The generators, too, and the metrics: as if nothing had happened, except for the clock.
    states = [
        json.loads((f / "checkpoints/step-00000150/state.json").read_text()) for f in (tmp_path / "whole", folder)
    ]
    assert states[0]["rng"] == states[1]["rng"]
    records = [
        [{k: v for k, v in r.items() if k not in TIMES} for r in read_records(f / "metrics.jsonl")]
        for f in (tmp_path / "whole", folder)
    ]
    assert records[0] == records[1]


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    first = train(tiny(), tmp_path, running=QUICK)
    before = (tmp_path / "checkpoints/step-00000006/model.safetensors").read_bytes()
    again = train(tiny(), tmp_path, running=QUICK, resume=True)
    assert (again.status, again.step, again.metrics) == (first.status, first.step, first.metrics)
    assert (tmp_path / "checkpoints/step-00000006/model.safetensors").read_bytes() == before


def test_old_checkpoints_and_half_written_ones_go(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=Running(tensorboard=False, save_every=1, keep=2))
    (tmp_path / "checkpoints/.step-00000009.abc").mkdir()
    train(tiny(), tmp_path, running=Running(tensorboard=False, save_every=1, keep=2), resume=True)
    checkpoint.prune(tmp_path / "checkpoints", 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]


def test_a_failed_save_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.ones(2)}
    checkpoint.save(tmp_path, 1, weights, {}, {})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(tmp_path, 2, weights, {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_named(file: str, tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    path = tmp_path / "checkpoints/step-00000006" / file
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"{file}.*(damaged|remove the folder)"):
        train(tiny(), tmp_path, running=QUICK, resume=True)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {
        ".json",
        ".jsonl",
        ".safetensors",
        ".lock",
    }


def test_a_half_written_line_of_metrics_is_dropped(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "tr')
    (tmp_path / "result.json").unlink()  # it was killed before
    train(tiny(), tmp_path, running=QUICK, resume=True)
    assert path.read_text() == whole


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit fails as on a full disk
from subquad.cli import main
import subquad.train.loop as loop

original = loop.Snapshot.save
def save(self, step, *rest):
    if step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
    original(self, step, *rest)
loop.Snapshot.save = save
main(["train", *sys.argv[2:]])
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on the size of a file")
def test_a_full_disk_is_one_line_and_the_checkpoints_before_it_stay(tmp_path: Path) -> None:
    options = ["copy", "--set", "length=4", "--steps", "6", "--batch", "4", "--dim", "32", "--save-every", "2",
               "--log-every", "1", "--no-tensorboard", "--out", str(tmp_path / "run")]  # fmt: skip
    command = [sys.executable, "-c", FULL, "20000", *options]  # ends in the middle of the weights
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("[")]
    assert len(said) == 1
    assert "cannot be written (File too large)" in said[0]
    assert "step-00000002" in said[0] and f"subquad train --resume --out {tmp_path / 'run'}" in said[0]
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["step-00000000", "step-00000002"]
    said.clear()
    run = Run.read(tmp_path / "run")
    train(run, tmp_path / "run", running=QUICK, resume=True, on_log=lambda text, *_: said.append(text))
    assert said[0] == "resumed at step 2"


def test_only_what_a_disk_can_cause_is_called_that(tmp_path: Path) -> None:
    full = checkpoint.disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert full is not None and "no checkpoint is complete yet" in str(full)
    assert checkpoint.disk_error(FileNotFoundError(errno.ENOENT, "book.txt"), tmp_path) is None
    assert checkpoint.disk_error(checkpoint.SafetensorError("invalid header"), tmp_path) is None


def test_a_thread_that_meets_a_full_disk_says_nothing_and_others_do() -> None:
    def fail(error: Exception) -> None:
        def raise_it() -> None:
            raise error

        thread = threading.Thread(target=raise_it)
        thread.start()
        thread.join()

    said: list[BaseException | None] = []
    before, threading.excepthook = threading.excepthook, lambda caught: said.append(caught.exc_value)
    try:
        with checkpoint.one_report():
            fail(OSError(errno.ENOSPC, "No space left on device"))
            fail(KeyError("other"))
        fail(OSError(errno.ENOSPC, "No space left on device"))
    finally:
        threading.excepthook = before
    assert [type(one) for one in said] == [KeyError, OSError]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    with locked(tmp_path), pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on "):
        train(tiny(), tmp_path, running=QUICK, resume=True)
    assert train(tiny(), tmp_path, running=QUICK, resume=True).status == "finished"


def test_lines_of_metrics_that_are_none_are_left_out(tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "garbage", "{}", "5", *lines[1:], '{"kind": "tr']))
    assert read_records(path) == [json.loads(line) for line in lines]


def test_what_the_first_weights_were_worth_stays(tmp_path: Path) -> None:
    train(tiny("softmax"), tmp_path / "one", running=QUICK)
    settings = tiny().settings.to_dict()
    run = Run.of("copy", "linear", model={"dim": 16}, settings=settings, start=tmp_path / "one", length=4)
    train(run, tmp_path / "two", running=QUICK)
    train(run, tmp_path / "two", running=QUICK, resume=True)
    records = read_records(tmp_path / "two/metrics.jsonl")
    assert [record["step"] for record in records if record["kind"] == "valid"] == [0, 3, 6]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("checkpoints/step-00000006/state.json", "[]", "is damaged: it has no 'version'"),
        ("checkpoints/step-00000006/state.json", '{"version": 1}', "is damaged: it has no 'step'"),
        ("run.json", '{"version": 1}', "the run has no 'task'"),
    ],
)
def test_damaged_json_is_named(file: str, text: str, message: str, tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        train(tiny(), tmp_path, running=QUICK, resume=True)


@pytest.mark.parametrize(("text", "message"), [("[]", "must hold a JSON object"), ("{", "result.json is not JSON")])
def test_damaged_results_are_named(text: str, message: str, tmp_path: Path) -> None:
    train(tiny(), tmp_path, running=QUICK)
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        summary(tmp_path)


def test_data_may_move(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 200)
    settings = {"steps": 4, "batch": 2, "valid_examples": 2, "valid_every": 2}
    model = {"dim": 16, "heads": 2, "layers": 1}
    run = Run.of("text", "linear", model=model, settings=settings, data=str(tmp_path / "a.txt"), length=16)
    train(run, tmp_path / "run", running=QUICK)
    (tmp_path / "there").mkdir()
    moved = (tmp_path / "a.txt").rename(tmp_path / "there/a.txt")
    assert load_trained(tmp_path / "run")[2] == 4
    assert train(run.changed(data=str(moved)), tmp_path / "run", running=QUICK, resume=True).status == "finished"
    other = moved.rename(tmp_path / "other.txt")
    with pytest.raises(ValueError, match=r"options\.data: .*a\.txt' there, .*other\.txt' now"):
        train(run.changed(data=str(other)), tmp_path / "run", running=QUICK, resume=True)
    with pytest.raises(ValueError, match="name it with --mechanism"):
        run.changed(model={"mechanism": "softmax"})


def test_a_data_file_with_other_content_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("all the perfumes of Arabia " * 400, encoding="utf-8")
    settings = {"steps": 4, "batch": 2, "valid_examples": 2}
    run = Run.of("text", "linear", model={"dim": 16, "layers": 1}, settings=settings, data=str(text), length=16)
    train(run, tmp_path / "run", running=QUICK)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    text.write_text("out, damned spot; out, I say " * 400, encoding="utf-8")
    with pytest.raises(ValueError, match="was trained on other data than the task 'text' reads now"):
        train(run, tmp_path / "run", running=QUICK, resume=True)
    found = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert {path for path in found if found[path] != before.get(path)} <= {tmp_path / "run/running.json"}
    text.write_text("all the perfumes of Arabia " * 400, encoding="utf-8")
    assert train(run, tmp_path / "run", running=QUICK, resume=True).status == "finished"
