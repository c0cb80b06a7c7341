"""Hugging Face transformers: our own models in its classes, and its models with our attention.

Importing it registers the model classes with transformers' Auto classes. Works with transformers >=5.0,<6.
"""

from . import versions  # noqa: F401

# isort: split

from ..mechanisms.head_groups import HeadGroups
from .cache import StateCache, StateLayer
from .calibration import LayerStatistics, calibrate_layers
from .callbacks import RedrawCallback
from .capturing import LayerSample, capture
from .configuration import SubquadConfig
from .conversion import convert, revert
from .distillation import DistillationReport, distill
from .layer_plan import LayerPlan, plan_layers
from .modeling import SubquadModel, SubquadPreTrainedModel
from .modeling_causal import SubquadForCausalLM
from .modeling_heads import (
    SubquadForCTC,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from .plan_candidates import default_candidates
from .registration import register
from .restoring import load
from .tokenization import ByteTokenizer
from .weights import from_transformers

__all__ = [
    "ByteTokenizer",
    "DistillationReport",
    "HeadGroups",
    "LayerPlan",
    "LayerSample",
    "LayerStatistics",
    "RedrawCallback",
    "StateCache",
    "StateLayer",
    "SubquadConfig",
    "SubquadForCTC",
    "SubquadForCausalLM",
    "SubquadForMaskedLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
    "SubquadPreTrainedModel",
    "calibrate_layers",
    "capture",
    "convert",
    "default_candidates",
    "distill",
    "from_transformers",
    "load",
    "plan_layers",
    "revert",
]

register()
