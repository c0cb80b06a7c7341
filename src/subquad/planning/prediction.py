"""How wrong will it be: the error of a mechanism on given queries and keys.

    error = |A' - A|_F^2 / |A|_F^2,  A the normalised attention matrix

For values with independent entries of mean 0 it is also the expected relative squared error of the output; with values
it is that of the outputs. In closed form where there is one that holds, else measured on a sample of the input.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..mechanisms import MECHANISMS, create
from ..mechanisms.base import Mechanism
from ..mechanisms.performer import Performer
from .baselines import uniform_error
from .candidates import calibrated, with_seed
from .closed_form import RELIABLE, closed_form, refusal
from .piece import Piece, check_inputs

__all__ = ["Prediction", "predict_error"]

MOST_TOKENS = 2048
MOST_SCORES = 1 << 24
DRAWS = 6


@dataclass(frozen=True)
class Prediction:
    """An error, how it was found and how far it may be off.

    error:     of the attention matrix, or of the outputs where v was given (`criterion`), all heads together
    low, high: what it is likely to lie between: 20 % in closed form; two deviations between draws and between parts of
               what was looked at where it was measured
    method:    "closed form", "measured" or "exact";  reason: why not the closed form
    per_head:  of each query head
    uniform:   the error of the mean of the values on the same tokens; what is above it is of no use
    tokens, draws: that were looked at; the tokens in each of so many `sequences` of the `batch`, without padding. The
               others have no part in the error, nor in low and high
    """

    mechanism: str
    options: dict[str, Any]
    error: float
    low: float
    high: float
    method: str
    reason: str
    criterion: str
    per_head: tuple[float, ...]
    uniform: float
    tokens: int
    draws: int
    sequences: int
    batch: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "per_head": list(self.per_head)}

    def __str__(self) -> str:
        times = f", {self.draws} draws" if self.draws > 1 else ""
        of = f" of {self.sequences} of {self.batch} sequences" if self.sequences < self.batch else ""
        how = f"{self.method} on {self.tokens} tokens{of}{times}" if self.method == "measured" else self.method
        return (
            f"{self.mechanism}: error of the {self.criterion} {self.error:.3g} ({how}; {self.low:.2g} to "
            f"{self.high:.2g}); the mean of the values has {self.uniform:.3g}"
        )


def predict_error(
    q: Tensor,
    k: Tensor,
    mechanism: str | Mechanism | type[Mechanism] = "performer",
    *,
    v: Tensor | None = None,
    num_features: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    seed: int = 0,
    **options: Any,
) -> Prediction:
    """The error that `mechanism` makes on q (B, Hq, L, D), k (B, H, S, D): of the mean over draws, if it draws.

    mechanism: a name with its options, calibrated on q and k where it uses calibration; or an object, taken as it is
    v:         (B, H, S, E): the relative squared error of these outputs instead of that of the attention matrix

    `method` says how it was found. Closed form (`planning/closed_form.py`): random features on up to 512 keys, 1024 in
    all sequences, where it says at most 0.03; there it is within 20 % of the mean over many draws. Measured: everything
    else, on up to 2048 tokens: the first of one sequence, or several sequences. Padding has no part in either. The
    features are those of Choromanski et al., "Rethinking Attention with Performers", 2021.

    >>> import torch, subquad as sq
    >>> q, k = 0.2 * torch.randn(2, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0))
    >>> found = sq.predict_error(q, k, "performer", num_features=256)
    >>> found.method, found.error < found.uniform
    ('closed form', True)
    >>> sq.predict_error(q, k, "taylor", degree=1).method
    'measured'
    """
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask, scale=scale)
    if num_features is not None:
        options["num_features"] = num_features
    if isinstance(mechanism, Mechanism):
        attend = copy.deepcopy(create(mechanism, q.shape[-1], **options))  # it keeps the draw that it has
    else:
        name = getattr(mechanism, "name", mechanism)
        own = with_seed(name, options, seed) if isinstance(name, str) and name in MECHANISMS else options
        attend = create(mechanism, q.shape[-1], q.shape[1], k.shape[1], **own)  # refuses what it does not know
        calibrated(attend, q, k, key_mask)
    piece = Piece(
        *(q, k, v),
        tokens=MOST_TOKENS,
        is_causal=is_causal,
        scale=scale,
        key_mask=key_mask,
        seed=seed,
        most_scores=MOST_SCORES,
        sequences=q.shape[0],
    )
    about: dict[str, Any] = {
        "mechanism": attend.name,
        "options": {name: value for name, value in options.items() if name != "seed"},
        "criterion": "attention matrix" if v is None else "output",
        "uniform": uniform_error(piece),
        "tokens": piece.tokens,
        "sequences": piece.sequences,
        "batch": piece.given,
    }
    if attend.exact:
        nothing = (0.0,) * q.shape[1]
        return Prediction(error=0.0, low=0.0, high=0.0, method="exact", reason="", per_head=nothing, draws=0, **about)
    reason = "values are given, and it is of the weights" if v is not None else refusal(attend, piece)
    if reason is None:
        assert isinstance(attend, Performer)
        error, heads, holds = closed_form(attend, piece)
        if holds:
            span: dict[str, Any] = {"low": error / 1.2, "high": 1.2 * error, "method": "closed form", "reason": ""}
            return Prediction(error=error, per_head=heads, draws=0, **span, **about)
        reason = f"it says {error:.2g}; it holds up to {RELIABLE:g}, and where no rare draws carry the error"
    return _measured(attend, piece, reason, about)


def _measured(attend: Mechanism, piece: Piece, reason: str, about: dict[str, Any]) -> Prediction:
    draws = DRAWS if attend.is_random else 1
    found, total = [], torch.zeros_like(piece.sizes)
    for draw in range(draws):
        if draw:
            attend.redraw()
        squares = piece.squares(attend)
        total += squares / draws
        found.append(float(squares.sum()) / piece.norm)
    error = statistics.fmean(found)
    off = statistics.stdev(found) / math.sqrt(draws) if draws > 1 and math.isfinite(error) else 0.0
    folded = piece.folded()
    if folded is not None and math.isfinite(error):
        off = math.hypot(off, error * folded.deviation(folded.by_segment(folded.squares(attend))))
    heads = total.sum((0, 2)) / piece.sizes.sum((0, 2)).clamp(min=1e-300)
    span: dict[str, Any] = {
        "low": max(0.0, error - 2 * off),
        "high": error + 2 * off,
        "method": "measured",
        "reason": reason,
    }
    return Prediction(error=error, per_head=tuple(heads.tolist()), draws=draws, **span, **about)
