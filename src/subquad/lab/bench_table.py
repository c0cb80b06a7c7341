"""A comparison as plain text."""

from collections.abc import Mapping, Sequence

from subquad.lab.bench import Cell, Comparison
from subquad.plain_text import aligned

__all__ = ["table"]


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
    direction = "forward + backward" if asked.get("backward") else "forward"
    blocks.append(
        f"{where['processor']}, {where['threads']} threads, torch {where['torch']}; "
        f"B{asked['batch']} H{asked['heads']} D{asked['head_dim']} {asked['dtype']}, {direction}, best of "
        f"up to {asked['runs']} interleaved runs.\n"
        "error: ||out - softmax|| / ||softmax|| for Gaussian q, k of that standard deviation. An estimate of softmax\n"
        "attention that is no better than `uniform` (the mean of the values) is useless on such an input; linear and\n"
        "efficient attention are functions of their own, for models trained with them."
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
