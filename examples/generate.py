"""Generate in constant time and memory per token: prompt, state, and a fork of it.

python examples/generate.py [--mechanism hybrid] [--tokens 200]
"""

import argparse
import time

import torch
from torch.utils import _pytree as pytree

import subquad as sq


def size_of(states: object) -> float:
    """KiB that a state holds."""
    return sum(x.numel() * x.element_size() for x in pytree.tree_leaves(states) if isinstance(x, torch.Tensor)) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanism", default="hybrid")
    parser.add_argument("--tokens", type=int, default=50)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = sq.nn.TransformerDecoder(layers=2, heads=4, dim=128, vocab=256, mechanism=given.mechanism, seed=0).eval()
    states = None
    with torch.no_grad():
        for piece in torch.randint(0, 256, (4, 1, 512)):  # a long prompt, consumed in pieces
            _, states = model.scan(piece, states, last_only=True)
            print(f"after {int(states.length[0])} tokens the state holds {size_of(states):.0f} KiB")
    prompt = torch.randint(0, 256, (1, 1))
    for seed in (0, 1):  # two continuations of the same context: states never change in place
        began = time.perf_counter()
        new = model.generate(prompt, given.tokens, states=states, generator=torch.Generator().manual_seed(seed))
        rate = given.tokens / (time.perf_counter() - began)
        print(f"continuation {seed}: {new[0, :8].tolist()} ... at {rate:.0f} tokens/s")


if __name__ == "__main__":
    main()
