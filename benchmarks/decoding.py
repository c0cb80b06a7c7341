"""One decoding step of one layer against a key-value cache: time per token, bytes, error, and a million tokens.

    python benchmarks/decoding.py [--model DIR --text FILE] [--contexts 16384,65536] [--only times,errors,million]
                                  [--queries 0.1]

Times: H 8, D 64, batch 1, keys around a few centres. `multipole` with all keys kept and in constant memory, and torch's
fused attention over a cache that is written in place, in the same rounds. Every step goes on from the newest state, so
chunks are completed and clustered as in generation. Mean and 99th percentile are over all steps. Weights are sharp:
most values cannot be seen beside the largest, and a step does not read them; with `--queries 0.1` they are flat.

Errors: relative squared errors |out - exact|^2 / |exact|^2 of the outputs of scanned tokens on the queries, keys and
values of every layer of a BERT-type encoder (DIR) on a text (FILE), with a causal mask, mean over layers.

Rollback: time of a step with `Checkpoints` over time without, for performer and hybrid.

Million: so many tokens, one after the other, in constant memory; time per token and bytes must stay as they are. Time
is that of the process, on one thread, so that it may run beside other work.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from multipole import captured, relative
from torch import Tensor

import subquad as sq
from subquad.lab import machine, write_json

HEADS, WIDTH, CENTRES = 8, 64, 64
KINDS: dict[str, dict[str, Any]] = {"all keys": {}, "constant": {"memory": "constant"}}


class Tokens:
    """q, k, v (1, H, n, D) of the next n tokens: keys and queries around the same centres."""

    def __init__(self, seed: int = 0, factor: float = 1.0) -> None:
        self.factor, self.generator = factor, torch.Generator().manual_seed(seed)
        self.centres = 2 * torch.randn(1, HEADS, CENTRES, WIDTH, generator=self.generator)

    def __call__(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        near = torch.randint(CENTRES, (2, n), generator=self.generator)
        noise = torch.randn(3, 1, HEADS, n, WIDTH, generator=self.generator)
        q, k = (self.centres[:, :, one] + 0.5 * some for one, some in zip(near, noise[:2], strict=True))
        return self.factor * q, k, noise[2]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


def times(contexts: list[int], steps: int, factor: float) -> list[dict[str, Any]]:
    rows = []
    for context in contexts:
        draw = Tokens(factor=factor)
        _, k, v = draw(context)
        cache_k, cache_v = (F.pad(x, (0, 0, 0, steps)) for x in (k, v))
        made = {name: sq.create("multipole", WIDTH, seed=0, **kind) for name, kind in KINDS.items()}
        states = {name: attn.absorb(k, v) for name, attn in made.items()}
        found: dict[str, list[float]] = {name: [] for name in ("SDPA", *KINDS)}
        for i in range(steps):
            q, new_k, new_v = draw(1)
            if i % 8 == 0:  # it takes the longest and always the same

                def exact(i: int = i, q: Tensor = q, new_k: Tensor = new_k, new_v: Tensor = new_v) -> Tensor:
                    end = context + i + 1  # noqa: B023
                    cache_k[:, :, end - 1 : end], cache_v[:, :, end - 1 : end] = new_k, new_v  # noqa: B023
                    return F.scaled_dot_product_attention(q, cache_k[:, :, :end], cache_v[:, :, :end])  # noqa: B023

                found["SDPA"].append(timed(exact)[0])
            for name, attn in made.items():
                seconds, (_, states[name]) = timed(
                    lambda attn=attn, name=name, q=q, new_k=new_k, new_v=new_v: attn.scan(
                        q,
                        new_k,
                        new_v,
                        states[name],  # noqa: B023
                    )
                )
                found[name].append(seconds)
        exact_ms = 1e3 * statistics.median(found["SDPA"])
        carried = {"SDPA": 2 * k.nbytes, **{name: state.nbytes for name, state in states.items()}}
        for name, times in found.items():
            ms = sorted(1e3 * x for x in times)
            middle, mean = statistics.median(ms), statistics.fmean(ms)
            row = {"context": context, "kind": name, "median_ms": middle, "mean_ms": mean,
                   "p99_ms": ms[int(0.99 * len(ms))], "max_ms": ms[-1], "bytes": carried[name],
                   "faster": exact_ms / middle, "faster_mean": exact_ms / mean}  # fmt: skip
            rows.append(row)
            print(f"{context:6} {name:9} median {middle:7.3f} ms  mean {mean:7.3f}  99th {row['p99_ms']:7.3f}  "
                  f"longest {ms[-1]:7.2f}  {carried[name] / 2**20:7.1f} MiB  SDPA's median over ours "
                  f"{row['faster']:5.1f}, over the mean {row['faster_mean']:5.1f}", flush=True)  # fmt: skip
    return rows


def errors(folder: Path, text: Path, lengths: list[int]) -> list[dict[str, Any]]:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "multipole": ("multipole", {"seed": 0}),
        "multipole, constant memory": ("multipole", {"seed": 0, "memory": "constant"}),
        "constant memory, limit 128": ("multipole", {"seed": 0, "memory": "constant", "limit": 128}),
        "window 512 and 4 sinks": ("local", {"window": 512, "sinks": 4}),
        "hybrid, window 256": ("hybrid", {"window": 256, "sinks": 4, "far": {"mechanism": "performer", "seed": 0}}),
    }
    rows = []
    for length in lengths:
        layers = captured(folder, text, length)
        for name, (mechanism, options) in kinds.items():
            found = []
            for q, k, v in layers:
                attn = sq.create(mechanism, q.shape[-1], q.shape[1], **options)
                if attn.uses_calibration:
                    attn.calibrate(q, k)
                exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                found.append(float(relative(attn.scan(q, k, v)[0], exact)))
            rows.append({"length": length, "kind": name, "error": statistics.fmean(found), "by_layer": found})
            print(f"{length:6} {name:28} error {rows[-1]['error']:.4f}", flush=True)
    return rows


def rollback(steps: int) -> list[dict[str, Any]]:
    rows = []
    model_of = {"performer": "performer", "hybrid": {"mechanism": "hybrid", "window": 64, "far": "performer"}}
    for name, mechanism in model_of.items():
        model = sq.nn.TransformerDecoder(2, 8, 512, 256, mechanism, positions="rotary", seed=0).eval()
        plain = model.scan(torch.zeros(1, 64, dtype=torch.int64))[1]
        start = model.empty_states(1, torch.device("cpu"))
        start = type(start)((sq.Checkpoints(64),) * 2, (), start.start, start.length, start.origin)
        states = {"plain": plain, "checkpoints": model.scan(torch.zeros(1, 64, dtype=torch.int64), start)[1]}
        found: dict[str, list[float]] = {kind: [] for kind in states}
        token = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(steps):
            for kind in states:
                seconds, (_, states[kind]) = timed(lambda kind=kind: model.scan(token, states[kind]))  # noqa: B023
                found[kind].append(seconds)
        ratio = statistics.median(found["checkpoints"]) / statistics.median(found["plain"])
        rows.append({"mechanism": name, "overhead": ratio - 1})
        print(f"{name}: a step with checkpoints takes {100 * (ratio - 1):+.1f} %")
    return rows


def million(tokens: int) -> dict[str, Any]:
    """A step per token, in windows of a hundredth: the time of each, bytes of the state and of the process."""
    draw, attn, state = Tokens(), sq.create("multipole", WIDTH, seed=0, memory="constant"), None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    windows, sizes, resident = [], [], []
    for number in range(100):
        q, k, v = draw(tokens // 100)
        start = time.process_time()
        for i in range(q.shape[2]):
            out, state = attn.scan(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], state)
        windows.append((time.process_time() - start) / q.shape[2])
        sizes.append(state.nbytes)
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if not out.isfinite().all():
            raise ArithmeticError(f"the output after {(number + 1) * q.shape[2]} tokens is not finite")
        if number % 10 == 9:
            ms, mib = 1e3 * statistics.median(windows[-10:]), sizes[-1] / 2**20
            print(f"{(number + 1) * q.shape[2]:8} tokens: {ms:.3f} ms per token, state {mib:.2f} MiB, process at most "
                  f"{resident[-1] / 1024:.0f} MiB", flush=True)  # fmt: skip
    torch.set_num_threads(threads)
    # The first window has no clusters at first.
    early, late = statistics.median(windows[1:11]), statistics.median(windows[-10:])
    same = len(set(sizes[1:])) == 1
    grown = (resident[-1] - resident[1]) / 1024
    print(f"{tokens} tokens: time of the last tenth over the first {late / early:.3f}; bytes of the state always the "
          f"same: {same}; the process grew by {grown:.1f} MiB after its second hundredth")  # fmt: skip
    return {"tokens": tokens, "early_ms": 1e3 * early, "late_ms": 1e3 * late, "bytes": sizes[-1], "flat_bytes": same,
            "windows_ms": [1e3 * x for x in windows], "grown_mib": grown}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--contexts", default="16384,65536")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--queries", type=float, default=1.0, help="factor of the queries in `times`")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="times,errors,rollback,million")
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    chosen = given.only.split(",")
    record: dict[str, Any] = {"machine": machine()}
    with torch.no_grad():
        if "times" in chosen:
            record["times"] = times([int(x) for x in given.contexts.split(",")], given.steps, given.queries)
        if "errors" in chosen and given.model and given.text:
            record["errors"] = errors(given.model, given.text, [int(x) for x in given.lengths.split(",")])
        if "rollback" in chosen:
            record["rollback"] = rollback(given.steps)
        if "million" in chosen:
            record["million"] = million(given.tokens)
    if given.json:
        write_json(given.json, record)
    failed = "million" in record and not record["million"]["flat_bytes"]
    sys.exit(failed)


if __name__ == "__main__":
    main()
