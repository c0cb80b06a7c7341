"""Docstrings as Markdown: doctests become code, runs of `name: meaning` become lists.

The sources stay plain text, which is what `help()` shows; this runs when the reference pages are built.
"""

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\*{0,2}[a-z_][a-zA-Z0-9_]*(?:, \*{0,2}[a-z_][a-zA-Z0-9_]*)*):\s+(\S.*)$")


def as_markdown(text: str) -> str:
    """The docstring with fences and lists.

    >>> print(as_markdown("Adds.\\n\\na, b: numbers\\n    of any kind\\n\\n>>> 1 + 1\\n2"))
    Adds.
    <BLANKLINE>
    - **a, b**: numbers of any kind
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    out: list[str] = []
    fenced = listed = False
    for line in text.splitlines():
        if fenced and not line.strip():
            out.append("```")
            fenced = False
        if not fenced and line.startswith(">>>"):
            out.append("```pycon")
            fenced = True
        if fenced:
            out.append(line)
            continue
        argument = ARGUMENT.match(line)
        if argument:
            if not listed and out and out[-1]:
                out.append("")  # a list needs an empty line before it
            out.append(f"- **{argument[1]}**: {argument[2]}")
        elif listed and line.startswith(" ") and line.strip():
            out[-1] += " " + line.strip()
            continue
        else:
            out.append(line)
        listed = bool(argument)
    return "\n".join([*out, "```"] if fenced else out)


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
