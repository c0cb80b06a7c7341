"""Protein sequences of a FASTA file, mapped into memory: only where each one begins is kept."""

from __future__ import annotations

import bisect
import gzip
import mmap
import re
import zlib
from array import array
from pathlib import Path

import torch
from torch import Tensor

from .base import DataError

__all__ = ["RESIDUES", "FastaFile", "encode", "residues"]

# The twenty amino acids, then the ambiguous and rare ones of the IUPAC alphabet; X stands for any.
RESIDUES = "ACDEFGHIKLMNPQRSTVWYBJOUXZ"

_CODES = torch.full((256,), -1, dtype=torch.int64)
for _id, _letter in enumerate(RESIDUES):
    _CODES[ord(_letter)] = _CODES[ord(_letter.lower())] = _id
_CODES[ord("*")] = _CODES[ord("-")] = -2  # a stop codon and a gap are no residues: left out
for _space in b" \t\r\n":
    _CODES[_space] = -2
_EMPTY = re.compile(rb"^>[^\n]*(?:\n[\s*-]*)?(?=^>|\Z)", re.MULTILINE)
_ODD = re.compile(rb"^[^>\n][^\n]*?[^A-Za-z*\s-]|^[^A-Za-z*\s>-]", re.MULTILINE)


def encode(letters: bytes) -> Tensor:
    """Ids (n,) of letters, white space, gaps and stops left out; -1 for what is no residue.

    >>> encode(b"ACX*\\na").tolist()
    [0, 1, 24, 0]
    """
    ids = _CODES[torch.frombuffer(bytearray(letters), dtype=torch.uint8).long()] if letters else _CODES[:0]
    return ids[ids != -2]


def residues(letters: bytes, where: str) -> Tensor:
    """Ids (n,) of a sequence with at least one residue and nothing else; `where` names it if not."""
    ids = encode(letters)
    if not len(ids):
        raise DataError(f"{where} has no residues; remove it")
    if bool((ids < 0).any()):
        odd = next(c for c in letters.decode("latin-1") if int(_CODES[ord(c)]) == -1)
        raise DataError(f"{where} holds {odd!r}, which is no residue ({RESIDUES})")
    return ids


class FastaFile:
    """The records of a FASTA file, plain or gzipped (which is unpacked in memory), by number."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise DataError(f"data={str(path)!r} does not exist or is a folder; expected a FASTA file")
        if self.path.stat().st_size == 0:
            raise DataError(f"data={str(path)!r} is empty; expected FASTA records ('>name', then residues)")
        self.data: bytes | mmap.mmap
        if self.path.suffix == ".gz":
            try:
                self.data = gzip.decompress(self.path.read_bytes())
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{self.path} cannot be unpacked ({error}); it is truncated or no gzip file") from None
        else:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.begins = self._index()

    def _index(self) -> array[int]:
        data = self.data
        place = 0
        while place < len(data) and data[place : place + 1].isspace():
            place += 1
        if data[place : place + 1] != b">":
            raise DataError(f"{self.path} begins with {data[place : place + 20]!r}; a FASTA file begins with '>'")
        begins = array("q")
        while place >= 0:
            begins.append(place)
            place = data.find(b"\n>", place)
            place = place + 1 if place >= 0 else -1
        begins.append(len(data))
        # Now, and not when a training run comes to it: a record without residues, or with what is none.
        for pattern in (_EMPTY, _ODD):
            if found := pattern.search(data):
                number = bisect.bisect_right(begins, found.start()) - 1
                self._read(begins, number)
        return begins

    def __len__(self) -> int:
        return len(self.begins) - 1

    def __reduce__(self) -> tuple[type[FastaFile], tuple[Path]]:
        return FastaFile, (self.path,)

    def sequence(self, index: int) -> Tensor:
        """Residue ids (n,), n at least 1, of record `index`."""
        return self._read(self.begins, index)

    def _read(self, begins: array[int], index: int) -> Tensor:
        record = self.data[begins[index] : begins[index + 1]]
        name, _, letters = record.partition(b"\n")
        shown = name.decode("ascii", "replace").strip()
        return residues(letters, f"{self.path}: record {index + 1} ({shown!r})")
