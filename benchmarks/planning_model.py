"""Inputs of `planning.py` from a pretrained model: queries, keys and values of its layers on a text.

The text is cut into five: the sample of a plan comes from the first fifth, the fresh inputs from the other four, some
sequences of the model's longest length of each.
"""

import dataclasses
from pathlib import Path

import torch
from planning_kinds import Kind, Pair, Sample
from torch import Tensor

from subquad.hf import capture
from subquad.hf.conversion.layers import known_layers

SEQUENCES = 2
LONGEST = 4096
FIFTHS = 5


def _nothing(q: Tensor, k: Tensor, own: torch.Generator) -> Pair:
    return q, k


@dataclasses.dataclass(frozen=True)
class Captured(Kind):
    """What one layer saw: `inputs[i]` of the i-th part of the text."""

    inputs: tuple[Sample, ...] = ()

    def draw(self, seed: int, length: int | None = None) -> Sample:
        """q, k, v (SEQUENCES, heads, length, width); seed 1 is the sample, those after it are fresh."""
        return self.inputs[seed - 1]


def captured_kinds(folder: Path, text: Path, name: str | None) -> dict[str, Kind]:
    """The first, a middle and the last attention layer of the model in `folder`."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    words = text.read_text(encoding="utf-8")
    length = min(LONGEST, getattr(model.config, "max_position_embeddings", LONGEST))
    step = len(words) // FIFTHS
    batches = []
    for i in range(FIFTHS):
        # A token is at least one character; the first ones of each part are enough.
        part = words[i * step : (i + 1) * step][: 12 * SEQUENCES * length]
        tokens = tokenizer(part, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        if len(tokens) < SEQUENCES * length:
            raise SystemExit(f"--text {text}: a fifth of it has {len(tokens)} tokens, {SEQUENCES * length} are needed")
        batches.append({"input_ids": torch.tensor(tokens[: SEQUENCES * length]).view(SEQUENCES, length)})
    shown = name or folder.name
    kinds: dict[str, Kind] = {}
    count = len(known_layers(model))
    for sample in capture(model, batches, layers=sorted({0, count // 2, count - 1})):
        inputs = tuple((q.float(), k.float(), v.float()) for q, k, v, _ in sample.calls())
        q, k, _ = inputs[0]
        kinds[f"{shown}, layer {sample.layer + 1}"] = Captured(
            _nothing, q.shape[-1], sample.is_causal, length, q.shape[1], k.shape[1],
            group=f"captured from {shown}", scale=sample.scale, inputs=inputs,
        )  # fmt: skip
    return kinds
