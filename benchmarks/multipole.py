"""Multipole attention on the queries, keys and values of a real model: error, time, kept errors, needles, gradients.

    python benchmarks/multipole.py --model DIR --text FILE [--only table,errors,needles,...] [--json FILE]

DIR is a BERT-type encoder (its position embeddings are interpolated for longer inputs), FILE a text that nothing was
tuned on. Times are the best of interleaved runs, with torch's fused attention in the same rounds; ratios are its time
over ours, the mean over layers. Errors are relative squared errors of a layer's output, all heads together.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from conversion_data import extended
from torch import Tensor

import subquad as sq
from subquad.kernels.multipole import cluster
from subquad.kernels.multipole.definition import statistics
from subquad.kernels.operator import Call
from subquad.lab.peak_memory import peak_memory

LENGTHS = (512, 2048, 8192)
Layer = tuple[Tensor, Tensor, Tensor]


def captured(folder: Path, text: Path, length: int, skip: int = 0) -> list[Layer]:
    """q, k, v (1, H, L, D) of every layer on the tokens of the text from `skip` on."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model = AutoModel.from_pretrained(str(folder), local_files_only=True, attn_implementation="sdpa").eval()
    words = text.read_text(encoding="utf-8", errors="ignore")[: 12 * (skip + length)]
    ids = tokenizer(words, truncation=False, verbose=False)["input_ids"][skip : skip + length]
    if len(ids) < length:
        raise SystemExit(f"--text {text}: {skip + len(ids)} tokens, {skip + length} are needed")
    found: list[Layer] = []
    real = F.scaled_dot_product_attention

    def seen(q: Tensor, k: Tensor, v: Tensor, *args: Any, **named: Any) -> Tensor:
        found.append((q.clone(), k.clone(), v.clone()))
        return real(q, k, v, *args, **named)

    F.scaled_dot_product_attention = seen
    try:
        with torch.no_grad():
            extended(model, length)(input_ids=torch.tensor([ids]))
    finally:
        F.scaled_dot_product_attention = real
    return found


def relative(out: Tensor, exact: Tensor, dims: Any = None) -> Tensor:
    return (out - exact).square().sum(dims) / exact.square().sum(dims)


