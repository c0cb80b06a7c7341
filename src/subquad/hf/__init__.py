"""Hugging Face transformers: our own models in its classes, and its models with our attention.

Importing it registers the model classes with transformers' Auto classes. Works with transformers >=5.0,<6.
"""

from . import versions  # noqa: F401

# isort: split

from ..mechanisms.head_groups import HeadGroups
from .cache import RollbackCache, StateCache, StateLayer
from .conversion.capturing import LayerSample, capture
from .conversion.converting import convert, revert
from .conversion.restoring import load
from .distillation.distilling import DistillationReport, distill
from .models.callbacks import RedrawCallback
from .models.causal import SubquadForCausalLM
from .models.configuration import SubquadConfig
from .models.heads import (
    SubquadForCTC,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from .models.registration import register
from .models.stack_model import SubquadModel, SubquadPreTrainedModel
from .models.tokenization import ByteTokenizer
from .models.weights import from_transformers
from .plan.candidates import default_candidates
from .plan.layer_plan import LayerPlan, plan_layers
from .plan.statistics import LayerStatistics, calibrate_layers

__all__ = [
    "ByteTokenizer",
    "DistillationReport",
    "HeadGroups",
    "LayerPlan",
    "LayerSample",
    "LayerStatistics",
    "RedrawCallback",
    "RollbackCache",
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
