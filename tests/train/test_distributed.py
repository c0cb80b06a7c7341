"""Two processes on gloo: the same loss and gradients as one, a killed one ends the other, sharded weights resume."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.train import Run, Running, train
from subquad.train.records import read_records

from .tiny_runs import tensors

CHILD = """
import json, sys
from subquad.train import Run, Running, train
train(Run.from_dict(json.loads(sys.argv[2])), sys.argv[1], resume=len(sys.argv) > 3,
      running=Running(tensorboard=False, log_every=1, save_every=1, keep=100))
"""
EVERY_STEP = Running(tensorboard=False, log_every=1, save_every=1, keep=100)
PATIENCE = 240.0  # seconds that a loaded machine may take to start two processes; nothing waits for it otherwise


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(command: list[str], count: int = 2, **more: str) -> list["subprocess.Popen[str]"]:
    """`count` processes that know of each other, as torchrun starts them, without torchrun to watch over them."""
    port = free_port()
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **more},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def end(processes: list["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    """(status, stderr) of each."""
    try:
        said = [process.communicate(timeout=PATIENCE)[1] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def masked_text(**settings: Any) -> Run:
    # Every example has another number of targets, so a mean of the two processes' means would be wrong.
    given = {"steps": 2, "batch": 8, "accumulate": 2, "valid_examples": 5, "clip": 0.0, "redraw_every": 1, **settings}
    mechanism = {"mechanism": "performer", "num_features": 8}
    return Run.of("text", mechanism, model={"dim": 16, "layers": 2, "heads": 2}, settings=given, masked=True, length=32)


def same(one: Path, two: Path) -> None:
    """Loss, validation, first gradient (AdamW's first moment is a tenth of it) and weights agree to 1e-5."""
    records = [read_records(folder / "metrics.jsonl") for folder in (one, two)]
    assert [(r["kind"], r["step"]) for r in records[0]] == [(r["kind"], r["step"]) for r in records[1]]
    for a, b in zip(*records, strict=True):
        for name in ("loss", "gradient_norm", "bits_per_byte"):
            if name in a:
                assert b[name] == pytest.approx(a[name], abs=1e-5)
    first, second = (tensors(folder, 1, "optimizer") for folder in (one, two))
    assert first.keys() == second.keys()
    for key, x in first.items():
        if key.endswith("exp_avg"):
            torch.testing.assert_close(second[key] * 10, x * 10, rtol=0, atol=1e-5)
    first, second = (tensors(folder, 2) for folder in (one, two))
    for key, x in first.items():
        torch.testing.assert_close(second[key], x, rtol=0, atol=1e-5)


def test_two_processes_are_one_and_resume_as_one(tmp_path: Path) -> None:
    run = masked_text()
    train(run, tmp_path / "one", running=EVERY_STEP)
    ended = end(start(["-c", CHILD, str(tmp_path / "two"), json.dumps(run.to_dict())]))
    assert [status for status, _ in ended] == [0, 0], ended
    same(tmp_path / "one", tmp_path / "two")
    state = json.loads((tmp_path / "two/checkpoints/step-00000002/state.json").read_text())
    assert len(state["rng"]) == 2
    # What two processes began, one can finish.
    shutil.rmtree(tmp_path / "two/checkpoints/step-00000002")
    train(run, tmp_path / "two", running=EVERY_STEP, resume=True)
    same(tmp_path / "one", tmp_path / "two")


def wait_for(path: Path, processes: list["subprocess.Popen[str]"], lines: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.is_file() or path.read_bytes().count(b"\n") < lines:
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_process_ends_the_other_with_a_message(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ["-m", "subquad.cli.train", "copy", "--mechanism", "linear", "--steps", "100000", "--batch", "4", "--cpu",
               "--set", "length=4", "--log-every", "1", "--no-tensorboard", "--out", str(folder)]  # fmt: skip
    processes = start(command)
    wait_for(folder / "metrics.jsonl", processes, 5)
    processes[1].send_signal(signal.SIGKILL)
    (status, said), _ = end(processes)
    assert status == 1
    assert "process 0 of 2 lost another one" in said
    assert "--resume" in said
    assert "Traceback" not in said


@pytest.mark.deep
def test_torchrun_ends_a_job_whose_process_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port(),
         "-m", "subquad.cli.train", "copy", "--mechanism", "linear", "--steps", "100000", "--batch", "4", "--cpu",
         "--set", "length=4", "--log-every", "1", "--no-tensorboard", "--out", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    wait_for(folder / "metrics.jsonl", [job], 5)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    ((status, said),) = end([job])
    assert status != 0
    assert "SIGKILL" in said or "lost another one" in said


# Accelerate shards on GPUs only. Here torch's own fully_shard does it on the CPU, in its place; the loop and the
# checkpoints cannot tell.
SHARDED = """
import torch
from torch.distributed.fsdp import fully_shard
from subquad.train.distributed import Workers

def prepare(self, module, optimizer):
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g["weight_decay"]) for g in optimizer.param_groups]
    for block in module.backbone.blocks:
        fully_shard(block)
    fully_shard(module)
    shards = dict(module.named_parameters())
    groups = [{"params": [shards[n] for n in shards if n in g], "weight_decay": decay} for g, decay in groups]
    assert any(type(p.data).__name__ == "DTensor" for p in shards.values())
    return module, torch.optim.AdamW(groups, betas=optimizer.param_groups[0]["betas"])

Workers.prepare, Workers.sharded = prepare, True
"""


@pytest.mark.deep
def test_sharded_weights_are_those_of_one_process_and_resume(tmp_path: Path) -> None:
    run = masked_text(accumulate=1)
    train(run, tmp_path / "one", running=EVERY_STEP)
    command = ["-c", SHARDED + CHILD, str(tmp_path / "two"), json.dumps(run.to_dict())]
    ended = end(start(command))
    assert [status for status, _ in ended] == [0, 0], ended
    same(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two/checkpoints/step-00000002")
    ended = end(start([*command, "resume"]))
    assert [status for status, _ in ended] == [0, 0], ended
    same(tmp_path / "one", tmp_path / "two")
