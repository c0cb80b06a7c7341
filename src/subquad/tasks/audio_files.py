"""Recordings: wav files with their transcripts, synthetic ones for a first try, and log-mel frames of both.

A recording is a file, or a row of a data set of the hub with a column of sounds and one of words (`hub.py`).
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .. import checks
from .base import DataError, split_of
from .hub import HubName, Rows, choose_column, is_hub, open_rows, undecoded

__all__ = ["DIGITS", "Recording", "SoundRow", "list_recordings", "log_mel", "read_wav", "spoken_tones"]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_DIGIT_FILE = re.compile(r"([0-9])_.+")
# A recording whose loudest sample is below this (full scale 1) holds no speech.
SILENCE = 1e-4


@dataclass(frozen=True)
class SoundRow:
    """Row `index` of a split of a data set."""

    hub: HubName
    split: str
    index: int

    def __str__(self) -> str:
        return f"{self.hub}: {self.split} row {self.index}"

    def content(self) -> io.BytesIO:
        """The sound as a file holds it."""
        rows, column = _sounds(self.hub, self.split)
        sound = rows[self.index][column]
        if not isinstance(sound, dict) or (sound.get("bytes") is None and sound.get("path") is None):
            raise DataError(f"{self} has {type(sound).__name__} in column {column!r}; expected a sound")
        content = sound.get("bytes")
        return io.BytesIO(Path(sound["path"]).read_bytes() if content is None else content)


@dataclass(frozen=True)
class Recording:
    """A file or row and what is said in it."""

    path: Path | SoundRow
    text: str


@lru_cache(maxsize=4)
def _sounds(hub: HubName, split: str) -> tuple[Rows, str]:
    """(rows, column) with the sounds as bytes: they are decoded here, as files are."""
    rows = open_rows(hub, split)
    column = choose_column(hub, rows.table, hub.column, "column", ("audio", "sound", "speech"))
    return undecoded(rows, column), column


def _hub_recordings(hub: HubName, split: str) -> tuple[Recording, ...]:
    rows = open_rows(hub, split)
    names = ("text", "sentence", "transcription", "label")
    label = choose_column(hub, rows.table, hub.label, "label", names, only=False)
    said = rows.table.select_columns([label])
    found = []
    for index, row in enumerate(rows.chosen):
        value = said[row][label]
        if isinstance(value, int) and 0 <= value < len(DIGITS):
            value = DIGITS[value]
        if not isinstance(value, str) or not value.strip():
            raise DataError(f"{hub}: row {row} has {value!r:.60} in column {label!r}; expected words or a digit")
        found.append(Recording(SoundRow(hub, split, index), " ".join(value.lower().split())))
    return tuple(found)


@lru_cache(maxsize=4)
def list_recordings(data: str, split: str) -> tuple[Recording, ...]:
    """The recordings of 'train' or 'valid': of a data set's own splits, or nine and one in ten of a folder's files."""
    if is_hub(data):
        return _hub_recordings(HubName.parse(data), split)
    every = _folder(data)
    found = tuple(one for index, one in enumerate(every) if split_of(index) == split)
    if not found:
        raise DataError(f"data={data!r} holds {len(every)} recordings, too few to keep some for validation")
    return found


@lru_cache(maxsize=4)
def _folder(folder: str) -> tuple[Recording, ...]:
    """The recordings of a folder: `transcripts.txt` with lines `file.wav words`, or files named `digit_*.wav`."""
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"data={folder!r} is not a folder; expected one with wav files")
    listing = path / "transcripts.txt"
    if listing.is_file():
        found = []
        try:
            lines = listing.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise DataError(f"{listing} is not UTF-8 ({error}); save it as that") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            name, *words = line.split()
            if not words:
                raise DataError(f"{listing}, line {number}: {line!r}; expected a file name, a space and its words")
            if not (path / name).is_file():
                raise DataError(f"{listing}, line {number}: {name!r} does not exist in {folder!r}")
            found.append(Recording(path / name, " ".join(words).lower()))
        if not found:
            raise DataError(f"{listing} is empty; expected lines of a file name and its words")
        return tuple(found)
    waves = sorted(path.rglob("*.wav"))
    named = [(wave, match) for wave in waves if (match := _DIGIT_FILE.fullmatch(wave.stem))]
    if not waves or len(named) != len(waves):
        odd = f"; {next(w for w in waves if not _DIGIT_FILE.fullmatch(w.stem)).name!r} is neither" if waves else ""
        raise DataError(
            f"data={folder!r} holds {len(waves)} wav files; expected names that begin with a digit and '_' "
            f"(7_jackson_32.wav), or a transcripts.txt with lines `file.wav words`{odd}"
        )
    return tuple(Recording(wave, DIGITS[int(match[1])]) for wave, match in named)


@lru_cache(maxsize=8192)
def read_wav(path: Path | SoundRow, rate: int) -> Tensor:
    """Samples (n,) float32 in -1..1 of a mono or stereo recording of the given rate; refuses others, and silence."""
    try:
        import soundfile  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise checks.missing_package("reading wav files", "soundfile", "train") from None
    try:
        content = path.content() if isinstance(path, SoundRow) else path
        samples, found = soundfile.read(content, dtype="float32", always_2d=True)
    except (RuntimeError, OSError) as error:  # soundfile's own errors are RuntimeErrors
        raise DataError(f"{path} cannot be read as audio ({error}); it is truncated or of another type") from None
    if found != rate:
        raise DataError(
            f"{path} has {found} samples per second, expected rate={rate}; resample all files to one rate, or say "
            f"--set rate={found} if all have it"
        )
    wave = torch.from_numpy(samples).mean(-1)
    if not bool(wave.isfinite().all()):
        raise DataError(f"{path} has samples that are no numbers (NaN or infinite); remove it from the data")
    if not len(wave) or float(wave.abs().max()) < SILENCE:
        raise DataError(f"{path} is empty or holds silence only; remove it from the data")
    return wave


def spoken_tones(digit: int, rate: int, generator: torch.Generator) -> Tensor:
    """A stand-in for a spoken digit: two tones, one after the other, of pitches, lengths and loudness that vary.

    >>> wave = spoken_tones(4, 8000, torch.Generator().manual_seed(0))
    >>> wave.dim(), 0 < float(wave.abs().max()) <= 1
    (1, True)
    """
    u = torch.rand(6, generator=generator, dtype=torch.float64)
    pitch = 0.95 + 0.1 * u[0]  # the speaker
    parts = []
    for step, which in enumerate((digit // 4, digit % 4)):
        hertz = (400 + 250 * which + 1100 * step) * pitch
        count = int(rate * (0.08 + 0.08 * u[1 + step]))
        time = torch.arange(count, dtype=torch.float64) / rate
        envelope = torch.sin(torch.linspace(0, torch.pi, count, dtype=torch.float64)).sqrt()
        parts.append(envelope * (torch.sin(2 * torch.pi * hertz * time) + 0.3 * torch.sin(4 * torch.pi * hertz * time)))
    wave = torch.cat(parts) * (0.2 + 0.5 * u[3])
    noise = 0.02 * torch.randn(wave.shape, generator=generator, dtype=torch.float64)
    return (wave + noise).clamp(-1, 1).float()


def _mel(hertz: Tensor) -> Tensor:
    return 2595 * torch.log10(1 + hertz / 700)


@lru_cache(maxsize=4)
def _filters(bins: int, size: int, rate: int) -> Tensor:
    """Triangles (size // 2 + 1, bins), evenly spaced on the mel scale from 20 Hz to half the rate."""
    edges = torch.linspace(float(_mel(torch.tensor(20.0))), float(_mel(torch.tensor(rate / 2))), bins + 2)
    hertz = 700 * (10 ** (edges / 2595) - 1)
    line = torch.linspace(0, rate / 2, size // 2 + 1).unsqueeze(-1)
    rise = (line - hertz[:-2]) / (hertz[1:-1] - hertz[:-2])
    fall = (hertz[2:] - line) / (hertz[2:] - hertz[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


def log_mel(wave: Tensor, rate: int, bins: int) -> Tensor:
    """wave (n,) -> frames (1 + n / hop, bins): log energies, hop 10 ms, window 25 ms, mean 0 and deviation 1 each.

    >>> log_mel(torch.randn(8000), 8000, 40).shape
    torch.Size([101, 40])
    """
    hop, window = rate // 100, rate // 40
    size = 1 << (window - 1).bit_length()
    spectrum = torch.stft(
        wave, size, hop, window, torch.hann_window(window), center=True, pad_mode="constant", return_complex=True
    )
    # The square of the modulus without its root: the root of a complex tensor is most of this function's time.
    energies = torch.view_as_real(spectrum).square().sum(-1).T @ _filters(bins, size, rate)
    frames = (energies + 1e-6).log()
    return (frames - frames.mean()) / frames.std().clamp(min=1e-3)
