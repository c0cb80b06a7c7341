"""Protein sequences, masked (both sides seen) or causal (left to right): perplexity and accuracy per residue.

The experiment of Choromanski et al., "Rethinking Attention with Performers", 2021, section 4.4, at any size. Built in
are synthetic sequences with motifs that come back later; `data=` names a FASTA file, or a data set of the hub with
a column of sequences; `length` may be 8192 and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import checks
from .base import UNLIMITED, Batch, DataError, Examples, Task, TaskModel, split_of
from .fasta import RESIDUES, FastaFile, residues
from .heads import CausalModel, MaskedModel, mask_tokens, perplexity, with_positions
from .hub import HubName, Rows, choose_column, is_hub, open_rows

__all__ = ["Protein"]

AMINO_ACIDS = 20
MASK = BEGIN = len(RESIDUES)  # never in one model: a causal one needs a beginning, a masked one a mask
VOCAB = len(RESIDUES) + 1
MOTIFS = 16
MOTIF_LENGTH = 12


def _motifs() -> Tensor:
    return torch.randint(AMINO_ACIDS, (MOTIFS, MOTIF_LENGTH), generator=torch.Generator().manual_seed(20))


@dataclass(frozen=True)
class _Synthetic:
    """Random residues with a few of 16 fixed motifs, each of which comes back reversed further on."""

    length: int

    def __len__(self) -> int:
        return UNLIMITED

    def sequence(self, index: int, generator: torch.Generator) -> Tensor:
        length = int(torch.randint(max(self.length // 2, 1), self.length + 1, (), generator=generator))
        chain = torch.randint(AMINO_ACIDS, (length,), generator=generator)
        motifs, half = _motifs(), length // 2
        for place in range(0, half - MOTIF_LENGTH + 1, 2 * MOTIF_LENGTH):
            motif = motifs[int(torch.randint(MOTIFS, (), generator=generator))]
            chain[place : place + MOTIF_LENGTH] = motif
            chain[half + place : half + place + MOTIF_LENGTH] = motif.flip(0)
        return chain


@dataclass(frozen=True)
class _Records:
    file: FastaFile
    chosen: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.chosen)

    def sequence(self, index: int, generator: torch.Generator) -> Tensor:
        return self.file.sequence(self.chosen[index])


@dataclass(frozen=True)
class _Table:
    rows: Rows
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    def sequence(self, index: int, generator: torch.Generator) -> Tensor:
        text = self.rows.text(index, self.column)
        return residues(text.encode("latin-1", "replace"), f"{self.rows.hub}: row {self.rows.chosen[index]}")


@dataclass(frozen=True)
class _Crops:
    """At most `length` residues of each sequence, from a random place, as a masked or causal example."""

    source: _Synthetic | _Records | _Table
    length: int
    causal: bool

    def __len__(self) -> int:
        return len(self.source)

    def item(self, index: int, generator: torch.Generator) -> Batch:
        """tokens (n,) and targets (n,), n up to `length`."""
        chain = self.source.sequence(index, generator)
        if len(chain) > self.length:
            place = int(torch.randint(len(chain) - self.length + 1, (), generator=generator))
            chain = chain[place : place + self.length]
        if self.causal:
            tokens = torch.cat([torch.tensor([BEGIN]), chain[:-1]])
            return {"tokens": tokens, "targets": chain, "weight": torch.tensor(float(len(chain)))}
        return mask_tokens(chain, MASK, AMINO_ACIDS, generator)


@dataclass(frozen=True)
class Protein(Task):
    """Sequences of the FASTA file or data set `data`, cut to `length` residues; masked, or `causal`."""

    name: ClassVar[str] = "protein"
    metric: ClassVar[str] = "perplexity"
    padded: ClassVar[bool] = True
    model: ClassVar[dict[str, Any]] = {"layers": 4, "heads": 4, "dim": 128}
    training: ClassVar[dict[str, Any]] = {"steps": 1000, "batch": 16, "lr": 1e-3, "warmup": 100}

    data: str | None = None
    length: int = 256
    causal: bool = False

    def __post_init__(self) -> None:
        checks.check_positive("length", self.length, least=2)
        checks.check_flag("causal", self.causal)

    def examples(self, split: str) -> Examples:
        """Crops of the records; one record in ten is kept for validation."""
        if self.data is None:
            return _Crops(_Synthetic(self.length), self.length, self.causal)
        if is_hub(self.data):
            rows = open_rows(HubName.parse(self.data), split)
            column = choose_column(rows.hub, rows.table, rows.hub.column, "column", ("sequence", "seq", "text"))
            return _Crops(_Table(rows, column), self.length, self.causal)
        file = FastaFile(self.data)
        chosen = tuple(index for index in range(len(file)) if split_of(index) == split)
        if not chosen:
            raise DataError(f"data={self.data!r} holds {len(file)} records, too few to keep some for validation")
        return _Crops(_Records(file, chosen), self.length, self.causal)

    def build(self, model: Mapping[str, Any]) -> TaskModel:
        """An encoder with a mask token, or a decoder with a token to begin with."""
        return (CausalModel if self.causal else MaskedModel)(VOCAB, with_positions(model, self.length))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, float]:
        """Perplexity (20 = a uniform guess among the amino acids) and accuracy per residue that counts."""
        figures = super().metrics(totals)
        return {**figures, "perplexity": perplexity(figures["loss"])}
