"""transformers' own tests for models, `ModelTesterMixin` and `GenerationTesterMixin`, on the model classes of this
library.

    python benchmarks/conversion_mixins.py CHECKOUT [-k generate]

CHECKOUT is a git checkout of transformers of the installed version, or near it, for its `tests` folder. Prints what
fails; docs/howto/conversion-inside.md says why these do.
"""

from __future__ import annotations

import argparse
import io
import sys
import unittest
import warnings
from pathlib import Path
from typing import Any

import torch
from conversion_testers import import_test
from torch.utils import _pytree as pytree

import subquad as sq

SIZE: dict[str, Any] = {
    "layers": 2,
    "heads": 4,
    "dim": 32,
    "vocab": 99,
    "seed": 0,
    "pad_token_id": 98,
    "bos_token_id": 97,
}
BATCH, LENGTH = 3, 7


class Tester:
    """Makes configs and batches, as transformers' testers do."""

    def __init__(self, parent: Any, kind: str) -> None:
        self.parent, self.kind, self.is_training = parent, kind, True
        self.batch_size, self.seq_length, self.num_hidden_layers = BATCH, LENGTH, SIZE["layers"]
        self.hidden_size, self.num_attention_heads, self.vocab_size = SIZE["dim"], SIZE["heads"], SIZE["vocab"]

    def get_config(self) -> Any:
        return sq.hf.SubquadConfig(**SIZE, kind=self.kind, mechanism="linear")

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(1, SIZE["vocab"] - 2, (BATCH, LENGTH))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check_cache(case: Any, batch_size: int, past_key_values: Any, seq_length: int, config: Any) -> None:
    """What the mixin asks models to say for themselves whose cache has no keys: its layers, rows and tokens."""
    assert isinstance(past_key_values, sq.hf.StateCache)
    assert len(past_key_values) == config.num_hidden_layers
    for layer in past_key_values.layers:
        assert (layer.batch_size, layer.get_seq_length()) == (batch_size, seq_length)


def check_equal(case: Any, one: Any, other: Any) -> None:
    """The same states in two caches."""
    torch.testing.assert_close(pytree.tree_leaves(one.model_state), pytree.tree_leaves(other.model_state))


def suite(checkout: Path, pattern: str | None) -> unittest.TestSuite:
    sys.path.insert(0, str(checkout))
    common = import_test("tests.test_modeling_common")
    generation = import_test("tests.generation.test_utils")
    kinds = {
        "decoder": (sq.hf.SubquadModel, sq.hf.SubquadForCausalLM, sq.hf.SubquadForSequenceClassification),
        "encoder": (sq.hf.SubquadModel, sq.hf.SubquadForMaskedLM, sq.hf.SubquadForSequenceClassification,
                    sq.hf.SubquadForTokenClassification),
    }  # fmt: skip
    # The tests ask by class name which labels a model takes.
    for task in ("", "_FOR_CAUSAL_LM", "_FOR_MASKED_LM", "_FOR_SEQUENCE_CLASSIFICATION", "_FOR_TOKEN_CLASSIFICATION"):
        words = "".join(part if part in ("LM",) else part.title() for part in task.split("_")).replace("Lm", "LM")
        getattr(common, f"MODEL{task}_MAPPING_NAMES")["subquad"] = f"Subquad{words or 'Model'}"
    found = unittest.TestSuite()
    for kind, classes in kinds.items():

        def set_up(self: Any, kind: str = kind) -> None:
            self.model_tester = Tester(self, kind)

        members = {
            "all_model_classes": classes,
            "all_generative_model_classes": (sq.hf.SubquadForCausalLM,) if kind == "decoder" else (),
            "has_attentions": False,
            "test_resize_embeddings": True,
            "setUp": set_up,
            "_check_past_key_values_for_generate": check_cache,
            "_check_caches_are_equal": check_equal,
        }
        bases = (common.ModelTesterMixin, *((generation.GenerationTesterMixin,) if kind == "decoder" else ()))
        case = type(f"Subquad{kind.title()}", (*bases, unittest.TestCase), members)
        loader = unittest.TestLoader()
        loader.testNamePatterns = [f"*{pattern}*"] if pattern else None
        found.addTests(loader.loadTestsFromTestCase(case))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-k", help="only tests with this in their name")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    result = unittest.TextTestRunner(verbosity=0, stream=io.StringIO()).run(suite(arguments.checkout, arguments.k))
    for case, trace in [*result.failures, *result.errors]:
        print(f"{case}: {trace.strip().splitlines()[-1][:300]}")
    skipped = len(result.skipped)
    wrong = len(result.failures) + len(result.errors)
    print(
        f"{result.testsRun} tests, {result.testsRun - wrong - skipped} passed, {skipped} do not apply, {wrong} failed"
    )


if __name__ == "__main__":
    main()
