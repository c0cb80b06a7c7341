"""Weighted coresets of keys beside multipole attention, on the queries, keys and values of a real model.

    python benchmarks/coreset.py --model DIR --text FILE [--lengths 512 2048 8192] [--json FILE]

Keys are points of the kernel h(x, y) = e^{beta x.y}. A pivoted Cholesky factorisation of H = h(K, K) picks r of them,
the next one with probability proportional to the diagonal that is left (Chen et al., "Randomly pivoted Cholesky",
2022), and Nystrom weights carry the others over to them:

    W = H(P, P)^-1 H(P, K)                           (r, S)
    out_i = H(q_i, P) (W V) / H(q_i, P) (W 1)        P the pivots

which is softmax attention with r keys, values W V and a weight W 1 per key. Weights may be negative and a normaliser
close to 0, so outputs are cut to the range of the values. "per 256" makes one coreset of every 256 keys and joins
them: parallel, possible in causal form, cheaper by S / 256. Pivots of one coreset follow one after the other and cost
S r^2, so coresets of more than `--pivots` are left out. The columns:

    evals   keys or clusters that a query is compared with       share   of all keys
    error   |out - exact|^2 / |exact|^2, the mean over layers     time    of this script's torch code, one thread: the
            coreset is a reference, multipole is its native operator

The reference is in float64: H has condition numbers near 1 / eps for keys that lie close together.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from multipole import Layer, captured, relative
from torch import Tensor

import subquad as sq


def pivots(keys: Tensor, beta: float, rank: int, generator: torch.Generator) -> Tensor:
    """Indices (X, r) of randomly pivoted Cholesky on e^{beta k.k'}, keys (X, S, D)."""
    batch, length, _ = keys.shape
    left = (beta * keys.square().sum(-1)).exp()  # the diagonal that no pivot explains yet
    factor = keys.new_zeros((batch, length, rank))
    chosen = torch.zeros(batch, rank, dtype=torch.long)
    row = torch.arange(batch)
    for step in range(rank):
        # A kernel of low rank is explained before r pivots: the rest is taken evenly.
        weight = torch.where(left.sum(-1, keepdim=True) > 0, left, torch.ones_like(left))
        pick = torch.multinomial(weight, 1, generator=generator).squeeze(-1)
        chosen[:, step] = pick
        column = (beta * (keys @ keys[row, pick].unsqueeze(-1)).squeeze(-1)).exp()
        column = column - (factor[:, :, :step] @ factor[row, pick, :step].unsqueeze(-1)).squeeze(-1)
        pivot = column[row, pick].clamp(min=1e-300).sqrt().unsqueeze(-1)
        factor[:, :, step] = column / pivot
        left = (left - factor[:, :, step].square()).clamp(min=0)
        left[row, pick] = 0
    return chosen


def coreset(keys: Tensor, values: Tensor, scale: float, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pivot keys (X, r, D), their values W V (X, r, E) and weights W 1 (X, r, 1)."""
    chosen = pivots(keys, scale, rank, torch.Generator().manual_seed(seed))
    found = keys.gather(1, chosen.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
    gram = (scale * found @ found.mT).exp()
    # Relative to the diagonal, so that keys of any norm are regularised alike.
    root = gram.diagonal(dim1=-2, dim2=-1).rsqrt().unsqueeze(-1)
    scaled = root * gram * root.mT + 1e-10 * torch.eye(rank, dtype=keys.dtype)
    weights = root * torch.linalg.solve(scaled, root * (scale * found @ keys.mT).exp())
    return found, weights @ values, weights.sum(-1, keepdim=True)


def attend(q: Tensor, parts: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """Weighted softmax attention of q (X, L, D) over pivots; shifted by a row's largest score."""
    keys, values, weight = parts
    scores = scale * q @ keys.mT
    kernel = (scores - scores.amax(-1, keepdim=True)).exp()
    return kernel @ values / (kernel @ weight)


def by_coreset(layer: Layer, share: int, size: int | None) -> Tensor:
    """One key in `share` remains; `size`: keys per coreset, None = one of all."""
    q, k, v = (x[0].double() for x in layer)
    scale, length = q.shape[-1] ** -0.5, k.shape[1]
    k = k - k.mean(1, keepdim=True)  # softmax does not see it, the kernel does
    size = length if size is None else size
    made = [
        coreset(k[:, at : at + size], v[:, at : at + size], scale, max(1, size // share), seed)
        for seed, at in enumerate(range(0, length, size))
    ]
    keys, values, weight = (torch.cat(x, 1) for x in zip(*made, strict=True))
    out = attend(q, (keys, values, weight), scale)
    return out.clamp(v.amin(1, keepdim=True), v.amax(1, keepdim=True))[None].float()


def clusters_and_keys(layer: Layer, attn: sq.Mechanism) -> float:
    """What a query of multipole is compared with, on average."""
    q, k, v = layer
    slots = k.shape[2] // attn.chunk * attn.clusters
    return slots + float(attn.inspect(q, k, v).exact_keys.float().mean()) + k.shape[2] % attn.chunk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--pivots", type=int, default=512, help="the most of one coreset")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for length in given.lengths:
        layers = captured(given.model, given.text, length)
        width = layers[0][0].shape[-1]
        exact = [F.scaled_dot_product_attention(*layer) for layer in layers]
        multipole = sq.create("multipole", width, seed=0)
        few = sq.create("multipole", width, seed=0, exact_keys=0)
        ways: dict[str, tuple[Callable[[Layer], Tensor], Callable[[Layer], float]]] = {
            "multipole": (lambda x: multipole(*x), lambda x: clusters_and_keys(x, multipole)),  # noqa: B023
            "multipole, means alone": (lambda x: few(*x), lambda x: clusters_and_keys(x, few)),  # noqa: B023
        }
        for share in (16, 8, 4):
            for size in (None, 256):
                if (size or length) // share > given.pivots:
                    continue
                title = f"coreset 1/{share}" + ("" if size is None else f" per {size}")
                run = (lambda x, share=share, size=size: by_coreset(x, share, size), lambda x, s=share: length / s)  # noqa: B023
                ways[title] = run
        for title, (run, evals) in ways.items():
            error = seconds = compared = 0.0
            for layer, want in zip(layers, exact, strict=True):
                start = time.perf_counter()
                with torch.no_grad():
                    out = run(layer)
                seconds += (time.perf_counter() - start) / len(layers)
                error += float(relative(out, want)) / len(layers)
                compared += evals(layer) / len(layers)
            rows.append({"length": length, "way": title, "evals": compared, "error": error, "seconds": seconds})
            line = f"{length:6} {title:26} evals {compared:7.0f} ({compared / length:4.0%})   error {error:9.5f}"
            print(f"{line}   {1e3 * seconds:8.1f} ms", flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
