"""Time per generated token and memory against context: a recurrent state against a key-value cache.

    python benchmarks/generation.py [--threads 2] [--batch 1,16] [--json results/generation.json]

One model (6 layers, 8 heads, dim 512, vocab 256), three kinds of attention with the same shapes: performer and linear
carry a state of constant size, softmax a key-value cache that is allocated once for the whole context and written in
place. At every context the next token is computed; all contexts and models are timed in turn. The contexts of the
recurrent models are really consumed (once, then repeated over the batch); the cache is filled with random numbers,
since its cost does not depend on them. A context whose cache would not fit in memory is skipped and said.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from scaling import slope
from torch import Tensor
from torch.utils import _pytree as pytree

import subquad as sq
from subquad.lab import interleave, machine, write_json

LAYERS, HEADS, DIM, VOCAB = 6, 8, 512, 256
WIDTH = DIM // HEADS
RECURRENT: dict[str, dict[str, Any]] = {
    "performer": {"mechanism": "performer", "num_features": 256, "seed": 0},
    "linear": {"mechanism": "linear"},
    "hybrid": {"mechanism": "hybrid", "window": 64, "sinks": 4, "far": {"mechanism": "performer", "seed": 0}},
}
MIB = 1 << 20


@dataclass
class Cache:
    """Keys and values of one layer, (B, H, context + 1, D), of which the first `filled` are there."""

    k: Tensor
    v: Tensor
    filled: int


class CachedSoftmax(sq.Mechanism):
    """softmax whose scan writes into a cache that was allocated for the whole context."""

    name, equation, paper, complexity = "cached-softmax", "", "", "O(L)"
    recurrent = exact = True

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, state: Any, call: Any) -> tuple[Tensor, Any]:
        # The last place is written again at every call, so that each timed step meets the same context.
        place = slice(state.filled, state.filled + k.shape[2])
        state.k[:, :, place], state.v[:, :, place] = k, v
        keys, values = state.k[:, :, : place.stop], state.v[:, :, : place.stop]
        return F.scaled_dot_product_attention(q, keys, values, scale=call.scale), state


def decoder(mechanism: Any) -> Any:
    torch.manual_seed(0)
    return sq.nn.TransformerDecoder(LAYERS, HEADS, DIM, VOCAB, mechanism, positions="rotary", seed=0).eval()


def cache_bytes(batch: int, context: int) -> int:
    return 2 * LAYERS * batch * DIM * (context + 1) * 4


def bytes_of(states: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(states) if isinstance(x, Tensor))


def steps(batch: int, contexts: list[int], skipped: list[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """For every model and context: what computes the next token, and the bytes it carries."""
    calls: dict[str, Any] = {}
    carried: dict[str, int] = {}
    token = torch.zeros(batch, 1, dtype=torch.int64)

    def add(name: str, context: int, model: Any, states: Any, size: int) -> None:
        calls[f"{name}@{context}"] = lambda: model.scan(token, states, last_only=True)
        carried[f"{name}@{context}"] = size

    for name, choice in RECURRENT.items():
        model, states, done = decoder(choice), None, 0
        for context in contexts:
            while done < context:
                piece = torch.randint(0, VOCAB, (1, min(1024, context - done)))
                _, states = model.scan(piece, states, last_only=True)
                done += piece.shape[1]
            repeated = states.select(torch.zeros(batch, dtype=torch.int64))
            add(name, context, model, repeated, bytes_of(repeated))
    exact = decoder(CachedSoftmax(WIDTH))
    linears = [(m, torch.randn(batch, 1, m.in_features)) for m in exact.modules() if isinstance(m, torch.nn.Linear)]
    # What every model pays whatever its attention: each weight is read once per step.
    calls["weights"] = lambda: [linear(x) for linear, x in linears]
    for context in contexts:
        need, free = cache_bytes(batch, context), psutil.virtual_memory().available
        if need > 0.7 * free:
            skipped.append(f"softmax, batch {batch}, context {context}: the cache needs {need / MIB:.0f} MiB, "
                           f"{free / MIB:.0f} MiB are free")  # fmt: skip
            continue
        shape = (batch, HEADS, context + 1, WIDTH)
        layers = tuple(Cache(torch.randn(shape), torch.randn(shape), context) for _ in range(LAYERS))
        states = exact.empty_states(batch, token.device, start=context)
        states = type(states)(layers, (), states.start, states.length, states.origin)
        add("softmax", context, exact, states, need)
    return calls, carried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--contexts", default="1024,4096,16384,65536")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    record: dict[str, Any] = {"machine": machine(), "rows": [], "slopes": [], "skipped": []}
    failed = False
    with torch.no_grad():
        for batch in map(int, given.batch.split(",")):
            # A batch of 16 goes up to 16k: beyond that the cache alone is tens of gigabytes.
            contexts = [c for c in map(int, given.contexts.split(",")) if batch == 1 or c <= 16384]
            calls, carried = steps(batch, contexts, record["skipped"])
            timings = interleave(calls, runs=given.runs, warmup=2)
            print(f"\nbatch {batch}: ms per step, MiB carried, and how much faster than softmax with its cache")
            record["rows"].append({"batch": batch, "model": "weights", "ms": timings["weights"].best * 1e3})
            print(f"  reading the weights alone: {timings['weights'].best * 1e3:.2f} ms")
            for context in contexts:
                exact = timings.get(f"softmax@{context}")
                for name in [*RECURRENT, "softmax"]:
                    key = f"{name}@{context}"
                    if key not in timings:
                        continue
                    best, faster = timings[key].best, exact.best / timings[key].best if exact else None
                    record["rows"].append({"batch": batch, "context": context, "model": name, "ms": best * 1e3,
                                           "carried_bytes": carried[key], "faster": faster})  # fmt: skip
                    print(f"  {context:6d} {name:10s} {best * 1e3:8.2f} ms {carried[key] / MIB:9.1f} MiB  "
                          + ("" if faster is None else f"{faster:5.1f}x"))  # fmt: skip
            for name in RECURRENT:
                rate = slope(contexts, [timings[f"{name}@{c}"].best for c in contexts])
                sizes = {carried[f"{name}@{c}"] for c in contexts}
                record["slopes"].append({"batch": batch, "model": name, "time": rate, "flat_memory": len(sizes) == 1})
                failed |= rate > 0.05 or len(sizes) != 1
                print(f"  {name}: slope of time {rate:+.3f} (flat: at most 0.05), memory flat: {len(sizes) == 1}")
    for line in record["skipped"]:
        print("skipped:", line)
    if given.json:
        write_json(given.json, record)
    sys.exit(failed)


if __name__ == "__main__":
    main()
