"""The report in the terminal: one line per mechanism, then what to use."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from subquad.plain_text import aligned

from .findings import headline
from .formatting import crossing, milliseconds
from .kinds import KINDS
from .load import warnings
from .notebook import Notebook
from .sections import memory, speed, use
from .settings import NO_ATTENTION, Settings

__all__ = ["terminal_table"]


def _longest(notebook: Notebook, names: Sequence[str], kind: str, causal: bool) -> int | None:
    lengths = [n for name in names for n in speed.points(notebook, name, kind, causal)]
    return max(lengths, default=None)


def terminal_table(notebook: Notebook, settings: Settings, found: dict[str, Any]) -> str:
    """Times at the longest length, crossovers and memory; then the recommendation for each kind of input."""
    blocks = [" ".join(headline(found, settings))]
    blocks += warnings(notebook.machine, notebook.load)
    forms = [("forward, full", "forward", False), ("forward + backward, full", "training", False)]
    header, columns = ["mechanism"], []
    for words, kind, causal in forms:
        longest = _longest(notebook, settings.names, kind, causal)
        if longest is not None:
            header += [f"{'forward' if kind == 'forward' else 'fwd+bwd'} L={longest}", "faster from"]
            columns.append((words, kind, causal, longest))
    sizes = [n for name in settings.names for n in memory.points(notebook, name, "forward")]
    if sizes:
        header.append(f"memory L={max(sizes)}")
    rows = [header]
    for name in [*settings.names, NO_ATTENTION]:
        row = [name]
        for words, kind, causal, longest in columns:
            ms = speed.points(notebook, name, kind, causal).get(longest)
            row.append("-" if ms is None else milliseconds(ms))
            known = found["crossovers"].get(words, {})
            row.append(crossing(known[name], found["shortest"]) if name in known else "-")
        if sizes:
            mib = memory.points(notebook, name, "forward").get(max(sizes))
            row.append("-" if mib is None else f"{mib:.0f} MiB")
        rows.append(row)
    blocks.append("\n".join(aligned(rows)))
    recommended = found["recommendations"]
    for kind, words in KINDS.items():
        mine = {(row["length"], row["budget"]): row for row in recommended if row["kind"] == kind}
        lines = [["tokens", *(f"error <= {budget:g}" for budget in settings.budgets)]]
        for length in settings.lengths:
            cells = [mine.get((length, budget)) for budget in settings.budgets]
            lines.append([str(length), *("-" if cell is None else use.in_words(cell) for cell in cells)])
        blocks.append("\n".join([f"What to use, {words}:", *aligned(lines)]))
    if notebook.skipped:
        said = [f"Not measured ({notebook.cells_total - notebook.cells_measured} of {notebook.cells_total} cells):"]
        for reason, by_section in notebook.reasons.items():
            said.append(f"  {reason}:")
            for section, names in by_section.items():
                said += textwrap.wrap(f"{section}: {'; '.join(names)}", 100, initial_indent=" " * 4,
                                      subsequent_indent=" " * 6)  # fmt: skip
        blocks.append("\n".join(said))
    blocks += [f"FAILED {cell['section']}: {cell['label']}: {cell['reason']}" for cell in notebook.failures]
    return "\n\n".join(blocks)