def best(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each, the best of interleaved rounds."""
    times = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def calibrated(name: str, layer: Layer, **options: Any) -> sq.Mechanism:
    q, k, _ = layer
    made = sq.create(name, q.shape[-1], q.shape[1], **options)
    if made.uses_calibration:
        made.calibrate(q, k)
    return made


def table(layers: dict[int, list[Layer]], rounds: int) -> list[dict[str, Any]]:
    sderf = {"mechanism": "performer", "features": "sderf", "center": True, "antithetic": True, "seed": 0}
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "multipole": ("multipole", {"seed": 0}),
        "hybrid, SDERF 256": ("hybrid", {"window": 32, "sinks": 4, "far": sderf}),
        "performer 256": ("performer", {"num_features": 256, "seed": 0}),
        "improved-clustered": ("improved-clustered", {"seed": 0}),
    }
    rows = []
    for length, found in layers.items():
        for causal in (False, True):
            errors: dict[str, float] = {}
            ratios: dict[str, float] = {}
            for layer in found:
                made = {
                    title: calibrated(name, layer, **options)
                    for title, (name, options) in others.items()
                    if not causal or sq.describe(name)["causal"]
                }
                exact = F.scaled_dot_product_attention(*layer, is_causal=causal)
                runs: dict[str, Callable[[], Any]] = {
                    "SDPA": lambda layer=layer: F.scaled_dot_product_attention(*layer, is_causal=causal)  # noqa: B023
                }
                for title, attn in made.items():
                    errors[title] = errors.get(title, 0) + float(relative(attn(*layer, is_causal=causal), exact)) / len(
                        found
                    )
                    runs[title] = lambda attn=attn, layer=layer: attn(*layer, is_causal=causal)  # noqa: B023
                times = best(runs, max(2, rounds * 2048 // length))
                for title in made:
                    ratios[title] = ratios.get(title, 0) + times["SDPA"] / times[title] / len(found)
            for title, error in errors.items():
                row = {"length": length, "causal": causal, "mechanism": title, "error": error, "ratio": ratios[title]}
                rows.append(row)
                kind = "causal" if causal else "full"
                print(f"{length:6} {kind:7} {title:20} error {error:.4f}   SDPA's time over it {ratios[title]:.2f}")
    return rows


def larger(rounds: int) -> list[dict[str, Any]]:
    """D 64 H 8, and batch 8 of width 32: times and errors of random input."""
    rows = []
    for shape in ((1, 8, 2048, 64), (1, 8, 8192, 64), (1, 8, 32768, 64), (8, 12, 2048, 32)):
        q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        attn = sq.create("multipole", shape[-1], seed=0)
        for causal in (False, True):
            times = best(
                {
                    "SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),  # noqa: B023
                    "multipole": lambda: attn(q, k, v, is_causal=causal),  # noqa: B023
                },
                2 if shape[2] > 8192 else rounds,
            )
            ratio, ms = times["SDPA"] / times["multipole"], 1e3 * times["multipole"]
            exact = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            error = float(relative(attn(q, k, v, is_causal=causal), exact))
            rows.append({"shape": shape, "causal": causal, "ratio": ratio, "ms": ms, "error": error})
            print(f"{shape!s:20} {'causal' if causal else 'full':7} {ms:8.1f} ms   {ratio:.2f}x   error {error:.3f}")
    return rows


def kept_errors(layers: dict[int, list[Layer]]) -> list[dict[str, Any]]:
    rows = []
    for length, found in layers.items():
        for causal in (False, True):
            for error in (0.003, 0.01, 0.03, 0.1):
                attn = sq.create("multipole", found[0][0].shape[-1], error=error, seed=0)
                ratios, keys = [], []
                for layer in found:
                    exact = F.scaled_dot_product_attention(*layer, is_causal=causal)
                    ratios.append(relative(attn(*layer, is_causal=causal), exact, (-1, -2)).flatten() / error)
                    keys.append(float(attn.inspect(*layer, is_causal=causal).exact_keys.float().mean()))
                ratio = torch.cat(ratios)
                row = {
                    "length": length, "causal": causal, "error": error, "median": float(ratio.median()),
                    "within_2x": float((ratio <= 2).float().mean()), "keys": sum(keys) / len(keys),
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{length:6} {'causal' if causal else 'full':7} error={error:<6} measured over asked: median "
                    f"{row['median']:.2f}, at most 2 in {row['within_2x']:.0%} of heads; exact keys {row['keys']:.0f}"
                )
    return rows


def needles(trials: int, length: int = 32768, dim: int = 64) -> list[dict[str, Any]]:
    """One key has an exact weight above 0.99; found: the output is within 1 % of its value."""
    rows = []
    for kind in ("random", "tight clusters"):
        found = 0
        attn = sq.create("multipole", dim, seed=0)
        for seed in range(trials):
            g = torch.Generator().manual_seed(seed)
            k = torch.randn(1, 1, length, dim, generator=g)
            if kind == "tight clusters":
                centres = torch.randn(64, dim, generator=g)
                k = centres[torch.randint(64, (length,), generator=g)] + 0.05 * k
            k = math.sqrt(dim) * F.normalize(k, dim=-1)
            place = int(torch.randint(length, (), generator=g))
            needle = math.sqrt(dim) * F.normalize(torch.randn(dim, generator=g), dim=-1)
            k[0, 0, place] = needle
            q = 4.0 * needle.view(1, 1, 1, dim)
            v = torch.randn(1, 1, length, dim, generator=g)
            assert torch.softmax(q @ k.mT / math.sqrt(dim), -1)[..., place] > 0.99
            found += bool((attn(q, k, v)[0, 0, 0] - v[0, 0, place]).norm() < 0.01 * v[0, 0, place].norm())
        rows.append({"kind": kind, "trials": trials, "found": found})
        print(f"needles among {length} {kind} keys: {found} of {trials}")
    return rows


def radii(layers: dict[int, list[Layer]]) -> list[dict[str, Any]]:
    """Median of s |q| r per layer, r the distance of a cluster's farthest key: masses lie within e^(s |q| r)."""
    rows = []
    for length, found in layers.items():
        spec = sq.create("multipole", found[0][0].shape[-1], seed=0)._spec()
        for number, (q, k, v) in enumerate(found):
            scale = q.shape[-1] ** -0.5
            stats = statistics(spec, k, v, cluster(spec, Call(scale), k))
            reach = float(scale * q.norm(dim=-1).median() * stats.radius[stats.size > 0].median())
            rows.append({"length": length, "layer": number, "reach": reach})
            print(f"{length:6} layer {number}: s |q| r = {reach:.1f}")
    return rows


def memory(lengths: list[int], heads: int, dim: int) -> list[dict[str, Any]]:
    """Bytes beside inputs and output, one call each in a process of its own."""
    rows = []
    for length in (n for n in lengths if n >= 2048):
        for name in ("softmax", "multipole"):
            for backward in (False, True):
                found = peak_memory(name, length, heads=heads, head_dim=dim, backward=backward)
                rows.append({"length": length, "mechanism": name, "backward": backward, **found})
                what = "forward + backward" if backward else "forward"
                print(f"{length:6} {name:10} {what:18} {found['extra_bytes'] / 2**20:.0f} MiB")
    return rows


def gradients(layers: dict[int, list[Layer]], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for length in (n for n in layers if n >= 2048):
        for causal in (False, True):
            layer = layers[length][len(layers[length]) // 2]
            attn = sq.create("multipole", layer[0].shape[-1], seed=0)
            way = torch.randn(layer[2].shape, generator=torch.Generator().manual_seed(0))

            def run(attend: Callable[..., Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
                args = [x.clone().requires_grad_() for x in layer]  # noqa: B023
                out = attend(*args, is_causal=causal)  # noqa: B023
                return out.detach(), torch.autograd.grad(out, args, way)  # noqa: B023

            out, got = run(attn)
            exact, want = run(F.scaled_dot_product_attention)
            times = best(
                {"SDPA": lambda: run(F.scaled_dot_product_attention), "multipole": lambda: run(attn)},  # noqa: B023
                max(2, rounds * 2048 // length),
            )
            row = {
                "length": length, "causal": causal, "out": float(relative(out, exact)),
                **{name: float(relative(a, b)) for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True)},
                "ratio": times["SDPA"] / times["multipole"],
            }  # fmt: skip
            rows.append(row)
            shown = ", ".join(f"{name} {row[name]:.4f}" for name in ("out", "dq", "dk", "dv"))
            print(
                f"{length:6} {'causal' if causal else 'full':7} forward + backward {row['ratio']:.2f}x; error {shown}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--only", default="table,larger,errors,needles,gradients,radii,memory")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    layers = {int(n): captured(args.model, args.text, int(n)) for n in args.lengths.split(",")}
    sections: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "table": lambda: table(layers, args.rounds),
        "larger": lambda: larger(args.rounds),
        "errors": lambda: kept_errors(layers),
        "needles": lambda: needles(args.trials),
        "gradients": lambda: gradients(layers, args.rounds),
        "radii": lambda: radii(layers),
        "memory": lambda: memory(list(layers), *next(iter(layers.values()))[0][0].shape[1::2]),
    }
    results = {}
    with torch.no_grad():
        for name in args.only.split(","):
            print(f"-- {name}")
            with torch.set_grad_enabled(name == "gradients"):
                results[name] = sections[name]()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
