"""Numbers in words, as the figures, the tables and the terminal say them."""

from __future__ import annotations

from .style import style_of

__all__ = ["crossing", "dot", "megabytes", "milliseconds", "times", "tokens"]


def milliseconds(ms: float) -> str:
    """A time.

    >>> milliseconds(0.0123), milliseconds(12.34), milliseconds(2500)
    ('12 µs', '12.3 ms', '2.50 s')
    """
    if ms < 0.1:
        return f"{ms * 1e3:.0f} µs"
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1e3:.2f} s"


def megabytes(mib: float) -> str:
    """A size.

    >>> megabytes(12.34), megabytes(2048)
    ('12.3 MiB', '2.00 GiB')
    """
    return f"{mib:.3g} MiB" if mib < 1024 else f"{mib / 1024:.2f} GiB"


def times(ratio: float) -> str:
    """A ratio with as many digits as it deserves.

    >>> times(0.384), times(3.24), times(148.2)
    ('0.38', '3.2', '148')
    """
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2g}"


def tokens(length: float) -> str:
    """A length, rounded as far as a crossover can be known.

    >>> tokens(487.2), tokens(1312), tokens(16384)
    ('490', '1,300', '16,000')
    """
    digits = 10 ** max(0, len(str(int(length))) - 2)
    return f"{round(length / digits) * digits:,}"


def crossing(length: float | None, shortest: float) -> str:
    """A crossover.

    >>> crossing(256.0, 256), crossing(612.3, 256), crossing(None, 256)
    ('≤ 256', '610', 'never here')
    """
    if length is None:
        return "never here"
    return f"≤ {length:,.0f}" if length <= shortest else tokens(length)


def dot(name: str) -> str:
    """The colour of a mechanism, as HTML."""
    style = style_of(name)
    return f'<i class="dot" style="--light:{style["light"]};--dark:{style["dark"]}"></i>'
