"""The predicted error of one mechanism on one sample, at any number of features, and whether the formula holds there.

Random features: the closed form of `covariance.py`. Polynomials: computed, since nothing about them is random.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..features.random import ExponentialFeatures, TrigFeatures
from ..mechanisms.base import Mechanism
from ..mechanisms.performer import Performer
from ..mechanisms.taylor import Taylor
from .baselines import Means, means_of, polynomial_weights, squared_errors
from .covariance import Law, RowSums, own_errors, row_sums
from .rarity import draw_variance, normaliser_skew
from .sampling import MOST_ROWS, Block, pick_by_size, pick_keys

__all__ = ["Curve", "refusal"]

# Where the formula holds: the next order of the expansion (`rarity.py`) changes it by at most SECOND_ORDER, the error
# of one draw does not differ from the mean by more than itself (MOST_RARE: its relative variance beyond a normal one),
# and the rows looked at agree. Trigonometric: the row whose normaliser comes nearest to 0 decides, and 0.02 keeps 0
# seven deviations away. A normaliser of variance far below 0: the leading order of what dependent rows share with one
# scale per direction is not enough.
SECOND_ORDER = 0.15
MOST_RARE = 1.0
TRIG_NORMALISER = 0.02
STEADY_NORMALISER = 0.04  # five deviations: draws show what the error is, if not the first order
STEADY_DRAW = 1 / 16  # four: a draw that was seen to stay away from 0 on parts of the data does so on the next
MOST_SAMPLING = 0.1
USUAL_FEATURES = 256
OUTPUT_KEYS = 1024


def refusal(attend: Mechanism) -> str | None:
    """Why there is no closed form for this mechanism, or None where there is one."""
    if isinstance(attend, Taylor):
        return None
    if attend.exact:
        return f"{attend.name} attention is exact, its error is 0"
    if not isinstance(attend, Performer):
        return f"{attend.name} has no closed form for its error"
    if not isinstance(attend.feature_map, ExponentialFeatures | TrigFeatures):
        return f"features={attend.features!r} is a kernel of its own, not an estimate of softmax attention"
    if attend.kernel != "softmax":
        return f"kernel={attend.kernel!r} is not an estimate of softmax attention"
    if attend.norms != "chi":
        return f"norms={attend.norms!r} is biased, and the closed form is of unbiased rows (norms='chi')"
    if attend.projection == "hadamard" and attend.blocks is not None and attend.blocks < 3:
        return f"blocks={attend.blocks} Hadamard factors are far from orthogonal rows; the closed form needs 3"
    return None


def _law(attend: Performer, head: int) -> Law:
    phi = attend.feature_map
    a = torch.zeros(attend.head_dim, dtype=torch.float64)
    basis = None
    if isinstance(phi, ExponentialFeatures) and phi.features in ("oprf", "sderf"):
        stored = phi.a.detach().cpu().to(torch.float64)
        a = stored[head if len(stored) > 1 else 0].expand(attend.head_dim)
        if phi.features == "sderf":
            basis = phi.basis[head].detach().cpu().to(torch.float64)
    trig = isinstance(phi, TrigFeatures)
    paired = trig or (isinstance(phi, ExponentialFeatures) and phi.antithetic)
    return Law(trig, paired, attend.projection, a, basis)


class Curve:
    """The error of one calibrated mechanism on one sample: for random features, at any number of features.

    `refusal` says which mechanisms have no closed form.
    """

    def __init__(
        self,
        attend: Mechanism,
        sample: list[Block],
        *,
        scale: float,
        max_keys: int,
        max_rows: int = 64,
        output_keys: int = OUTPUT_KEYS,
    ) -> None:
        self.attend = attend
        per_block = math.ceil(min(max_rows * len({block.head for block in sample}), MOST_ROWS) / max(1, len(sample)))
        heads = sorted({block.head for block in sample})
        self.norm = dict.fromkeys(heads, 0.0)
        self.norm_out = dict.fromkeys(heads, 0.0)
        self.fixed = dict.fromkeys(heads, (0.0, 0.0))
        self.laws: dict[int, Law] = {}
        self.sums: dict[int, RowSums] = {}
        self.out_sums: dict[int, RowSums] = {}
        self.max_keys, self.output_keys = max_keys, max(output_keys, max_keys)
        self.spreads: dict[int, float] = {}
        self.skews: dict[int, float] = {}
        means: list[Means] | None = None
        phi = getattr(attend, "feature_map", None)
        if getattr(attend, "center", False) or getattr(attend, "hermite", False):
            means = means_of(phi.calibration, scale)  # type: ignore[union-attr]
        for block in sample:
            head = block.head
            self.norm[head] += block.total(block.weights.square())
            if block.v is not None:
                self.norm_out[head] += block.total(block.out.square())
            centre = None if means is None else means[block.kv_head]
            if isinstance(attend, Taylor):
                rows = polynomial_weights(block, centre, degree=attend.degree, hermite=attend.hermite)
                added = squared_errors(block, rows)
                self.fixed[head] = (self.fixed[head][0] + added[0], self.fixed[head][1] + added[1])
            else:
                assert isinstance(attend, Performer)
                self.laws[head] = _law(attend, block.kv_head)
                sums, spread, skew = self._random(block, centre, self.laws[head], per_block)
                self.spreads[head] = max(spread, self.spreads.get(head, 0.0))
                self.skews[head] = max(skew, self.skews.get(head, 0.0))
                self.sums[head] = self.sums[head] + sums if head in self.sums else sums

    def _random(self, block: Block, means: Means | None, law: Law, max_rows: int) -> tuple[RowSums, float, float]:
        x, y = block.x, block.y
        if means is not None:
            x, y = x - means.x, y - means.y
        own = own_errors(law, x, y, block.weights)
        # At a usual number of features, bounded as the error of a row is.
        sizes = torch.minimum(own.sum(-1) / USUAL_FEATURES, 1 + block.weights.square().sum(-1)) * block.count

        def looked_at(most: int, keys: int, *, output: bool) -> tuple[RowSums, Tensor, Tensor, Tensor, Tensor]:
            rows, multiples = pick_by_size(sizes, most)
            few = replace(
                block,
                x=block.x[rows],
                visible=block.visible[rows],
                weights=block.weights[rows],
                count=block.count[rows],
            )
            # Outputs weigh pairs by their values, which know nothing of a key's norm: an even sample serves better.
            index, count = pick_keys(few, keys, None if output else own[rows])
            residual = few.v[index] - few.out.unsqueeze(1) if output and few.v is not None else None
            weights = few.weights.gather(1, index)
            stands = few.count * multiples
            sums = row_sums(law, x[rows], y[index], weights, count, residual, stands, multiples)
            return sums, rows, index, count, stands

        everything = block.y.shape[0] <= self.max_keys
        sums, rows, index, count, stands = looked_at(max_rows, self.max_keys, output=everything)
        if block.v is not None and not everything:
            # Between different keys the values mostly cancel, and a sample of the keys does not: the fewer are left out
            # the better. A few rows will do, since only the ratio to the error of their weights is taken from them.
            more = looked_at(max(4, max_rows // 8), self.output_keys, output=True)[0]
            head = block.head
            self.out_sums[head] = self.out_sums[head] + more if head in self.out_sums else more
        if law.trig:  # cosines are bounded
            return sums, 0.0, 0.0
        z = x[rows].unsqueeze(1) + y[index]
        z = z if law.basis is None else z @ law.basis
        carried = own[rows].gather(1, index)
        spread = draw_variance(z, carried, law.a, paired=law.paired, rows=stands, keys=count)
        weights = block.weights[rows].gather(1, index)
        skew = normaliser_skew(z, carried, weights, law.a, paired=law.paired, rows=stands, keys=count)
        return sums, spread, skew

    def _squares(self, head: int, num_features: int) -> tuple[float, float]:
        weights, out = self.sums[head].error(self.laws[head], num_features)
        if head in self.out_sums:
            some, some_out = self.out_sums[head].error(self.laws[head], num_features)
            out = weights * some_out / some if some > 0 else 0.0
        return weights, out

    def at(self, num_features: int | None) -> tuple[float, float, tuple[float, ...]]:
        """error, output error and the error per head; `num_features` counts for random features only."""
        squares = self.fixed
        if self.sums:
            assert num_features is not None
            squares = {h: self._squares(h, num_features) for h in self.sums}
        error = sum(e for e, _ in squares.values()) / sum(self.norm.values())
        size = sum(self.norm_out.values())
        out = sum(e for _, e in squares.values()) / size if size > 0 else 0.0
        return error, out, tuple(e / self.norm[h] for h, (e, _) in squares.items())

    def error(self, num_features: int | None, *, output: bool) -> float:
        """The error of the outputs, or of the attention matrix."""
        weights, out, _ = self.at(num_features)
        return out if output else weights

    def _signs(self, num_features: int) -> tuple[float, float, float, float]:
        """What tells whether the first order holds: rare draws, variance of the normaliser, next order, error of the
        sample.

        Averages over rows, each by its share in the error; trigonometric normaliser: the largest, since one row whose
        normaliser comes near 0 owns the whole error.
        """
        total = rare = average = largest = skew = variance = 0.0
        for head, sums in self.sums.items():
            law = self.laws[head]
            each, _ = sums.rows(law, num_features)
            one, c = law.coefficient(num_features)
            carried = each * sums.multiples
            total += float(carried.sum())
            rare += float(carried.sum()) * one * self.spreads[head]
            skew += float(carried.sum()) * one * self.skews[head]
            spread = torch.nan_to_num(one * sums.normaliser - c * sums.normaliser_gain, nan=math.inf, posinf=math.inf)
            average += float(torch.nan_to_num(carried * spread, nan=0.0, posinf=math.inf).sum())
            largest = max(largest, float(spread.max()))
            # Both steps of the sample: which rows were computed exactly, and which of these were looked at.
            stands = sums.multiples / sums.exact
            variance += float((sums.exact * stands * (stands - 1) * each.square()).sum())
            sampled = carried[sums.exact > 1]
            variance += len(sampled) * float(sampled.var()) if len(sampled) > 1 else 0.0
        if not total > 0:
            return 0.0, 0.0, 0.0, 0.0
        trig = any(law.trig for law in self.laws.values())
        normaliser = largest if trig else average / total
        return rare / total, normaliser, 3 * normaliser - 2 * skew / total, math.sqrt(variance) / total

    def steady(self, num_features: int, *, redraws: bool) -> bool:
        """Whether the normaliser of every row stays away from 0; exponential features are positive, so it always does.

        Where trigonometric features may cross it, their error has no mean that draws could show.
        """
        trig = any(law.trig for law in self.laws.values())
        return not trig or self._signs(num_features)[1] <= (STEADY_NORMALISER if redraws else STEADY_DRAW)

    def trust(self, num_features: int | None) -> tuple[bool, str]:
        """Whether the formula holds at this number of features, and if not, why."""
        if not self.sums:
            return True, ""
        assert num_features is not None
        error = self.at(num_features)[0]
        trig = any(law.trig for law in self.laws.values())
        rare, normaliser, second, sampling = self._signs(num_features)
        measure = "measure it, for example with plan()"
        if trig and not normaliser <= TRIG_NORMALISER:
            return False, f"there is a row whose normaliser comes close to 0: the true error is larger; {measure}"
        if not trig and not rare <= MOST_RARE:
            return False, (
                "queries and keys of large norm: draws too rare to be met carry the expected error, the usual one is "
                f"smaller; {measure}"
            )
        if not trig and not abs(second) <= SECOND_ORDER:
            return False, (
                f"too few features for the first order: the next one changes it by {second:+.0%}, and it is not the "
                f"last; {measure}"
            )
        if not trig and normaliser < -error:
            return False, f"what dependent rows share is beyond its leading order here; {measure}"
        if not sampling <= MOST_SAMPLING:
            return False, f"the rows looked at differ too much to stand for all (raise max_queries); or {measure}"
        return True, ""
