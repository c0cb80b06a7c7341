"""Train a classifier on long sequences with attention whose cost is linear in their length.

    python examples/train_long.py [--length 2048] [--mechanism performer] [--steps 60]

The task needs the whole sequence: two marked digits stand anywhere in it, are they equal?
"""

import argparse

import torch
from torch import Tensor, nn

import subquad as sq

DIGITS, FILLER = 4, 12  # ids 0..3 are marked digits, the rest is noise


class Classifier(nn.Module):
    """An encoder, the maximum over its outputs, and two classes."""

    def __init__(self, mechanism: str, dim: int = 64) -> None:
        super().__init__()
        self.encoder = sq.nn.TransformerEncoder(layers=2, heads=4, dim=dim, vocab=DIGITS + FILLER, mechanism=mechanism)
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(tokens).amax(1))
        return logits


def batch(size: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(DIGITS, DIGITS + FILLER, (size, length))
    first, second = torch.randint(0, DIGITS, (2, size))
    same = torch.rand(size) < 0.5
    second = torch.where(same, first, second)
    places = torch.rand(size, length).argsort(-1)[:, :2]
    tokens.scatter_(1, places, torch.stack([first, second], 1))
    return tokens, (first == second).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--mechanism", default="performer")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Classifier(given.mechanism)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = sq.nn.RedrawSchedule(model.encoder, every=20)  # fresh random features from time to time
    for step in range(1, given.steps + 1):
        tokens, labels = batch(16, given.length)
        schedule.step()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0 or step == given.steps:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
