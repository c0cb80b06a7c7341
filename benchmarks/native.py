"""The native CPU kernels against the machine's own matrix product, the chunked backend, and torch's attention.

    python benchmarks/native.py [--quick] [--json FILE] [--threads N] [--only shares,hadamard,decode,...]

Every time is the best of several runs, and whatever is compared runs alternately, so that a passing disturbance hits
both sides. Credited operations per token and head: forward 2[2MD + 2M(E+1)], forward and backward 2[4MD + 6M(E+1)];
causal is credited the same, recomputation and exponentials not at all. The share is that rate over the rate of a
float32 GEMM.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from subquad.features.base import FeatureMap
from subquad.features.polynomial import PolynomialFeatures
from subquad.features.random import ExponentialFeatures
from subquad.kernels.native import library, pool
from subquad.kernels.operator import Call
from subquad.kernels.windowed_linear import BACKENDS, WindowedLinear
from subquad.kernels.windowed_linear.map_arrays import MapArrays
from subquad.kernels.windowed_linear.native.maps import NativeMap, map_inputs
from subquad.kernels.windowed_linear.native.operator import Batched, Inputs, Options, make_call, write
from subquad.kernels.windowed_linear.native.operator import attention as operator
from subquad.state import State

Results = dict[str, Any]
native, chunked = BACKENDS["native"], BACKENDS["chunked"]
HEADS, FEATURES = 8, 256
IDENTITY = NativeMap(MapArrays())
STEPS = 10  # of decoding, one after the other


def best(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each run, the best of `repeats` rounds through all of them."""
    seconds = dict.fromkeys(runs, math.inf)
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds


def gemm(size: int = 2048) -> tuple[Callable[[], object], float]:
    """A square float32 product and its operations."""
    a, b = torch.randn(2, size, size)
    return lambda: a @ b, 2.0 * size**3


def make(kind: str, dim: int, projection: str = "orthogonal") -> FeatureMap:
    """An exponential map with FEATURES features."""
    return ExponentialFeatures(dim, FEATURES, features=kind, projection=projection, seed=0)


