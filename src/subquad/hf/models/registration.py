"""Makes the model classes known to transformers' Auto classes; importing `subquad.hf` does it."""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForCTC,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .causal import SubquadForCausalLM
from .configuration import SubquadConfig
from .heads import (
    SubquadForCTC,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from .stack_model import SubquadModel
from .tokenization import ByteTokenizer

__all__ = ["register"]


def register() -> None:
    """Register everything; a second call changes nothing."""
    AutoConfig.register("subquad", SubquadConfig, exist_ok=True)
    for auto, model in (
        (AutoModel, SubquadModel),
        (AutoModelForCausalLM, SubquadForCausalLM),
        (AutoModelForMaskedLM, SubquadForMaskedLM),
        (AutoModelForSequenceClassification, SubquadForSequenceClassification),
        (AutoModelForTokenClassification, SubquadForTokenClassification),
        (AutoModelForCTC, SubquadForCTC),
    ):
        auto.register(SubquadConfig, model, exist_ok=True)
    # A folder without another tokenizer is a byte-level one.
    AutoTokenizer.register(SubquadConfig, slow_tokenizer_class=ByteTokenizer, exist_ok=True)
