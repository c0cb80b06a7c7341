"""`torch.nn.MultiheadAttention` with a mechanism inside, and with it `nn.TransformerEncoder` and `TransformerDecoder`.

A converted module keeps its parameters and gets another class, whose forward projects as before and attends with the
mechanism. torch's encoder layers have fused paths that never call their attention module: one is taken only if no
module has hooks, so a converted module has one; the other packs padded batches into nested tensors before any layer
sees them, so it is switched off in the encoder above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...mechanisms import Mechanism
from .attending import attend_seen
from .interface import Seen, mechanism_of, unhook
from .masks import Visible, visible_keys

__all__ = ["ConvertedMultiheadAttention", "convert_torch", "revert_torch", "watched"]

# The encoder's own setting, kept while it is switched off.
_NESTED = "subquad_use_nested_tensor"


def _heads(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(B, L, embed_dim) -> (B, H, L, D)."""
    split: Tensor = x.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
    return split


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """q, k, v as heads, from batch-first inputs."""
    if module._qkv_same_embed_dim:
        assert module.in_proj_weight is not None
        weights: tuple[Any, ...] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    inputs = (query, key, value)
    return tuple(_heads(module, F.linear(x, w, b)) for x, w, b in zip(inputs, weights, biases, strict=True))


def _batched(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _shown(mask: Tensor) -> Tensor:
    """torch's masks (True or -inf = hidden) as ours (True = visible)."""
    return ~mask if mask.dtype == torch.bool else mask


def _visible(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, where: str
) -> Visible:
    """What this call may see, or a refusal that names the mask."""
    length, keys = q.shape[2], k.shape[2]
    visible = Visible(False, None)
    if mask is not None:
        shown = _shown(mask)
        shown = shown[None, None] if shown.dim() == 2 else shown.unflatten(0, (-1, module.num_heads))
        visible = visible_keys(shown, length, keys, False, where)
    key_mask = None if visible.key_mask is None else visible.key_mask.expand(q.shape[0], keys)
    if padding is not None:
        padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
        real = visible_keys(_shown(padding)[:, None, None, :], 1, keys, False, where).key_mask
        if real is not None:
            key_mask = real if key_mask is None else key_mask & real
    return visible._replace(key_mask=key_mask)


def _seen(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], padding: Any, mask: Any, where: str) -> Seen:
    q, k, v = _projected(module, *(_batched(module, x) for x in inputs))
    causal, key_mask, segments = _visible(module, q, k, padding, mask, where)
    return Seen(q, k, v, key_mask, causal, module.head_dim**-0.5, segments)


class ConvertedMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` whose child `subquad` attends. Made by `convert`, never constructed.

    Weights are never formed, so the second result is None whatever `need_weights` says; dropout of weights is not
    applied.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Layouts and masks as in torch; `attn_mask` may be causal or hide keys from all queries, nothing else."""
        mechanism = mechanism_of(self)
        assert mechanism is not None
        if query.is_nested:
            raise ValueError(
                "a converted MultiheadAttention takes padded tensors with key_padding_mask, got nested ones"
            )
        where = f"a converted MultiheadAttention ({mechanism.name})"
        if is_causal and attn_mask is None:
            raise ValueError(
                f"{where}: is_causal=True is a hint about attn_mask; pass attn_mask as well, as torch asks"
            )
        if not mechanism.cross and query is not key and (key is value or not self._qkv_same_embed_dim):
            raise ValueError(
                f"{where}: query is another tensor than key and value, which is cross attention, and {mechanism.name} "
                "goes by the places of one sequence. Pass the same tensor three times, or leave this layer exact"
            )
        seen = _seen(self, (query, key, value), key_padding_mask, attn_mask, where)
        out = attend_seen(mechanism, seen, query is not key)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        if query.dim() == 2:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None


def _stand_in(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A hook that does nothing: while there is one, torch's fused encoder layer is not used."""


def convert_torch(model: nn.Module, module: nn.MultiheadAttention, mechanism: Mechanism) -> None:
    """Give `module`, a part of `model`, a mechanism. With an exact one it goes on as it is."""
    module.add_module("subquad", mechanism)
    if mechanism.exact:
        return
    module.__class__ = ConvertedMultiheadAttention
    module.register_forward_pre_hook(_stand_in)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(module is part for part in encoder.modules()):
            if not hasattr(encoder, _NESTED):
                setattr(encoder, _NESTED, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False


def revert_torch(model: nn.Module, module: nn.MultiheadAttention) -> None:
    """Undo `convert_torch`."""
    del module._modules["subquad"]
    if not isinstance(module, ConvertedMultiheadAttention):
        return
    module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
    unhook(module, _stand_in)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and hasattr(encoder, _NESTED):
            encoder.use_nested_tensor = getattr(encoder, _NESTED)
            delattr(encoder, _NESTED)


@contextmanager
def watched(model: nn.Module, recorder: Callable[[nn.Module, Seen], None]) -> Iterator[None]:
    """Show every call of an `nn.MultiheadAttention` of `model` to `recorder` first, with torch's fused paths off."""

    def report(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        names = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs = (call["query"], call["key"], call["value"])
        where = "a MultiheadAttention"
        recorder(module, _seen(module, inputs, call.get("key_padding_mask"), call.get("attn_mask"), where))

    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    handles = [module.register_forward_pre_hook(report, with_kwargs=True) for module in found]
    fused = torch.backends.mha.get_fastpath_enabled()
    if found:
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for handle in handles:
            handle.remove()
