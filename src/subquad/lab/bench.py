"""Every mechanism beside softmax attention: how long it takes and how far its output is.

The error is `||out - softmax||^2 / ||softmax||^2` over sampled query rows, the softmax computed in float64. The inputs
are Gaussian with a stated standard deviation, because the error of a random-feature method is a property of the input:
a table with one anonymous input says nothing. The row *uniform* replaces attention by the mean of the values; a
mechanism whose error is not below it has learnt nothing from q and k on that input.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad import checks
from subquad.lab.calibrated import make_calibrated, options_for
from subquad.lab.measure import Timing, interleave, machine
from subquad.lab.peak_memory import available_memory, peak_memories
from subquad.lab.peers import Peer, installed_peers
from subquad.plain_text import aligned, first_line
from subquad.planning.baselines import uniform_attention

__all__ = ["UNIFORM", "Cell", "Comparison", "compare", "read_comparison", "table"]

UNIFORM = "uniform"
_REFERENCE_ROWS = 256
_PEER_FEATURES = 256  # the number that the mechanisms here have by default


@dataclass(frozen=True)
class Cell:
    """One mechanism at one length.

    `status` is `measured`, `refused` (the mechanism says that it cannot do this; `reason` repeats it),
    `skipped` (this length would not fit into memory) or `failed` (an error that is a bug). `errors` maps the
    standard deviation of q and k to the relative squared error. `memory` is what `peak_memory` says, if asked for.
    """

    mechanism: str
    length: int
    causal: bool
    status: str
    reason: str = ""
    timing: Timing | None = None
    errors: Mapping[float, float] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a record."""
        return {
            "mechanism": self.mechanism,
            "length": self.length,
            "causal": self.causal,
            "status": self.status,
            "reason": self.reason,
            **(self.timing.as_dict() if self.timing else {}),
            "errors": [{"input_std": std, "relative_squared_error": error} for std, error in self.errors.items()],
            **({"memory": dict(self.memory)} if self.memory else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Cell":
        """The cell that `as_dict` wrote."""
        runs = data.get("runs_ms")
        return cls(
            *(data["mechanism"], data["length"], data["causal"], data["status"], data["reason"]),
            timing=Timing(tuple(run / 1e3 for run in runs)) if runs else None,
            errors={item["input_std"]: item["relative_squared_error"] for item in data["errors"]},
            memory=data.get("memory", {}),
        )


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: what was asked, where it ran, every cell, and whether it ran to the end."""

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    cells: tuple[Cell, ...]
    complete: bool

    def as_dict(self) -> dict[str, Any]:
        """Every number, ready for `lab.write_json`."""
        return {
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "complete": self.complete,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def read_comparison(path: str | os.PathLike[str]) -> Comparison:
    """A comparison from the JSON file that was written of it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = tuple(Cell.from_dict(cell) for cell in data["cells"])
        return Comparison(data["settings"], data["machine"], cells, data["complete"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)}: not a saved comparison ({type(error).__name__}: {error})") from None


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, is_causal: bool) -> Tensor:
    """Float64 softmax attention of the queries `rows` only: exact, and O(rows * L) instead of O(L^2)."""
    out = []
    for head in range(q.shape[1]):  # one head at a time keeps the logits small at 16k keys
        logits = q[:, head, rows].double() @ k[:, head].double().mT / q.shape[-1] ** 0.5
        if is_causal:
            later = torch.arange(k.shape[-2], device=k.device) > rows[:, None]
            logits = logits.masked_fill(later, float("-inf"))
        out.append(logits.softmax(-1) @ v[:, head].double())
    return torch.stack(out, 1)


@dataclass(frozen=True)
class _Study:
    """What is the same for every length of a comparison."""

    names: Sequence[str]
    peers: Mapping[str, Peer]
    batch: int
    heads: int
    head_dim: int
    input_stds: Sequence[float]
    options: Mapping[str, Mapping[str, Any]]
    runs: int
    seconds: float
    seed: int
    backward: bool
    memory: bool

    def bytes_needed(self, length: int) -> int:
        """Roughly, at this length: the inputs at every size, one competitor's working space, sampled exact rows."""
        tensor = 4 * self.batch * self.heads * length * self.head_dim
        features = 4 * self.batch * self.heads * length * _PEER_FEATURES
        working = (12 if self.backward else 4) * tensor + (3 * features if self.peers else 0)
        rows = 2 * 8 * self.batch * min(length, _REFERENCE_ROWS) * length
        return (3 + 2 * len(self.input_stds)) * tensor + working + rows

    def chosen(self, name: str, length: int) -> dict[str, Any]:
        """The options of a mechanism at this length."""
        return options_for(name, seed=self.seed, length=length) | dict(self.options.get(name, {}))

    def prepare(self, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Callable[[], Tensor]:
        """A call without arguments that computes this competitor's attention of these tensors."""
        if name == UNIFORM:
            return lambda: uniform_attention(q, k, v, is_causal=is_causal)
        if name in self.peers:
            return self.peers[name].prepare(q, k, v, is_causal, _PEER_FEATURES)
        attend = make_calibrated(name, self.head_dim, self.heads, q.shape[2], self.seed, **self.options.get(name, {}))
        return lambda: attend(q, k, v, is_causal=is_causal)

    def timed(self, name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Callable[[], object]:
        """The call that the clock sees."""
        if not self.backward:
            return self.prepare(name, q, k, v, is_causal)
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        call = self.prepare(name, q, k, v, is_causal)

        def both() -> None:
            with torch.enable_grad():
                out = call()
                out.backward(torch.ones_like(out))

        return both

    def length(self, length: int, is_causal: bool) -> Iterator[Cell]:
        """All competitors at one length: first the errors, which also show who refuses, then the interleaved timing."""
        needed, there = self.bytes_needed(length), available_memory()
        if there is not None and needed > there:
            reason = f"needs about {needed / 2**30:.1f} GiB of memory, {there / 2**30:.1f} GiB are available"
            yield from (Cell(name, length, is_causal, "skipped", reason) for name in self.names)
            return
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.heads, length, self.head_dim)
        q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
        rows = torch.linspace(0, length - 1, min(length, _REFERENCE_ROWS)).round().long()
        references = {std: _softmax_rows(std * q, std * k, v, rows, is_causal) for std in self.input_stds}
        calls: dict[str, Callable[[], object]] = {}
        errors: dict[str, dict[float, float]] = {}
        refused: dict[str, tuple[str, str]] = {}
        q_timed, k_timed = self.input_stds[0] * q, self.input_stds[0] * k
        for name in self.names:
            try:
                errors[name] = {}
                estimate = name not in self.peers or self.peers[name].estimates_softmax
                for std, reference in references.items() if estimate else ():
                    out = self.prepare(name, std * q, std * k, v, is_causal)()[:, :, rows].double()
                    errors[name][std] = float((out - reference).square().sum() / reference.square().sum())
                call = self.timed(name, q_timed, k_timed, v, is_causal)
                call()  # the warm-up: whoever cannot do this says so here, not between the others' runs
                calls[name] = call
            except (ValueError, TypeError, NotImplementedError) as error:
                refused[name] = ("refused", first_line(error))
            except Exception as error:  # one broken mechanism must not take the measurements of the others with it
                refused[name] = ("failed", f"{type(error).__name__}: {first_line(error)}")
        timings = interleave(calls, runs=self.runs, warmup=0, seconds=self.seconds)
        del calls, references
        memory = self.peaks(list(timings), length, is_causal) if self.memory else {}
        for name in self.names:
            if name in timings:
                known = memory.get(name, {})
                yield Cell(name, length, is_causal, "measured", "", timings[name], errors[name], known)
            else:
                yield Cell(name, length, is_causal, *refused[name])

    def peaks(self, names: Sequence[str], length: int, is_causal: bool) -> dict[str, dict[str, Any]]:
        """Of fresh processes; only what this library creates can be asked for there."""
        ours = [name for name in names if name != UNIFORM and name not in self.peers]
        form = {"length": length, "batch": self.batch, "heads": self.heads, "head_dim": self.head_dim,
                "is_causal": is_causal, "backward": self.backward, "threads": torch.get_num_threads()}  # fmt: skip
        asked = [{"mechanism": name, "options": self.chosen(name, length), **form} for name in ours]
        return dict(zip(ours, peak_memories(asked), strict=True))


def compare(
    mechanisms: Sequence[str] | None = None,
    lengths: Iterable[int] = (512, 1024, 2048, 4096),
    *,
    causal: Iterable[bool] = (False, True),
    batch: int = 1,
    heads: int = 8,
    head_dim: int = 64,
    input_stds: Sequence[float] = (0.5, 1.0),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    runs: int = 5,
    seconds: float = 3.0,
    threads: int | None = None,
    seed: int = 0,
    backward: bool = False,
    memory: bool = False,
    peers: bool = False,
    resume: Comparison | None = None,
    on_cell: Callable[[Cell, int, int], None] | None = None,
    on_length: Callable[[Comparison], None] | None = None,
) -> Comparison:
    """Time every mechanism against softmax at several lengths and measure its error.

    Float32, on the CPU. Within one length all mechanisms are timed in turn (see `lab.interleave`), so
    their ratios hold even where the milliseconds do not. A length that would not fit into memory is skipped before
    anything is allocated.

    mechanisms: names; all that are listed where None. `softmax` is always measured: it is the yardstick.
    lengths: numbers of tokens L.
    causal: which of full (False) and causal (True) attention to compare.
    batch, heads, head_dim: B, H and D of the (B, H, L, D) inputs.
    input_stds: standard deviations of q and k at which the error is measured; the first one is timed.
    options: extra arguments of `create` by mechanism name.
    runs: measured rounds per length.
    seconds: stop the rounds of one length once they took this long (at least two are run).
    threads: torch's number of threads for the comparison; unchanged where None.
    seed: of the inputs and of the mechanisms.
    backward: time forward and backward together instead of forward alone.
    memory: also the peak memory of every call, each measured in a fresh process (seconds per length).
    peers: also the other libraries that are installed here (`lab.peers`).
    resume: an earlier, interrupted comparison with the same settings: lengths that it finished are taken from it.
    on_cell: called after each cell with the cell, how many are done and how many there will be.
    on_length: called after each length with what there is so far, for saving it.

    Returns a `Comparison`. Ctrl-C ends it early: what was measured is returned, with `complete=False`.

    >>> result = compare(["softmax"], [16], causal=[False], heads=2, head_dim=8, runs=1)
    >>> [(cell.mechanism, cell.status) for cell in result.cells]
    [('softmax', 'measured'), ('uniform', 'measured')]
    """
    names = list(subquad.list_mechanisms() if mechanisms is None else mechanisms)
    names = ["softmax", *dict.fromkeys(name for name in names if name not in ("softmax", UNIFORM)), UNIFORM]
    most = 16 * (os.cpu_count() or 1)
    if threads is not None and not 1 <= threads <= most:
        raise ValueError(f"threads={threads}: expected 1 to {most}; more than the cores only wait for each other")
    lengths, causal, input_stds = sorted(set(lengths)), list(causal), list(input_stds)
    if not lengths or lengths[0] < 1:
        raise ValueError(f"lengths={lengths}: one or more positive numbers of tokens are expected")
    if not input_stds or min(input_stds) <= 0:
        raise ValueError(f"input_stds={input_stds}: one or more positive standard deviations are expected")
    known = set(subquad.list_mechanisms()) | {UNIFORM}
    if unknown := [name for name in names if name not in known]:
        hint = checks.nearest(unknown[0], known)
        raise ValueError(f"mechanisms={unknown}: expected names among {sorted(known)}{hint}")
    found = {peer.name: peer for peer in installed_peers()} if peers else {}
    names[-1:-1] = found  # `uniform` stays last

    settings: dict[str, Any] = {
        "mechanisms": names, "lengths": lengths, "causal": causal, "batch": batch, "heads": heads,
        "head_dim": head_dim, "input_stds": input_stds, "options": {k: dict(v) for k, v in (options or {}).items()},
        "runs": runs, "seconds": seconds, "seed": seed, "backward": backward, "memory": memory,
        "peers": {peer.package: peer.version for peer in found.values()}, "dtype": "float32",
        "version": subquad.__version__,
    }  # fmt: skip
    if resume is not None:
        asked = json.loads(json.dumps(settings))
        if other := sorted(name for name in asked if resume.settings.get(name) != asked[name]):
            raise ValueError(f"resume: that comparison was made with other settings: {', '.join(other)}")
    study = _Study(
        names, found, batch, heads, head_dim, input_stds, options or {}, runs, seconds, seed, backward, memory
    )
    cells: list[Cell] = []
    total = len(causal) * len(lengths) * len(names)
    complete = False
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    where = machine()
    try:
        with torch.no_grad():
            for is_causal in causal:
                for length in lengths:
                    earlier = [c for c in resume.cells if (c.causal, c.length) == (is_causal, length)] if resume else []
                    whole = {cell.mechanism for cell in earlier} == set(names)
                    for cell in earlier if whole else study.length(length, is_causal):
                        cells.append(cell)
                        if on_cell:
                            on_cell(cell, len(cells), total)
                    if on_length:
                        on_length(Comparison(settings, where, tuple(cells), len(cells) == total))
        complete = True
    except KeyboardInterrupt:
        pass  # the caller sees complete=False and still has every finished cell
    finally:
        torch.set_num_threads(before)
    return Comparison(settings, where, tuple(cells), complete)


# -- as plain text --------------------------------------------------------------------------------------------------


def table(comparison: Comparison) -> str:
    """The comparison as plain text: milliseconds and speed against softmax per length, errors at the longest one."""
    blocks = []
    for is_causal in comparison.settings["causal"]:
        cells = {(c.mechanism, c.length): c for c in comparison.cells if c.causal == is_causal}
        lengths = sorted({c.length for c in cells.values() if c.status != "skipped"})
        if lengths:
            blocks.append(_block(comparison, cells, lengths, is_causal))
    notes = {_note(cell): None for cell in comparison.cells if cell.status != "measured"}
    if notes:
        blocks.append("\n".join(notes))
    where, asked = comparison.machine, comparison.settings
    threads = "thread" if where["threads"] == 1 else "threads"
    direction = "forward + backward" if asked.get("backward") else "forward"
    blocks.append(
        f"{where['processor']}, {where['threads']} {threads}, torch {where['torch']}; "
        f"B{asked['batch']} H{asked['heads']} D{asked['head_dim']} {asked['dtype']}, {direction}, best of "
        f"up to {asked['runs']} interleaved runs.\n"
        "error: ||out - softmax||^2 / ||softmax||^2 for Gaussian q, k of that standard deviation. An estimate of\n"
        "softmax attention that is no better than `uniform` (the mean of the values) is useless on such an input;\n"
        "linear and efficient attention are functions of their own, for models trained with them."
    )
    if asked.get("peers"):
        blocks.append("peers: " + ", ".join(f"{name} {version}" for name, version in asked["peers"].items()))
    if not comparison.complete:
        blocks.append("Interrupted: the table holds what was measured until then.")
    return "\n\n".join(blocks)


def _note(cell: Cell) -> str:
    kind = "causal" if cell.causal else "full"
    if cell.status == "skipped":
        return f"L={cell.length} ({kind}): skipped: {cell.reason}"
    if cell.status == "refused":
        why = cell.reason.split(". ")[0]  # the rest says what to do instead, which the table shows
        return why if why.startswith(cell.mechanism) else f"{cell.mechanism} ({kind}): {why}"
    return f"{cell.mechanism} ({kind}): {cell.status}: {cell.reason}"


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 0.95 else f"{ratio:.2f}x"


def _memory(cell: Cell | None) -> str:
    if cell is None or not cell.memory:
        return "-"
    return f"{cell.memory['extra_bytes'] / 2**20:.0f}" if "extra_bytes" in cell.memory else "failed"


def _block(
    comparison: Comparison, cells: Mapping[tuple[str, int], Cell], lengths: Sequence[int], is_causal: bool
) -> str:
    stds = comparison.settings["input_stds"]
    with_memory = any(cell.memory for cell in cells.values())
    header = ["causal" if is_causal else "full", *(f"L={length} ms" for length in lengths)]
    header += [f"error, std {std:g}" for std in stds]
    header += ["peak MB"] if with_memory else []
    lines = [header]
    for name in comparison.settings["mechanisms"]:
        row = [name]
        for length in lengths:
            cell, softmax = cells.get((name, length)), cells.get(("softmax", length))
            if cell is None or cell.timing is None:
                row.append("-")
            elif softmax is None or softmax.timing is None:
                row.append(f"{cell.timing.best * 1e3:.2f}")
            else:
                row.append(f"{cell.timing.best * 1e3:.2f} ({_times(softmax.timing.best / cell.timing.best)})")
        last = cells.get((name, lengths[-1]))
        row += [f"{last.errors[std]:.2g}" if last and std in last.errors else "-" for std in stds]
        row += [_memory(last)] if with_memory else []
        lines.append(row)
    what = "errors and peak memory on top of q, k, v" if with_memory else "errors"
    return "\n".join(aligned(lines)) + f"\n({what} at L={lengths[-1]})"
