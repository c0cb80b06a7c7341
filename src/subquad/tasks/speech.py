"""Speech recognition: connectionist temporal classification on log-mel frames, word error rate.

Recordings of single digits are strung together into long utterances with pauses between them; sentences with
transcripts are taken as they are. Built in are synthetic tones in place of digits; `data=` names a folder of wav files
(`7_jackson_32.wav`, as in the Free Spoken Digit Dataset, or with a `transcripts.txt`), or a data set of the hub with
columns of sounds and words. Graves et al., "Connectionist Temporal Classification", 2006. `--mechanism bilstm` is the
recurrent baseline, with as many parameters as the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from ..features.precision import full_precision, widened
from ..nn.models import TransformerEncoder
from .audio_files import DIGITS, Recording, list_recordings, log_mel, read_wav, spoken_tones
from .base import SPLITS, UNLIMITED, Batch, DataError, Examples, Task, TaskModel, pad

__all__ = ["Speech", "SpeechModel", "word_errors"]

BLANK = 0


def word_errors(said: Sequence[str], heard: Sequence[str]) -> tuple[int, int]:
    """(wrong, all) words: substitutions, insertions and deletions, by jiwer.

    >>> word_errors(["one two three"], ["one too three four"])
    (2, 3)
    """
    try:
        import jiwer
    except ModuleNotFoundError:
        raise checks.missing_package("the word error rate", "jiwer", "train") from None
    output = jiwer.process_words(list(said), list(heard))
    return (
        output.substitutions + output.insertions + output.deletions,
        output.hits + output.substitutions + output.deletions,
    )


class _BiLSTM(nn.Module):
    """(B, L, dim) -> (B, L, dim), two directions, with about `parameters` parameters in `layers` layers.

    Padding comes last, so the forward direction never sees it; the backward one reads every sequence reversed within
    its own length. torch computes padded sequences with one fused call, packed ones step by step: over ten times as
    slow.
    """

    def __init__(self, layers: int, dim: int, parameters: int) -> None:
        super().__init__()

        def size(hidden: int) -> int:
            first = 2 * 4 * hidden * (dim + hidden + 2)
            later = 2 * 4 * hidden * (2 * hidden + hidden + 2)
            return first + (layers - 1) * later + 2 * hidden * dim + 3 * dim

        hidden = min(range(1, 4 * dim), key=lambda h: abs(size(h) - parameters))
        self.norm = nn.LayerNorm(dim)  # as before every branch of the transformer it is compared with
        widths = [dim] + [2 * hidden] * (layers - 1)
        self.ahead = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True) for width in widths)
        self.back = nn.ModuleList(nn.LSTM(width, hidden, batch_first=True) for width in widths)
        with torch.no_grad():
            # Gates that are open at first: without, it stays long where every frame is blank (Jozefowicz et al., 2015).
            for lstm in (*self.ahead, *self.back):
                lstm.bias_ih_l0[hidden : 2 * hidden] = 1.0
        self.out = nn.Linear(2 * hidden, dim)

    def forward(self, x: Tensor, *, key_mask: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        lengths = key_mask.sum(-1, keepdim=True)
        reverse = torch.where(place < lengths, lengths - 1 - place, place).unsqueeze(-1)  # (B, L, 1), its own inverse
        hidden = self.norm(x)
        for ahead, back in zip(self.ahead, self.back, strict=True):
            backward = back(hidden.take_along_dim(reverse, 1))[0].take_along_dim(reverse, 1)
            hidden = torch.cat([ahead(hidden)[0], backward], -1)
        result: Tensor = self.out(hidden)
        return result


class _Nearby(nn.Module):
    """(B, L, dim) -> (B, L, dim): adds to every frame what a convolution over its neighbours gives.

    Softmax attention can single out the frames around a query by their positions; a mechanism with few features can
    not. Gulati et al., "Conformer", 2020, therefore divide the work: convolutions for what is near, attention for the
    rest.
    """

    def __init__(self, dim: int, reach: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.near = nn.Conv1d(dim, dim, 2 * reach + 1, padding=reach, groups=dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x: Tensor, key_mask: Tensor) -> Tensor:
        inside = self.norm(x) * key_mask.unsqueeze(-1)  # what stands in the padding must not reach the last frames
        added: Tensor = self.mix(F.gelu(self.near(inside.transpose(1, 2)).transpose(1, 2)))
        return x + added


class SpeechModel(TaskModel):
    """Frames (B, T, bins) -> a convolution that keeps every `stride`-th -> `nearby` convolutions over neighbours ->
    backbone -> symbols and blank."""

    def __init__(
        self, units: Sequence[str], joint: str, bins: int, stride: int, nearby: int, model: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.units, self.joint, self.stride = tuple(units), joint, stride
        baseline = model["mechanism"] == "bilstm"
        fields = {**model, "mechanism": "softmax"} if baseline else dict(model)
        encoder = TransformerEncoder(**fields)
        dim = encoder.config.dim
        self.reduce = nn.Conv1d(bins, dim, 2 * stride + 1, stride, padding=stride)
        self.nearby = nn.ModuleList(_Nearby(dim) for _ in range(nearby))
        self.head = nn.Linear(dim, len(units) + 1)
        with torch.no_grad():
            # Most frames are blank. From equal chances on, a model of long utterances learns to repeat one symbol in
            # place of it (repeats are removed, too), and stays there.
            self.head.bias[BLANK] = 4.0
        self.backbone: nn.Module = encoder
        if baseline:
            self.backbone = _BiLSTM(encoder.config.layers, dim, sum(p.numel() for p in encoder.parameters()))

    def log_probabilities(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T', units + 1) and the lengths T' of each utterance."""
        reduced = self.reduce(frames.transpose(1, 2)).transpose(1, 2)
        kept = (lengths - 1) // self.stride + 1
        mask = torch.arange(reduced.shape[1], device=frames.device) < kept.unsqueeze(-1)
        hidden = F.gelu(reduced)
        for nearby in self.nearby:
            hidden = nearby(hidden, mask)
        hidden = self.backbone(hidden, key_mask=mask)
        # bfloat16 logits are off by some hundredths, alike in all frames of a pause, and the loss adds up thousands.
        with full_precision(hidden):
            return self.head(widened(hidden)).log_softmax(-1), kept

    def transcribe(self, logs: Tensor, lengths: Tensor) -> list[str]:
        """The most likely symbol of each frame, repeats and blanks removed."""
        texts = []
        for row, length in zip(logs.argmax(-1).cpu(), lengths.tolist(), strict=True):
            symbols = torch.unique_consecutive(row[:length])
            texts.append(self.joint.join(self.units[s - 1] for s in symbols.tolist() if s != BLANK))
        return texts

    def forward(self, batch: Batch) -> Batch:
        """Sum of -log P(transcript); in evaluation also wrong and all words."""
        logs, kept = self.log_probabilities(batch["frames"], batch["lengths"])
        loss = F.ctc_loss(
            logs.transpose(0, 1), batch["symbols"], kept, batch["symbol_lengths"], BLANK, "sum", zero_infinity=True
        )
        if self.training:
            return {"loss": loss}
        said = [
            self.joint.join(self.units[s - 1] for s in row[:length].tolist())
            for row, length in zip(batch["symbols"].cpu(), batch["symbol_lengths"].tolist(), strict=True)
        ]
        wrong, words = word_errors(said, self.transcribe(logs, kept))
        return {"loss": loss, "wrong": loss.new_tensor(wrong), "words": loss.new_tensor(words)}


