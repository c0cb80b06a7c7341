"""What a student learns from in distillation: the attention of its teacher, layer by layer, and the whole teacher.

What the teacher gave is kept between steps as far as memory allows (`teacher_cache.py`): it does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...features.precision import full_precision, widened
from ...mechanisms.softmax import Softmax
from ...nn.pooling import pool
from ..conversion.capturing import by_sequence, capture, run
from ..conversion.interface import mechanism_of
from ..conversion.layers import known_layers
from ..conversion.output_projections import output_weight
from .teacher_cache import TeacherCache
from .trainable import loss_between

__all__ = ["attention_loss", "model_loss", "output_loss"]


def _lesson(teacher: nn.Module, indices: Sequence[int], batch: Any) -> list[tuple[int, dict[str, Any], Tensor, int]]:
    """What the teacher's layers see and give: (layer, call, exact output, calls of that layer)."""
    found = []
    for sample in capture(teacher, [batch], layers=indices):
        for *tensors, mask in sample.calls():
            # What a half-precision model learns from is not rounded again.
            q, k, v = map(widened, tensors)
            call = sample.arguments(mask)
            with torch.no_grad():
                wanted = Softmax(q.shape[-1])(q, k, v, **call)
            found.append((sample.layer, {"q": q, "k": k, "v": v, **call}, wanted, len(sample)))
    return found


def attention_loss(teacher: nn.Module, student: nn.Module, batch: Any, index: int, kept: TeacherCache) -> Tensor:
    """Sum of the losses of all converted layers on the teacher's own tensors; `index` is the number of the batch."""
    layers = {layer.index: layer for layer in known_layers(student) if _learns(layer.module)}
    exact = {layer.index: layer for layer in known_layers(teacher)}
    total = torch.zeros(())
    for number, call, wanted, calls in kept.get(("attention", index), lambda: _lesson(teacher, list(layers), batch)):
        mechanism = mechanism_of(layers[number].module)
        assert mechanism is not None
        weight = output_weight(teacher, exact[number], call["q"].shape[1], call["v"].shape[-1])
        out = mechanism(**call)
        total = total.to(out.device) + loss_between(out, wanted, weight, call["query_mask"]) / calls
    return total


def _learns(module: nn.Module) -> bool:
    mechanism = mechanism_of(module)
    return mechanism is not None and any(True for _ in mechanism.parameters())


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """Logits, else the last hidden state (of a sentence encoder: its token embeddings), else the tensor itself."""
    out = run(model, batch)
    if isinstance(out, Tensor):
        return out
    for name in ("logits", "last_hidden_state", "token_embeddings"):
        found = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(f"the model returns a {type(out).__name__} without logits or last_hidden_state to compare")


def output_loss(student: Tensor, teacher: Tensor, mask: Tensor | None, *, logits: bool) -> Tensor:
    """KL(teacher || student) of logits, mean over real tokens; for hidden states the relative squared error, and that
    of their mean over the sequence, which is what sentence encoders use. In float32 or wider."""
    student, teacher = widened(student), widened(teacher)
    real = None if mask is None else mask.bool()
    with full_precision(student):
        if logits:
            loss = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
            return loss.mean() if real is None else loss[real].mean()
        if real is None:
            return (student - teacher).square().sum() / teacher.square().sum()
        tokens = (student - teacher)[real].square().sum() / teacher[real].square().sum()
        pooled, wanted = (pool(x, real, "mean") for x in (student, teacher))
        return tokens + (pooled - wanted).square().sum() / wanted.square().sum()


def model_loss(
    teacher: nn.Module,
    student: nn.Module,
    batch: Any,
    index: int,
    kept: TeacherCache,
    extra: Callable[..., Tensor] | None,
) -> Tensor:
    """`output_loss` of the whole models on one batch, or `extra(student's, teacher's, batch)`."""
    with torch.no_grad():
        wanted = kept.get(("model", index), lambda: _outputs(teacher, batch))
    found = _outputs(student, batch)
    if extra is not None:
        return extra(found, wanted, batch)
    (found, _), (wanted, mask) = (by_sequence(teacher, batch, x) for x in (found, wanted))
    config: Any = getattr(teacher, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return output_loss(found, wanted, mask, logits=wanted.shape[-1] == getattr(text, "vocab_size", None))
