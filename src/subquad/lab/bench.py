"""Every mechanism beside softmax attention: how long it takes and how far its output is.

The error is ``||out - softmax|| / ||softmax||`` over sampled query rows, the softmax computed in float64. The inputs
are Gaussian with a stated standard deviation, because the error of a random-feature method is a property of the input:
a table with one anonymous input says nothing. The row *uniform* replaces attention by the mean of the values; a
mechanism whose error is not below it has learnt nothing from q and k on that input.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad.lab.measure import Timing, interleave, machine

__all__ = ["UNIFORM", "Cell", "Comparison", "compare", "table"]

UNIFORM = "uniform"
_REFERENCE_ROWS = 256


@dataclass(frozen=True)
class Cell:
    """One mechanism at one length.

    ``status`` is ``measured``, ``refused`` (the mechanism says that it cannot do this; ``reason`` repeats it) or
    ``failed`` (an error that is a bug). ``errors`` maps the standard deviation of q and k to the relative error.
    """

    mechanism: str
    length: int
    causal: bool
    status: str
    reason: str = ""
    timing: Timing | None = None
    errors: Mapping[float, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for a record."""
        return {
            "mechanism": self.mechanism,
            "length": self.length,
            "causal": self.causal,
            "status": self.status,
            "reason": self.reason,
            **(self.timing.as_dict() if self.timing else {}),
            "errors": [{"input_std": std, "relative_error": error} for std, error in self.errors.items()],
        }


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`: what was asked, where it ran, every cell, and whether it ran to the end."""

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    cells: tuple[Cell, ...]
    complete: bool

    def as_dict(self) -> dict[str, Any]:
        """Every number, ready for :func:`subquad.lab.write_json`."""
        return {
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "complete": self.complete,
            "cells": [cell.as_dict() for cell in self.cells],
        }


def _uniform(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Attention that looks at neither q nor k: the mean of the values seen so far."""
    if is_causal:
        counts = torch.arange(1, v.shape[-2] + 1, dtype=v.dtype, device=v.device)
        return v.cumsum(-2) / counts[:, None]
    return v.mean(-2, keepdim=True).expand(*q.shape[:-1], v.shape[-1])


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, is_causal: bool) -> Tensor:
    """Float64 softmax attention of the queries ``rows`` only: exact, and O(rows * L) instead of O(L^2)."""
    out = []
    for head in range(q.shape[1]):  # one head at a time keeps the logits small at 16k keys
        logits = q[:, head, rows].double() @ k[:, head].double().mT / q.shape[-1] ** 0.5
        if is_causal:
            later = torch.arange(k.shape[-2], device=k.device) > rows[:, None]
            logits = logits.masked_fill(later, float("-inf"))
        out.append(logits.softmax(-1) @ v[:, head].double())
    return torch.stack(out, 1)


def _create(
    name: str, head_dim: int, heads: int, seed: int, longest: int, options: Mapping[str, Any]
) -> subquad.Mechanism:
    """The mechanism with its defaults; what is random in it is seeded."""
    known = subquad.describe(name)["options"]
    own: dict[str, Any] = {"seed": seed} if "seed" in known else {}
    if "length" in known:
        own["length"] = longest  # Linformer is built for a length
    return subquad.create(name, head_dim, heads, **(own | dict(options))).eval()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


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
    on_cell: Callable[[Cell, int, int], None] | None = None,
) -> Comparison:
    """Time every mechanism against softmax at several lengths and measure its error.

    Forward only, float32, on the CPU. Within one length all mechanisms are timed in turn (see
    :func:`subquad.lab.interleave`), so their ratios hold even where the milliseconds do not.

    Args:
        mechanisms: names; all that are listed where None. ``softmax`` is always measured: it is the yardstick.
        lengths: numbers of tokens L.
        causal: which of full (False) and causal (True) attention to compare.
        batch, heads, head_dim: B, H and D of the (B, H, L, D) inputs.
        input_stds: standard deviations of q and k at which the error is measured; the first one is timed.
        options: extra arguments of :func:`subquad.create` by mechanism name.
        runs: measured rounds per length.
        seconds: stop the rounds of one length once they took this long (at least two are run).
        threads: torch's number of threads for the comparison; unchanged where None.
        seed: of the inputs and of the mechanisms.
        on_cell: called after each cell with the cell, how many are done and how many there will be.

    Returns:
        a :class:`Comparison`. Ctrl-C ends it early: what was measured is returned, with ``complete=False``.

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
        raise ValueError(f"mechanisms={unknown}: expected names among {sorted(known)}")

    settings: dict[str, Any] = {
        "mechanisms": names, "lengths": lengths, "causal": causal, "batch": batch, "heads": heads,
        "head_dim": head_dim, "input_stds": input_stds, "options": {k: dict(v) for k, v in (options or {}).items()},
        "runs": runs, "seconds": seconds, "seed": seed, "dtype": "float32", "version": subquad.__version__,
    }  # fmt: skip
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
                    shape = (batch, heads, length, head_dim)
                    for cell in _one_length(names, shape, is_causal, input_stds, options or {}, runs, seconds, seed):
                        cells.append(cell)
                        if on_cell:
                            on_cell(cell, len(cells), total)
        complete = True
    except KeyboardInterrupt:
        pass  # the caller sees complete=False and still has every finished cell
    finally:
        torch.set_num_threads(before)
    return Comparison(settings, where, tuple(cells), complete)


def _one_length(
    names: Sequence[str],
    shape: tuple[int, int, int, int],
    is_causal: bool,
    input_stds: Sequence[float],
    options: Mapping[str, Mapping[str, Any]],
    runs: int,
    seconds: float,
    seed: int,
) -> list[Cell]:
    """All mechanisms at one length: first the errors, which also show who refuses, then the interleaved timing."""
    _, heads, length, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    rows = torch.linspace(0, length - 1, min(length, _REFERENCE_ROWS)).round().long()
    references = {std: _softmax_rows(std * q, std * k, v, rows, is_causal) for std in input_stds}

    calls: dict[str, Callable[[], Tensor]] = {}
    errors: dict[str, dict[float, float]] = {}
    refused: dict[str, tuple[str, str]] = {}
    timed = input_stds[0]
    q_timed, k_timed = timed * q, timed * k
    for name in names:
        try:
            if name == UNIFORM:
                attend: Callable[..., Tensor] = _uniform
            else:
                attend = _create(name, head_dim, heads, seed, q.shape[2], options.get(name, {}))
            errors[name] = {}
            for std, reference in references.items():
                out = attend(std * q, std * k, v, is_causal=is_causal)[:, :, rows].double()
                errors[name][std] = float((out - reference).norm() / reference.norm())
            calls[name] = lambda attend=attend: attend(q_timed, k_timed, v, is_causal=is_causal)  # type: ignore[misc]
        except (ValueError, TypeError, NotImplementedError) as error:
            refused[name] = ("refused", _first_line(error))
        except Exception as error:  # one broken mechanism must not take the measurements of the others with it
            refused[name] = ("failed", f"{type(error).__name__}: {_first_line(error)}")
    # No further warm-up: measuring the errors has just run every call at this length.
    timings = interleave(calls, runs=runs, warmup=0, seconds=seconds)
    return [
        Cell(name, length, is_causal, "measured", timing=timings[name], errors=errors[name])
        if name in timings
        else Cell(name, length, is_causal, *refused[name])
        for name in names
    ]


def table(comparison: Comparison) -> str:
    """The comparison as plain text: milliseconds and speed against softmax per length, errors at the longest one."""
    blocks = []
    for is_causal in comparison.settings["causal"]:
        cells = {(c.mechanism, c.length): c for c in comparison.cells if c.causal == is_causal}
        lengths = sorted({length for _, length in cells})
        if lengths:
            blocks.append(_block(comparison, cells, lengths, is_causal))
    notes = {f"{c.mechanism} ({'causal' if c.causal else 'full'}): {c.status}: {c.reason}": None
             for c in comparison.cells if c.status != "measured"}  # fmt: skip
    if notes:
        blocks.append("\n".join(notes))
    where, asked = comparison.machine, comparison.settings
    blocks.append(
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}; "
        f"B{asked['batch']} H{asked['heads']} D{asked['head_dim']} {asked['dtype']}, forward, best of "
        f"up to {asked['runs']} interleaved runs.\n"
        "error: ||out - softmax|| / ||softmax|| for Gaussian q, k of that standard deviation. An estimate of softmax\n"
        "attention that is no better than `uniform` (the mean of the values) is useless on such an input; linear and\n"
        "efficient attention are functions of their own, for models trained with them."
    )
    if not comparison.complete:
        blocks.append("Interrupted: the table holds what was measured until then.")
    return "\n\n".join(blocks)


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x" if ratio >= 0.95 else f"{ratio:.2f}x"


def _block(
    comparison: Comparison, cells: Mapping[tuple[str, int], Cell], lengths: Sequence[int], is_causal: bool
) -> str:
    stds = comparison.settings["input_stds"]
    header = ["causal" if is_causal else "full", *(f"L={length} ms" for length in lengths)]
    header += [f"error, std {std:g}" for std in stds]
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
        lines.append(row)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in lines]  # fmt: skip
    text.insert(1, "-" * len(text[0]))
    return "\n".join(text) + f"\n(errors at L={lengths[-1]})"
