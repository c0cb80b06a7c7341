"""What a conversion did and how far each layer is from exact attention on the calibration batches.

    error = |out - exact|^2 / |exact|^2    Frobenius norms over all real queries and heads of a layer

Beside it, on the same tensors: `uniform` attention, the mean of the visible values, and `window_only`, exact attention
inside the same window and sinks with nothing far away. A mechanism that does not beat both is not worth its cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...mechanisms import Mechanism, create
from ...mechanisms.softmax import Softmax
from ...plain_text import columns
from ...planning.baselines import uniform_attention
from .capturing import LayerSample
from .layers import AttentionLayer

if TYPE_CHECKING:
    from ..plan.automatic import Chosen

__all__ = ["ConversionReport", "Errors", "LayerReport", "in_brief", "total_tokens"]

# The window of the comparison for mechanisms that have none.
_WINDOW, _SINKS = 32, 4


@dataclass(frozen=True)
class LayerReport:
    """One attention layer: `mechanism` None where it was left exact, for `reason`; errors None where not measured."""

    layer: int
    name: str
    mechanism: dict[str, Any] | None
    reason: str = ""
    error: float | None = None
    uniform: float | None = None
    window_only: float | None = None


@dataclass(frozen=True)
class ConversionReport:
    """Per layer, what happened and how wrong it is; `str(report)` is a table, `as_dict()` plain data.

    >>> report = ConversionReport((LayerReport(0, "a", {"mechanism": "linear"}, error=0.5),))
    >>> report.converted, report.left_exact
    ([0], [])
    """

    layers: tuple[LayerReport, ...]
    calibration_batches: int = 0
    calibration_tokens: int = 0
    notes: tuple[str, ...] = field(default=())
    choice: Chosen | None = field(default=None, repr=False)

    @property
    def verdict(self) -> str:
        """One sentence on what the choice is worth; "" where the mechanism was named."""
        return "" if self.choice is None else self.choice.verdict

    @property
    def converted(self) -> list[int]:
        """Numbers of the converted layers."""
        return [layer.layer for layer in self.layers if layer.mechanism is not None]

    @property
    def left_exact(self) -> list[int]:
        """Numbers of the layers that are as they were."""
        return [layer.layer for layer in self.layers if layer.mechanism is None]

    @property
    def no_better_than_uniform(self) -> list[int]:
        """Numbers of the converted layers whose error is not below that of the mean of the values."""
        rows = ((layer.layer, layer.error, layer.uniform) for layer in self.layers if layer.mechanism is not None)
        return [number for number, error, uniform in rows if error and uniform is not None and error >= uniform]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [asdict(layer) for layer in self.layers]
        return {
            "layers": rows,
            "calibration_batches": self.calibration_batches,
            "calibration_tokens": self.calibration_tokens,
            "notes": list(self.notes),
            "choice": None if self.choice is None else self.choice.as_dict(),
            "converted": self.converted,
            "left_exact": self.left_exact,
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "name", "mechanism", "error", "uniform", "window only")]
        for layer in self.layers:
            what = f"exact: {layer.reason}" if layer.mechanism is None else in_brief(layer.mechanism)
            numbers = ("" if x is None else f"{x:.4f}" for x in (layer.error, layer.uniform, layer.window_only))
            rows.append((str(layer.layer), layer.name, what, *numbers))
        lines = columns(rows)
        lines.append(
            f"{len(self.converted)} of {len(self.layers)} attention layers converted"
            + (f"; errors on {self.calibration_tokens} tokens" if self.calibration_batches else "; errors not measured")
        )
        if self.no_better_than_uniform:
            which = ", ".join(map(str, self.no_better_than_uniform))
            lines.append(f"layers {which}: the error is not below that of uniform attention, the mean of the values")
        return "\n".join([*lines, *self.notes, *([] if self.choice is None else [str(self.choice)])])


def in_brief(config: dict[str, Any]) -> str:
    """A mechanism's config in a few words: its name and the options that say what it costs.

    >>> groups = [{"heads": [0, 2], "mechanism": "local", "window": 32}, {"heads": [1], "mechanism": "multipole"}]
    >>> in_brief({"mechanism": "head-groups", "groups": groups})
    'heads 0, 2: local window=32; 1: multipole'
    """
    if "groups" in config:
        named = (f"{', '.join(map(str, group['heads']))}: {in_brief(group)}" for group in config["groups"])
        return f"heads {'; '.join(named)}"
    options = ("features", "num_features", "window", "sinks", "clusters")
    shown = [str(config["mechanism"]), *(f"{name}={config[name]}" for name in options if config.get(name) is not None)]
    far = config.get("far")
    if isinstance(far, dict):
        shown.append(f"far={in_brief(far)}")
    return " ".join(shown)


class Errors:
    """Running sums of squared errors of one layer, batch by batch.

    >>> import subquad as sq
    >>> attn, layer = sq.create("linear", 8), AttentionLayer(0, "a", torch.nn.Identity(), 8, 2, 2, False, False)
    >>> q, k, v = torch.randn(3, 1, 2, 20, 8)
    >>> errors = Errors(layer, attn)
    >>> errors.add(LayerSample(0, "a", [q], [k], [v], [None], scale=8**-0.5))
    >>> sorted(errors.relative())
    ['error', 'uniform', 'window_only']
    """

    def __init__(self, layer: AttentionLayer, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.exact = Softmax(mechanism.head_dim)
        self.window: Mechanism | None = None
        if not layer.cross:
            window, sinks = getattr(mechanism, "window", None), getattr(mechanism, "sinks", None)
            self.window = create(
                "local",
                mechanism.head_dim,
                window=_WINDOW if window is None else window,
                sinks=_SINKS if sinks is None else sinks,
            )
        self.norm = 0.0
        self.squared: dict[str, float] = {}

    @torch.no_grad()
    def add(self, sample: LayerSample) -> None:
        """Add what the layer saw."""
        for q, k, v, key_mask in sample.calls():
            call, own = sample.arguments(key_mask), sample.query_mask(key_mask)
            exact = self.exact(q, k, v, **call)
            outs = {
                "error": self.mechanism(q, k, v, **call),
                "uniform": uniform_attention(q, k, v, is_causal=sample.is_causal, key_mask=key_mask),
            }
            if self.window is not None:
                outs["window_only"] = self.window(q, k, v, **call)
            real = torch.ones((), device=v.device) if own is None else own[:, None, :, None].to(v.device)
            self.norm += float((exact.double() * real).square().sum())
            for name, out in outs.items():
                difference = (out.double() - exact.double()) * real
                self.squared[name] = self.squared.get(name, 0.0) + float(difference.square().sum())

    def relative(self) -> dict[str, float]:
        """Relative squared errors by name."""
        return {name: value / max(self.norm, 1e-300) for name, value in self.squared.items()}


def total_tokens(samples: Iterable[LayerSample]) -> int:
    """Real tokens of the sample that saw most of them."""
    return max((sample.tokens for sample in samples), default=0)
