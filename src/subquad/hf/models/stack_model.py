"""The base of all model classes here: a stack of `subquad.nn` behind transformers' interface.

There is no second implementation of anything: blocks, positions, masks and `scan` are those of `nn.TransformerEncoder`
and `nn.TransformerDecoder`; this file turns `attention_mask` and `past_key_values` into `key_mask` and states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from ... import checks
from ...features.precision import Float32Buffers
from ...kernels.checkpointing import tracing
from ...nn import TransformerDecoder, TransformerEncoder
from ...nn.attention import calibrating, check_sequence, reset_linear
from ...nn.layer_mechanisms import draw_seed
from ...nn.packing import run_packed
from ...nn.stack import Stack
from ..cache import StateCache
from .configuration import SubquadConfig
from .loading import load_strictly, settle, shared_names

__all__ = ["Head", "SubquadModel", "SubquadPreTrainedModel", "as_asked", "check_rest"]

Self = TypeVar("Self", bound="SubquadPreTrainedModel")

# Arguments that transformers passes to every model and that change nothing here.
_IGNORED = ("num_items_in_batch", "cache_position")


def check_rest(rest: dict[str, Any]) -> None:
    """Refuse arguments that would be ignored, except those that transformers passes to every model."""
    for name, value in rest.items():
        if value is None or name in _IGNORED or (name == "output_attentions" and value is False):
            continue
        if name == "output_attentions":
            raise ValueError("output_attentions=True is not possible: mechanisms need not form the (L, S) weights")
        if name == "position_ids":
            raise ValueError(
                "position_ids is not taken: a position is the number of real tokens before a token, which follows "
                "from attention_mask and past_key_values"
            )
        if name == "token_type_ids" and not bool(torch.as_tensor(value).any()):
            continue
        raise TypeError(f"forward() got {name}=, which these models do not have; leave it out")


def as_asked(out: Any, return_dict: bool | None, config: Any) -> Any:
    """An output as a tuple where the call, or else the config, says return_dict=False."""
    asked = config.return_dict if return_dict is None else return_dict
    return out.to_tuple() if asked is False else out


class Head(nn.Linear):
    """A linear layer on top of the stack, Xavier-initialised; also when the checkpoint has none."""

    def reset_parameters(self) -> None:
        """Xavier-uniform weights, zero bias."""
        reset_linear(self)


class SubquadPreTrainedModel(PreTrainedModel):
    """What all model classes share: loading, redrawing, calibration, checkpointing."""

    config_class = SubquadConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012

    def _finish(self) -> None:
        """At the end of every constructor: names that are shared or stay float32, then transformers' own steps."""
        settle(self)  # a model can be built under another default dtype
        self._tied_weights_keys = shared_names(self)
        precise = {
            f"^{path}.{name}$".replace(".", r"\.")
            for path, module in self.named_modules()
            if isinstance(module, Float32Buffers)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        self._keep_in_fp32_modules_strict = precise
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        # The stack initialised itself; what a checkpoint can lack are heads.
        if isinstance(module, Head) or module is self._stack().__dict__["_modules"].get("head"):
            reset_linear(module)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """{name: name it shares its tensor with}, as it is, whatever the config says about word embeddings."""
        return shared_names(self)

    def _stack(self) -> Any:
        return self.base_model.stack

    @classmethod
    def from_pretrained(cls: type[Self], pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        """As transformers', from safetensors only, and strict: a key that is missing, unknown or of another shape is an
        error that names it, and so is a corrupt file. A head that the checkpoint's model class did not have is new.
        """
        load = super().from_pretrained
        return load_strictly(cls, load, pretrained_model_name_or_path, *inputs, **options)

    @classmethod
    def from_nn(cls: type[Self], model: Stack, **fields: Any) -> Self:
        """This class around a copy of an `nn.TransformerDecoder` or `nn.TransformerEncoder`, in its mode and dtype.

        >>> import subquad as sq
        >>> inner = sq.nn.TransformerDecoder(layers=1, heads=2, dim=8, vocab=5, mechanism="linear").eval()
        >>> outer, tokens = sq.hf.SubquadForCausalLM.from_nn(inner), torch.tensor([[1, 2, 3]])
        >>> torch.equal(outer(tokens).logits, inner(tokens))
        True
        """
        made: Any = cls(SubquadConfig.from_architecture(model.config, **fields))
        weights = model.state_dict()
        if "head.weight" not in made._stack().state_dict():
            weights.pop("head.weight", None)
        made = made.to(next(model.parameters()).dtype)
        made._stack().load_state_dict(weights)
        made.train(model.training)
        wrapped: Self = made
        return wrapped

    # -- mechanisms -------------------------------------------------------------------------------------------------

    def redraw(self) -> None:
        """Resample what is random in every mechanism, deterministically from its seed and its draw counter."""
        self._stack().redraw()

    def calibrate(self, *inputs: Any, **batch: Any) -> None:
        """Run a batch and add each layer's queries and keys to its mechanism's statistics; see `nn`'s `calibrate`."""
        with calibrating(self):
            self.base_model(*inputs, **{"use_cache": False, **batch})

    # -- embeddings -------------------------------------------------------------------------------------------------

    def get_input_embeddings(self) -> Any:
        """The token embedding; None for models of frames or floats."""
        return self._stack().embedding

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the token embedding, also by one of another size."""
        stack = self._stack()
        stack.embedding, stack.config = value, replace(stack.config, vocab=value.num_embeddings)
        self.config.vocab = value.num_embeddings


class SubquadModel(SubquadPreTrainedModel):
    """Token ids, embeddings or frames -> hidden states (B, L, dim) after the final norm; causal if kind is decoder.

    >>> config = SubquadConfig(layers=2, heads=2, dim=16, vocab=256, mechanism="linear", kind="encoder")
    >>> SubquadModel(config)(torch.randint(0, 256, (2, 10))).last_hidden_state.shape
    torch.Size([2, 10, 16])
    """

    def __init__(self, config: SubquadConfig, *, lm_head: bool = False) -> None:
        if config.seed is None:
            config.seed = draw_seed()  # so that what is saved says what was built
        super().__init__(config)
        kind = TransformerDecoder if config.kind == "decoder" else TransformerEncoder
        self.stack: Any = kind.from_config(config.architecture())
        if not lm_head and config.kind == "decoder":
            self.stack.head = None
        self.frames = None
        if config.frame_width is not None:
            self.frames = Head(config.frame_width * config.frame_stack, config.dim)
        self._finish()

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether training keeps only the input of each block; set by `gradient_checkpointing_enable()`."""
        return bool(self.stack.checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.stack.checkpoint_activations(enabled)

    @property
    def is_recurrent(self) -> bool:
        """Whether every layer's mechanism can scan, so that `generate` can use a cache."""
        return self.config.kind == "decoder" and all(m.recurrent for m in self.stack.mechanisms())

    # -- inputs -----------------------------------------------------------------------------------------------------

    def frame_mask(self, mask: Tensor) -> Tensor:
        """The mask (B, T) of frames as the mask (B, ceil(T / frame_stack)) of tokens: real if any of its frames is."""
        stack = self.config.frame_stack
        if stack == 1:
            return mask
        return F.pad(mask, (0, -mask.shape[1] % stack)).reshape(mask.shape[0], -1, stack).any(-1)

    def _joined_frames(self, frames: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """frames (B, T, F) -> tokens (B, ceil(T / n), dim), and the mask of these."""
        assert self.frames is not None
        check_sequence("input_features", frames, self.config.frame_width)
        if mask is not None:
            frames = frames.masked_fill(~mask.unsqueeze(-1), 0.0)
        frames = F.pad(frames, (0, 0, 0, -frames.shape[1] % self.config.frame_stack))
        joined = frames.reshape(frames.shape[0], -1, self.frames.in_features)
        return self.frames(joined.to(self.frames.weight.dtype)), None if mask is None else self.frame_mask(mask)

    def _input(self, input_ids: Any, inputs_embeds: Any, input_features: Any) -> tuple[str, Tensor]:
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "input_features": input_features}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"give exactly one of input_ids, inputs_embeds and input_features, got {names or 'none'}")
        name = names[0]
        if (name == "input_features") != (self.frames is not None):
            wanted = "input_features (B, T, frame_width)" if self.frames is not None else "input_ids or inputs_embeds"
            raise ValueError(f"got {name}=, but a model with frame_width={self.config.frame_width} takes {wanted}")
        if name == "input_ids":
            self.stack.check_input(name, input_ids)
        elif name == "inputs_embeds":
            check_sequence(name, inputs_embeds, self.config.dim)
        return name, given[name]

    def _key_mask(self, attention_mask: Any, batch: int, length: int, past: int, device: torch.device) -> Tensor | None:
        """(B, L) bool of the new tokens, from transformers' mask (B, past + L) or (B, L); None if nothing is masked."""
        if attention_mask is None:
            return None
        if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask must have shape (batch, length), got {checks.describe_shape(attention_mask)}: "
                "mechanisms need not form the (L, S) scores that another mask would be for"
            )
        if tuple(attention_mask.shape) not in ((batch, past + length), (batch, length)):
            raise ValueError(
                f"attention_mask must have shape (batch, past + length) = ({batch}, {past + length}), got "
                f"{checks.describe_shape(attention_mask)}"
            )
        mask = attention_mask[:, -length:].to(device=device, dtype=torch.bool)
        if not tracing(mask) and device.type == "cpu" and bool(mask.all()):
            return None
        return mask

    def _cache(self, past_key_values: Any, use_cache: bool | None) -> StateCache | None:
        if use_cache is None:  # what the config says, for calls that can have one
            use_cache = self.config.use_cache and self.is_recurrent and not self.training
        if past_key_values is None and not use_cache:
            return None
        if not self.is_recurrent:
            names = sorted({m.name for m in self.stack.mechanisms() if not m.recurrent})
            reason = f"{names} have no recurrent form" if names else "an encoder has no next token"
            raise ValueError(f"use_cache=True is not possible: {reason}; call with use_cache=False")
        if past_key_values is None:
            return StateCache(self.config.layers)
        if not isinstance(past_key_values, StateCache):
            raise TypeError(
                f"past_key_values must be a subquad.hf.StateCache, which holds states, got "
                f"{type(past_key_values).__name__}, which holds keys; leave it out to begin a new one"
            )
        return past_key_values

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """One of input_ids (B, L), inputs_embeds (B, L, dim), input_features (B, T, frame_width) -> (B, L, dim).

        attention_mask:  (B, L), or (B, past + L) with a cache; 0 = padding, anywhere (of frames: at the end)
        past_key_values: a `StateCache` to continue; it is changed in place. use_cache=True begins one; None: as the
                         config says, in evaluation mode
        segment_ids:     (B, L) integers: several sequences in a row, each as if it were alone
        """
        check_rest(rest)
        name, x = self._input(input_ids, inputs_embeds, input_features)
        cache = self._cache(past_key_values, False if use_cache is None and segment_ids is not None else use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        mask = self._key_mask(attention_mask, x.shape[0], x.shape[1], past, x.device)
        if name == "input_features":
            x, mask = self._joined_frames(x, mask)
        is_causal = self.config.kind == "decoder"
        recording = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if segment_ids is not None and (cache is not None or recording):
            raise ValueError("segment_ids cannot be combined with a cache or output_hidden_states")
        kept: list[Tensor] | None = [] if recording else None
        if segment_ids is not None:
            hidden = run_packed(
                lambda x, mask: self.stack.hidden(x, is_causal=is_causal, key_mask=mask), x, segment_ids, mask
            )
        elif cache is None:
            hidden = self.stack.hidden(x, is_causal=is_causal, key_mask=mask, between=kept)
        else:
            before = cache.model_state or cache.recording(self.stack.empty_states(x.shape[0], x.device))
            hidden, states = self.stack.scan_hidden(x, before, key_mask=mask, start=None, between=kept)
            cache.store(states, x.shape[1])
        out = BaseModelOutputWithPast(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            past_key_values=cache,
            hidden_states=None if kept is None else (*kept[:-1], hidden),  # type: ignore[arg-type]
        )
        return as_asked(out, return_dict, self.config)
