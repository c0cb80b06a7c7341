"""One colour per mechanism everywhere, told apart without red and green: Okabe and Ito's palette, then Tol's.

Sixteen mechanisms are more than any palette can keep apart, so relatives share a hue and differ in dash and marker.
"""

from __future__ import annotations

from .settings import NO_ATTENTION

__all__ = ["STYLES", "order", "style_of"]

# (on white, on black, dash, marker)
Style = tuple[str, str, str, str]

STYLES: dict[str, Style] = {
    "softmax": ("#1b1d22", "#f2f2ee", "solid", "circle"),
    "multipole": ("#009e73", "#2fd1a2", "solid", "circle"),
    "performer": ("#d55e00", "#ff8a3c", "solid", "circle"),
    "taylor": ("#0072b2", "#58b3ee", "solid", "square"),
    "linear": ("#009e73", "#2fd1a2", "dash", "diamond-open"),
    "hedgehog": ("#7d7d1c", "#cfcf5a", "solid", "diamond"),
    "efficient": ("#56b4e9", "#9ad6ff", "solid", "triangle-up"),
    "separable-linformer": ("#56b4e9", "#9ad6ff", "dash", "triangle-up-open"),
    "linformer": ("#5b4fc4", "#a79bff", "solid", "triangle-down"),
    "nystrom": ("#5b4fc4", "#a79bff", "dash", "triangle-down-open"),
    "hybrid": ("#c98a00", "#f2b93b", "solid", "star"),
    "local": ("#c98a00", "#f2b93b", "dash", "star-open"),
    "clustered": ("#cc79a7", "#f0a3cb", "dash", "pentagon-open"),
    "improved-clustered": ("#cc79a7", "#f0a3cb", "solid", "pentagon"),
    "lsh": ("#882255", "#d9659b", "solid", "hexagon"),
    "sparse": ("#882255", "#d9659b", "dash", "hexagon-open"),
    NO_ATTENTION: ("#8a8f98", "#8a8f98", "dot", "line-ew"),
    # random features
    "trig": ("#8a8f98", "#a9aeb8", "solid", "x"),
    "positive": ("#0072b2", "#58b3ee", "solid", "square"),
    "hyperbolic": ("#d55e00", "#ff8a3c", "solid", "circle"),
    "oprf": ("#009e73", "#2fd1a2", "solid", "diamond"),
    "sderf": ("#5b4fc4", "#a79bff", "solid", "triangle-up"),
    # projections
    "gaussian": ("#8a8f98", "#a9aeb8", "solid", "x"),
    "orthogonal": ("#d55e00", "#ff8a3c", "solid", "circle"),
    "hadamard-1": ("#cc79a7", "#f0a3cb", "dash", "pentagon-open"),
    "hadamard-3": ("#0072b2", "#58b3ee", "solid", "square"),
    "hadamard-1-loop": ("#cc79a7", "#f0a3cb", "dot", "x"),
    "hadamard-3-loop": ("#56b4e9", "#9ad6ff", "dot", "x"),
    "simplex": ("#009e73", "#2fd1a2", "solid", "diamond"),
    # levels
    "uniform": ("#1b1d22", "#f2f2ee", "dash", "line-ew"),
    "degree-1": ("#c98a00", "#f2b93b", "dash", "line-ew"),
    "taylor-2": ("#882255", "#d9659b", "dash", "line-ew"),
    "hermite-2": ("#882255", "#d9659b", "dot", "line-ew"),
    # kinds of input
    "flat": ("#56b4e9", "#9ad6ff", "solid", "circle"),
    "unit": ("#0072b2", "#58b3ee", "solid", "square"),
    "real": ("#d55e00", "#ff8a3c", "solid", "diamond"),
    "low-rank": ("#cc79a7", "#f0a3cb", "solid", "triangle-up"),
    "nearby": ("#009e73", "#2fd1a2", "solid", "star"),
    # the published experiment
    "published-orthogonal": ("#882255", "#d9659b", "solid", "x"),
    "published-hadamard": ("#cc79a7", "#f0a3cb", "dash", "pentagon-open"),
    "key-only": ("#c98a00", "#f2b93b", "dot", "line-ew"),
}
_SPARE: tuple[Style, ...] = (
    ("#0072b2", "#58b3ee", "solid", "circle"),
    ("#d55e00", "#ff8a3c", "solid", "square"),
    ("#009e73", "#2fd1a2", "solid", "diamond"),
    ("#cc79a7", "#f0a3cb", "solid", "triangle-up"),
    ("#c98a00", "#f2b93b", "solid", "star"),
)


def style_of(key: str) -> dict[str, str]:
    """Colours on white and black, dash and marker; a stranger always gets the same one of a few.

    >>> style_of("performer")["light"]
    '#d55e00'
    """
    style = STYLES.get(key) or _SPARE[sum(map(ord, key)) % len(_SPARE)]
    return dict(zip(("light", "dark", "dash", "symbol"), style, strict=True))


def order(key: str) -> int:
    """The place of a mechanism in a row of them: relatives beside each other, strangers last.

    >>> sorted(["local", "hybrid", "softmax"], key=order)
    ['softmax', 'hybrid', 'local']
    """
    return list(STYLES).index(key) if key in STYLES else len(STYLES)
