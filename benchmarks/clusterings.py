"""Mechanisms that choose, on the queries, keys and values of a real model: error against time.

    python benchmarks/clusterings.py --model DIR --text FILE [--lengths 512 2048 8192] [--rounds 5] [--json FILE]

`improved-clustered` with 32 keys, its clusters by signs (hamming) and by K-means on the queries (lloyd), with several
numbers of clusters and iterations; lsh with 4 and 8 rounds; multipole and sparse as they come. Errors are relative
squared errors of a layer's output, the mean over layers; times are milliseconds of one layer, the best of interleaved
rounds, with torch's fused attention in the same rounds. Tune on one text, report on another.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from multipole import best, captured, relative

import subquad as sq

WAYS: dict[str, dict[str, Any]] = {
    f"{clustering} C={clusters} iterations={iterations}": {
        "mechanism": "improved-clustered",
        "topk": 32,
        "clustering": clustering,
        "clusters": clusters,
        "iterations": iterations,
    }
    for clustering, clusters, iterations in (
        *(("hamming", clusters, 10) for clusters in (25, 50, 100)),
        *(("lloyd", clusters, turns) for clusters in (25, 50, 100) for turns in (2, 5, 10)),
    )
}
WAYS |= {f"lsh rounds={rounds}": {"mechanism": "lsh", "rounds": rounds} for rounds in (4, 8)}
WAYS |= {"multipole": {"mechanism": "multipole"}, "sparse stride=64": {"mechanism": "sparse", "stride": 64}}


def seeded(name: str) -> dict[str, int]:
    return {"seed": 0} if "seed" in sq.describe(name)["options"] else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for length in given.lengths:
        layers = captured(given.model, given.text, length)
        exact = [F.scaled_dot_product_attention(*layer) for layer in layers]
        made = {
            title: sq.create(head_dim=layers[0][0].shape[-1], **options, **seeded(options["mechanism"]))
            for title, options in WAYS.items()
        }
        runs = {title: lambda attn=attn: attn(*layers[0]) for title, attn in made.items()}  # noqa: B023
        times = best({**runs, "SDPA": lambda: F.scaled_dot_product_attention(*layers[0])}, given.rounds)  # noqa: B023
        for title, attn in made.items():
            errors = [float(relative(attn(*layer), want)) for layer, want in zip(layers, exact, strict=True)]
            row = {"length": length, "way": title, "error": sum(errors) / len(errors), "ms": 1e3 * times[title]}
            rows.append({**row, "sdpa": 1e3 * times["SDPA"]})
            print(f"{length:6} {title:32} error {row['error']:.4f}   {row['ms']:8.2f} ms", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
