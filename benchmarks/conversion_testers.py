"""Small models and batches from the model testers of a transformers checkout."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def families(checkout: Path) -> list[str]:
    """Folders of tests that have a test of a model."""
    return sorted({path.parent.name for path in (checkout / "tests" / "models").glob("*/test_modeling_*.py")})


def import_test(name: str) -> Any:
    """A test file of another version: names that the installed one lacks serve tests that do not run."""
    for _ in range(40):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            lacking = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if lacking is None:
                raise
            setattr(importlib.import_module(lacking[2]), lacking[1], None)
    raise ImportError(name)


def cases(checkout: Path, family: str) -> Iterator[tuple[str, Any]]:
    """(name, test case that is set up) for every model tester of a family."""
    sys.path.insert(0, str(checkout))
    for path in sorted((checkout / "tests" / "models" / family).glob("test_modeling_*.py")):
        module = import_test(f"tests.models.{family}.{path.stem}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ != module.__name__ or not issubclass(kind, unittest.TestCase):
                continue
            if getattr(kind, "all_model_classes", None) or getattr(kind, "model_tester_class", None):
                case: Any = kind("run")
                case.setUp()
                if getattr(case, "model_tester", None) is not None and hasattr(case, "_prepare_for_class"):
                    yield name, case


def models(case: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(class name, a function that makes the model, a batch for it)."""
    config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
    # One class, and one that generates: the others put other heads on the same attention.
    chosen = [*case.all_model_classes[:1], *(getattr(case, "all_generative_model_classes", None) or ())[:1]]
    for kind in dict.fromkeys(chosen):
        made = {k: v for k, v in case._prepare_for_class(inputs, kind).items() if v is not None}

        def make(kind: Any = kind) -> Any:
            torch.manual_seed(0)
            return kind(copy.deepcopy(config)).eval()

        yield kind.__name__, make, made


def prompts(case: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of generation: those that the family's own generation tests use."""
    prepare = getattr(case, "prepare_config_and_inputs_for_generate", None)
    if prepare is None:
        return {k: v for k, v in inputs.items() if k != "labels"}
    return {k: v for k, v in prepare(batch_size=2)[1].items() if v is not None}


def padded(inputs: dict[str, Any]) -> dict[str, Any] | None:
    ids = inputs.get("input_ids")
    if (
        not isinstance(ids, Tensor)
        or ids.dim() != 2
        or ids.shape[1] < 5
        or ids.shape[0] < 2
        or "pixel_values" in inputs
    ):
        return None
    mask = torch.ones_like(ids)
    mask[-1, :2] = 0
    return {**inputs, "attention_mask": mask}
