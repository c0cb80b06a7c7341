"""Numbers into figures: error, projections, spectra and the map of recommendations, where a line is something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subquad.lab.errors import FAMILIES, PROJECTIONS

from . import error, projections, published, recommendation, spectrum
from .figure import Figure, Line, Selector
from .figures import milliseconds
from .inputs import KINDS
from .notebook import Notebook
from .settings import Settings

__all__ = ["error_figures", "projection_figure", "published_figure", "spectrum_figures", "tradeoff_figure"]

WORST = 10.0  # relative squared error beyond which a setting is not worth a place in the figure
FAMILY_WORDS = {"trig": "trigonometric", "positive": "positive", "hyperbolic": "hyperbolic", "oprf": "OPRF",
                "sderf": "SDERF"}  # fmt: skip


def _levels(notebook: Notebook, data: str, sizes: list[int], choice: dict[str, str]) -> list[Line]:
    for asked, result in notebook.of(error.NAME):
        if asked["name"] == data:
            return [
                Line(key, words, [sizes[0], sizes[-1]], [result["baselines"][key]] * 2,
                     "taylor" if key != "uniform" else "", choice, flat=True)
                for key, words in error.BASELINES.items()
            ]  # fmt: skip
    return []


def _point(point: Mapping[str, Any]) -> str:
    if point["measured"] is None:
        return "diverged"
    return f"error {point['measured']:.3g} ± {point['deviation'] or 0:.2g} over {point['draws']} draws"


def error_figures(notebook: Notebook, settings: Settings) -> list[Figure]:
    """The same 25 curves per input twice: by feature map at one projection, and by projection at one feature map."""
    sizes = list(settings.error_features)
    done = {asked["name"] for asked, _ in notebook.of(error.NAME)}
    data = [each for each in error.data_of(settings) if each.name in done]
    maps, matrices = [], []
    for each in data:
        for family in FAMILIES:
            for projection in PROJECTIONS:
                points = error.curve(notebook, each.name, family, projection)
                if not points:
                    continue
                x, y = [p["size"] for p in points], [p["measured"] for p in points]
                notes = [_point(p) for p in points]
                choice = {"data": each.name}
                maps.append(Line(family, FAMILY_WORDS[family], x, y, "performer", {**choice, "by": projection}, notes))
                matrices.append(
                    Line(projection, projections.WORDS[projection], x, y, "performer", {**choice, "by": family}, notes)
                )
        levels = _levels(notebook, each.name, sizes, {"data": each.name})
        maps += levels
        matrices += levels
    chooser = Selector("data", "Inputs", [(each.name, each.words) for each in data] or [("none", "none")])
    by_projection = Selector("by", "Projection", [("orthogonal", "orthogonal"), *(
        item for item in projections.WORDS.items() if item[0] != "orthogonal")])  # fmt: skip
    by_family = Selector("by", "Features", [("hyperbolic", "hyperbolic"), *(
        item for item in FAMILY_WORDS.items() if item[0] != "hyperbolic")])  # fmt: skip
    return [
        Figure(
            "error-features", "Which feature map?",
            "Relative squared error of the attention matrix against the number of features, mean over draws. The "
            "dashed levels need no randomness: a curve above <em>uniform attention</em> is worse than averaging the "
            "values. On flat scores polynomials win; on sharp scores in few directions the calibrated SDERF does; on "
            "large isotropic inputs nothing random helps. Errors beyond 100 leave the figure: trigonometric features "
            "divide by sums that can vanish.",
            "features M", "relative squared error", maps, [chooser, by_projection], legend=True, y_max=100.0,
        ),
        Figure(
            "error-projections", "Which projection?",
            "The same measurements, one feature map at a time. Orthogonal, simplex and three-factor Hadamard rows are "
            "about equally good, and better than independent ones where the error is small. A single Hadamard factor "
            "looks as good on isotropic inputs and fails on anisotropic ones: choose those above to see it.",
            "features M", "relative squared error", matrices, [chooser, by_family], legend=True, y_max=100.0,
        ),
    ]  # fmt: skip


def published_figure(notebook: Notebook, settings: Settings) -> Figure:
    """The published experiment, as run and as meant."""
    lines = []
    for kind, words in published.KINDS.items():
        mine = published.points(notebook, kind)
        if mine:
            notes = [f"mean squared error {y:.3g}" for y in mine.values()]
            lines.append(Line(kind, words, list(mine), list(mine.values()), "performer", notes=notes))
    sizes = list(settings.published_features)
    named = {"uniform": "mean of the values", "key-only": "weights by the key alone"}
    for key, level in published.levels(notebook).items():
        lines.append(Line(key, named[key], [sizes[0], sizes[-1]], [level] * 2, flat=True))
    return Figure(
        "published", "The published figure, rebuilt",
        "d 16, 1024 tokens, standard deviation 1.5, median of four draws. The published projections give what weights "
        "by the key alone give; the mean of the values, which ignores everything, is lower still, and every correct "
        "estimator is above both: at this scale none of them is usable.",
        "features m", "mean squared error of the output", lines, legend=True,
    )  # fmt: skip


def projection_figure(notebook: Notebook, settings: Settings) -> Figure:
    """Time of the projection alone and of the whole attention."""
    lines = []
    names = {**projections.WORDS, **projections.LOOPS}
    for dim in settings.projection_dims:
        for what in ("alone", "whole", "drawing"):
            for kind, words in names.items():
                mine = projections.points(notebook, what, kind, dim)
                if mine:
                    choice = {"dim": str(dim), "show": what}
                    notes = [milliseconds(ms) for ms in mine.values()]
                    lines.append(Line(kind, words, list(mine), list(mine.values()), "performer", choice, notes))
    show = Selector("show", "Time of", (
        ("alone", "the projection"), ("whole", "the whole attention"), ("drawing", "drawing the matrix")))  # fmt: skip
    width = Selector("dim", "Width", [(str(dim), f"d {dim}") for dim in settings.projection_dims])
    return Figure(
        "projections", "What a projection costs",
        f"{settings.projection_features} features, one head. Written out as a matrix, every projection is the same "
        "product. Butterflies as separate torch operations lose to it by an order of magnitude. Inside the native "
        "kernel they run on data that stays in cache: compare the whole attention at the larger widths.",
        "tokens", "milliseconds", lines, [show, width], legend=True,
    )  # fmt: skip


def spectrum_figures(notebook: Notebook) -> list[Figure]:
    """Cumulated spectrum, and the rank that is needed against length."""
    curves, ranks = [], []
    lengths = sorted({asked["length"] for asked, _ in notebook.of(spectrum.NAME)}, reverse=True)
    for kind, words in KINDS.items():
        for length in lengths:
            for what in ("energy", "cumulated"):
                mine = spectrum.points(notebook, kind, length, what)
                if mine:
                    notes = [f"{100 * x:.1f} % of them hold {100 * y:.1f} %" for x, y in mine.items()]
                    choice = {"length": str(length), "show": what}
                    curves.append(
                        Line(kind, words, [100 * x for x in mine], [100 * y for y in mine.values()], "softmax", choice,
                             notes)
                    )  # fmt: skip
        mine_by_length = spectrum.ranks(notebook, kind)
        if mine_by_length:
            notes = [f"rank {rank:.0f} of {n}" for n, rank in mine_by_length.items()]
            ranks.append(Line(kind, words, list(mine_by_length), list(mine_by_length.values()), "softmax", notes=notes))
    sizes = Selector("length", "Tokens", [(str(n), str(n)) for n in lengths] or [("none", "none")])
    show = Selector("show", "Show", (("energy", "energy (squares)"), ("cumulated", "singular values")))
    return [
        Figure(
            "spectrum", "How low-rank is attention?",
            "Share of the spectrum in the largest singular values, as in the Linformer papers. Flat attention is "
            "nearly rank one, which is why low-rank methods look good on it; sharp attention needs most directions, "
            "and no fixed rank will do. (The linear form of 'Revisiting Linformer' is printed with both softmaxes over "
            "the wrong axis, so that its rows do not sum to one; separable-linformer here takes queries over "
            "features and keys over tokens, as efficient attention does.)",
            "% of the singular values", "% of the spectrum", curves, [show, sizes], x_log=False, y_log=False,
            legend=True,
        ),
        Figure(
            "rank", "Rank against length",
            "Rank that holds 95 % of the energy. A method of fixed rank works where this line is flat; where it grows "
            "with length, the approximation gets worse the longer the input.",
            "tokens", "rank for 95 % of the energy", ranks, legend=True,
        ),
    ]  # fmt: skip


def tradeoff_figure(notebook: Notebook, settings: Settings) -> Figure:
    """Every setting that a recommendation chose from: error against time."""
    lines = []
    done = [kind for kind in KINDS if any(asked.get("kind") == kind for asked, _ in notebook.of(recommendation.NAME))]
    lengths = list(reversed(settings.lengths))
    for kind in done:
        for length in lengths:
            rows = recommendation.tried(notebook, kind, length)
            choice = {"kind": kind, "length": str(length)}
            for name in dict.fromkeys(row["mechanism"] for row in rows):
                found = [row for row in rows if row["mechanism"] == name and row["error"] <= WORST]
                mine = sorted(found, key=lambda row: row["ms"])
                if name == "softmax":
                    continue  # exact: it has no place on a logarithmic axis; the table has it
                notes = [f"{row['label']}: error {row['error']:.2g}, {milliseconds(row['ms'])}, {row['gain']:.2g}× "
                         "softmax's speed" for row in mine]  # fmt: skip
                lines.append(
                    Line(name, name, [row["ms"] for row in mine], [row["error"] for row in mine], name, choice, notes)
                )
    return Figure(
        "tradeoff", "Error against time, every setting tried",
        "Each point is one setting. Good is low and left. The recommendation takes the leftmost point below the error "
        "budget; where there is none, softmax. Settings with an error beyond 10 are left out.",
        "milliseconds", "relative squared error", lines,
        [Selector("kind", "Inputs", [(kind, KINDS[kind]) for kind in done] or [("none", "none")]),
         Selector("length", "Tokens", [(str(n), f"{n}") for n in lengths])],
        points=True,
    )  # fmt: skip
