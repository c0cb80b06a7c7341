"""The baselines that every error stands beside: uniform attention and polynomials of the scores."""

import math

import pytest
import torch

import subquad as sq
from subquad.features import variance
from subquad.planning.baselines import uniform_attention

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
    q = torch.randn(1, 1, 64, D, generator=generator, dtype=torch.float64)
    q *= tau * math.sqrt(D) / q.norm(dim=-1, keepdim=True)
    k = torch.randn(1, 1, 8192, D, generator=generator, dtype=torch.float64)
    found = sq.predict_error(q, k, "taylor", degree=2).baselines
    assert found["uniform"] == pytest.approx(float(variance.hermite_error(0, tau)), rel=0.03)
    assert found["degree-1"] == pytest.approx(float(variance.hermite_error(1, tau)), rel=0.05)
    assert found["hermite-2"] == pytest.approx(float(variance.hermite_error(2, tau)), rel=0.1)
    plain = sq.predict_error(q, k, "taylor", degree=2)
    assert plain.method == "computed"
    assert plain.error == pytest.approx(float(variance.taylor_error(2, tau)), rel=0.1)


@pytest.mark.parametrize("options", [{"degree": 1}, {"degree": 2}, {"degree": 1, "center": True}, {"hermite": True}])
def test_taylor_is_what_the_mechanism_computes(options):
    generator = torch.Generator().manual_seed(4)
    q, k = 0.7 * torch.randn(2, 1, 2, 30, 8, generator=generator, dtype=torch.float64) + 0.3
    v = torch.randn(1, 2, 30, 5, generator=generator, dtype=torch.float64)
    prediction = sq.predict_error(q, k, "taylor", v=v, is_causal=True, **options)
    attend = sq.create("taylor", 8, 2, **options)
    if "degree" not in options or "center" in options:
        attend.calibrate(q, k)
    exact = sq.attention(q, k, v, "softmax", is_causal=True)
    error = float((attend(q, k, v, is_causal=True) - exact).square().sum() / exact.square().sum())
    assert prediction.output_error == pytest.approx(error, rel=1e-9)
    weights = attend(q, k, torch.eye(30, dtype=torch.float64).expand(1, 2, 30, 30), is_causal=True)
    exact = sq.attention(q, k, torch.eye(30, dtype=torch.float64).expand(1, 2, 30, 30), "softmax", is_causal=True)
    assert prediction.error == pytest.approx(float((weights - exact).square().sum() / exact.square().sum()), rel=1e-9)
