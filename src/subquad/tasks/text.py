"""Language modelling on the bytes of any file, causal or masked: bits per byte and perplexity.

Built in are the first scenes of Shakespeare's "Coriolanus" (96 kB, public domain); `data=` names any other file, which
may be larger than memory (see `token_file.py`), or a data set of the hub, which is streamed (`token_stream.py`). The
last tenth of a file is kept for validation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import checks
from ..files import replacing
from ..nn.generation import stream
from .base import Batch, DataError, Examples, Progress, Task, TaskModel
from .heads import CausalModel, MaskedModel, mask_tokens, perplexity, with_positions
from .hub import HubName, is_hub
from .token_file import TokenFile
from .token_stream import TokenStream

__all__ = ["Text"]

BUILT_IN = Path(__file__).with_name("coriolanus.txt")
# Bytes that a trained model writes.
SAMPLED = 256
_PURPOSE = {"train": "training", "valid": "validation"}


def _example(window: Tensor, vocab: int, masked: bool, generator: torch.Generator) -> Batch:
    """window (length + 1,) -> tokens (length,) and targets (length,): the next token, or those that were masked."""
    if not masked:
        return {"tokens": window[:-1], "targets": window[1:], "weight": torch.tensor(float(len(window) - 1))}
    return mask_tokens(window[:-1], vocab, vocab, generator)


@dataclass(frozen=True)
class _Streamed:
    """Windows of a stream, in its order."""

    stream: TokenStream
    vocab: int
    masked: bool

    def __len__(self) -> int:
        return len(self.stream)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        return _example(self.stream.window(index), self.vocab, self.masked, generator)

    def position(self, index: int) -> dict[str, Any]:
        return self.stream.position(index)

    def seek(self, position: Mapping[str, Any]) -> None:
        self.stream.seek(position)

    def close(self) -> None:
        self.stream.close()


@dataclass(frozen=True)
class _Windows:
    """Windows of a stretch of a token file: at random places for training, one after the other for validation."""

    file: TokenFile
    begin: int
    end: int
    length: int
    masked: bool
    random: bool

    def __len__(self) -> int:
        return max(self.end - self.begin - 1, 0) // self.length

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """`length` tokens and their targets."""
        place = self.begin + index * self.length
        if self.random:
            place = self.begin + int(
                torch.randint(self.end - self.begin - self.length, (), generator=generator, dtype=torch.int64)
            )
        return _example(self.file.window(place, self.length + 1), self.file.vocab, self.masked, generator)


@dataclass(frozen=True)
class Text(Task):
    """Windows of `length` tokens of the file or data set `data`; `vocab` if it holds token ids; causal or `masked`."""

    name: ClassVar[str] = "text"
    metric: ClassVar[str] = "bits_per_byte"
    model: ClassVar[dict[str, Any]] = {"layers": 4, "heads": 4, "dim": 128}
    training: ClassVar[dict[str, Any]] = {"steps": 1000, "batch": 16, "lr": 1e-3, "warmup": 100}

    data: str | None = None
    length: int = 256
    masked: bool = False
    vocab: int | None = None

    def __post_init__(self) -> None:
        checks.check_positive("length", self.length)
        checks.check_flag("masked", self.masked)
        if self.vocab is not None:
            checks.check_positive("vocab", self.vocab, least=2)
            object.__setattr__(self, "metric", "bits_per_token")

    def _file(self) -> TokenFile:
        return TokenFile(BUILT_IN if self.data is None else self.data, self.vocab)

    def examples(self, split: str) -> Examples:
        """Windows of the first nine tenths, or of the last one; of a stream, of its own splits."""
        if self.data is not None and is_hub(self.data):
            tokens = TokenStream(HubName.parse(self.data), split, self.length, self.vocab)
            if not len(tokens):
                raise DataError(
                    f"{self.data!r} has too little text for validation, not even one window of length={self.length}; "
                    "use a smaller length (--set length=) or name a larger split (:valid=NAME)"
                )
            return _Streamed(tokens, self.vocab or 256, self.masked)
        file = self._file()
        border = len(file) - len(file) // 10
        begin, end = (0, border) if split == "train" else (border, len(file))
        if end - begin <= self.length + 1:
            raise DataError(
                f"{str(file.path)!r} has {end - begin} tokens for {_PURPOSE[split]}, too few for one window of "
                f"length={self.length}; use a larger file or a smaller length (--set length=)"
            )
        return _Windows(file, begin, end, self.length, self.masked, random=split == "train")

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """A decoder over the bytes, or an encoder over the bytes and a mask token."""
        # Without the file: a trained model can be used where its data is not.
        vocab, model = self.vocab or 256, with_positions(model, self.length)
        return MaskedModel(vocab + 1, model) if self.masked else CausalModel(vocab, model)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Bits and perplexity per byte, or per token where `vocab` is given, and accuracy."""
        figures = super().metrics(totals)
        bits = figures["loss"] / math.log(2)
        return {**figures, self.metric: bits, "perplexity": perplexity(figures["loss"])}

    def finish(self, model: Any, folder: Path, seed: int, progress: Progress) -> dict[str, Any]:
        """A causal byte model writes a sample of bytes, where its mechanism can be run token by token."""
        if self.masked or self.vocab is not None or not all(m.recurrent for m in model.backbone.mechanisms()):
            return {}
        prompt = self.examples("valid").item(0, torch.Generator())["tokens"][None, :32]
        generator = torch.Generator().manual_seed(seed)
        device = next(model.parameters()).device
        written = prompt[0].tolist()
        config = model.backbone.config
        count = min(SAMPLED, config.max_length - len(written)) if config.positions == "learned" else SAMPLED
        if count < 1:
            return {}
        for token in stream(model.backbone.cpu(), prompt, count, temperature=0.8, generator=generator):
            progress("sampling", len(written) - prompt.shape[1], count)
            written.append(int(token))
        model.backbone.to(device)
        with replacing(folder / "sample.txt") as draft:
            draft.write_bytes(bytes(written))
        return {"sample": "sample.txt"}
