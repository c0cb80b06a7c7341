"""The optimisers of a run by name: AdamW, Adam, RAdam, NAdam and SGD are torch's, Lion is here.

All of them use the settings' rate, betas and weight decay. `adam` and `sgd` add the decay to the gradient, as their
papers do; the others keep it apart (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .settings import Settings

__all__ = ["Lion", "make_optimizer"]


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).

        w <- w - lr (sign(beta1 m + (1 - beta1) g) + decay w),    m <- beta2 m + (1 - beta2) g

    Every entry moves by the rate, so it wants a tenth to a third of AdamW's rate.

    >>> weight = nn.Parameter(torch.tensor([1.0, -1.0]))
    >>> weight.grad = torch.tensor([0.3, -20.0])
    >>> Lion([weight], lr=0.1).step()
    >>> weight.data
    tensor([ 0.9000, -0.9000])
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = momentum.lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - second)
        return loss


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices only: shrinking a norm's scale or an embedding's row is no regularisation."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[parameter.dim() >= 2 and id(parameter) not in embeddings].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": params, "weight_decay": decays[kind]} for kind, params in groups.items() if params]


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimiser that `settings.optimizer` names; the loop sets its rate before every step."""
    groups, betas = _parameter_groups(model, settings.weight_decay or 0.0), (settings.beta1, settings.beta2)
    if settings.optimizer == "lion":
        return Lion(groups, betas=betas)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=settings.beta1)
    if settings.optimizer == "radam":
        return torch.optim.RAdam(groups, betas=betas, decoupled_weight_decay=True)
    if settings.optimizer == "nadam":
        return torch.optim.NAdam(groups, betas=betas, decoupled_weight_decay=True)
    return (torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW)(groups, betas=betas)
