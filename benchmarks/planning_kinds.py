"""The inputs of `planning.py`: synthetic queries and keys, and layers of pretrained models; none built the planner."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conversion_data import extended, written_out
from torch import Tensor

from subquad.planning.piece import evenly

Pair = tuple[Tensor, Tensor]
Sample = tuple[Tensor, Tensor, Tensor | None]  # q, k and, where outputs are judged, v
# standard normal q, k, what belongs to the kind, what is new in every sample -> q, k
Make = Callable[[Tensor, Tensor, torch.Generator, torch.Generator], Pair]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A distribution of inputs; what belongs to the kind (means, centres, paths) is the same for every seed."""

    make: Make
    head_dim: int = 64
    is_causal: bool = False
    length: int = 4096
    heads: int = 2
    kv_heads: int = 2
    group: str = "synthetic inputs"
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
        return *self.make(q, k, own, generator), None


def weighted(q: Tensor, k: Tensor, weights: Tensor, deviation: float) -> Pair:
    """Scores q.k / sqrt(D) of this standard deviation."""
    factor = (deviation * q.shape[-1] ** 0.5 / float(weights.pow(4).sum().sqrt())) ** 0.5
    return factor * weights * q, factor * weights * k


def spectrum(power: float, deviation: float) -> Make:
    return lambda q, k, own, new: weighted(q, k, torch.arange(1, q.shape[-1] + 1).float() ** -power, deviation)


def rank(directions: int, deviation: float) -> Make:
    return lambda q, k, own, new: weighted(q, k, (torch.arange(q.shape[-1]) < directions).float(), deviation)


