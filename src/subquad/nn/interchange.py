"""Taking the place of `torch.nn.TransformerEncoder`: its weights, and its way of being called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import checks
from .config import MechanismChoice
from .models import TransformerEncoder

__all__ = ["TorchEncoderCall", "from_torch"]


def _activation(layer: nn.TransformerEncoderLayer) -> str:
    function: Any = layer.activation
    if isinstance(function, nn.GELU):
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if function is F.gelu:
        return "gelu"
    if function in (F.relu, torch.relu) or isinstance(function, nn.ReLU):
        return "relu"
    raise ValueError(f"the layer's activation is {function!r}; only relu and gelu have a place in these blocks")


def _layers(module: object) -> tuple[list[nn.TransformerEncoderLayer], nn.Module | None]:
    if isinstance(module, nn.TransformerEncoderLayer):
        return [module], None
    if isinstance(module, nn.TransformerEncoder):
        found = list(module.layers)
        if all(isinstance(layer, nn.TransformerEncoderLayer) for layer in found) and found:
            return found, module.norm
        raise TypeError("every layer of the TransformerEncoder must be a torch.nn.TransformerEncoderLayer")
    raise TypeError(
        f"module must be a torch.nn.TransformerEncoder or TransformerEncoderLayer, got {type(module).__name__}"
    )


def _copy(target: nn.Module | None, weight: Tensor | None, bias: Tensor | None) -> None:
    """Into a linear map or a norm; a bias that torch's module does not have is 0."""
    if target is None or weight is None:  # keys that are made from queries; a norm without weights, which begins as one
        return
    with torch.no_grad():
        target.weight.requires_grad_(weight.requires_grad).copy_(weight)  # type: ignore[operator]
        if target.bias is not None:
            target.bias.requires_grad_(weight.requires_grad if bias is None else bias.requires_grad)
            target.bias.zero_() if bias is None else target.bias.copy_(bias)  # type: ignore[operator]


def _refuse_unlike(layers: list[nn.TransformerEncoderLayer]) -> None:
    """One config describes all layers: they may differ in their weights alone."""

    def facts(layer: nn.TransformerEncoderLayer) -> dict[str, Any]:
        return {
            "heads": layer.self_attn.num_heads, "dim": layer.self_attn.embed_dim,
            "hidden": layer.linear1.out_features, "norm_first": layer.norm_first, "activation": _activation(layer),
            "norm1.eps": layer.norm1.eps, "norm2.eps": layer.norm2.eps, "dropout": layer.dropout1.p,
            "bias": layer.linear1.bias is not None,
        }  # fmt: skip

    first = facts(layers[0])
    if first["norm1.eps"] != first["norm2.eps"]:
        raise ValueError(
            f"layer 0 has two eps, {first['norm1.eps']:g} and {first['norm2.eps']:g}; blocks here have one"
        )
    for number, layer in enumerate(layers):
        for name, value in facts(layer).items():
            if value != first[name]:
                raise ValueError(
                    f"layer {number} has {name}={value!r}, layer 0 has {first[name]!r}: the layers of one model are "
                    "alike here but for their weights; convert the module itself, subquad.hf.convert"
                )


