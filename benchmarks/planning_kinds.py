"""The inputs of `planning.py`: laws of queries and keys, of which any number of samples can be drawn.

DEVELOPED are those that led to a change of the planner as it was written; nothing was changed because of HELD_OUT. Two
rules of the planner (long tails of draws, normalisers near 0) came from "8 directions" and "D32 grouped heads, spectrum
1", which is why these count as developed. That a plan names the draw it has measured, and how it sees that inputs
differ, was developed on DEVELOPED; results of an earlier planner on all kinds were known by then. "spectrum 3/4" was
held out until it showed that few but slow trigonometric features kept the plan from looking for faster ones, "topics"
until it showed that a good draw of clusters says nothing about the next input.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Sample = tuple[Tensor, Tensor, Tensor | None]  # q, k and, where outputs are judged, v
Make = Callable[[Tensor, Tensor, torch.Generator], Pair]  # standard normal q, k and what belongs to the kind -> q, k


@dataclasses.dataclass(frozen=True)
class Kind:
    """A law of inputs; what belongs to the kind (means, centres, paths) is the same for every seed."""

    make: Make
    head_dim: int = 64
    is_causal: bool = False
    length: int = 4096
    heads: int = 2
    kv_heads: int = 2
    group: str = "developed with"
    scale: float | None = None

    @property
    def clock(self) -> tuple[int, int, bool, int, int]:
        """All that a time depends on."""
        return self.length, self.head_dim, self.is_causal, self.heads, self.kv_heads

    def draw(self, seed: int, length: int | None = None) -> Sample:
        """q (1, heads, length, head_dim), k (1, kv_heads, length, head_dim), no values."""
        generator = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(12345)
        size = self.length if length is None else length
        q = torch.randn(1, self.heads, size, self.head_dim, generator=generator)
        k = torch.randn(1, self.kv_heads, size, self.head_dim, generator=generator)
        return *self.make(q, k, own), None


def isotropic(size: float) -> Make:
    return lambda q, k, own: (size * q, size * k)


def weighted(q: Tensor, k: Tensor, weights: Tensor, deviation: float) -> Pair:
    """Scores q.k / sqrt(D) of this standard deviation."""
    factor = (deviation * q.shape[-1] ** 0.5 / float(weights.pow(4).sum().sqrt())) ** 0.5
    return factor * weights * q, factor * weights * k


def spectrum(power: float, deviation: float) -> Make:
    return lambda q, k, own: weighted(q, k, torch.arange(1, q.shape[-1] + 1).float() ** -power, deviation)


def rank(directions: int, deviation: float) -> Make:
    return lambda q, k, own: weighted(q, k, (torch.arange(q.shape[-1]) < directions).float(), deviation)


def shifted(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    means = torch.randn(2, 1, q.shape[1], 1, q.shape[-1], generator=own)
    means = 3.0 * means / means.norm(dim=-1, keepdim=True)
    return 0.4 * q + means[0], 0.4 * k + means[1]


def encoder(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """As in trained encoders: small norms that differ between tokens, common means, a falling spectrum."""
    heads = q.shape[1]
    weights = torch.arange(1, q.shape[-1] + 1).float() ** -0.5
    means = 0.2 * torch.randn(2, 1, heads, 1, q.shape[-1], generator=own)
    lengths = torch.exp(0.15 * torch.randn(2, 1, heads, q.shape[2], 1, generator=own))
    q, k = weighted(q, k, weights, 0.4)
    return lengths[0] * q + means[0], lengths[1] * k + means[1]


def neighbours(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """A smooth path through space: every token sees those beside it."""
    turns = 0.02 + torch.rand(1, q.shape[1], 1, q.shape[-1] // 2, generator=own)
    angles = torch.arange(q.shape[2])[:, None] * turns
    path = 2.6 * torch.cat([angles.cos(), angles.sin()], -1)
    return path + 0.1 * q, path + 0.1 * k


def heavy_norms(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Norms with the tails of a log-normal law: a few tokens are five times as long as the others."""
    return tuple(0.25 * torch.exp(0.5 * x[..., :1]) * x for x in (q, k))  # type: ignore[return-value]


def wandering(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """A first-order autoregressive path with a memory of about 12 tokens, seen by queries and keys alike."""
    length, keep = k.shape[2], 0.92
    decay = keep ** torch.arange(96.0).flip(0)
    padded = torch.nn.functional.pad(k.transpose(2, 3), (95, 0))
    path = (1 - keep**2) ** 0.5 * (padded.unfold(-1, 96, 1) @ decay).transpose(2, 3)[:, :, :length]
    return 1.15 * path + 0.3 * q, 1.15 * path


def sinks(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Every query has a common part that the first four keys answer to: they take about half of each row."""
    common = torch.randn(1, q.shape[1], 1, q.shape[-1], generator=own)
    common = common / common.norm(dim=-1, keepdim=True)
    strong = torch.zeros(k.shape[2], 1)
    strong[:4] = 1.0
    width = q.shape[-1] ** 0.5
    return 0.4 * q + 4.0 * common, 0.4 * k + strong * common * (0.25 * width * 7.0)


def topics(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Queries and keys of 30 topics; a query looks at the keys of its own."""
    centres = torch.randn(q.shape[1], 30, q.shape[-1], generator=own)
    member = torch.randint(0, 30, (2, q.shape[2]), generator=own)
    return 0.85 * centres[:, member[0]] + 0.2 * q, 0.85 * centres[:, member[1]] + 0.2 * k


DEVELOPED: dict[str, Kind] = {
    "isotropic 0.3": Kind(isotropic(0.3)),
    "shifted": Kind(shifted),
    "like an encoder": Kind(encoder),
    "spectrum 1, scores 1": Kind(spectrum(1.0, 1.0)),
    "spectrum 1, scores 2": Kind(spectrum(1.0, 2.0)),
    "2 directions, scores 1.5": Kind(rank(2, 1.5)),
    "neighbours": Kind(neighbours),
    "D16 spectrum 1, scores 1": Kind(spectrum(1.0, 1.0), 16),
    "causal neighbours": Kind(neighbours, is_causal=True),
    "8 directions, scores 0.7": Kind(rank(8, 0.7)),
    "D32 grouped heads, spectrum 1, scores 0.7": Kind(spectrum(1.0, 0.7), 32, heads=4, kv_heads=2),
    "spectrum 3/4, scores 0.5": Kind(spectrum(0.75, 0.5)),
    "topics": Kind(topics),
}
HELD_OUT: dict[str, Kind] = {
    "isotropic 0.5": Kind(isotropic(0.5)),
    "6 directions, scores 0.9": Kind(rank(6, 0.9)),
    "heavy norms": Kind(heavy_norms),
    "wandering": Kind(wandering),
    "causal isotropic 0.6": Kind(isotropic(0.6), is_causal=True),
    "causal sinks": Kind(sinks, is_causal=True),
    "causal wandering": Kind(wandering, is_causal=True),
    "D32 grouped heads, spectrum 1/2, scores 0.8": Kind(spectrum(0.5, 0.8), 32, heads=4, kv_heads=2),
    "8k 2 directions, scores 0.8": Kind(rank(2, 0.8), length=8192),
    "8k spectrum 1, scores 0.6": Kind(spectrum(1.0, 0.6), length=8192),
}
KINDS = DEVELOPED | {name: dataclasses.replace(kind, group="held out") for name, kind in HELD_OUT.items()}
