"""What a stack is used for besides generating: masked language models, classification of sequences and tokens, CTC."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import (
    CausalLMOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from ... import checks
from ...nn.pooling import pool
from .configuration import SubquadConfig
from .stack_model import Head, SubquadModel, SubquadPreTrainedModel, as_asked

__all__ = [
    "SubquadForCTC",
    "SubquadForMaskedLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
]


class SubquadForMaskedLM(SubquadPreTrainedModel):
    """Token ids (B, L) -> logits (B, L, vocab) of the tokens themselves; the config's kind is encoder.

    >>> config = SubquadConfig(kind="encoder", layers=1, heads=2, dim=16, vocab=257, mechanism="linear")
    >>> SubquadForMaskedLM(config)(torch.randint(0, 256, (2, 9))).logits.shape
    torch.Size([2, 9, 257])
    """

    def __init__(self, config: SubquadConfig) -> None:
        if config.kind != "encoder" or config.vocab is None:
            raise ValueError(
                f"SubquadForMaskedLM needs a config of kind='encoder' with a vocab, got kind={config.kind!r}, "
                f"vocab={config.vocab!r}"
            )
        super().__init__(config)
        self.model = SubquadModel(config)
        self.lm_head = Head(config.dim, config.vocab)
        self._finish()

    def get_output_embeddings(self) -> nn.Linear:
        """The output layer."""
        head: nn.Linear = self.lm_head
        return head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the output layer."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """labels (B, L): the ids that were there before masking; -100 = no loss."""
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **rest,
        )
        logits = self.lm_head(out.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab, num_items_in_batch=rest.get("num_items_in_batch")
            )
        made = MaskedLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return as_asked(made, return_dict, self.config)


class _Classifier(SubquadPreTrainedModel):
    """A stack, dropout, and a linear layer to as many labels as the config has."""

    def __init__(self, config: SubquadConfig) -> None:
        super().__init__(config)
        self.num_labels = config.labels
        self.model = SubquadModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = Head(config.dim, config.labels)
        self._finish()


class SubquadForSequenceClassification(_Classifier):
    """Token ids (B, L) or frames (B, T, frame_width) -> logits (B, num_labels); num_labels = 1 is a regression.

    >>> config = SubquadConfig(kind="encoder", layers=1, heads=2, dim=16, vocab=256, mechanism="linear", num_labels=3)
    >>> SubquadForSequenceClassification(config)(torch.randint(0, 256, (2, 9))).logits.shape
    torch.Size([2, 3])
    """

    # The loss is a mean over sequences: Trainer must divide it by the number of batches that it accumulates.
    accepts_loss_kwargs = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_features: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """labels (B,) ids, (B,) or (B, num_labels) floats for regression, (B, num_labels) 0/1 for several at once."""
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            input_features=input_features,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **rest,
        )
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None and input_features is not None:
            mask = self.model.frame_mask(mask)
        how = self.config.pooling or ("last" if self.config.kind == "decoder" else "mean")
        logits = self.classifier(self.dropout(pool(out.last_hidden_state, mask, how)))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        made = SequenceClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return as_asked(made, return_dict, self.config)


class SubquadForTokenClassification(_Classifier):
    """Token ids (B, L) -> logits (B, L, num_labels).

    >>> config = SubquadConfig(kind="encoder", layers=1, heads=2, dim=16, vocab=256, mechanism="linear", num_labels=3)
    >>> SubquadForTokenClassification(config)(torch.randint(0, 256, (2, 9))).logits.shape
    torch.Size([2, 9, 3])
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """labels (B, L) ids; -100 = no loss."""
        out = self.model(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **rest,
        )
        logits = self.classifier(self.dropout(out.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=rest.get("num_items_in_batch"))
        made = TokenClassifierOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return as_asked(made, return_dict, self.config)


class SubquadForCTC(SubquadPreTrainedModel):
    """Speech frames (B, T, frame_width) -> logits (B, ceil(T / frame_stack), num_labels), trained without alignment.

    Graves et al., "Connectionist Temporal Classification", 2006. One of the labels, config.ctc_blank, stands for
    nothing; a transcript may be as long as the frames after stacking, repeated labels need a blank between them.

    >>> config = SubquadConfig(
    ...     kind="encoder", layers=1, heads=2, dim=16, mechanism="linear", frame_width=20, frame_stack=2, num_labels=30)
    >>> model, labels = SubquadForCTC(config), torch.tensor([[5, 6, 7], [8, 9, -100]])
    >>> out = model(torch.randn(2, 50, 20), labels=labels)
    >>> out.logits.shape, out.loss.shape
    (torch.Size([2, 25, 30]), torch.Size([]))
    """

    main_input_name = "input_features"
    # As for classification: a mean over sequences.
    accepts_loss_kwargs = False

    def __init__(self, config: SubquadConfig) -> None:
        if config.frame_width is None:
            raise ValueError("SubquadForCTC needs frame_width=, the width of a speech frame (80 for 80 mel bands)")
        if config.ctc_blank >= config.labels:
            raise ValueError(f"ctc_blank={config.ctc_blank} must be one of the num_labels={config.labels} labels")
        super().__init__(config)
        self.model = SubquadModel(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.lm_head = Head(config.dim, config.labels)
        self._finish()

    def forward(
        self,
        input_features: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **rest: Any,
    ) -> Any:
        """attention_mask (B, T): 0 = padding frames, at the end.

        labels (B, U) without blanks; negative = padding, anywhere. The loss is the mean over sequences of
        -log p(transcript), each divided by the length of its transcript; a transcript that does not fit its frames
        counts as 0.
        """
        out = self.model(
            attention_mask=attention_mask,
            input_features=input_features,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **rest,
        )
        logits = self.lm_head(self.dropout(out.last_hidden_state))
        loss: Any = None if labels is None else self._loss(logits, attention_mask, labels)
        made = CausalLMOutput(loss=loss, logits=logits, hidden_states=out.hidden_states)
        return as_asked(made, return_dict, self.config)

    def _loss(self, logits: Tensor, attention_mask: Tensor | None, labels: Tensor) -> Tensor:
        if labels.dim() != 2 or labels.shape[0] != logits.shape[0]:
            raise ValueError(
                f"labels must have shape (batch, length) with batch {logits.shape[0]}, got "
                f"{checks.describe_shape(labels)}"
            )
        real = labels >= 0
        most = int(labels.max()) if labels.numel() else -1
        if most >= self.config.labels or bool((labels[real] == self.config.ctc_blank).any()):
            raise ValueError(
                f"labels must be in 0..{self.config.labels - 1} without the blank {self.config.ctc_blank}; "
                "negative = padding"
            )
        if attention_mask is None:
            lengths = torch.full((logits.shape[0],), logits.shape[1], device=logits.device)
        else:
            lengths = self.model.frame_mask(attention_mask.bool()).sum(-1)
        # In float32: products of many small probabilities.
        log_probs = F.log_softmax(logits, -1, dtype=torch.float32).transpose(0, 1)
        # One transcript after the other: wherever the padding stands it is left out.
        return F.ctc_loss(log_probs, labels[real], lengths, real.sum(-1), self.config.ctc_blank, zero_infinity=True)
