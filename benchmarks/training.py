"""A whole training step of a model, sub-quadratic attention against SDPA: time and peak memory.

    python benchmarks/training.py [--threads 2] [--lengths 4096,16384] [--layers 12,2] [--json results/training.json]

A decoder (dim 768, 12 heads) computes logits and loss of one sequence, goes backward and takes an AdamW step. Every
cell runs in a process of its own, which is what makes peak memory mean something; the models take turns, the best of
the runs counts. `--layers` gives the depth at each length: what fits. The cost per layer is what is compared, so a
shallower model says the same.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch

import subquad as sq
from subquad.lab import machine, write_json
from subquad.lab.peak_memory import high_water, reset_high_water

DIM, HEADS, VOCAB = 768, 12, 256
MODELS: dict[str, Any] = {
    "softmax": "softmax",
    "performer": {"mechanism": "performer", "num_features": 256, "seed": 0},
    "linear": "linear",
    "hybrid": {"mechanism": "hybrid", "window": 64, "sinks": 4, "far": {"mechanism": "performer", "seed": 0}},
    "multipole": {"mechanism": "multipole", "seed": 0},
}
MIB = 1 << 20


def child(job: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model = sq.nn.TransformerDecoder(job["layers"], HEADS, DIM, VOCAB, MODELS[job["model"]], seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(length: int) -> float:
        tokens = torch.randint(0, VOCAB, (1, length + 1))
        began = time.perf_counter()
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=job["bf16"]):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimiser.step()
        return time.perf_counter() - began

    step(128)  # the optimiser's state and the gradients are there before the mark is set
    before = reset_high_water()
    seconds = min(step(job["length"]) for _ in range(job["steps"]))
    return {"seconds": seconds, "peak_bytes": high_water() - before}


def run(job: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job}: {done.stderr.strip().splitlines()[-1] if done.stderr else 'killed (memory?)'}")
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--layers", default="12,2")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1, help="steps per process, after a short warm-up")
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument("--json")
    parser.add_argument("--child")
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(json.loads(given.child))))
        return
    record: dict[str, Any] = {"machine": machine(), "rows": []}
    for length, layers in zip(map(int, given.lengths.split(",")), map(int, given.layers.split(",")), strict=True):
        cells: dict[str, list[dict[str, float]]] = {name: [] for name in given.models.split(",")}
        for _ in range(given.rounds):
            for name in cells:
                job = {"model": name, "length": length, "layers": layers, "threads": given.threads,
                       "steps": given.steps, "bf16": given.bf16}  # fmt: skip
                cells[name].append(run(job))
        print(f"\nL = {length}, {layers} layers: one training step")
        exact = min(c["seconds"] for c in cells["softmax"]) if "softmax" in cells else None
        for name, results in cells.items():
            seconds, peak = min(c["seconds"] for c in results), min(c["peak_bytes"] for c in results)
            faster = exact / seconds if exact else float("nan")
            record["rows"].append({"length": length, "layers": layers, "model": name, "seconds": seconds,
                                   "peak_bytes": peak, "faster": faster})  # fmt: skip
            print(f"  {name:10s} {seconds:8.2f} s  {peak / MIB:8.0f} MiB  {faster:5.2f}x")
    if given.json:
        write_json(given.json, record)


if __name__ == "__main__":
    main()
