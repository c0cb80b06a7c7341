"""What a model is worth on text, before and after its attention was replaced: the score that its kind is judged by.

causal language model    perplexity: exp of the mean loss of real tokens, the first of each text excepted
masked language model    masked accuracy: share of hidden tokens (15 %, the same ones for every model) found again
anything else            embedding cosine: mean cosine between a text's mean hidden state and the exact model's
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.hf.conversion.capturing import run
from subquad.kernels.operator import Call
from subquad.mechanisms import Mechanism
from subquad.nn.pooling import pool
from subquad.planning.baselines import uniform_attention

__all__ = ["KINDS", "Uniform", "embeddings", "kind_of", "read_documents", "score", "to_batches"]

Batch = dict[str, Tensor]
KINDS = {"perplexity": "lower is better", "masked accuracy": "higher is better", "embedding cosine": "1 is exact"}
_HIDDEN_SHARE, _IGNORED = 0.15, -100


@final
class Uniform(Mechanism):
    """The mean of the visible values in the place of attention: what a conversion has to beat.

    >>> import subquad as sq
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
    >>> torch.allclose(sq.attention(q, k, v, Uniform), v.mean(2, keepdim=True), atol=1e-6)
    True
    """

    name = "uniform"
    equation = "mean of the visible values"
    paper = "none"
    complexity = "O(L)"
    CONTRACT_VARIANTS: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        return uniform_attention(q, k, v, is_causal=is_causal, key_mask=call.key_mask)


def read_documents(path: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of the texts in a file: a JSON list of lists of ids, or text whose documents are separated by empty
    lines (by line ends, where there is no empty line). Longer ones are cut into pieces of `longest` tokens.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: it cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".json":
        rows = _token_ids(text)
        if rows is None:
            raise ValueError(f"{path}: expected a JSON list of lists of token ids, like [[5, 17, 3], [8, 2]]")
    else:
        if tokenizer is None:
            raise ValueError(f"{path} is text, and the model's folder has no tokenizer; give token ids (.json) instead")
        parts = text.split("\n\n") if "\n\n" in text.strip() else text.splitlines()
        parts = [part.strip() for part in parts if part.strip()]
        # Cut by hand below: truncation would throw the rest of a long text away.
        rows = tokenizer(parts, truncation=False, verbose=False)["input_ids"] if parts else []
    pieces = [row[start : start + longest] for row in rows for start in range(0, len(row), longest)]
    return [piece for piece in pieces if len(piece) > 1]


def _token_ids(text: str) -> list[list[int]] | None:
    """The JSON lists of whole numbers of at least 0 in a text, or None where it holds anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not (isinstance(found, list) and all(isinstance(row, list) for row in found)):
        return None
    numbers = all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for row in found for token in row
    )
    return found if numbers else None


def to_batches(documents: Sequence[Sequence[int]], size: int, padding: int) -> list[Batch]:
    """Batches of `size` texts of similar length, padded on the right; the last one may be smaller."""
    order = sorted(documents, key=len)
    batches = []
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        ids = torch.full((len(rows), len(rows[-1])), padding, dtype=torch.long)
        for row, tokens in zip(ids, rows, strict=True):
            row[: len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens) for tokens in rows])
        batches.append({"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()})
    return batches


def kind_of(model: nn.Module, mask_token: int | None) -> str:
    """Which score fits a model: see the top of this file."""
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "perplexity"
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() and mask_token is not None:
        return "masked accuracy"
    return "embedding cosine"


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = run(model, batch).logits
    return logits.float()


def _perplexity(model: nn.Module, batches: Sequence[Batch]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, _IGNORED)[:, 1:]
        logits = _logits(model, batch)[:, :-1].flatten(0, 1)
        total += float(F.cross_entropy(logits.cpu(), targets.flatten(), ignore_index=_IGNORED, reduction="sum"))
        count += int((targets != _IGNORED).sum())
    return math.exp(total / max(count, 1))


def _masked_accuracy(model: nn.Module, batches: Sequence[Batch], mask_token: int, special: Sequence[int]) -> float:
    generator = torch.Generator().manual_seed(0)
    right, count = 0, 0
    for batch in batches:
        ids = batch["input_ids"]
        allowed = (batch["attention_mask"] == 1) & ~torch.isin(ids, torch.tensor(list(special), dtype=torch.long))
        hidden = (torch.rand(ids.shape, generator=generator) < _HIDDEN_SHARE) & allowed
        found = _logits(model, {**batch, "input_ids": ids.masked_fill(hidden, mask_token)}).argmax(-1).cpu()
        right += int((found == ids)[hidden].sum())
        count += int(hidden.sum())
    return right / max(count, 1)


@torch.no_grad()
def embeddings(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Means of the last hidden states over real tokens, of length 1: (texts, width)."""
    rows = []
    for batch in batches:
        out = run(model, {**batch, "output_hidden_states": True})
        hidden = out.hidden_states[-1] if getattr(out, "hidden_states", None) is not None else out.last_hidden_state
        real = batch["attention_mask"].to(hidden.device).bool()
        rows.append(F.normalize(pool(hidden, real, "mean"), dim=-1).cpu())
    return torch.cat(rows)


@torch.no_grad()
def score(
    kind: str,
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    exact: nn.Module | None = None,
    mask_token: int | None = None,
    special: Sequence[int] = (),
) -> float:
    """The score of this kind (one of KINDS) for `model` on batches; `exact` is the model that a cosine is taken to."""
    if kind == "perplexity":
        return _perplexity(model, batches)
    if kind == "masked accuracy":
        if mask_token is None:
            raise ValueError("masked accuracy needs mask_token=, the id that stands for a hidden token")
        return _masked_accuracy(model, batches, mask_token, special)
    if kind != "embedding cosine" or exact is None:
        raise ValueError(f"kind={kind!r}: expected one of {list(KINDS)}, and exact= for the cosine")
    return float((embeddings(model, batches) * embeddings(exact, batches)).sum(-1).mean())