@dataclass(frozen=True)
class _Utterances:
    """Utterances of one split: digits strung together, or recordings as they are."""

    task: Speech
    recordings: tuple[Recording, ...]
    units: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.recordings) if self.task.data is not None and not self._strung else UNLIMITED

    @property
    def _strung(self) -> bool:
        return self.task.data is None or self.units == DIGITS

    def _digit(self, generator: torch.Generator) -> tuple[str, Tensor]:
        if self.task.data is None:
            digit = int(torch.randint(10, (), generator=generator))
            return DIGITS[digit], spoken_tones(digit, self.task.rate, generator)
        chosen = self.recordings[int(torch.randint(len(self.recordings), (), generator=generator))]
        return chosen.text, read_wav(chosen.path, self.task.rate)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """frames (T, bins), symbols (N,) counted from 1, weight 1."""
        rate = self.task.rate
        if self._strung:
            span = self.task.digits - self.task.fewest + 1
            count = self.task.fewest + int(torch.randint(span, (), generator=generator))
            spoken = [self._digit(generator) for _ in range(count)]
            symbols = [self.units.index(word) + 1 for word, _ in spoken]
            parts = []
            for _, wave in spoken:
                pause = int(torch.randint(rate // 50, rate // 5, (), generator=generator))
                parts += [0.002 * torch.randn(pause, generator=generator), wave]
            wave = torch.cat(parts)
        else:
            chosen = self.recordings[index]
            symbols, wave = [self.units.index(letter) + 1 for letter in chosen.text], read_wav(chosen.path, rate)
        frames = log_mel(wave, rate, self.task.bins)
        # CTC needs a frame per symbol, and a blank between two of the same.
        least = len(symbols) + sum(a == b for a, b in pairwise(symbols))
        if (len(frames) - 1) // self.task.stride + 1 < least:
            where = "an utterance" if self._strung else str(self.recordings[index].path)
            how = f"lower stride={self.task.stride}" if self.task.stride > 1 else "leave it out, or correct its text"
            raise DataError(
                f"{where}: {len(symbols)} symbols need {least} frames, and it has {len(frames)} (every "
                f"{self.task.stride} of them is used); {how}"
            )
        return {"frames": frames, "symbols": torch.tensor(symbols), "weight": torch.tensor(1.0)}


@dataclass(frozen=True)
class Speech(Task):
    """Wav files of `data` at `rate` samples per second; utterances of `fewest` to `digits` digits; `bins` mel bands;
    every `stride`-th frame reaches the model, after `nearby` convolutions over its neighbours."""

    name: ClassVar[str] = "speech"
    metric: ClassVar[str] = "word_error_rate"
    padded: ClassVar[bool] = True
    model: ClassVar[dict[str, Any]] = {"layers": 4, "heads": 4, "dim": 96}
    training: ClassVar[dict[str, Any]] = {"steps": 1000, "batch": 16, "lr": 1e-3, "warmup": 100, "valid_examples": 64}

    data: str | None = None
    rate: int = 8000
    digits: int = 10
    fewest: int = 5
    bins: int = 40
    stride: int = 4
    nearby: int = 2

    def __post_init__(self) -> None:
        for name in ("digits", "fewest", "bins", "stride"):
            checks.check_positive(name, getattr(self, name))
        checks.check_positive("rate", self.rate, least=1000)
        checks.check_positive("nearby", self.nearby, least=0)
        if self.fewest > self.digits:
            raise ValueError(f"fewest={self.fewest} must not be above digits={self.digits}")

    def units(self) -> tuple[str, ...]:
        """What is recognised: whole digits where every recording is one, else letters."""
        recordings: list[Recording] = []
        if self.data is not None:
            recordings = [one for split in SPLITS for one in list_recordings(self.data, split)]
        if all(recording.text in DIGITS for recording in recordings):
            return DIGITS
        return tuple(sorted({letter for recording in recordings for letter in recording.text}))

    def examples(self, split: str) -> Examples:
        """The recordings of a split; every one is read once, so that a bad file ends it now."""
        recordings: tuple[Recording, ...] = ()
        if self.data is not None:
            recordings = list_recordings(self.data, split)
            for one in recordings:
                read_wav(one.path, self.rate)
        return _Utterances(self, recordings, self.units())

    def collate(self, items: Sequence[Batch]) -> Batch:
        """Utterances of different lengths, padded at the end."""
        frames, symbols = [item["frames"] for item in items], [item["symbols"] for item in items]
        return {
            "frames": pad(frames),
            "lengths": torch.tensor([len(x) for x in frames]),
            "symbols": pad(symbols),
            "symbol_lengths": torch.tensor([len(x) for x in symbols]),
            "weight": torch.stack([item["weight"] for item in items]),
        }

    def build(self, model: Mapping[str, Any]) -> SpeechModel:
        """A transformer, or the BiLSTM of the same size for mechanism 'bilstm'."""
        units = self.units()
        return SpeechModel(units, " " if units == DIGITS else "", self.bins, self.stride, self.nearby, model)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Loss per utterance and the word error rate, 0 = all right."""
        return {"loss": totals["loss"] / totals["weight"], "word_error_rate": totals["wrong"] / totals["words"]}
