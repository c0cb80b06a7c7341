"""How low-rank attention matrices are.

Wang et al., "Linformer", 2020, plot the cumulated singular values of softmax matrices; what a rank-r method can reach
is the energy (the squares) of the first r of them, Eckart and Young, 1936.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..figure import Figure, Line, Selector
from ..kinds import KINDS, sample
from ..notebook import Notebook
from ..running import REST, Clock, Job
from ..section import Section
from ..settings import Settings

__all__ = ["SECTION", "of_matrix", "points", "ranks"]

NAME = "spectrum"
ENERGY = 0.95


def of_matrix(matrix: Tensor) -> dict[str, Any]:
    """Cumulated shares of the singular values of an attention matrix, and the rank that holds 95 % of the energy."""
    values = torch.linalg.svdvals(matrix.double())
    linear, energy = values.cumsum(-1) / values.sum(), values.square().cumsum(-1) / values.square().sum()
    count = len(values)
    index = sorted({round(count * (i / 40) ** 2) for i in range(1, 41)} - {0})
    at = torch.tensor(index) - 1
    return {
        "index": index,
        "cumulated": linear[at].tolist(),
        "energy": energy[at].tolist(),
        "rank": int((energy < ENERGY).sum()) + 1,
        "size": count,
    }


def separable(q: Tensor, k: Tensor) -> Tensor:
    """P = softmax(Q) softmax(K)^T, queries over features and keys over tokens: rows that sum to 1, of rank <= d.

    >>> matrix = separable(torch.randn(50, 4), torch.randn(50, 4))
    >>> bool(torch.allclose(matrix.sum(-1), torch.ones(50))), int(torch.linalg.matrix_rank(matrix.double(), rtol=1e-6))
    (True, 4)
    """
    return torch.softmax(q, -1) @ torch.softmax(k, -2).mT


FORMS = {"softmax": "softmax(QKᵀ)", "separable": "softmax(A) softmax(B)"}


def _measure(settings: Settings, kind: str, length: int) -> dict[str, Any]:
    inputs = sample(kind, length, heads=1, head_dim=settings.head_dim, seed=settings.seed)
    q, k = inputs.q[0, -1], inputs.k[0, -1]
    root = q.shape[-1] ** 0.25
    exact = torch.softmax((q @ k.mT) / root**2, -1)
    return {"softmax": of_matrix(exact), "separable": of_matrix(separable(q / root, k / root))}


def jobs(settings: Settings, notebook: Notebook) -> list[Job]:
    """One per kind of input and length; the longest is cubic in its length."""
    found = []
    for length in settings.spectrum_lengths:
        for kind, words in KINDS.items():
            if length > sample(kind, length, heads=1, head_dim=2).q.shape[2]:
                continue  # no more was captured
            asked = {"kind": kind, "length": length, "head_dim": settings.head_dim, "seed": settings.seed, "forms": 2}

            def run(clock: Clock, kind: str = kind, length: int = length) -> Mapping[str, Any]:
                return _measure(settings, kind, length)

            quiet, first = 0.05 + 8e-10 * length**3, length == settings.spectrum_lengths[0]
            found.append(Job(f"{words}, L={length}", asked, run, quiet, REST, 8 * 12 * length**2, first, cells=2))
    return found


def points(notebook: Notebook, form: str, kind: str, length: int, what: str) -> dict[float, float]:
    """`cumulated` or `energy` by the share of the singular values that are kept."""
    for asked, result in notebook.of(NAME):
        if asked["kind"] == kind and asked["length"] == length:
            one = result[form]
            return {i / one["size"]: y for i, y in zip(one["index"], one[what], strict=True)}
    return {}


def ranks(notebook: Notebook, form: str, kind: str) -> dict[int, float]:
    """The rank that holds 95 % of the energy, by length."""
    found = {asked["length"]: result[form]["rank"] for asked, result in notebook.of(NAME) if asked["kind"] == kind}
    return dict(sorted(found.items()))


def figures(notebook: Notebook, settings: Settings) -> list[list[Figure]]:
    """Cumulated spectrum, and the rank that is needed against length, of softmax and of the separable form."""
    curves, needed = [], []
    lengths = sorted({asked["length"] for asked, _ in notebook.of(NAME)}, reverse=True)
    for kind, words in KINDS.items():
        for form in FORMS:
            for length in lengths:
                for what in ("energy", "cumulated"):
                    mine = points(notebook, form, kind, length, what)
                    if mine:
                        notes = [f"{100 * x:.1f} % of them hold {100 * y:.1f} %" for x, y in mine.items()]
                        choice = {"length": str(length), "show": what, "form": form}
                        x, y = [100 * x for x in mine], [100 * y for y in mine.values()]
                        curves.append(Line(kind, words, x, y, "softmax", choice, notes))
            by_length = ranks(notebook, form, kind)
            if by_length:
                notes = [f"rank {rank:.0f} of {n}" for n, rank in by_length.items()]
                x, y = list(by_length), list(by_length.values())
                needed.append(Line(kind, words, x, y, "softmax", {"form": form}, notes))
    which = Selector("form", "Matrix", list(FORMS.items()))
    sizes = Selector("length", "Tokens", [(str(n), str(n)) for n in lengths] or [("none", "none")])
    show = Selector("show", "Show", (("energy", "energy (squares)"), ("cumulated", "singular values")))
    return [[
        Figure(
            "spectrum", "How low-rank is attention?",
            "Share of the spectrum in the largest singular values, as in the Linformer papers. Flat attention is "
            "nearly rank one, which is why low-rank methods look good on it; sharp attention needs most directions, "
            "and no fixed rank will do. The separable form of 'Revisiting Linformer', P = softmax(A) softmax(B), has "
            "at most as many directions as a head is wide, whatever the input: a low rank that says nothing about "
            "softmax attention. (It is printed with both softmaxes over the wrong axis, so that its rows do not sum to "
            "one; here queries are normalised over features and keys over tokens.)",
            "% of the singular values", "% of the spectrum", curves, [which, show, sizes], x_log=False, y_log=False,
            legend=True,
        ),
        Figure(
            "rank", "Rank against length",
            "Rank that holds 95 % of the energy. A method of fixed rank works where this line is flat; where it grows "
            "with length, the approximation gets worse the longer the input.",
            "tokens", "rank for 95 % of the energy", needed, [which], legend=True,
        ),
    ]]  # fmt: skip


SECTION = Section(
    NAME,
    "The spectrum of attention",
    "Low-rank methods assume that attention matrices have low rank. Some do.",
    jobs,
    figures,
)
