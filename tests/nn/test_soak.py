"""One million generated tokens: memory stays flat and nothing overflows."""

from typing import Any

import pytest
import torch

import subquad as sq
from subquad.lab.peak_memory import resident_memory


@pytest.mark.deep
@pytest.mark.parametrize(
    "mechanism",
    [
        "linear",
        "performer",
        "hybrid",
        pytest.param({"mechanism": "multipole", "memory": "constant", "chunk": 64, "limit": 32}, id="multipole"),
    ],
)
def test_a_million_tokens_in_constant_memory(mechanism: Any) -> None:
    torch.set_num_threads(1)
    model = sq.nn.TransformerDecoder(layers=1, heads=2, dim=16, vocab=16, mechanism=mechanism, seed=0)
    generator = torch.Generator().manual_seed(0)
    batch, steps = 32, 1_000_000 // 32
    settled = None
    for step, tokens in enumerate(
        sq.nn.stream(model, torch.zeros(batch, 4, dtype=torch.int64), steps, generator=generator)
    ):
        assert tokens.shape == (batch,)
        if step == steps // 10:
            settled = resident_memory()
    assert settled is not None
    # sample() refuses NaN logits, so arriving here means that all of them were numbers.
    assert step + 1 == steps
    assert resident_memory() - settled < 16 << 20, "memory grows with the number of tokens"
