"""The error of random-feature estimators against their number of features, beside what it has to beat.

python examples/error_curves.py [--std 0.5] [--head-dim 16] [--png curves.png]
"""

import argparse

import torch

import subquad as sq

ESTIMATORS = {
    "trig": {"features": "trig"},
    "positive (FAVOR+)": {"features": "positive"},
    "hyperbolic": {"features": "hyperbolic"},
    "hyperbolic, hadamard": {"features": "hyperbolic", "projection": "hadamard"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--std", type=float, default=0.7, help="standard deviation of queries and keys")
    parser.add_argument("--num-features", default="16,64,256")
    parser.add_argument("--png", help="draw the curves (needs matplotlib)")
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    q, k = given.std * torch.randn(2, 1, 1, given.length, given.head_dim, generator=generator)
    v = torch.randn(1, 1, given.length, given.head_dim, generator=generator)
    exact = sq.attention(q, k, v, "softmax")

    def error(out: torch.Tensor) -> float:
        return float((out - exact).norm() / exact.norm())

    counts = [int(count) for count in given.num_features.split(",")]
    lines = {"uniform": error(v.mean(2, keepdim=True).expand_as(exact))}
    for degree in (1, 2):
        lines[f"taylor {degree}"] = error(sq.attention(q, k, v, "taylor", degree=degree))
    for name, value in lines.items():
        print(f"{name:22s} {value:.3f}")
    curves = {}
    for name, options in ESTIMATORS.items():
        curves[name] = [
            sum(error(sq.attention(q, k, v, "performer", num_features=m, seed=s, **options)) for s in range(4)) / 4
            for m in counts
        ]
        print(f"{name:22s} " + "  ".join(f"M={m}: {e:.3f}" for m, e in zip(counts, curves[name], strict=True)))
    if given.png:
        import matplotlib.pyplot as plt

        for name, values in curves.items():
            plt.loglog(counts, values, marker="o", label=name)
        for name, value in lines.items():
            plt.axhline(value, linestyle="--", linewidth=1, label=name)
        plt.xlabel("features")
        plt.ylabel("relative error of the output")
        plt.legend()
        plt.savefig(given.png)


if __name__ == "__main__":
    main()
