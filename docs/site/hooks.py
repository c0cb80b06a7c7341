"""What the pages take from the code and from measurements, so that it is written once.

{{ facts NAME }}      equation, paper, cost and abilities of a mechanism, as `sq.describe` knows them
{{ measured NAME }}   its error and time from data/mechanisms.json (python docs/site/measure.py)
{{ catalogue }}       the table of all mechanisms
{{ contributing PART }}   a section of CONTRIBUTING.md
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import subquad as sq

DOCS = Path(__file__).parent.parent
MARK = re.compile(r"^\{\{ (facts|measured|catalogue|contributing) ?(.*?) ?\}\}$", re.MULTILINE)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _code(text: str) -> str:
    """Code for a cell of a table: a vertical bar would end the cell, and backticks know no escape for it."""
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _facts(name: str) -> str:
    about: dict[str, Any] = sq.describe(name)
    options = ", ".join(f"`{option}={value!r}`" for option, value in about["options"].items()) or "none"
    rows = [
        ("weights", _code(about["equation"])),
        ("paper", about["paper"]),
        ("cost", _code(about["complexity"])),
        ("causal", _yes(about["causal"])),
        (
            "token by token, in constant memory",
            "no, its state grows" if about["recurrent"] > about["constant_memory"] else _yes(about["constant_memory"]),
        ),
        ("options", options),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| **{key}** | {value} |" for key, value in rows)])


def _measured(name: str) -> str:
    data = json.loads((DOCS / "data" / "mechanisms.json").read_text(encoding="utf-8"))
    rows = [row for row in data["rows"] if row["mechanism"] == name]
    if not rows:
        raise KeyError(f"data/mechanisms.json has no rows for {name!r}: run python docs/site/measure.py")
    kinds = data["kinds"]
    head = ["| length | time, ms | SDPA, ms |", "|---|---|---|"]
    for kind in kinds:
        head[0] += f" error, {kind} | uniform |"
        head[1] += "---|---|"
    lines = head
    for row in rows:
        line = f"| {row['length']} | {row['ms']:.1f} | {row['softmax_ms']:.1f} |"
        for kind in kinds:
            line += f" {row['errors'][kind]['error']:.3f} | {row['errors'][kind]['uniform']:.3f} |"
        lines.append(line)
    note = (
        f"Settings: `{rows[0]['options'] or 'defaults'}`. Relative error of the output, not causal, 8 heads of width "
        f"64, without training; {data['date']}, {data['machine']['processor']}, {data['machine']['threads']} threads "
        "(`python docs/site/measure.py`). *Uniform* is the plain mean of the values, which needs no attention."
    )
    return "\n".join([*lines, "", note])


def _catalogue() -> str:
    lines = ["| mechanism | causal | constant-memory state | weights | paper |", "|---|---|---|---|---|"]
    for name in sq.list_mechanisms():
        about = sq.describe(name)
        state = _yes(about["constant_memory"])
        weights = _code(about["equation"])
        lines.append(f"| [{name}]({name}.md) | {_yes(about['causal'])} | {state} | {weights} | {about['paper']} |")
    return "\n".join(lines)


def _contributing(part: str) -> str:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(part)}.*?\n(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise KeyError(f"CONTRIBUTING.md has no section {part!r}")
    return found.group(1)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    makers = {"facts": _facts, "measured": _measured, "contributing": _contributing}

    def made(match: re.Match[str]) -> str:
        kind, argument = match.groups()
        return _catalogue() if kind == "catalogue" else makers[kind](argument)

    return MARK.sub(made, markdown)


# What is not prose: tags, and whatever stands in code.
_UNTOUCHED = re.compile(r"(<pre.*?</pre>|<code.*?</code>|<script.*?</script>|<svg.*?</svg>|<[^>]+>)", re.DOTALL)
_RAISED = re.compile(r"\^(?:\{([^{}]*)\}|([A-Za-z0-9])(?![A-Za-z0-9]))")
_LOWERED = re.compile(r"_\{([^{}]*)\}|(?<=\b[A-Za-z\u03b1-\u03c9])_([A-Za-z0-9])(?![A-Za-z0-9_])")


def set_formulas(page: str) -> str:
    """e^{x.y} and z_j in the prose of an HTML page as powers and indices; code and tags stay as they are.

    >>> set_formulas("<p>e^{x.y}, n_b and <code>a^{b}</code></p>")
    '<p>e<sup>x.y</sup>, n<sub>b</sub> and <code>a^{b}</code></p>'
    """
    parts = _UNTOUCHED.split(page)
    for i in range(0, len(parts), 2):
        raised = _RAISED.sub(lambda m: f"<sup>{m[1] or m[2]}</sup>", parts[i])
        parts[i] = _LOWERED.sub(lambda m: f"<sub>{m[1] or m[2]}</sub>", raised)
    return "".join(parts)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for the HTML of every page."""
    return set_formulas(html)