def periodic(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Every token sees those a multiple of 64 away."""
    angle = 2 * torch.pi * torch.arange(q.shape[2]) / 64
    wave = torch.stack([f(n * angle) for n in (1, 2, 3, 4) for f in (torch.cos, torch.sin)], -1)
    path = torch.nn.functional.pad(1.6 * wave, (0, q.shape[-1] - 8))
    return path + 0.2 * q, path + 0.2 * k


def needles(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Flat attention, but every 32nd query has one key somewhere that it is nearly the same as."""
    q, k = 0.4 * q, 0.4 * k
    asking = torch.arange(0, q.shape[2], 32)
    found = torch.randint(0, k.shape[2], asking.shape, generator=new)
    strong = torch.randn(len(asking), q.shape[-1], generator=new)
    strong = 3.0 * q.shape[-1] ** 0.25 * strong / strong.norm(dim=-1, keepdim=True)
    q, k = q.clone(), k.clone()
    q[:, :, asking] += strong
    k[:, :, found] += strong
    return q, k


def unlike_heads(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """One head is flat, the next sharp in a few directions."""
    sizes = torch.linspace(0.25, 1.1, q.shape[1]).view(1, -1, 1, 1)
    weights = torch.arange(1, q.shape[-1] + 1).float() ** -0.7
    factor = sizes * q.shape[-1] ** 0.5 / float(weights.norm()) * weights
    return factor * q, factor[:, : k.shape[1]] * k


def outliers(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Two coordinates are ten times as large as the others, as in many trained models, with a common mean."""
    weights = torch.full((q.shape[-1],), 0.3)
    weights[:2] = 1.5
    mean = torch.zeros(q.shape[-1])
    mean[0] = 2.0
    return weights * q + mean, weights * k - mean


def drifting(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """The mean of the keys moves along the sequence: its stretches are not alike."""
    way = torch.linspace(-1, 1, k.shape[2]).unsqueeze(-1) * torch.randn(q.shape[-1], generator=own)
    return 0.35 * q + 0.3, 0.35 * k + 0.5 * way


def laplace(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Entries with longer tails than a Gaussian's."""
    return tuple(0.3 * x.sign() * x.abs() ** 1.6 for x in (q, k))  # type: ignore[return-value]


def student(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Lengths with the tails of Student's law of 5 degrees of freedom."""

    def one(x: Tensor) -> Tensor:
        square = torch.randn(*x.shape[:-1], 5, generator=new).square().mean(-1, keepdim=True)
        return 0.35 * x / square.sqrt()

    return one(q), one(k)


def few_entries(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Nine entries in ten are 0; those of queries and keys meet by chance."""
    return tuple(1.5 * x * (torch.rand(x.shape, generator=new) < 0.1) for x in (q, k))  # type: ignore[return-value]


def two_tempers(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Every other query is flat, those between are sharp."""
    sizes = torch.where(torch.arange(q.shape[2]) % 2 == 0, 0.2, 1.2).unsqueeze(-1)
    return sizes * q, 0.6 * k


def loud_keys(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """One key in fifty is four times as long as the others."""
    loud = (torch.rand(k.shape[2], 1, generator=new) < 0.02).float()
    return 0.5 * q, 0.35 * (1 + 3 * loud) * k


def rotary(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """The same content everywhere, turned by its position with falling frequencies, and a little noise."""
    half = q.shape[-1] // 2
    angles = torch.arange(q.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    content = torch.randn(2, 1, q.shape[1], 1, half, generator=own)

    def turned(x: Tensor) -> Tensor:
        return torch.cat([x * angles.cos(), x * angles.sin()], -1)

    return turned(1.1 * content[0]) + 0.3 * q, turned(1.1 * content[1])[:, : k.shape[1]] + 0.3 * k


def words(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """A text of 500 words by Zipf's law; queries and keys are two linear maps of their vectors."""
    often = 1.0 / torch.arange(1, 501).float()
    text = torch.multinomial(often, q.shape[2], replacement=True, generator=new)
    vectors = torch.randn(500, q.shape[-1], generator=own)[text]
    maps = torch.randn(2, q.shape[1], q.shape[-1], q.shape[-1], generator=own) / q.shape[-1] ** 0.5
    return 0.9 * vectors @ maps[0] + 0.15 * q, 0.9 * vectors @ maps[1, : k.shape[1]] + 0.15 * k


def hierarchy(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Eight groups of eight: a query looks at its group, and more at its part of it."""
    groups = torch.randn(8, q.shape[-1], generator=own)
    parts = (groups[:, None] + 0.7 * torch.randn(8, 8, q.shape[-1], generator=own)).flatten(0, 1)
    member = torch.randint(0, 64, (2, q.shape[2]), generator=new)
    return 0.55 * parts[member[0]] + 0.2 * q, 0.55 * parts[member[1]] + 0.2 * k


def documents(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Stretches of 200 tokens, each about something else, which its queries look for."""
    about = torch.randn(-(-q.shape[2] // 200), q.shape[-1], generator=new)[torch.arange(q.shape[2]) // 200]
    return 0.7 * about + 0.4 * q, 0.7 * about + 0.4 * k


def opposed(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """A query looks away from its own key."""
    return 0.7 * q, 0.4 * k - 0.5 * q[:, : k.shape[1]]


def cosines(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Queries and keys of the same length: scores are 10 times their cosine."""
    factor = (10.0 * q.shape[-1] ** 0.5) ** 0.5
    return tuple(factor * x / x.norm(dim=-1, keepdim=True) for x in (q, k))  # type: ignore[return-value]


def copying(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    """Every query looks for the key 17 places before it, and softly at all others."""
    return 0.6 * q + 0.9 * k.roll(17, 2)[:, : q.shape[1]], 0.9 * k


LAWS: dict[str, Kind] = {
    "periodic": Kind(periodic),
    "causal periodic": Kind(periodic, is_causal=True),
    "needles": Kind(needles),
    "unlike heads": Kind(unlike_heads, heads=4, kv_heads=4),
    "outliers": Kind(outliers),
    "drifting": Kind(drifting),
    "laplace": Kind(laplace),
    "8k spectrum 0.8, scores 1.2": Kind(spectrum(0.8, 1.2), length=8192),
    "D16 5 directions, scores 1.1": Kind(rank(5, 1.1), 16),
    "Student": Kind(student),
    "few entries": Kind(few_entries),
    "two tempers": Kind(two_tempers),
    "loud keys": Kind(loud_keys),
    "causal rotary": Kind(rotary, is_causal=True),
    "words": Kind(words),
    "causal words": Kind(words, is_causal=True),
    "hierarchy": Kind(hierarchy),
    "documents": Kind(documents),
    "opposed": Kind(opposed),
    "cosines": Kind(cosines),
    "causal copying": Kind(copying, is_causal=True),
}


# -- captured from models ---------------------------------------------------------------------------------------------

MOST_TOKENS = 4096  # of one input: four sequences of 1024 tokens
MOST_HEADS = 4
PARTS = 3  # of the text: a sample, and two fresh inputs


@dataclasses.dataclass(frozen=True)
class Captured(Kind):
    """What one layer saw: `inputs[i]` of the i-th part of the text."""

    inputs: tuple[Sample, ...] = ()

    def draw(self, seed: int, length: int | None = None) -> Sample:
        """q, k, v (sequences, heads, length, width); seed 1 is the sample, those after it are fresh."""
        return self.inputs[seed - 1]


def as_given(q: Tensor, k: Tensor, own: torch.Generator, new: torch.Generator) -> Pair:
    return q, k


def _tokens(folder: Path, text: Path) -> list[int]:
    """Of a JSON list of token numbers, for models without a tokenizer; else of a text."""
    if text.suffix == ".json":
        return list(json.loads(text.read_text(encoding="utf-8")))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    words = text.read_text(encoding="utf-8")[:2_000_000]
    return list(tokenizer(words, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])


def some_heads(q: Tensor, k: Tensor, v: Tensor) -> Sample:
    """Four query heads in whole groups."""
    group = q.shape[1] // k.shape[1]
    kept = evenly(k.shape[1], max(1, MOST_HEADS // group))
    queries = (kept.unsqueeze(1) * group + torch.arange(group)).flatten()
    return q[:, queries], k[:, kept], v[:, kept]


def captured_once(file: Path, *asked: Any) -> dict[str, Kind]:
    """The same as `captured_kinds`, kept in a file: a benchmark that goes on need not run the models again."""
    if file.exists():
        found: dict[str, Kind] = torch.load(file, weights_only=False)  # this program wrote it
        return found
    found = captured_kinds(*asked)
    torch.save(found, file)
    return found


def captured_kinds(name: str, folder: Path, text: Path, longest: int, most_layers: int = 4) -> dict[str, Kind]:
    """Four heads of layers of the model in `folder`, evenly: the sample from the first third of the text, fresh from
    the rest. Learned positions are interpolated where `longest` is more than the model knows."""
    from transformers import AutoModel

    from subquad.hf import capture

    model = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
    if model.config.model_type == "albert":
        model = written_out(model)
    tokens = _tokens(folder, text)
    sequences = max(1, MOST_TOKENS // longest)
    length = min(longest, len(tokens) // (PARTS * sequences))
    if hasattr(getattr(model, "embeddings", None), "position_embeddings"):
        model = extended(model, length)
    step = len(tokens) // PARTS
    batches = []
    for i in range(PARTS):
        part = tokens[i * step : i * step + sequences * length]
        batches.append({"input_ids": torch.tensor(part).view(sequences, length)})
    kinds: dict[str, Kind] = {}
    every = [sample for sample in capture(model, batches) if len(sample)]
    kept = sorted({round(i * (len(every) - 1) / max(1, most_layers - 1)) for i in range(most_layers)})
    for sample in (every[i] for i in kept):
        inputs = tuple(some_heads(q.float(), k.float(), v.float()) for q, k, v, _ in sample.calls())
        q, k, _ = inputs[0]
        kinds[f"{name}, {length} tokens, layer {sample.layer + 1}"] = Captured(
            as_given, q.shape[-1], sample.is_causal, q.shape[2], q.shape[1], k.shape[1],
            group=f"captured from {name}", scale=sample.scale, inputs=inputs,
        )  # fmt: skip
    return kinds
