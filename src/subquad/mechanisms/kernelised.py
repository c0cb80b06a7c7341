"""A mechanism that is a feature map plus one state update.

    out = phi(q)^T S / phi(q)^T z,     S = sum_j phi(k_j) v_j^T,     z = sum_j phi(k_j)

Katharopoulos et al., "Transformers are RNNs", 2020. A subclass only sets `self.feature_map`; the parallel, chunked and
recurrent forms, padding, grouped heads, precision and gradients come from the kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import checks
from ..features.base import FeatureMap
from ..features.calibration import Calibration
from ..kernels import windowed_linear
from ..kernels.operator import Call
from ..kernels.windowed_linear import WindowedLinear
from ..state import State
from .windowed_linear import WindowedLinearMechanism

__all__ = ["Kernelised"]


class Kernelised(WindowedLinearMechanism):
    """A feature map plus one state update: out = phi(q)^T S / phi(q)^T z. Subclasses set `self.feature_map`."""

    kernelised = True
    feature_map: FeatureMap
    # Whether the output is divided by phi(q)^T z.
    normalise: bool = True

    def resolve_scale(self, scale: float | None) -> float:
        if scale is None:
            return self.feature_map.default_scale(self.head_dim)
        return super().resolve_scale(scale)

    def calibrate(
        self, q: Tensor, k: Tensor, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> None:
        if not self.uses_calibration:
            super().calibrate(q, k)
        checks.check_attention(q, k, k, head_dim=self.head_dim, heads=self.heads, kv_heads=self.kv_heads)
        self.feature_map.calibrate(q, k, key_mask, query_mask)

    def _origin(self, scale: float) -> str:
        draw = self.feature_map.draw_key()
        # Of the children themselves: reading the whole module tree would take a good part of a decode step.
        statistics = self.feature_map._modules.get("calibration")
        calibrated = f" calibration {statistics.fingerprint}" if isinstance(statistics, Calibration) else ""
        return f"{self._identity()} draw {draw}{calibrated} scale {scale:.9g}"

    def _identity(self) -> str:
        """Name and all options but the seed, which `draw_key` holds. Kept: a decode step has no time to write it."""
        known = self.__dict__.get("_kept_identity")
        if known is None:
            options = {name: getattr(self, name) for name in self.options() if name != "seed"}
            shown = (f"{name}={getattr(x, '__qualname__', x)}" for name, x in options.items())
            known = self.__dict__["_kept_identity"] = f"{self.name}({', '.join(shown)})"
        return str(known)

    def _spec(self, is_causal: bool) -> WindowedLinear:
        return WindowedLinear(self.feature_map, causal=is_causal, normalise=self.normalise)

    def _absorb(self, k: Tensor, v: Tensor, state: Any, call: Call) -> State:
        return windowed_linear.absorb(self._spec(False), call, k, v, self._before(k, v, state, call.scale))

    def _read(self, q: Tensor, state: Any, call: Call) -> Tensor:
        state = self._continued(state, self._origin(call.scale), q)
        return windowed_linear.read(self._spec(False), call, q, state)
