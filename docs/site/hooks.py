"""What mkdocs does to every page: powers and indices of formulas in prose are set as such."""

import re
from typing import Any

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
