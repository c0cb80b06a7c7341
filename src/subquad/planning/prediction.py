"""How wrong will it be: the error of a mechanism on given queries and keys, without drawing anything.

    error = |A' - A|_F^2 / |A|_F^2,  A the normalised attention matrix

For values with independent entries of mean 0 it is also the expected relative squared error of the output. Random
features: the closed form of `covariance.py`, on a sample of rows. Polynomials: computed on the same sample.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..features.calibration import Calibration
from ..mechanisms import create
from ..mechanisms.base import Mechanism
from ..mechanisms.performer import Performer
from ..mechanisms.taylor import Taylor
from .baselines import baseline_errors, means_of
from .curve import Curve, refusal
from .sampling import CANDIDATES, blocks

__all__ = ["Prediction", "calibrated", "check_inputs", "predict_error"]


@dataclass(frozen=True)
class Prediction:
    """A predicted error and how far to trust it.

    error:        |A' - A|^2 / |A|^2 over all heads together; `per_head`: of each query head
    output_error: the same of the outputs A v, if v was given
    reliable:     False where the formula is known to break; `reason` says why
    baselines:    errors of uniform attention, degree 1, Hermite and Taylor degree 2 on the same rows
                  (`baselines_output`: of outputs); an error above "uniform" is worse than the mean of the values
    method:       "closed form" for random features, "computed" where there is no randomness
    queries, keys: rows looked at per head, and the most keys per row
    """

    mechanism: str
    options: dict[str, Any]
    error: float
    per_head: tuple[float, ...]
    reliable: bool
    reason: str
    method: str
    baselines: dict[str, float]
    queries: int
    keys: int
    output_error: float | None = None
    baselines_output: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "per_head": list(self.per_head)}

    def __str__(self) -> str:
        trust = "" if self.reliable else f" (not reliable: {self.reason})"
        lines = ", ".join(f"{name} {value:.3g}" for name, value in self.baselines.items())
        return f"{self.mechanism}: error {self.error:.3g}{trust}; {lines}"


def calibrated(attend: Mechanism, q: Tensor, k: Tensor, key_mask: Tensor | None) -> Mechanism:
    """`attend`, calibrated on q and k where it uses calibration."""
    if attend.uses_calibration:
        with torch.no_grad():
            attend.calibrate(q.detach(), k.detach(), key_mask=key_mask)
    return attend


def check_inputs(q: Any, k: Any, v: Any, *, is_causal: bool, key_mask: Any) -> None:
    """Shapes, and at least one query with one key."""
    width = q.shape[-1] if isinstance(q, Tensor) and q.dim() else 0
    checks.check_attention(q, k, k if v is None else v, head_dim=width, heads=None, kv_heads=None)
    checks.check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k.device)
    if 0 in q.shape[:3] or k.shape[2] == 0:
        raise ValueError(
            f"q {checks.describe_shape(q)} and k {checks.describe_shape(k)}: at least one query and one key is expected"
        )
    if is_causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"is_causal=True needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None and not bool(torch.isfinite(x).all()):
            raise ValueError(
                f"{name} must be finite; {int((~torch.isfinite(x)).sum())} of its {x.numel()} entries are NaN or "
                "infinite. Check what wrote it: half precision overflows at 65504"
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
    max_queries: int = 64,
    max_keys: int = 512,
    **options: Any,
) -> Prediction:
    """The error that `mechanism` will make on q (B, Hq, L, D) and k (B, H, S, D), before anything is drawn.

    mechanism:   "performer" with its options (softmax kernel, chi norms), "taylor", or an object of these; a name is
                 calibrated on q and k where it uses calibration, an object is taken as it is
    v:           (B, H, S, E): also predict the relative squared error of the output; with more than 1024 keys (or
                 `max_keys`, if that is more) it rests on a sample of the values, whose error grows with S over that
    max_queries: rows per head;  max_keys: keys per row that the closed form looks at

    Closed form: see `planning/covariance.py`. It is the first order of an expansion in the errors of a row's sum;
    `reliable` is True where the next order changes it by at most 15 %, no rare draws carry it, the normaliser stays
    away from 0 and the rows looked at agree; there it is within 20 % of the mean over many draws. The features are
    those of Choromanski et al., "Rethinking Attention with Performers", 2021, and Likhosherstov et al., "FAVOR#", 2023.

    >>> import torch, subquad as sq
    >>> q, k = 0.3 * torch.randn(2, 1, 2, 200, 64)
    >>> prediction = sq.predict_error(q, k, "performer", num_features=256)
    >>> prediction.reliable, prediction.error < prediction.baselines["uniform"]
    (True, True)
    >>> sq.predict_error(q, k, "taylor", degree=1).error < prediction.error   # flat attention: polynomials win
    True
    """
    check_inputs(q, k, v, is_causal=is_causal, key_mask=key_mask)
    checks.check_positive("max_queries", max_queries)
    checks.check_positive("max_keys", max_keys, least=2)
    if num_features is not None:
        options["num_features"] = num_features
    if isinstance(mechanism, Mechanism):
        attend = create(mechanism, q.shape[-1], **options)
        if isinstance(attend, Performer | Taylor):
            attend.feature_map.check_ready()
    else:
        if mechanism == "performer":
            options = {"seed": 0, **options}  # the error does not depend on it, torch's generator is left alone
        attend = create(mechanism, q.shape[-1], q.shape[1], k.shape[1], **options)
        calibrated(attend, q, k, key_mask)
    reason = refusal(attend)
    if reason is not None:
        raise ValueError(f"mechanism={attend.name!r}: {reason}. Use plan(), which measures such mechanisms on a sample")
    number = attend.resolve_scale(scale)
    rows = max(max_queries, CANDIDATES)
    sample = list(blocks(q, k, v, scale=number, is_causal=is_causal, key_mask=key_mask, max_queries=rows))
    if not sample:
        raise ValueError("key_mask leaves no query with a key; at least one real key per sampled sequence is expected")
    curve = Curve(attend, sample, scale=number, max_rows=max_queries, max_keys=max_keys)
    error, out, per_head = curve.at(getattr(attend, "num_features", None))
    reliable, why = curve.trust(getattr(attend, "num_features", None))
    statistics = Calibration(k.shape[1], k.shape[-1])
    statistics.update(q.cpu(), k.cpu(), None if key_mask is None else key_mask.cpu())
    baselines, baselines_out = baseline_errors(sample, means_of(statistics, number))
    return Prediction(
        mechanism=attend.name,
        options={name: value for name, value in options.items() if name != "seed"},
        error=error,
        per_head=per_head,
        reliable=reliable,
        reason=why,
        method="closed form" if curve.sums else "computed",
        baselines=baselines,
        queries=sum(len(block.x) for block in sample) // len(curve.norm),
        keys=min(max_keys if curve.sums else sample[0].y.shape[0], sample[0].y.shape[0]),
        output_error=None if v is None else out,
        baselines_output=baselines_out,
    )
