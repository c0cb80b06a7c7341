"""Data sets of the Hugging Face hub, or saved on disk, by name: `hub:NAME[:field=value]...`.

    hub:roneneldan/TinyStories                            a name on the hub
    hub:ylecun/mnist:config=mnist:column=image            with its configuration and the column to read
    hub:data/letters:column=body:label=mood               a folder on this machine

A folder is one that `datasets` saved (`save_to_disk`), or one of parquet, JSON lines, CSV, arrow or text files; nothing
is fetched for it. Everything goes through the package `datasets`. Rows for validation come from the data set's own
split where it has one, else one row in ten is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from .. import checks
from ..plain_text import first_line
from .base import DataError, split_of

__all__ = ["HubName", "Rows", "choose_column", "is_hub", "open_rows", "open_splits", "undecoded"]

PREFIX = "hub:"
_VALID_NAMES = ("validation", "valid", "val", "dev", "test")
# What `save_to_disk` leaves behind, for a table and for several.
_SAVED = ("state.json", "dataset_dict.json")


def is_hub(data: str | None) -> bool:
    """Whether `data` names a data set instead of a file.

    >>> is_hub("hub:ylecun/mnist"), is_hub("book.txt"), is_hub(None)
    (True, False, False)
    """
    return data is not None and data.startswith(PREFIX)


@dataclass(frozen=True)
class HubName:
    """A data set and what of it to read.

    name: on the hub, or a folder or file.   config: its configuration.   revision: a commit or tag on the hub
    column: what to learn from; label: the column with labels or transcripts.   train, valid: names of its splits
    """

    name: str
    config: str | None = None
    column: str | None = None
    label: str | None = None
    train: str | None = None
    valid: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, data: str) -> HubName:
        """`hub:NAME[:field=value]...`

        >>> HubName.parse("hub:ylecun/mnist:column=image").column
        'image'
        """
        name, *pairs = data.removeprefix(PREFIX).split(":")
        known = [field.name for field in fields(cls) if field.name != "name"]
        example = f"expected hub:NAME or hub:NAME:column=text; fields are {', '.join(known)}"
        if not name:
            raise DataError(f"data={data!r} names no data set; {example}")
        given: dict[str, str] = {}
        for pair in pairs:
            key, sign, value = pair.partition("=")
            if not sign or not value or key not in known or key in given:
                hint = checks.nearest(key, known)
                raise DataError(f"data={data!r}: {pair!r} is no field=value, unknown, or given twice{hint}; {example}")
            given[key] = value
        return cls(name, **given)

    def __str__(self) -> str:
        return f"{PREFIX}{self.name}"


def _datasets() -> Any:
    try:
        import datasets  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise checks.missing_package("data=hub:...", "datasets", "train") from None
    return datasets


def _load(hub: HubName, *, streaming: bool) -> Any:
    datasets = _datasets()
    path = Path(hub.name)
    if path.exists():
        for field in ("config", "revision"):
            if getattr(hub, field) is not None:
                raise DataError(f"{hub} is on this machine, which has no {field}; leave :{field}= out")
    try:
        if path.is_dir() and any((path / name).is_file() for name in _SAVED):
            return datasets.load_from_disk(hub.name)
        if path.is_file():
            kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
            if path.suffix not in kinds:
                raise DataError(f"{hub}: {path.name!r} is of another type; expected one of {', '.join(kinds)}")
            return datasets.load_dataset(kinds[path.suffix], data_files=hub.name, streaming=streaming)
        return datasets.load_dataset(hub.name, hub.config, revision=hub.revision, streaming=streaming)
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        # Whatever is wrong (no network, no such name, a truncated file), datasets says it; what to do about it follows.
        reason = first_line(error)
        local = path.exists()
        advice = (
            "expected a folder written by save_to_disk, or one of parquet, JSON lines, CSV, arrow or text files"
            if local
            else "it needs the name of a data set and the network, or a copy in datasets' cache. Without network: save "
            "it elsewhere with datasets.load_dataset(NAME).save_to_disk(FOLDER) and give hub:FOLDER"
        )
        raise DataError(f"{hub} cannot be loaded ({type(error).__name__}: {reason}); {advice}") from None


def open_splits(hub: HubName, *, streaming: bool) -> tuple[Any, Any | None]:
    """(data for training, data for validation or None if one row in ten has to be kept); streams where asked for."""
    loaded = _load(hub, streaming=streaming)
    splits: Mapping[str, Any] = loaded if isinstance(loaded, Mapping) else {"train": loaded}

    def find(field: str, candidates: Iterable[str]) -> str | None:
        wanted: str | None = getattr(hub, field)
        if wanted is not None and wanted not in splits:
            raise DataError(f"{hub} has no split {field}={wanted!r}; it has {sorted(splits)}")
        return wanted or next((name for name in candidates if name in splits), None)

    train = find("train", ("train", *splits) if len(splits) == 1 else ("train",))
    if train is None:
        raise DataError(f"{hub} has the splits {sorted(splits)}; say which to train on with :train=NAME")
    valid = find("valid", (name for name in _VALID_NAMES if name != train))
    if valid == train:
        raise DataError(f"{hub}: train and valid are both {train!r}; leave valid out to keep one row in ten of it")
    return splits[train], None if valid is None else splits[valid]


def _first_row(stream: Any) -> Mapping[str, Any]:
    """Of text, CSV and JSON, whose columns are known by their rows only."""
    rows = iter(stream)
    try:
        row: Mapping[str, Any] = next(rows, {})
        return row
    finally:
        rows.close()


def choose_column(
    hub: HubName, data: Any, wanted: str | None, field: str, names: Sequence[str], *, only: bool = True
) -> str:
    """The column called `wanted`; if that is None the first of the usual `names`, or with `only` the only one."""
    columns = list(data.column_names or _first_row(data))
    if wanted is not None:
        if wanted not in columns:
            raise DataError(f"{hub} has no column {wanted!r}; it has {columns}{checks.nearest(wanted, columns)}")
        return wanted
    found = next((name for name in names if name in columns), columns[0] if only and len(columns) == 1 else None)
    if found is None:
        raise DataError(f"{hub} has the columns {columns}; say which one to read with :{field}=NAME")
    return found


@dataclass(frozen=True)
class Rows:
    """Numbered rows of a table on disk: `table[chosen[i]]`. `chosen` is a range, however many there are."""

    hub: HubName
    table: Any
    chosen: range | Sequence[int]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.table[self.chosen[index]]
        return row

    def text(self, index: int, column: str) -> str:
        """The text in a column; anything else is refused."""
        value = self[index][column]
        if not isinstance(value, str) or not value:
            raise DataError(
                f"{self.hub}: row {self.chosen[index]} has {value!r:.60} in column {column!r}; expected text"
            )
        return value


@lru_cache(maxsize=4)
def open_rows(hub: HubName, split: str) -> Rows:
    """The rows of 'train' or 'valid', mapped into memory and read one by one."""
    train, valid = open_splits(hub, streaming=False)
    table = train if split == "train" or valid is None else valid
    if valid is not None:
        chosen: range | Sequence[int] = range(len(table))
    else:
        chosen = [index for index in range(len(table)) if split_of(index) == split]
    if not len(chosen):
        raise DataError(f"{hub} holds {len(table)} rows, too few to train and to keep some for validation")
    return Rows(hub, table, chosen)


def undecoded(rows: Rows, column: str) -> Rows:
    """The rows with a column of sounds as `{"bytes": ..., "path": ...}`: decoding them would need a package more."""
    audio = _datasets().Audio
    if not isinstance(rows.table.features[column], audio):
        return rows
    return replace(rows, table=rows.table.cast_column(column, audio(decode=False)))
