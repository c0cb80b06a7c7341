"""What `local` and `hybrid` share: a window around each query, a few sinks, and a state that holds both.

A position is the rank of a token among the real tokens of its sequence: padding takes no place in the window, wherever
it stands, and the output of a masked token is 0 (`kernels/padding.py`).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .. import checks
from ..features.precision import compute_dtype
from ..kernels import windowed_linear
from ..kernels.operator import Call
from ..kernels.padding import Order, all_finite
from ..kernels.softmax import softmax_attention
from ..kernels.windowed_linear import WindowedLinear
from .windowed_linear import WindowedLinearMechanism

__all__ = ["Windowed", "exact_attention", "first_rows_everywhere"]


class Windowed(WindowedLinearMechanism):
    """Exact weights for the keys around a query and for the first ones; subclasses say what happens to the others.

    window: tokens on each side (causal: the last `window` tokens, besides the token itself)
    sinks:  the first tokens of each sequence, seen by all; `global_tokens` is accepted as another name of it
    """

    cross = False
    zero_at_padding = True
    aliases: ClassVar[dict[str, str]] = {"global_tokens": "sinks"}
    # What to use where queries and keys are different tokens.
    instead_of_cross: str

    def _set_window(self, window: int, sinks: int) -> None:
        checks.check_positive("window", window, least=0)
        checks.check_positive("sinks", sinks, least=0)
        self.window, self.sinks = window, sinks

    def _all_near(self, q: Tensor, v: Tensor, call: Call, is_causal: bool) -> bool:
        """Whether no key is far from any query, so that this is softmax attention and torch's own is the fastest."""
        most = self.window + 1 + self.sinks if is_causal else max(self.window + 1, self.sinks)
        # Torch's kernel multiplies hidden keys by 0, which a value that is not finite survives.
        return call.backend is None and call.chunk_size is None and 0 < q.shape[2] <= most and all_finite(v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call, *, is_causal: bool) -> Tensor:
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"{self.name} needs as many queries as keys, got {q.shape[2]} and {k.shape[2]}: its window stands "
                "around a query's own position, which cross attention does not have. "
                f"Use {self.instead_of_cross}"
            )
        if self._all_near(q, v, call, is_causal):
            return exact_attention(q, k, v, call, is_causal)
        return super()._attend(q, k, v, call, is_causal=is_causal)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, is_causal: bool) -> Tensor:
    """Softmax attention of real tokens among each other; with as many queries as keys, 0 for masked ones."""
    kind = compute_dtype(v)
    out = softmax_attention(q.to(kind), k.to(kind), v.to(kind), call, is_causal=is_causal).to(v.dtype)
    if call.key_mask is not None and q.shape[2] == k.shape[2]:
        out = out.masked_fill(~call.key_mask[:, None, :, None], 0.0)
    return out


def first_rows_everywhere(spec: WindowedLinear, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both sides, with queries of the sinks that see every key, as in Longformer."""
    order = Order(call.key_mask, k.shape[2], k.device)
    q, k, v = (order.front(x) for x in (q, k, v))
    call = call._replace(key_mask=None if call.key_mask is None else order.real)
    out = windowed_linear.attend(spec, call, q, k, v)
    rows = min(spec.sinks, q.shape[2])
    # More queries than one: with as many as keys there is nothing left of `out`, and masked rows are 0 either way.
    return order.back(torch.cat([exact_attention(q[:, :, :rows], k, v, call, False), out[:, :, rows:]], 2))
