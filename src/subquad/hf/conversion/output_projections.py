"""Where the linear maps of an attention layer are: those that make q, k and v, and the one that mixes the heads.

An error of a head counts as much as the output projection lets through, so plans and distillation weigh it by that:

    |W_o (out - exact)|^2 = sum over head pairs of (out_h - exact_h)^T W_h^T W_g (out_g - exact_g)
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .layers import AttentionLayer

__all__ = ["output_projection", "output_weight", "projection_names"]

# Names inside the attention module, then below the module that holds it (BERT puts its output beside the attention).
_INSIDE = ("o_proj", "out_proj", "c_proj", "out_lin", "dense", "o", "wo", "proj", "out")
_BESIDE = ("output.dense", "dense")


def _linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _below(module: nn.Module, path: str) -> nn.Module | None:
    for part in path.split("."):
        found = module._modules.get(part)
        if found is None:
            return None
        module = found
    return module


def output_projection(model: nn.Module, layer: AttentionLayer) -> tuple[str, nn.Module] | None:
    """Name and module of the linear map after the heads of `layer`, None where none is known.

    >>> from subquad.hf.conversion.layers import find_layers
    >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
    >>> output_projection(model, find_layers(model)[0])[0]
    'layers.0.self_attn.out_proj'
    """
    for name in _INSIDE:
        found = _below(layer.module, name)
        if found is not None and _linear(found):
            return f"{layer.name}.{name}" if layer.name else name, found
    parent_name, _, _ = layer.name.rpartition(".")
    parent = model.get_submodule(parent_name) if layer.name else None
    for name in _BESIDE if parent is not None else ():
        assert parent is not None
        found = _below(parent, name)
        if found is not None and _linear(found):
            return f"{parent_name}.{name}", found
    return None


def output_weight(model: nn.Module, layer: AttentionLayer, heads: int, width: int) -> Tensor | None:
    """W_o by heads, (H, out, E), detached; None where it is not known or does not fit heads of this width."""
    found = output_projection(model, layer)
    if found is None:
        return None
    parameter = found[1].weight
    assert isinstance(parameter, Tensor)
    weight = parameter.detach()
    weight = weight.mT if isinstance(found[1], Conv1D) else weight
    if weight.shape[-1] != heads * width:
        return None
    return weight.reshape(-1, heads, width).transpose(0, 1)


def projection_names(model: nn.Module, layers: list[AttentionLayer]) -> list[str]:
    """Full names of the linear maps of these layers: q, k, v and the output.

    >>> from subquad.hf.conversion.layers import find_layers
    >>> from transformers import BertConfig, BertModel
    >>> small = BertConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = BertModel(small)
    >>> [name.split("attention.")[1] for name in projection_names(model, find_layers(model))]
    ['self.query', 'self.key', 'self.value', 'output.dense']
    """
    names: dict[str, None] = {}
    for layer in layers:
        for name, module in layer.module.named_children():
            if _linear(module):
                names[f"{layer.name}.{name}" if layer.name else name] = None
        found = output_projection(model, layer)
        if found is not None:
            names[found[0]] = None
    return list(names)
