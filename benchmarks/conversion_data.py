"""Data and figures of merit for benchmarks/conversion.py: from files to batches, from models to numbers."""

import copy
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.lab.quality import embeddings

Batch = dict[str, Tensor]


def padded(rows: list[list[int]], batch: int, pad: int = 0) -> list[Batch]:
    """Token lists as batches, padded on the right."""
    found = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        longest = max(map(len, part))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in part])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in part])
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


# -- sentences and passages ---------------------------------------------------------------------------------------


def sts_rows(folder: Path, split: str) -> list[tuple[float, str, str]]:
    rows = []
    for line in (folder / f"sts-{split}.csv").read_text(encoding="utf-8").splitlines():
        parts = line.split("\t")
        rows.append((float(parts[4]), parts[5], parts[6]))
    return rows


def sentence_batches(tokenizer: Any, folder: Path, count: int, batch: int, seed: int = 0) -> list[Batch]:
    """Sentences of the train split."""
    rows = sts_rows(folder, "train")
    random.Random(seed).shuffle(rows)
    texts = [text for row in rows[: count // 2] for text in row[1:]]
    return [
        dict(tokenizer(texts[i : i + batch], padding=True, truncation=True, return_tensors="pt"))
        for i in range(0, len(texts), batch)
    ]


def pair_scores(tokenizer: Any, folder: Path, count: int) -> tuple[list[Batch], list[Batch], Tensor]:
    """The first pairs of the dev split and what people said of them."""
    rows = sts_rows(folder, "dev")[:count]

    def batches(texts: list[str]) -> list[Batch]:
        return [
            dict(tokenizer(texts[i : i + 50], padding=True, truncation=True, return_tensors="pt"))
            for i in range(0, len(texts), 50)
        ]

    return batches([r[1] for r in rows]), batches([r[2] for r in rows]), torch.tensor([r[0] for r in rows])


def passages(
    tokenizer: Any, folder: Path, split: str, *, count: int, batch: int, seed: int, shortest: int = 400,
    longest: int = 512,
) -> list[Batch]:  # fmt: skip
    """Sentences of one split, shuffled and joined to `shortest` .. `longest` tokens; dev without those train has."""
    train = {text for row in sts_rows(folder, "train") for text in row[1:]}
    texts = sorted({text for row in sts_rows(folder, split) for text in row[1:]} - (train if split == "dev" else set()))
    rng = random.Random(seed)
    rng.shuffle(texts)
    rows, place = [], 0
    for _ in range(count):
        wanted, ids = rng.randint(shortest, longest) - 2, []
        while len(ids) < wanted:
            ids += tokenizer(texts[place % len(texts)], add_special_tokens=False)["input_ids"]
            place += 1
        rows.append([tokenizer.cls_token_id, *ids[:wanted], tokenizer.sep_token_id])
    return padded(rows, batch, tokenizer.pad_token_id)


def cosine(found: Tensor, wanted: Tensor) -> float:
    return float((found * wanted).sum(-1).mean())


def _ranks(x: Tensor) -> Tensor:
    _, place, count = x.double().unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2.0)[place]


def spearman(model: nn.Module, pairs: tuple[list[Batch], list[Batch], Tensor]) -> float:
    """Rank correlation of cosines and human scores."""
    first, second, scores = pairs
    cosines = (embeddings(model, first) * embeddings(model, second)).sum(-1)
    a, b = (r - r.mean() for r in (_ranks(cosines), _ranks(scores)))
    return float((a @ b) / (a.norm() * b.norm()))


def extended(model: nn.Module, length: int) -> Any:
    """A copy of a BERT-type model for longer inputs: its position embeddings interpolated linearly."""
    longer = copy.deepcopy(model)
    table = longer.embeddings.position_embeddings
    if length <= table.num_embeddings:
        return longer
    weight = F.interpolate(table.weight.detach().T[None], size=length, mode="linear", align_corners=True)[0].T
    longer.embeddings.position_embeddings = nn.Embedding.from_pretrained(weight.contiguous())
    longer.embeddings.register_buffer("position_ids", torch.arange(length)[None], persistent=False)
    longer.embeddings.register_buffer("token_type_ids", torch.zeros(1, length, dtype=torch.long), persistent=False)
    longer.config.max_position_embeddings = length
    return longer


# -- language models ----------------------------------------------------------------------------------------------


def story_batches(path: Path, batch: int = 12) -> tuple[list[Batch], list[Batch], float]:
    """(for statistics and distillation, every third one for measuring, mean length)."""
    rows = json.loads(Path(path).read_text(encoding="utf-8"))
    mean = sum(map(len, rows)) / len(rows)
    lessons = sorted((r for i, r in enumerate(rows) if i % 3), key=len)
    unseen = sorted((r for i, r in enumerate(rows) if not i % 3), key=len)
    return padded(lessons, batch), padded(unseen, batch), mean


def _vocabulary(folder: Path) -> dict[str, int]:
    for place in (folder, folder.parent):
        if (place / "vocab.txt").exists():
            words = (place / "vocab.txt").read_text(encoding="utf-8").split("\n")
            return {word: i for i, word in enumerate(words) if word}
    raise FileNotFoundError(f"no vocab.txt in {folder} or above it")


def antibody_batches(path: Path, model: Path, species: str, batch: int = 16) -> tuple[list[Batch], float]:
    """Heavy chains as IgLM reads them: [HEAVY] [HUMAN] residues [SEP], or another species."""
    words = _vocabulary(model)
    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    chains = [line for line in lines if line and not line.startswith(">")]
    rows = [[words["[HEAVY]"], words[f"[{species}]"], *(words[r] for r in c), words["[SEP]"]] for c in chains]
    return padded(rows, batch, words["[PAD]"]), sum(map(len, rows)) / len(rows)


def sampled_antibodies(
    model: Any, folder: Path, species: str, count: int, batch: int = 16
) -> tuple[list[Batch], float]:
    """Heavy chains that IgLM writes itself, up to its end of a chain."""
    words = _vocabulary(folder)
    start = torch.tensor([[words["[HEAVY]"], words[f"[{species}]"]]] * count)
    torch.manual_seed(0)
    found = model.generate(
        start, do_sample=True, max_length=150, pad_token_id=words["[PAD]"], eos_token_id=words["[SEP]"]
    ).tolist()
    rows = [row[: row.index(words["[SEP]"]) + 1] if words["[SEP]"] in row else row for row in found]
    return padded(rows, batch, words["[PAD]"]), sum(map(len, rows)) / len(rows)


def written_out(model: Any) -> Any:
    """An ALBERT whose one shared layer is there once per depth, with the same weights: the same function, but each
    depth can have statistics and a plan of its own, which queries and keys as different as those of its depths need.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_groups = config.num_hidden_layers
    longer = type(model)(config).eval()
    state = model.state_dict()
    shared = "albert_layer_groups.0."
    for name in [name for name in state if shared in name]:
        for depth in range(1, config.num_hidden_layers):
            state[name.replace(shared, f"albert_layer_groups.{depth}.")] = state[name]
    longer.load_state_dict(state)
    return longer


TOKEN = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)


def molecules(reaction: str, shortest: int = 12) -> set[str]:
    """The molecules of a reaction that are large enough to tell it by; solvents and salts are in half of them."""
    return {part for side in reaction.split(">") for part in side.split(".") if len(part) >= shortest}


def split_reactions(lines: list[str], unseen: int, lessons: int) -> tuple[list[str], list[str]]:
    """(lessons, unseen): no molecule of the one in the other, so nobody is asked what was shown to him."""
    kept = list(dict.fromkeys(lines))
    random.Random(0).shuffle(kept)
    measured = kept[: min(unseen, len(kept) // 2)]
    known = set().union(*map(molecules, measured))
    free = [line for line in kept[len(measured) :] if not molecules(line) & known]
    return free[:lessons], measured


def reaction_batches(
    path: Path, model: Path, *, unseen: int, lessons: int, batch: int = 16, share: float = 0.15
) -> tuple[list[Batch], list[Batch], float]:
    """(lessons, unseen, mean length of the unseen): a share of the tokens masked; labels are -100 elsewhere."""
    words = _vocabulary(model)
    rng = random.Random(0)
    special = torch.tensor([words[w] for w in ("[CLS]", "[SEP]", "[PAD]")])

    def tokens(reaction: str) -> list[int]:
        return [words["[CLS]"], *(words.get(t, words["[UNK]"]) for t in TOKEN.findall(reaction)), words["[SEP]"]]

    def batches(part: list[str]) -> tuple[list[Batch], float]:
        rows = [row for row in map(tokens, sorted(part, key=len)) if len(row) <= 512]
        found = []
        for one in padded(rows, batch, words["[PAD]"]):
            ids = one["input_ids"]
            open_places = one["attention_mask"].bool() & ~torch.isin(ids, special)
            chosen = open_places & (torch.tensor([rng.random() for _ in range(ids.numel())]).view_as(ids) < share)
            hidden = ids.masked_fill(chosen, words["[MASK]"])
            found.append({**one, "input_ids": hidden, "labels": torch.where(chosen, ids, -100)})
        return found, sum(map(len, rows)) / len(rows)

    lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    taught, measured = split_reactions(lines, unseen, lessons)
    made, mean = batches(measured)
    shown = batches(taught)[0]
    rng.shuffle(shown)  # those of all lengths among the first ones, which calibrate
    return shown, made, mean


def keys_seen(sample: Any, window: int) -> tuple[list[float], list[float]]:
    """Of one layer's first call, by heads: exp of the entropy of its rows, and their weight beyond the window."""
    q, k, mask = sample.q[0], sample.k[0], sample.key_mask[0]
    real = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask
    weights = (sample.scale * q @ k.mT).masked_fill(~real[:, None, None], -math.inf).softmax(-1)
    place = torch.arange(q.shape[2])
    beyond = (weights * ((place[:, None] - place).abs() > window)).sum(-1)
    entropy = torch.special.entr(weights).sum(-1)

    def mean(x: Tensor) -> Tensor:
        return (x * real[:, None]).sum((0, 2)) / real.sum()

    return mean(entropy).exp().tolist(), mean(beyond).tolist()


@torch.no_grad()
def masked_accuracy(model: nn.Module, batches: list[Batch]) -> float:
    """Share of masked tokens that the model names."""
    right, count = 0, 0
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        chosen = batch["labels"] >= 0
        guess = model(**inputs).logits.argmax(-1)
        right, count = right + int((guess == batch["labels"])[chosen].sum()), count + int(chosen.sum())
    return right / count
