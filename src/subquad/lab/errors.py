"""How the error falls with the number of features, beside the baselines that must be beaten.

    error = |A' - A|^2 / |A|^2            of the attention matrix, or of the outputs A v where values are given

A relative *squared* error, as in `predict_error`, `plan` and `bench`. Every curve has the
errors of uniform attention, degree 1 and Taylor degree 2 on the same rows beside it: they need no randomness, and a
random-feature map above "uniform" is worse than the mean of the values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from subquad import checks
from subquad.lab.calibrated import options_for
from subquad.mechanisms import MECHANISMS, create
from subquad.mechanisms.base import Mechanism
from subquad.plain_text import aligned, first_line
from subquad.planning.baselines import baseline_errors
from subquad.planning.candidates import PLANNABLE, calibrated
from subquad.planning.piece import Piece, check_inputs

__all__ = ["FAMILIES", "PROJECTIONS", "SIZES", "ErrorLine", "ErrorPoint", "ErrorStudy", "error_study", "error_table"]

FAMILIES = ("trig", "positive", "hyperbolic", "oprf", "sderf")
PROJECTIONS: dict[str, dict[str, Any]] = {
    "gaussian": {"projection": "gaussian"},
    "orthogonal": {"projection": "orthogonal"},
    "hadamard-1": {"projection": "hadamard", "blocks": 1},
    "hadamard-3": {"projection": "hadamard", "blocks": 3},
    "simplex": {"projection": "simplex"},
}
# What plays the part of the number of features elsewhere; a mechanism not listed has one setting.
SIZES = {
    "multipole": "exact_keys",
    "local": "window",
    "hybrid": "window",
    "nystrom": "landmarks",
    "clustered": "clusters",
    "improved-clustered": "clusters",
}
_MODIFIERS = ("antithetic", "center")


@dataclass(frozen=True)
class ErrorPoint:
    """One number of features: `measured` is the mean over `draws`, `deviation` their standard deviation."""

    size: int | None
    measured: float
    deviation: float
    draws: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


@dataclass(frozen=True)
class ErrorLine:
    """One curve: a mechanism with its options; `size` names the option that varies, None for a flat line."""

    label: str
    mechanism: str
    options: Mapping[str, Any]
    size: str | None
    points: tuple[ErrorPoint, ...]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "options": dict(self.options), "points": [point.as_dict() for point in self.points]}


@dataclass(frozen=True)
class ErrorStudy:
    """What `error_study` found: the curves and, on the same rows, the baselines."""

    lines: tuple[ErrorLine, ...]
    baselines: Mapping[str, float]
    criterion: str
    settings: Mapping[str, Any]
    complete: bool

    @property
    def measured_on(self) -> str:
        """How much of the input was measured: all of it, or how many of its tokens; cross attention is named so."""
        asked = self.settings
        keys, tokens = asked["keys"], asked["tokens"]
        if asked["length"] != keys:
            some = "" if tokens == keys else f", of which {asked['measured_queries']} and {tokens} are measured"
            return f"cross attention: {asked['length']} queries to {keys} keys{some}"
        return (
            f"all {keys} tokens are measured" if tokens == keys else f"the first {tokens} of {keys} tokens are measured"
        )

    def as_dict(self) -> dict[str, Any]:
        """Every number, ready for `lab.write_json`."""
        return {**vars(self), "lines": [line.as_dict() for line in self.lines], "baselines": dict(self.baselines),
                "settings": dict(self.settings)}  # fmt: skip


def _family(name: str) -> dict[str, Any]:
    """`sderf+antithetic+center` -> options of the performer."""
    features, *modifiers = name.split("+")
    if features not in FAMILIES:
        raise ValueError(f"features={name!r}: expected one of {list(FAMILIES)}{checks.nearest(features, FAMILIES)}, "
                         f"each with +{' or +'.join(_MODIFIERS)} after it where wanted")  # fmt: skip
    for modifier in modifiers:
        checks.check_option("features modifier", modifier, _MODIFIERS)
    return {"features": features, **dict.fromkeys(modifiers, True)}


def _curves(
    features: Iterable[str], projections: Iterable[str], mechanisms: Iterable[str | Mapping[str, Any]]
) -> list[tuple[str, str, dict[str, Any], str | None]]:
    """(label, mechanism, options, name of the option that varies) of every line asked for."""
    chosen: list[tuple[str, str, dict[str, Any], str | None]] = []
    projections = list(projections)
    for family in features:
        for projection in projections:
            checks.check_option("projections", projection, PROJECTIONS)
            options = {**_family(family), **PROJECTIONS[projection]}
            chosen.append((f"{family} {projection}", "performer", options, "num_features"))
    for item in mechanisms:
        data: dict[str, Any] = {"mechanism": item} if isinstance(item, str) else dict(item)
        name = str(data.pop("mechanism", None))
        checks.check_option("mechanisms", name, MECHANISMS)
        size = "num_features" if name == "performer" else SIZES.get(name)
        size = None if size in data else size
        shown = ", ".join(f"{key}={value}" for key, value in data.items())
        chosen.append((f"{name} ({shown})" if shown else name, name, data, size))
    return chosen


def _make(name: str, options: Mapping[str, Any], q: Tensor, k: Tensor, seed: int) -> Mechanism:
    own = options_for(name, seed=seed, length=k.shape[2])
    return create(name, q.shape[-1], q.shape[1], k.shape[1], **(own | dict(options)))


def error_study(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    features: Iterable[str] = FAMILIES,
    projections: Iterable[str] = ("orthogonal",),
    mechanisms: Iterable[str | Mapping[str, Any]] = (),
    num_features: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024),
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    calibration: tuple[Tensor, Tensor] | None = None,
    baselines: Mapping[str, float] | None = None,
    draws: int = 8,
    tokens: int = 1024,
    seed: int = 0,
    on_line: Callable[[ErrorLine, int, int], None] | None = None,
) -> ErrorStudy:
    """Error against number of features on q (B, Hq, L, D), k (B, H, S, D), for every pair of features and projection.

    v:            (B, H, S, E): study the outputs; without it the attention matrix
    features:     names of random features, with +antithetic or +center after them: "sderf+antithetic+center"
    projections:  gaussian | orthogonal | hadamard-1 | hadamard-3 | simplex
    mechanisms:   further lines: names, or {"mechanism": name, **options}; what plays the part of the number of features
                  there (window, clusters, landmarks) takes the same values, and what has none is a flat line
    calibration:  q, k that calibrated features see; None = the data itself
    baselines:    those that an earlier study of the same inputs found; None = found here
    draws:        independent projections per point;  tokens: how many of the sequence are measured
    on_line:      called after each line with the line, how many are done and how many there will be

    Ctrl-C ends it early: what was measured is returned, with `complete=False`.

    >>> import torch
    >>> q, k = 0.3 * torch.randn(2, 1, 1, 100, 16, generator=torch.Generator().manual_seed(0))
    >>> study = error_study(q, k, features=["positive"], num_features=[16, 256], draws=4)
    >>> few, many = study.lines[0].points
    >>> few.measured > many.measured, sorted(study.baselines)
    (True, ['degree-1', 'hermite-2', 'taylor-2', 'uniform'])
    """
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask, scale=scale)
    for argument, value in (("draws", draws), ("tokens", tokens)):
        checks.check_positive(argument, value)
    sizes = sorted(set(num_features))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"num_features={list(num_features)}: one or more positive numbers are expected")
    curves = _curves(features, projections, mechanisms)
    q, k = q.detach().cpu(), k.detach().cpu()
    v = None if v is None else v.detach().cpu()
    mask = None if key_mask is None else key_mask.cpu()
    number = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    piece = Piece(q, k, v, tokens=tokens, is_causal=is_causal, scale=scale, key_mask=mask, seed=seed)
    if baselines is None:
        baselines = baseline_errors(piece, q, k, mask)
    seen = (q, k, mask) if calibration is None else (*calibration, None)
    lines: list[ErrorLine] = []
    complete = False
    try:
        for label, name, options, size in curves:
            line = _line(label, name, options, size, sizes, piece, seen, draws, seed)
            lines.append(line)
            if on_line:
                on_line(line, len(lines), len(curves))
        complete = True
    except KeyboardInterrupt:
        pass  # the caller sees complete=False and still has every finished line
    settings = {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "length": q.shape[2], "keys": k.shape[2],
        "head_dim": q.shape[-1], "tokens": piece.tokens,
        "measured_queries": piece.q.shape[2], "num_features": sizes, "is_causal": is_causal, "scale": number,
        "draws": draws, "seed": seed, "calibrated_on": "the data itself" if calibration is None else "other data",
    }  # fmt: skip
    criterion = "attention matrix" if v is None else "output"
    return ErrorStudy(tuple(lines), baselines, criterion, settings, complete)


def _line(
    label: str, name: str, options: dict[str, Any], size: str | None, sizes: Sequence[int], piece: Piece,
    seen: tuple[Tensor, Tensor, Tensor | None], draws: int, seed: int,
) -> ErrorLine:  # fmt: skip
    """One curve; a setting that the mechanism refuses is left out, and the note says why."""
    points: list[ErrorPoint] = []
    notes: dict[str, None] = {}
    if name != "softmax" and name not in PLANNABLE:
        notes["a function of its own or to be trained first: its distance from softmax attention is no failure"] = None
    for value in sizes if size is not None else [None]:
        chosen = options if size is None else {**options, size: value}
        try:
            attend = calibrated(_make(name, chosen, piece.q, piece.k, seed), *seen)
            found = piece.errors(attend, draws=draws if attend.is_random else 1)
        except (ValueError, NotImplementedError) as error:
            if not points and value == sizes[-1]:
                raise  # nothing of it can be measured: that is the user's to know, not a footnote
            notes[f"{size} {value}: {first_line(error)}"] = None
            continue
        deviation = statistics.stdev(found) if len(found) > 1 else 0.0
        points.append(ErrorPoint(value, statistics.fmean(found), deviation, len(found)))
    return ErrorLine(label, name, options, size, tuple(points), "; ".join(notes))


def error_table(study: ErrorStudy) -> str:
    """The study as plain text: errors, then the baselines."""
    flat = all(line.size is None for line in study.lines)
    sizes = study.settings["num_features"][: 1 if flat else None]
    uniform = study.baselines["uniform"]

    def shown(point: ErrorPoint) -> str:
        return f"{point.measured:.2g}" + ("!" if point.measured >= uniform else "")

    header = [f"error of the {study.criterion}", *("" if flat else f"M={size}" for size in sizes)]
    rows = [header]
    for line in study.lines:
        by_size = {point.size: point for point in line.points}
        cells = [shown(by_size[size]) if size in by_size else "-" for size in sizes]
        if line.size is None and line.points:
            cells = [shown(line.points[0]), *[""] * (len(sizes) - 1)]
        rows.append([line.label if line.size in (None, "num_features") else f"{line.label} ({line.size}=M)", *cells])
    for name, value in study.baselines.items():
        rows.append([name, f"{value:.2g}", *[""] * (len(sizes) - 1)])
    text = aligned(rows)
    text.insert(2 + len(study.lines), text[1])
    asked = study.settings
    shape = f"B{asked['batch']} H{asked['heads']} D{asked['head_dim']}, {asked['tokens']} tokens"
    form = "causal" if asked["is_causal"] else "full"
    draws = "one draw" if asked["draws"] == 1 else f"mean of {asked['draws']} draws"
    text += [
        "",
        f"{shape}, {form}, {draws}; relative squared error against softmax attention",
        "! no better than uniform (the mean of the values). The lines below the rule have no randomness.",
    ]
    text += [f"{line.label}: {line.note}" for line in study.lines if line.note]
    if not study.complete:
        text.append("Interrupted: the table holds what was measured until then.")
    return "\n".join(line.rstrip() for line in text)
