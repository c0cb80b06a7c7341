"""What a few batches say about each head of each layer: means and covariances for centring, SDERF and balancing, and
how local and how sharp its attention is.

    locality(w) = share of the exact attention within w tokens of the query        0 .. 1
    score_deviation = standard deviation of q.k scale over the keys, mean over queries

Only real tokens count. Sums are merged in float64 (Chan, Golub and LeVeque), so neither many tokens nor means far from
0 lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...features.calibration import Calibration
from ...mechanisms import Mechanism
from ..conversion.capturing import LayerSample, capture

__all__ = ["LayerStatistics", "calibrate_layers", "gather"]

WINDOWS = (16, 32, 64, 128)
# Rows of a layer's attention that are written out to see where its weight lies.
ROWS = 256


@dataclass
class LayerStatistics:
    """One attention layer.

    calibration:     means and covariances of queries and keys, per KV head
    locality:        {window: (Hq,)} share of attention within `window` tokens on each side
    score_deviation: (Hq,) standard deviation of the scores over the keys
    """

    layer: int
    name: str
    calibration: Calibration
    locality: dict[int, Tensor] = field(default_factory=dict)
    score_deviation: Tensor = field(default_factory=lambda: torch.zeros(0))
    queries: int = 0

    @property
    def tokens(self) -> int:
        """Real keys seen."""
        return int(self.calibration.counts[1])

    def add(self, sample: LayerSample) -> None:
        """Add what the layer saw in one or more calls."""
        for q, k, _, key_mask in sample.calls():
            for what, x in (("queries", q), ("keys", k)):
                real = x if key_mask is None or x.shape[2] != key_mask.shape[1] else x.transpose(1, 2)[key_mask]
                if not bool(torch.isfinite(real).all()):
                    raise ValueError(
                        f"attention layer {sample.layer} ({sample.name}) has {what} that are not finite on the "
                        "calibration batches; calibrate in float32, or leave the batch out"
                    )
            query_mask = sample.query_mask(key_mask)
            self.calibration.update(q, k, key_mask, query_mask)
            self._look(q, k, key_mask, query_mask, sample)

    def _look(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, sample: LayerSample
    ) -> None:
        """Locality and deviation on evenly spaced rows."""
        length, size = q.shape[2], k.shape[2]
        rows = torch.linspace(0, length - 1, min(ROWS, length)).long().unique().to(q.device)
        groups = q.shape[1] // k.shape[1]
        scores = sample.scale * q[:, :, rows].double() @ k.double().repeat_interleave(groups, 1).mT
        column = torch.arange(size, device=q.device)
        hidden = torch.zeros(1, 1, len(rows), size, dtype=torch.bool, device=q.device)
        if sample.is_causal:
            hidden = hidden | (column > rows[:, None])
        if key_mask is not None:
            hidden = hidden | ~key_mask[:, None, None]
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
        real = (~hidden).any(-1).expand(q.shape[0], 1, -1)
        if query_mask is not None:
            real = real & query_mask[:, None, rows]
        count = int(real.sum())
        if not count:
            return
        visible = (~hidden).double()
        number = visible.sum(-1).clamp(min=1)
        mean = (scores * visible).sum(-1) / number
        spread = (((scores - mean.unsqueeze(-1)) * visible).square().sum(-1) / number).sqrt()
        share = count / (self.queries + count)

        def merged(old: Tensor | None, values: Tensor) -> Tensor:
            new = (values * real).sum((0, 2)) / count
            return new if old is None or not old.numel() else old + share * (new - old)

        self.score_deviation = merged(self.score_deviation, spread)
        if not sample.cross:
            distance = (rows[:, None] - column).abs()
            for window in WINDOWS:
                near = (weights * (distance <= window)).sum(-1)
                self.locality[window] = merged(self.locality.get(window), near)
        self.queries += count

    def calibrate(self, mechanism: Mechanism) -> Mechanism:
        """Give a mechanism for this layer these statistics instead of batches; returns it."""
        mechanism.use_statistics(self.calibration)
        return mechanism

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report, without the covariances."""
        return {
            "layer": self.layer,
            "name": self.name,
            "tokens": self.tokens,
            "locality": {str(w): [round(float(x), 4) for x in values] for w, values in self.locality.items()},
            "score_deviation": [round(float(x), 4) for x in self.score_deviation],
        }


def gather(samples: Iterable[LayerSample], into: Mapping[int, LayerStatistics] | None = None) -> dict[int, Any]:
    """Statistics by layer number from what `capture` returned, added to `into` where given."""
    found = dict(into or {})
    for sample in samples:
        if not len(sample):
            continue
        if sample.layer not in found:
            k = sample.k[0]
            calibration = Calibration(k.shape[1], k.shape[3]).to(k.device)
            found[sample.layer] = LayerStatistics(sample.layer, sample.name, calibration)
        found[sample.layer].add(sample)
    return found


def calibrate_layers(
    model: nn.Module, batches: Iterable[Any], layers: Iterable[int | str] | None = None
) -> dict[int, LayerStatistics]:
    """Statistics of every attention layer of `model` on `batches`, by layer number; the model is left as it was.

    batches: dicts of tensors as the model takes them; a handful is enough, their padding does not count
    layers:  numbers or names; None = all

    >>> import torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
    >>> found = calibrate_layers(model, [torch.randn(2, 30, 16)])
    >>> found[0].tokens, found[0].calibration.key_mean.shape, sorted(found[0].locality)
    (60, torch.Size([2, 8]), [16, 32, 64, 128])
    """
    wanted = None if layers is None else list(layers)
    found: dict[int, LayerStatistics] = {}
    empty = True
    for batch in batches:  # one at a time: what a layer saw is not kept
        empty = False
        found = gather(capture(model, [batch], layers=wanted), found)
    if empty:
        raise ValueError("batches is empty: at least one is needed, a dict of tensors as the model takes them")
    return found
