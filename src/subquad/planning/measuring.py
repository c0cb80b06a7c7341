"""The error of any mechanism, measured: its own output on a contiguous piece of the sequence against exact attention.

Contiguous, because what a window or a cluster leaves out depends on what stands where. With values v of independent
entries +-1 and width E, the mean of |A' v - A v|^2 is E |A' - A|^2: one run measures the error of the whole matrix. Its
size E |A|^2 is computed, not taken from |A v|^2: rows of flat attention are all alike, and the E numbers that they make
of v scatter by sqrt(2 / E) however many rows there are.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from ..mechanisms.base import Mechanism
from ..mechanisms.softmax import Softmax
from .sampling import evenly

__all__ = ["Piece"]

VALUE_WIDTH = 64


class Piece:
    """The first tokens of a few sequences, in float32 on the CPU, with their exact output."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        *,
        tokens: int,
        is_causal: bool,
        scale: float | None,
        key_mask: Tensor | None,
        seed: int,
    ) -> None:
        length, size = q.shape[2], k.shape[2]
        items = evenly(q.shape[0], max(1, min(4, tokens // max(length, size))))
        rows = slice(0, min(length, tokens)) if length == size else evenly(length, tokens)

        def taken(x: Tensor, at: slice | Tensor) -> Tensor:
            return x.detach()[items.to(x.device)][:, :, at if isinstance(at, slice) else at.to(x.device)].float().cpu()

        self.q, self.k = taken(q, rows), taken(k, slice(0, tokens))
        if v is None:
            generator = torch.Generator().manual_seed(seed)
            shape = (*self.k.shape[:3], VALUE_WIDTH)
            self.v = 2.0 * torch.randint(0, 2, shape, generator=generator).float() - 1.0
        else:
            self.v = taken(v, slice(0, tokens))
        self.call: dict[str, object] = {"is_causal": is_causal, "scale": scale, "key_mask": None}
        real = None
        if key_mask is not None:
            real = key_mask[items.to(key_mask.device), :tokens].cpu()
            self.call["key_mask"] = real
        with torch.no_grad():
            self.exact = Softmax(self.q.shape[-1])(self.q, self.k, self.v, **self.call)
        # Padding is no query either, and a row without any key is 0 in both.
        self.rows = real.unsqueeze(1).unsqueeze(-1).float() if real is not None and length == size else None
        if v is None:
            self.norm = VALUE_WIDTH * self._squared_weights(is_causal, scale, real)
        else:
            self.norm = float(self._masked(self.exact).double().square().sum())

    def _squared_weights(self, is_causal: bool, scale: float | None, real: Tensor | None) -> float:
        """|A|^2 over all real queries, a few rows at a time."""
        group = self.q.shape[1] // self.k.shape[1]
        keys = self.k.repeat_interleave(group, 1)
        scale = 1.0 / math.sqrt(self.q.shape[-1]) if scale is None else scale
        total = 0.0
        for rows in torch.arange(self.q.shape[2]).split(128):
            hidden = torch.zeros(len(rows), keys.shape[2], dtype=torch.bool)
            if is_causal:
                hidden = torch.arange(keys.shape[2]) > rows.unsqueeze(1)
            if real is not None:
                hidden = hidden | ~real[:, None, None, :]
            scores = (scale * self.q[:, :, rows] @ keys.mT).masked_fill(hidden, -math.inf)
            # A row without keys is NaN here and 0 in the output: it counts as 0.
            squares = torch.softmax(scores, -1).square_().sum(-1, keepdim=True).nan_to_num_(0.0)
            total += float((squares if self.rows is None else squares * self.rows[:, :, rows]).double().sum())
        return total

    @property
    def tokens(self) -> int:
        """Keys per sequence."""
        return self.k.shape[2]

    def _masked(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x * self.rows

    def errors(self, attend: Mechanism, *, draws: int = 1, enough: float = math.inf) -> list[float]:
        """|A' v - A v|^2 / |A v|^2 of every one of `draws` redraws; fewer once their mean is clearly above `enough`."""
        found: list[float] = []
        with torch.no_grad():
            for draw in range(draws):
                if draw:
                    attend.redraw()
                out = attend(self.q, self.k, self.v, **self.call)
                squares = float(self._masked(out - self.exact).double().square().sum())
                found.append(squares / self.norm if math.isfinite(squares) else math.inf)
                if found[-1] == math.inf or (len(found) >= 3 and sum(found) > 3.0 * enough * len(found)):
                    break
        return found

    def error(self, attend: Mechanism, *, draws: int = 1, enough: float = math.inf) -> float:
        """The mean of `errors`."""
        return statistics.fmean(self.errors(attend, draws=draws, enough=enough))