def attention(backend: Any, phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One call of a backend."""
    out: Tensor = backend.attend(WindowedLinear(phi, causal=causal), Call(q.shape[-1] ** -0.5), q, k, v)
    return out


def library_call(phi: FeatureMap, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Any:
    """Linear attention as the library sees it."""
    found, q, k = map_inputs(phi, q, k, q.shape[-1] ** -0.5)
    options = Options(*found.options, 1.0, -1, 0, causal=causal, normalise=True, tail=True)
    return make_call(Inputs(q, k, v), Batched(), found.map.arrays, options, found.packed)


def trained(run: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    """Forward and backward of `run`."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    cotangent = torch.randn_like(v)
    return lambda: torch.autograd.grad(run(*leaves), leaves, cotangent)


def inputs(length: int, dim: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of moderate size."""
    q, k, v = torch.randn(3, batch, HEADS, length, dim) * 0.5
    return q, k, v


def against_gemm(
    product: Callable[[], object], calls: dict[str, Callable[[], object]], repeats: int
) -> dict[str, float]:
    """Best times of the calls and of the GEMM. A share is a ratio of two bests: a product of 17 GFLOP and the call that
    is compared with it both need many rounds until one of them falls into a quiet moment; the slow backend does not."""
    every = best({"gemm": product, **calls}, repeats)
    again = best({"gemm": product, "native": calls["native"]}, 3 * repeats)
    return {name: min(seconds, again.get(name, math.inf)) for name, seconds in every.items()}


def shares(length: int, repeats: int) -> list[Results]:
    """Share of the GEMM rate, and the ratio to the chunked backend."""
    rows = []
    print(f"\nshare of the GEMM rate, B1 H{HEADS} M{FEATURES} L{length} (targets: full 85 / 60 %, causal 60 / 45 %)")
    for dim in (64, 128):
        q, k, v = inputs(length, dim)
        product, operations = gemm()
        for kind in ("positive", "hyperbolic"):
            phi = make(kind, dim)
            for causal in (False, True):
                run = partial(attention, native, phi, causal=causal)
                slow = partial(attention, chunked, phi, causal=causal)
                calls: dict[str, Callable[[], object]]
                with torch.no_grad():
                    calls = {"native": partial(run, q, k, v), "chunked": partial(slow, q, k, v)}
                    forward = against_gemm(product, calls, repeats)
                calls = {"native": trained(run, q, k, v), "chunked": trained(slow, q, k, v)}
                both = against_gemm(product, calls, repeats)
                md, me = FEATURES * dim, FEATURES * (dim + 1)
                credit = [length * HEADS * 2.0 * (2 * md + 2 * me), length * HEADS * 2.0 * (4 * md + 6 * me)]
                row: Results = {"dim": dim, "features": kind, "causal": causal}
                for name, times, done in (("forward", forward, credit[0]), ("both", both, credit[1])):
                    # Against the product of the same rounds: a machine may be slow for a minute and fast for the next.
                    row[f"{name}_ms"] = times["native"] * 1e3
                    row[f"{name}_gemm_gflops"] = rate = operations / times["gemm"] / 1e9
                    row[f"{name}_share"] = done / times["native"] / 1e9 / rate
                    row[f"{name}_over_chunked"] = times["chunked"] / times["native"]
                rows.append(row)
                line = f"  D{dim:<4d}{kind:11s}{'causal' if causal else 'full':7s}"
                for name in ("forward", "both"):
                    keys = ("ms", "share", "gemm_gflops", "over_chunked")
                    ms, share, rate, ratio = (row[f"{name}_{what}"] for what in keys)
                    line += f" {name:>8s} {ms:6.1f} ms {share:4.0%} of {rate:.0f} GFLOP/s {ratio:.1f}x chunked"
                print(line)
    return rows


def project_alone(phi: FeatureMap, q: Tensor) -> Callable[[], object]:
    """The projection without anything around it, its result left in the cache."""
    call, loaded = library_call(phi, q, q, q, False), library.load()
    return lambda: loaded.subquad_project(ctypes.byref(call), None)


def hadamard(length: int, repeats: int) -> list[Results]:
    """Hadamard-Rademacher (three factors) against the dense orthogonal projection."""
    rows = []
    print(f"\nHadamard against dense, positive, forward, L{length} (targets 1.15 1.35 1.5; projection alone 1.8 3 4)")
    for dim in (64, 128, 256):
        q, k, v = inputs(length, dim)
        maps = {"dense": make("positive", dim), "fast": make("positive", dim, "hadamard")}
        with torch.no_grad():
            run = partial(attention, native)
            whole = best({name: partial(run, phi, q, k, v, False) for name, phi in maps.items()}, 3 * repeats)
            alone = best({name: project_alone(phi, q) for name, phi in maps.items()}, 3 * repeats)
        r = 3 * math.log2(dim) / dim
        row = {
            "dim": dim,
            "attention": whole["dense"] / whole["fast"],
            "ceiling": 4 / (2 + 2 * r),
            "projection": alone["dense"] / alone["fast"],
        }
        rows.append(row)
        print(
            f"  D{dim:<4d} attention {row['attention']:.2f}x (ceiling {row['ceiling']:.2f}x)"
            f"   projection alone {row['projection']:.2f}x"
        )
    return rows


def decode(repeats: int) -> list[Results]:
    """One token for every head, step after step as in generation: native, the library's part of it, torch, a copy.

    One layer alone finds its state in the cache again; in a model the other layers have pushed it out.
    """
    rows = []
    print(
        f"\ndecode step of a layer, H{HEADS} D64 M{FEATURES}"
        " (targets: 3x torch at batch 1, 2x the copy of the state at batch 16)"
    )
    phi = make("hyperbolic", 64)
    for batch, layers in ((1, 1), (1, 12), (16, 1), (16, 12)):
        q, k, v = inputs(200, 64, batch)
        spec = WindowedLinear(phi, causal=True)
        with torch.inference_mode():
            state = native.absorb(spec, Call(0.125), k, v, spec.empty(k, v, 0.125, ""))
            token = [x[:, :, :1].contiguous() for x in (q, k, v)]
            runs: dict[str, Callable[[], object]] = {
                "native": call_steps(native, phi, token, state, layers),
                "library": library_steps(phi, token, state, layers),
                "torch": call_steps(chunked, phi, token, state, layers),
                "copy": copy_steps(state, layers),
            }
            found = best(runs, repeats * 10 // layers)
        times = {name: seconds / STEPS / layers for name, seconds in found.items()}
        row: Results = {"batch": batch, "layers": layers, **{f"{name}_us": t * 1e6 for name, t in times.items()}}
        rows.append(row)
        print(
            f"  batch {batch:<3d} layers {layers:<3d} native {row['native_us']:6.1f} us, the library alone"
            f" {row['library_us']:6.1f}   torch {row['torch_us']:7.1f} ({times['torch'] / times['native']:.1f}x)   copy"
            f" {row['copy_us']:6.1f} (native {times['native'] / times['copy']:.1f}x,"
            f" library {times['library'] / times['copy']:.1f}x of it)"
        )
    return rows


def call_steps(backend: Any, phi: FeatureMap, token: list[Tensor], state: State, layers: int) -> Callable[[], object]:
    """STEPS decode steps through all layers, each with a state of its own that is replaced step by step."""
    spec, call, states = WindowedLinear(phi, causal=True), Call(0.125), [copy.deepcopy(state) for _ in range(layers)]

    def run() -> None:
        for _ in range(STEPS):
            for layer in range(layers):
                _, states[layer] = backend.scan(spec, call, *token, states[layer])

    return run


def copy_steps(state: State, layers: int) -> Callable[[], object]:
    """What reading every state once and writing it once takes, as often as `call_steps` does."""
    pairs = [(state.weighted.clone(), state.weighted.clone()) for _ in range(layers)]

    def run() -> None:
        for step in range(STEPS):
            for there, back in pairs:
                (there.copy_(back) if step % 2 else back.copy_(there))

    return run


def library_steps(phi: FeatureMap, token: list[Tensor], state: State, layers: int) -> Callable[[], object]:
    """The steps of `call_steps` as the library sees them, between two sets of arrays: what they cost without Python."""
    out = torch.empty_like(token[2])
    kept, calls = [], []
    assert state.far is not None
    for _ in range(layers):
        there, back = ([x.contiguous().clone() for x in state.far] for _ in range(2))
        kept += [there, back]
        for before, after in ((there, back), (back, there)):
            q, k, v = token
            call = library_call(phi, q, k, v, True)
            write(call, "out", out)
            call.s_in, call.z_in, call.c_in = (x.data_ptr() for x in before)
            call.s_out, call.z_out, call.c_out = (x.data_ptr() for x in after)
            call.non_temporal = layers * sum(x.nbytes for x in there) > pool.LAST_CACHE
            calls.append(call)
    loaded = library.load()

    def run(kept: Any = (kept, out, token)) -> None:
        for step in range(STEPS):
            for layer in range(layers):
                library.check_status(loaded.subquad_step(ctypes.byref(calls[2 * layer + step % 2])))

    return run


def taylor(length: int, repeats: int) -> list[Results]:
    """Degree-2 products formed inside the kernels, features computed by torch first, and the chunked backend."""
    rows = []
    print(f"\nTaylor degree 2, H{HEADS} E64 L{length}, forward: products formed in the kernels over the two other ways")
    for dim in (16, 32, 64):
        phi = PolynomialFeatures(dim)
        q, k, _ = inputs(length, dim)
        v = torch.randn(1, HEADS, length, 64)
        for causal in (False, True):

            def stored(q: Tensor = q, k: Tensor = k, v: Tensor = v, causal: bool = causal, phi: Any = phi) -> object:
                scale = q.shape[-1] ** -0.5
                inputs = Inputs(phi.queries(q, scale).values, phi.keys(k, scale).values, v)
                options = Options(*IDENTITY.options, 1.0, -1, 0, causal=causal, normalise=True, tail=False)
                return operator(inputs, Batched(), IDENTITY.map.arrays, *options.encoded())

            runs: dict[str, Callable[[], object]] = {
                "products": partial(attention, native, phi, q, k, v, causal),
                "stored": stored,
                "chunked": partial(attention, chunked, phi, q, k, v, causal),
            }
            with torch.no_grad():
                times = best(runs, repeats)
            row: Results = {"dim": dim, "causal": causal, "features": phi.num_features}
            row |= {f"{name}_ms": t * 1e3 for name, t in times.items()}
            rows.append(row)
            print(
                f"  D{dim:<4d} M{phi.num_features:<5d}{'causal' if causal else 'full':7s} {row['products_ms']:7.1f} ms"
                f"   features by torch first {times['stored'] / times['products']:.1f}x"
                f"   chunked {times['chunked'] / times['products']:.1f}x"
            )
    return rows


def crossover(repeats: int) -> list[Results]:
    """From which length on the native kernels are faster than torch's softmax attention."""
    rows = []
    print(f"\nagainst torch's SDPA, hyperbolic, H{HEADS} D64 M{FEATURES}: SDPA time / native time")
    phi = make("hyperbolic", 64)
    for length in (256, 512, 1024, 2048, 4096):
        q, k, v = inputs(length, 64)
        row: Results = {"length": length}
        for causal in (False, True):
            ours = partial(attention, native, phi, causal=causal)
            theirs = partial(F.scaled_dot_product_attention, is_causal=causal)
            with torch.no_grad():
                plain = best({"ours": partial(ours, q, k, v), "theirs": partial(theirs, q, k, v)}, repeats)
            both = best({"ours": trained(ours, q, k, v), "theirs": trained(theirs, q, k, v)}, repeats)
            name = "causal" if causal else "full"
            row[f"{name}_forward"] = plain["theirs"] / plain["ours"]
            row[f"{name}_both"] = both["theirs"] / both["ours"]
        rows.append(row)
        print(
            f"  L{length:<6d} forward full {row['full_forward']:5.2f}x causal {row['causal_forward']:5.2f}x"
            f"   forward+backward full {row['full_both']:5.2f}x causal {row['causal_both']:5.2f}x"
        )
    return rows


def _spin() -> None:
    while True:
        pass


def neighbour(length: int, repeats: int) -> Results:
    """How much a busy process beside it costs."""
    phi = make("positive", 64)
    q, k, v = inputs(length, 64)
    with torch.no_grad():
        runs: dict[str, Callable[[], object]] = {
            "native": lambda: attention(native, phi, q, k, v, False),
            "chunked": lambda: attention(chunked, phi, q, k, v, False),
        }
        quiet = best(runs, repeats)
        busy = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
        busy.start()
        try:
            time.sleep(1.0)
            disturbed = dict.fromkeys(runs, 0.0)
            for _ in range(repeats):
                for name, run in runs.items():
                    start = time.perf_counter()
                    run()
                    disturbed[name] += (time.perf_counter() - start) / repeats
        finally:
            busy.kill()
            busy.join()
    row = {name: disturbed[name] / quiet[name] for name in runs}
    print(
        f"\nslowdown beside one busy process (target 2.5x): native {row['native']:.1f}x, chunked {row['chunked']:.1f}x"
    )
    return row


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short sequences, few repeats")
    parser.add_argument("--threads", type=int, help="torch threads; torch's default unless given")
    parser.add_argument("--only", default="shares,hadamard,decode,taylor,crossover,neighbour")
    parser.add_argument("--json", type=Path, help="write every number there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    loaded = library.load()
    length, repeats = (1024, 3) if options.quick else (4096, 10)
    isa, threads = loaded.subquad_isa().decode(), torch.get_num_threads()
    print(f"native kernels: {isa}, {threads} threads, torch {torch.__version__}")
    measures: dict[str, Callable[[], Any]] = {
        "shares": lambda: shares(length, repeats),
        "hadamard": lambda: hadamard(length, repeats),
        "decode": lambda: decode(repeats),
        "taylor": lambda: taylor(length, repeats),
        "crossover": lambda: crossover(repeats),
        "neighbour": lambda: neighbour(length, repeats),
    }
    unknown = set(options.only.split(",")) - set(measures)
    if unknown:
        parser.error(f"--only: {sorted(unknown)} not known, expected some of {list(measures)}")
    results: Results = {"isa": isa, "threads": threads}
    for name in options.only.split(","):
        results[name] = measures[name]()
        if options.json:  # after every part, so that an interruption loses nothing
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
