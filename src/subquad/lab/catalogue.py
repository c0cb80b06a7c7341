"""The mechanisms as a list for reading: what each computes, what it costs, what it can do."""

import textwrap
from collections.abc import Iterable

import subquad

__all__ = ["mechanism_list"]

_FACTS = ("causal", "recurrent", "exact")


def mechanism_list(width: int = 100, names: Iterable[str] | None = None) -> str:
    """Every mechanism as a paragraph: name, facts and complexity, then equation, paper and options with defaults.

    width: no line is longer, unless a single word is
    names: those to list; None = all

    >>> print(mechanism_list().split("\\n\\n")[0].splitlines()[0].split()[0])
    clustered
    """
    paragraphs = []
    for name in subquad.list_mechanisms() if names is None else names:
        facts = subquad.describe(name)
        can = ", ".join(fact if facts[fact] else f"not {fact}" for fact in _FACTS)
        options = ", ".join(f"{option}={default!r}" for option, default in facts["options"].items()) or "none"
        lines = textwrap.wrap(
            f"{facts['complexity']}; {can}", width, initial_indent=f"{name:20s} ", subsequent_indent=" " * 21
        )
        for label, text in (("equation", facts["equation"]), ("paper", facts["paper"]), ("options", options)):
            lead = f"  {label:9s} "
            lines += textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=" " * len(lead))
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)
