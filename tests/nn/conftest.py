"""Tiny models around every mechanism that the models' tests run through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import subquad as sq
from subquad.mechanisms import MECHANISMS

VOCAB = 19


def _variants(name: str) -> list[dict[str, Any]]:
    variants = list(MECHANISMS[name].CONTRACT_VARIANTS)
    if name == "performer":
        # Projections only differ in their buffers: one variant per kind of feature map is enough here.
        kinds: dict[str, dict[str, Any]] = {}
        for variant in variants:
            kinds.setdefault(f"{variant.get('features')} {variant.get('center')}", variant)
        variants = list(kinds.values())
    return [{"mechanism": name, **variant} for variant in variants]


def choices(**facts: bool) -> list[dict[str, Any]]:
    """Every mechanism with these facts, with the options of its contract variants."""
    return [choice for name in sq.list_mechanisms(**facts) for choice in _variants(name)]


def first_choices(**facts: bool) -> list[dict[str, Any]]:
    return [_variants(name)[0] for name in sq.list_mechanisms(**facts)]


def _id(choice: dict[str, Any]) -> str:
    rest = ",".join(f"{k}={v}" for k, v in choice.items() if k not in ("mechanism", "seed", "num_features"))
    return f"{choice['mechanism']}[{rest}]".replace(" ", "")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, made in (
        ("recurrent", choices(causal=True, recurrent=True)),
        ("merging", [x for x in choices(causal=True, recurrent=True) if sq.create(**x, head_dim=8, heads=2).merges]),
        ("each_recurrent", first_choices(causal=True, recurrent=True)),
        ("each_causal", first_choices(causal=True)),
        ("each_mechanism", first_choices()),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, made, ids=[_id(choice) for choice in made])


@pytest.fixture
def decoder():
    """decoder(mechanism, **options): a float64 decoder in evaluation mode, calibrated where it has to be."""

    def make(mechanism: Any, *, dtype: torch.dtype = torch.float64, **options: Any) -> sq.nn.TransformerDecoder:
        fields = {"layers": 2, "heads": 2, "dim": 16, "vocab": VOCAB, "seed": 5, **options}
        model = sq.nn.TransformerDecoder(mechanism=mechanism, **fields).to(dtype).eval()
        model.calibrate(tokens(2, model.config.max_length or 20, seed=99))
        return model

    return make


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="tokens")
def tokens_fixture():
    return tokens
