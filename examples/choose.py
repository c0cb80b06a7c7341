"""Which mechanism, with how many features, for these queries and keys?

    python examples/choose.py [--file qk.safetensors] [--target-error 0.1]

Without a file it makes up queries and keys as smooth attention has them.
"""

import argparse

import torch

import subquad as sq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", help="a safetensors file with q and k, (batch, heads, length, width)")
    parser.add_argument("--target-error", type=float, default=0.1, help="relative error that is good enough")
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args()
    if given.file:
        from safetensors.torch import load_file

        tensors = load_file(given.file)
        q, k = tensors["q"], tensors["k"]
    else:
        generator = torch.Generator().manual_seed(0)
        q, k = 0.5 * torch.randn(2, 1, 2, given.length, 32, generator=generator)
    for features in (64, 256):
        forecast = sq.predict_error(q, k, "performer", num_features=features)
        print(f"performer with {features} features: expected error {forecast.error:.3f} ({forecast.method})")
    print(sq.plan(q, k, target_error=given.target_error))


if __name__ == "__main__":
    main()
