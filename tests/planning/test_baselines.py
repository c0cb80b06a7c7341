"""The baselines that every error stands beside: uniform attention and polynomials of the scores."""

import math

import pytest
import torch

import subquad as sq
from subquad.features import variance
from subquad.planning.baselines import BASELINES, baseline_errors, uniform_attention
from subquad.planning.piece import Piece

D = 64


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_uniform_attention_is_exact_attention_of_queries_that_are_zero(is_causal, masked):
    k, v = torch.randn(2, 2, 2, 20, 8, dtype=torch.float64)
    q = torch.zeros(2, 6, 20, 8, dtype=torch.float64)
    mask = None
    if masked:
        mask = torch.arange(20) < torch.tensor([[20], [13]])
        mask[0, :3] = False  # the first causal queries see nothing
    exact = sq.attention(q, k, v, "softmax", is_causal=is_causal, key_mask=mask)
    if masked:
        v[1, :, 13:] = math.nan  # padding may hold anything
    found = uniform_attention(q, k, v, is_causal=is_causal, key_mask=mask)
    torch.testing.assert_close(found, exact)


def test_uniform_attention_counts_in_float32():
    values = torch.full((1, 1, 4096, 1), 3.0, dtype=torch.bfloat16)
    for is_causal in (False, True):
        found = uniform_attention(values, values, values, is_causal=is_causal)
        assert torch.equal(found, values)


def test_baselines_of_gaussian_rows():
    """Scores N(0, tau^2) in each row: the closed forms of the best polynomial of degree 0, 1 and 2."""
    generator = torch.Generator().manual_seed(3)
    tau = 0.8
    q = torch.randn(1, 1, 512, D, generator=generator)
    q *= tau * math.sqrt(D) / q.norm(dim=-1, keepdim=True)
    k = torch.randn(1, 1, 8192, D, generator=generator)
    found = baseline_errors(Piece(q, k, None, tokens=8192), q, k)
    assert list(found) == list(BASELINES)
    assert found["uniform"] == pytest.approx(float(variance.hermite_error(0, tau)), rel=0.03)
    assert found["degree-1"] == pytest.approx(float(variance.hermite_error(1, tau)), rel=0.05)
    assert found["hermite-2"] == pytest.approx(float(variance.hermite_error(2, tau)), rel=0.1)
    assert found["taylor-2"] == pytest.approx(float(variance.taylor_error(2, tau)), rel=0.1)