def from_torch(
    module: nn.TransformerEncoder | nn.TransformerEncoderLayer, mechanism: MechanismChoice = "softmax", **options: Any
) -> TransformerEncoder:
    """A `TransformerEncoder` with the weights of torch's, and any mechanism in it; 'softmax' gives equal outputs.

    In training it drops out of what a block adds, as torch's does, but neither attention weights nor hidden units of
    the feed-forward part. Parameters that want no gradient in torch's want none here.

    The result takes (B, L, dim) and `key_mask` (True = real) whatever `batch_first` was; `TorchEncoderCall.from_torch`
    keeps torch's way of being called. `options` are fields of `ModelConfig` that the weights leave open (seed ...).

    >>> import subquad as sq
    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    >>> theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> ours, x = sq.nn.from_torch(theirs).eval(), torch.randn(2, 7, 16)
    >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
    True
    """
    layers, final = _layers(module)
    first = layers[0]
    attention = first.self_attn
    if attention.in_proj_weight is None or attention.bias_k is not None or attention.add_zero_attn:
        raise ValueError("self_attn must have one width for q, k and v, no add_bias_kv and no add_zero_attn")
    if final is not None and not isinstance(final, nn.LayerNorm):
        raise ValueError(f"the final norm is a {type(final).__name__}; only LayerNorm has a place here")
    _refuse_unlike(layers)
    has_bias = first.linear1.bias is not None
    described: dict[str, Any] = {
        "hidden": first.linear1.out_features,
        "norm": "pre" if first.norm_first else "post",
        "norm_eps": first.norm1.eps,
        "final_norm": final is not None,
        "final_norm_eps": None if final is None else final.eps,
        "activation": _activation(first),
        "positions": "none",
        "bias": has_bias,
    }
    fixed = sorted(set(options) & set(described) - {"positions"})
    if fixed:
        raise ValueError(f"the options {fixed} follow from the module given and cannot be chosen; leave them out")
    described = {"dropout": first.dropout1.p, **described, **options}
    made = TransformerEncoder(len(layers), attention.num_heads, attention.embed_dim, mechanism, **described)
    # Before the weights come in: the default dtype may be too narrow for them.
    made.to(device=first.linear1.weight.device, dtype=first.linear1.weight.dtype)
    for block, layer in zip(made.blocks, layers, strict=True):
        own: Any = block
        weights = layer.self_attn.in_proj_weight.chunk(3)
        has = layer.self_attn.in_proj_bias
        biases = (None,) * 3 if has is None else has.chunk(3)
        for target, weight, bias in zip(
            (own.attention.q, own.attention.k, own.attention.v), weights, biases, strict=True
        ):
            _copy(target, weight, bias)
        for target, source in (
            (own.attention.out, layer.self_attn.out_proj),
            (own.feed.up, layer.linear1),
            (own.feed.down, layer.linear2),
            (own.attention_norm, layer.norm1),
            (own.feed_norm, layer.norm2),
        ):
            _copy(target, source.weight, source.bias)
    if final is not None:
        _copy(made.norm, final.weight, final.bias)
    return made.train(module.training)


class TorchEncoderCall(nn.Module):
    """A `TransformerEncoder` that is called as `torch.nn.TransformerEncoder` is.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32)
    >>> theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> ours = TorchEncoderCall.from_torch(theirs, "softmax")
    >>> x, padding = torch.randn(7, 2, 16), torch.arange(7) >= torch.tensor([[7], [5]])
    >>> same = torch.isclose(ours(x, src_key_padding_mask=padding), theirs(x, src_key_padding_mask=padding), atol=1e-5)
    >>> bool(same[:5].all())
    True
    """

    def __init__(self, encoder: TransformerEncoder, *, batch_first: bool = False) -> None:
        super().__init__()
        self.encoder, self.batch_first = encoder, batch_first

    @classmethod
    def from_torch(
        cls,
        module: nn.TransformerEncoder | nn.TransformerEncoderLayer,
        mechanism: MechanismChoice = "softmax",
        **options: Any,
    ) -> TorchEncoderCall:
        """A `TorchEncoderCall` with the weights of `module`, to use in its place."""
        encoder = from_torch(module, mechanism, **options)
        return cls(encoder, batch_first=_layers(module)[0][0].self_attn.batch_first).train(module.training)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
        *,
        src_mask: Tensor | None = None,
    ) -> Tensor:
        """src (L, B, dim), or (B, L, dim) with batch_first; padding masks as torch has them: True = padding.

        `mask` (`src_mask` in a layer's place) may be the causal one; any other is refused.
        """
        if not isinstance(src, Tensor) or src.dim() != 3:
            raise ValueError(
                f"src must have three dimensions, batch and length among them, got {checks.describe_shape(src)}"
            )
        x = src if self.batch_first else src.transpose(0, 1)
        causal = _is_causal(src_mask if mask is None else mask, is_causal, x.shape[1])
        real = None
        if src_key_padding_mask is not None:
            real = ~_hidden("src_key_padding_mask", src_key_padding_mask)
        out: Tensor = self.encoder(x, is_causal=causal, key_mask=real)
        return out if self.batch_first else out.transpose(0, 1)


def _hidden(argument: str, mask: Tensor) -> Tensor:
    """True where a mask of torch's modules hides: a bool one says so, a float one is added to the scores."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= -1e4
    if not mask.is_floating_point() or not bool((hidden | (mask == 0)).all()):
        raise ValueError(
            f"{argument} must be bool with True for hidden tokens, or float with 0 for real and -inf for hidden ones; "
            f"got {mask.dtype} with other values, and nothing is added to single scores here"
        )
    return hidden


def _is_causal(mask: Tensor | None, is_causal: bool | None, length: int) -> bool:
    if mask is None or is_causal:
        return bool(is_causal)
    hidden = _hidden("mask", mask)
    future = torch.ones(length, length, dtype=torch.bool, device=mask.device).triu(1)
    if hidden.shape != future.shape or not torch.equal(hidden, future):
        raise ValueError(
            "mask is not supported unless it is the causal one: mechanisms need not form the (L, L) score matrix. Use "
            "is_causal=True for a causal mask and src_key_padding_mask for padding"
        )
    return True
