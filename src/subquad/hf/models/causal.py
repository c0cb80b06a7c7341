"""The causal language model: `nn.TransformerDecoder` with transformers' `generate`, on a cache of states."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from ... import checks
from ..cache import StateCache
from .configuration import SubquadConfig
from .stack_model import SubquadModel, SubquadPreTrainedModel, as_asked

__all__ = ["SubquadForCausalLM"]


def _check_prompt(prompt: Any, mask: Any) -> None:
    """Refuse what has no last token to go on from: an empty sequence, or one whose end is padding."""
    if not (isinstance(prompt, Tensor) and prompt.dim() == 2):
        return
    real = mask if isinstance(mask, Tensor) and mask.dim() == 2 else prompt.new_ones(prompt.shape)
    if prompt.shape[1] == 0 or not bool(real.any(-1).all()):
        raise ValueError(
            f"the prompt of at least one sequence is empty ({checks.describe_shape(prompt)}, padding not counted): "
            "give at least one token per sequence, for example a begin-of-text token"
        )
    if not bool(real[:, -1].all()):
        raise ValueError(
            "attention_mask hides the last token of at least one prompt, so the next one would follow padding; pad on "
            "the left, with tokenizer.padding_side = 'left'"
        )


def _within_segments(labels: Tensor, segment_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Labels (B, L) without those of tokens that do not follow a real token of the same segment."""
    follows = segment_ids[:, 1:] == segment_ids[:, :-1]
    if mask is not None:
        follows = follows & mask[:, :-1].bool()
    return labels.masked_fill(~F.pad(follows, (1, 0)).to(labels.device), -100)


class SubquadForCausalLM(SubquadPreTrainedModel, GenerationMixin):
    """Token ids (B, L) -> logits (B, L, vocab) of the next token; the config's kind is decoder.

    `generate` keeps one state per layer (`StateCache`), of a size that does not depend on the context where the
    mechanism's `constant_memory` is True. Mechanisms that cannot scan generate too, by running over the whole text at
    every step.

    >>> import torch
    >>> config = SubquadConfig(layers=2, heads=2, dim=16, vocab=256, mechanism="performer", seed=0)
    >>> model = SubquadForCausalLM(config).eval()
    >>> model.generate(torch.tensor([[72, 101]]), max_new_tokens=5, do_sample=False).shape
    torch.Size([1, 7])
    """

    def __init__(self, config: SubquadConfig) -> None:
        if config.kind != "decoder":
            raise ValueError(f"the config is of kind={config.kind!r}, SubquadForCausalLM needs kind='decoder'")
        super().__init__(config)
        self.model = SubquadModel(config, lm_head=True)
        self._finish()

    def get_output_embeddings(self) -> nn.Linear | None:
        """The output layer; None where it is the token embedding."""
        head: nn.Linear | None = self.model.stack.head
        return head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output layer."""
        self.model.stack.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        segment_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """input_ids (B, L) or inputs_embeds (B, L, dim) -> logits (B, L, vocab); see `SubquadModel` for the others.

        labels:         (B, L) ids, as input_ids: they are shifted here; -100 = no loss. With segment_ids nothing is
                        predicted across segments: the first label of each does not count. (Trainer's number of
                        targets has them in it unless they are -100.)
        logits_to_keep: only the last so many logits (0 = all), or those at these places
        """
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            segment_ids=segment_ids,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **rest,
        )
        hidden = out.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        hidden = hidden[:, kept] if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        logits = self.model.stack.logits(hidden)
        loss = None
        if labels is not None:
            if segment_ids is not None:
                labels = _within_segments(labels, segment_ids, attention_mask)
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab, num_items_in_batch=rest.get("num_items_in_batch")
            )
        made = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return as_asked(made, return_dict, self.config)

    def generate(self, inputs: Tensor | None = None, *rest: Any, **options: Any) -> Any:
        """transformers' `generate`; a prompt that is empty or padded on the right is refused before anything starts."""
        _check_prompt(options.get("input_ids") if inputs is None else inputs, options.get("attention_mask"))
        return super().generate(inputs, *rest, **options)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any
    ) -> None:
        """Begin generation with states in place of keys and values; called by `generate`."""
        mode = str(getattr(rest[0], "value", "")) if rest else ""
        assisted = "assisted" in mode or bool(getattr(generation_config, "is_assistant", False))
        implementation = generation_config.cache_implementation
        if implementation is not None and model_kwargs.get("past_key_values") is None:
            raise ValueError(
                f"cache_implementation={implementation!r} stores keys and values; these models store states, in a "
                "subquad.hf.StateCache. Leave it out"
            )
        if not self.model.is_recurrent:
            if assisted:
                raise ValueError(
                    "assisted and prompt-lookup decoding go on from a state, and the mechanism of this model has none; "
                    "use greedy decoding, sampling or beam search, or a mechanism of list_mechanisms(recurrent=True)"
                )
            generation_config.use_cache = False
            return
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache is not False:
            given = model_kwargs["past_key_values"] = StateCache(self.config.layers)
            if assisted:  # it takes back tokens that turn out wrong
                given.activate_past_recording()
            return
        if assisted and isinstance(given, StateCache):
            given.activate_past_recording()
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)  # type: ignore[misc]
