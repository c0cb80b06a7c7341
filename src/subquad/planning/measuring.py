"""The error of any mechanism, measured: its own output on a contiguous piece of the sequence against exact attention.

Contiguous, because what a window or a cluster leaves out depends on what stands where. With values v of independent
entries +-1, E |A' v - A v|^2 / E |A v|^2 = |A' - A|^2 / |A|^2: one run measures the error of the whole matrix.
"""

from __future__ import annotations

import math

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
        self.norm = float(self._masked(self.exact).double().square().sum())

    @property
    def tokens(self) -> int:
        """Keys per sequence."""
        return self.k.shape[2]

    def _masked(self, x: Tensor) -> Tensor:
        return x if self.rows is None else x * self.rows

    def error(self, attend: Mechanism, *, draws: int = 1, enough: float = math.inf) -> float:
        """Mean over `draws` redraws of |A' v - A v|^2 / |A v|^2; stops early once it is clearly above `enough`."""
        total, done = 0.0, 0
        with torch.no_grad():
            for draw in range(draws):
                if draw:
                    attend.redraw()
                out = attend(self.q, self.k, self.v, **self.call)
                total += float(self._masked(out - self.exact).double().square().sum()) / self.norm
                done += 1
                if not math.isfinite(total):
                    return math.inf
                if done >= 3 and total / done > 3.0 * enough:
                    break
        return total / done
