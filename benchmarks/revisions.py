"""Two source trees of this library in one run, in turn: CPU time of forward, backward and a step, per mechanism.

    python benchmarks/revisions.py OLD/src NEW/src [--length 4096] [--rounds 15] [--threads 1] [--busy]

Each tree runs in a process of its own and waits while the other one works. Times are CPU seconds of the process (one
thread unless asked otherwise), the best of all rounds, so that other work on the machine matters little. `--busy` runs
a busy loop beside every measurement and reports wall-clock times with and without it: at most 2x is wanted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = [
    ("linear", {}),
    ("performer", {"seed": 0}),
    ("multipole", {"seed": 0}),
    ("hybrid", {"window": 64, "sinks": 4, "far": {"mechanism": "performer", "seed": 0}}),
    ("local", {"window": 128}),
    ("improved-clustered", {"seed": 0}),
    ("improved-clustered", {"seed": 0, "clusters": 25, "topk": 32, "clustering": "hamming", "iterations": 10}),
    ("clustered", {"seed": 0, "clusters": 25, "clustering": "hamming", "iterations": 10}),
    ("lsh", {"seed": 0, "buckets": 64, "bucket_size": 64}),
    ("sparse", {"stride": 128}),
    ("sparse", {"pattern": "fixed", "stride": 128, "summary": 8}),
]
# Every mechanism has a forward and a backward; these have no causal form, or no step.
FULL_ONLY = ("clustered", "improved-clustered")
WITHOUT_STEP = (*FULL_ONLY, "lsh", "sparse")


def worker(source: str) -> None:
    """Answer requests {name, options, what, dim, length, heads, threads, causal} with CPU and wall seconds."""
    sys.path.insert(0, source)
    sys.meta_path[:] = [f for f in sys.meta_path if "_editable" not in type(f).__module__]
    import torch

    import subquad as sq

    assert Path(sq.__file__).is_relative_to(Path(source).resolve()), sq.__file__
    made: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        torch.set_num_threads(asked["threads"])
        if line not in made:
            made.clear()
            attn = sq.create(asked["name"], asked["dim"], asked["heads"], **asked["options"]).eval()
            tokens = 0.5 * torch.randn(3, 1, asked["heads"], asked["length"], asked["dim"])
            causal, what = asked["causal"], asked["what"]
            if what == "step":
                with torch.no_grad():
                    state = attn.scan(*tokens[:, :, :, :500])[1]
                one = [x[:, :, :1].contiguous() for x in tokens]

                def run(attn: Any = attn, one: Any = one, state: Any = state) -> None:
                    with torch.no_grad():
                        for _ in range(300):
                            _, state = attn.scan(*one, state)
            elif what == "backward":
                leaves = [x.clone().requires_grad_() for x in tokens]

                def run(attn: Any = attn, leaves: Any = leaves, causal: bool = causal) -> None:
                    out = attn(*leaves, is_causal=causal)
                    torch.autograd.grad(out, leaves, torch.ones_like(out))
            else:

                def run(attn: Any = attn, tokens: Any = tokens, causal: bool = causal) -> None:
                    with torch.no_grad():
                        attn(*tokens, is_causal=causal)

            made[line] = run
            run()
        start, wall = time.process_time(), time.perf_counter()
        made[line]()
        answer = {"cpu": time.process_time() - start, "wall": time.perf_counter() - wall}
        print(json.dumps(answer), flush=True)


class Tree:
    """A process with one source tree on its path."""

    def __init__(self, source: Path) -> None:
        command = [sys.executable, __file__, "--worker", str(source.resolve())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, request: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, float] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        self.process.communicate()


def race(trees: list[Tree], request: dict[str, Any], rounds: int, kind: str) -> list[float]:
    """The best seconds of each tree, run in turn."""
    best = [float("inf")] * len(trees)
    for _ in range(rounds):
        for i, tree in enumerate(trees):
            best[i] = min(best[i], tree.ask(request)[kind])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--only", nargs="+", default=sorted({name for name, _ in CASES}), help="mechanisms")
    parser.add_argument("--what", nargs="+", default=["forward", "backward", "step"])
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker)
        return
    trees = [Tree(source) for source in given.sources]
    shape = {"length": given.length, "heads": given.heads, "threads": given.threads}
    calls = [(what, causal) for what in given.what for causal in (False, True) if causal or what != "step"]
    for name, options in [case for case in CASES if case[0] in given.only]:
        print(f"{name} {options}")
        for dim in given.dims:
            for what, causal in calls:
                if (causal and name in FULL_ONLY) or (what == "step" and name in WITHOUT_STEP):
                    continue
                asked = {**shape, "name": name, "options": options, "dim": dim, "what": what, "causal": causal}
                found = race(trees, asked, given.rounds, "wall" if given.busy else "cpu")
                times = "  ".join(f"{1e3 * seconds:9.2f} ms" for seconds in found)
                line = f"  D{dim:<4d}{what:9s}{'causal' if causal else 'full':7s} {times}"
                if len(found) == 2:
                    line += f"   first / second {found[0] / found[1]:5.2f}"
                if given.busy:
                    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    try:
                        beside = race(trees, asked, given.rounds, "wall")
                    finally:
                        loop.kill()
                    slower = "  ".join(f"{b / a:4.2f}x" for a, b in zip(found, beside, strict=True))
                    line += f"   beside a busy process {slower}"
                print(line, flush=True)
    for tree in trees:
        tree.end()


if __name__ == "__main__":
    main()
