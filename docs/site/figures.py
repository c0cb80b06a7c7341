"""Draws, for every mechanism, the attention matrix it stands for beside softmax's: docs/figures/NAME.svg.

    python docs/site/figures.py

Attention to v = identity returns the weights themselves. The tokens are a random walk, so that near ones are alike,
with a few that everyone looks at: windows, buckets, clusters and low rank all have something to find.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

import subquad as sq

FIGURES = Path(__file__).parent.parent / "figures"
LENGTH, WIDTH = 64, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "clustered": {"clusters": 8, "seed": 0},
    "hybrid": {"window": 6, "sinks": 2, "far": {"mechanism": "performer", "num_features": 128, "seed": 0}},
    "improved-clustered": {"clusters": 8, "topk": 12, "seed": 0},
    "linformer": {"length": LENGTH, "rank": 16},
    "local": {"window": 6, "sinks": 2},
    "lsh": {"rounds": 2, "buckets": 8, "bucket_size": 8, "seed": 0},
    "multipole": {"chunk": 16, "clusters": 4, "exact_keys": 8, "seed": 0},
    "nystrom": {"landmarks": 12},
    "performer": {"num_features": 128, "seed": 0},
    "sparse": {"stride": 8},
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    walk = torch.randn(LENGTH, WIDTH, generator=generator).cumsum(0)
    walk = (walk - walk.mean(0)) / walk.std()
    q = 1.3 * walk + 0.3 * torch.randn(LENGTH, WIDTH, generator=generator)
    k = 1.3 * walk + 0.3 * torch.randn(LENGTH, WIDTH, generator=generator)
    k[:2] += 1.2 * q.mean(0) / q.mean(0).norm()
    return q[None, None], k[None, None]


def weights(name: str, is_causal: bool) -> torch.Tensor:
    torch.manual_seed(0)
    q, k = tokens()
    attend = sq.create(name, WIDTH, 1, **OPTIONS.get(name, {}))
    if attend.uses_calibration:
        attend.calibrate(q, k)
    with torch.no_grad():
        out: torch.Tensor = attend(q, k, torch.eye(LENGTH)[None, None], is_causal=is_causal)
    return out[0, 0]


def draw(name: str) -> None:
    modes = [False, True] if sq.describe(name)["causal"] else [False]
    panels = [
        (f"{which}, causal" if causal else which, weights(which, causal))
        for causal in modes
        for which in ("softmax", name)
    ]
    if name == "softmax":
        panels = panels[::2]
    figure, axes = plt.subplots(1, len(panels), figsize=(2.5 * len(panels), 2.7), squeeze=False)
    top = max(float(panels[0][1].quantile(0.995)), 1e-3)
    for axis, (title, matrix) in zip(axes[0], panels, strict=True):
        # Square root: small weights, which is where mechanisms differ, would be white otherwise.
        shown = matrix.abs().clamp(max=top).div(top).sqrt()
        axis.imshow(shown, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0][0].set_ylabel("query", fontsize=8)
    axes[0][0].set_xlabel("key", fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURES / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "subquad"  # the same picture is the same file
    FIGURES.mkdir(exist_ok=True)
    for name in sq.list_mechanisms():
        draw(name)
        print(FIGURES / f"{name}.svg")


if __name__ == "__main__":
    main()
