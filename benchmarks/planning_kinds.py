"""The inputs of `planning.py`: laws of queries and keys, and layers of pretrained models.

LAWS were not looked at while the planner was written as it is now; its margins (two deviations between stretches, 1.2
of the target) are those of an earlier planner, which had seen some of them (INHERITED).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

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
    group: str = "laws"
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


def periodic(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Every token sees those a multiple of 64 away."""
    angle = 2 * torch.pi * torch.arange(q.shape[2]) / 64
    wave = torch.stack([f(n * angle) for n in (1, 2, 3, 4) for f in (torch.cos, torch.sin)], -1)
    path = torch.nn.functional.pad(1.6 * wave, (0, q.shape[-1] - 8))
    return path + 0.2 * q, path + 0.2 * k


def needles(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Flat attention, but every 32nd query has one key somewhere that it is nearly the same as."""
    q, k = 0.4 * q, 0.4 * k
    asking = torch.arange(0, q.shape[2], 32)
    found = torch.randint(0, k.shape[2], asking.shape, generator=own)
    strong = torch.randn(len(asking), q.shape[-1], generator=own)
    strong = 3.0 * q.shape[-1] ** 0.25 * strong / strong.norm(dim=-1, keepdim=True)
    q, k = q.clone(), k.clone()
    q[:, :, asking] += strong
    k[:, :, found] += strong
    return q, k


def unlike_heads(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """One head is flat, the next sharp in a few directions."""
    sizes = torch.linspace(0.25, 1.1, q.shape[1]).view(1, -1, 1, 1)
    weights = torch.arange(1, q.shape[-1] + 1).float() ** -0.7
    factor = sizes * q.shape[-1] ** 0.5 / float(weights.norm()) * weights
    return factor * q, factor[:, : k.shape[1]] * k


def outliers(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Two coordinates are ten times as large as the others, as in many trained models, with a common mean."""
    weights = torch.full((q.shape[-1],), 0.3)
    weights[:2] = 1.5
    mean = torch.zeros(q.shape[-1])
    mean[0] = 2.0
    return weights * q + mean, weights * k - mean


def drifting(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """The mean of the keys moves along the sequence: its stretches are not alike."""
    way = torch.linspace(-1, 1, k.shape[2]).unsqueeze(-1) * torch.randn(q.shape[-1], generator=own)
    return 0.35 * q + 0.3, 0.35 * k + 0.5 * way


def laplace(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    """Entries with longer tails than a Gaussian's."""
    return tuple(0.3 * x.sign() * x.abs() ** 1.6 for x in (q, k))  # type: ignore[return-value]


INHERITED: dict[str, Kind] = {
    "isotropic 0.3": Kind(isotropic(0.3)),
    "shifted": Kind(shifted),
    "like an encoder": Kind(encoder),
    "spectrum 1, scores 1": Kind(spectrum(1.0, 1.0)),
    "2 directions, scores 1.5": Kind(rank(2, 1.5)),
    "neighbours": Kind(neighbours),
    "causal neighbours": Kind(neighbours, is_causal=True),
    "isotropic 0.5": Kind(isotropic(0.5)),
    "6 directions, scores 0.9": Kind(rank(6, 0.9)),
    "heavy norms": Kind(heavy_norms),
    "wandering": Kind(wandering),
    "causal sinks": Kind(sinks, is_causal=True),
    "topics": Kind(topics),
    "D32 grouped heads, spectrum 1/2, scores 0.8": Kind(spectrum(0.5, 0.8), 32, heads=4, kv_heads=2),
}
LAWS: dict[str, Kind] = {
    **{name: dataclasses.replace(kind, group="laws known to an earlier planner") for name, kind in INHERITED.items()},
    **{
        name: dataclasses.replace(kind, group="new laws")
        for name, kind in {
            "periodic": Kind(periodic),
            "causal periodic": Kind(periodic, is_causal=True),
            "needles": Kind(needles),
            "unlike heads": Kind(unlike_heads, heads=4, kv_heads=4),
            "outliers": Kind(outliers),
            "drifting": Kind(drifting),
            "laplace": Kind(laplace),
            "causal laplace": Kind(laplace, is_causal=True),
            "8k spectrum 0.8, scores 1.2": Kind(spectrum(0.8, 1.2), length=8192),
            "D16 5 directions, scores 1.1": Kind(rank(5, 1.1), 16),
        }.items()
    },
}


# -- captured from models ---------------------------------------------------------------------------------------------

SEQUENCES = 2
LONGEST = 4096
PARTS = 3  # of the text: a sample, and two fresh inputs


@dataclasses.dataclass(frozen=True)
class Captured(Kind):
    """What one layer saw: `inputs[i]` of the i-th part of the text."""

    inputs: tuple[Sample, ...] = ()

    def draw(self, seed: int, length: int | None = None) -> Sample:
        """q, k, v (SEQUENCES, heads, length, width); seed 1 is the sample, those after it are fresh."""
        return self.inputs[seed - 1]


def _tokens(folder: Path, text: Path) -> list[int]:
    """Of a JSON list of token numbers, for models without a tokenizer; else of a text."""
    if text.suffix == ".json":
        return list(json.loads(text.read_text(encoding="utf-8")))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    words = text.read_text(encoding="utf-8")[:2_000_000]
    return list(tokenizer(words, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def captured_kinds(name: str, folder: Path, text: Path, most_layers: int = 6) -> dict[str, Kind]:
    """Layers of the model in `folder`, evenly: the sample from the first third of the text, fresh from the rest."""
    from transformers import AutoModel

    from subquad.hf import capture

    model = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
    tokens = _tokens(folder, text)
    limits = [getattr(model.config, field, None) for field in ("max_position_embeddings", "n_positions")]
    length = min([LONGEST, len(tokens) // (PARTS * SEQUENCES), *(n - 2 for n in limits if isinstance(n, int))])
    step = len(tokens) // PARTS
    batches = []
    for i in range(PARTS):
        part = tokens[i * step : i * step + SEQUENCES * length]
        batches.append({"input_ids": torch.tensor(part).view(SEQUENCES, length)})
    kinds: dict[str, Kind] = {}
    every = [sample for sample in capture(model, batches) if len(sample)]
    kept = sorted({round(i * (len(every) - 1) / max(1, most_layers - 1)) for i in range(most_layers)})
    for sample in (every[i] for i in kept):
        inputs = tuple((q.float(), k.float(), v.float()) for q, k, v, _ in sample.calls())
        q, k, _ = inputs[0]
        kinds[f"{name}, layer {sample.layer + 1}"] = Captured(
            lambda q, k, own: (q, k), q.shape[-1], sample.is_causal, q.shape[2], q.shape[1], k.shape[1],
            group=f"captured from {name}", scale=sample.scale, inputs=inputs,
        )  # fmt: skip
    return kinds
