"""What can be learned in a converted model: the parameters of its mechanisms, and numbers that calibration has set.

Centres, SDERF scales and projections are buffers, so that a converted model has exactly the parameters it had before.
For the time of a distillation they are parameters; afterwards they are buffers again, under the same names, so that
what was learned is saved and loaded like any calibration.

    centre      xbar, ybar of centred maps: any value leaves the kernel as it is and moves only the error
    scales      A <= 0 per direction of oprf and sderf
    projection  the directions themselves, where each head has its own: no longer random, a learned positive map
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...features.calibration import Calibration
from ...features.polynomial import PolynomialFeatures
from ...features.precision import full_precision, widened
from ...features.random import ExponentialFeatures, RandomFeatures
from ..conversion.interface import mechanism_of

__all__ = ["attention_tensors", "bounded", "gradients_off", "learning", "learns", "loss_between", "trainable_buffers"]


def _wanted(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(owner, name) of the buffers that `module` can learn."""
    if isinstance(module, ExponentialFeatures) and module.features in ("oprf", "sderf"):
        yield module, "a"
    if isinstance(module, RandomFeatures):
        matrix = module.projection._buffers.get("matrix")
        # One matrix for all heads is a draw; a matrix per head can be fitted to it.
        if matrix is not None and matrix.dim() == 3:
            yield module.projection, "matrix"
    if isinstance(module, RandomFeatures | PolynomialFeatures):
        centred = getattr(module, "center", False) or isinstance(module, PolynomialFeatures)
        if centred and isinstance(module.calibration, Calibration):
            yield module.calibration, "query_mean"
            yield module.calibration, "key_mean"


def learns(model: nn.Module) -> bool:
    """Whether the mechanisms of a converted model have anything to learn."""
    with trainable_buffers(model):
        return bool(attention_tensors(model))


@contextmanager
def trainable_buffers(model: nn.Module) -> Iterator[None]:
    """Inside, the buffers of all mechanisms in `model` that can be learned are parameters."""
    changed: list[tuple[nn.Module, str]] = []
    for attention in model.modules():
        mechanism = mechanism_of(attention)
        if mechanism is None:
            continue
        for module in mechanism.modules():
            for owner, name in _wanted(module):
                if name in owner._buffers:
                    tensor = owner._buffers.pop(name)
                    assert tensor is not None
                    owner.register_parameter(name, nn.Parameter(tensor.detach().clone()))
                    changed.append((owner, name))
    try:
        yield
    finally:
        for owner, name in changed:
            parameter = owner._parameters.pop(name)
            assert parameter is not None
            owner.register_buffer(name, parameter.detach().clone())
            if isinstance(owner, Calibration):
                owner.refresh()


@contextmanager
def learning(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, these want gradients, in float32 or wider: steps and Adam's moments would be lost in half precision.
    Afterwards they are frozen, in the dtype that they had."""
    before = [(parameter, parameter.dtype) for parameter in parameters]
    for parameter, _ in before:
        parameter.data = widened(parameter.data)
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, dtype in before:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)


def attention_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all mechanisms in `model`, by their full names."""
    found: dict[str, nn.Parameter] = {}
    for prefix, attention in model.named_modules():
        mechanism = mechanism_of(attention)
        if mechanism is not None:
            for name, parameter in mechanism.named_parameters():
                found[f"{prefix}.subquad.{name}" if prefix else f"subquad.{name}"] = parameter
    return found


def bounded(parameters: dict[str, nn.Parameter]) -> None:
    """Put scales back where the estimate exists, A <= 0, after a step."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name.endswith("feature_map.a"):
                parameter.clamp_(max=0.0)


def gradients_off(model: nn.Module) -> dict[str, bool]:
    """Freeze everything; returns what wanted gradients before."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return before


def loss_between(out: Tensor, exact: Tensor, weight: Tensor | None, mask: Tensor | None) -> Tensor:
    """|W (out - exact)|^2 / |W exact|^2 over real queries: out, exact (B, H, L, E), weight (H, out, E), mask (B, L).
    In float32 or wider."""
    out, size = widened(out), widened(exact)
    difference = out - size
    if mask is not None:
        real = mask[:, None, :, None]
        difference, size = difference * real, size * real
    with full_precision(out):
        if weight is not None:
            difference = torch.einsum("bhle,hoe->blo", difference, weight.to(difference.dtype))
            size = torch.einsum("bhle,hoe->blo", size, weight.to(size.dtype))
        return difference.square().sum() / size.square().sum().clamp(min=torch.finfo(size.dtype).tiny)
