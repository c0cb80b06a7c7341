"""Hedgehog: the map is the paper's, and `fit` brings its weights closer to softmax's."""

import pytest
import torch

import subquad as sq
from subquad.features.learned import HedgehogFeatures


def _sample(batch=2, heads=2, kv_heads=None, length=48, dim=8, norm=1.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = norm * torch.randn(batch, heads, length, dim, generator=generator)
    k = norm * torch.randn(batch, kv_heads or heads, length, dim, generator=generator)
    return q, k


def _weights(attn, q, k, visible):
    """The rows of the mechanism from the definition of phi, in float64."""
    phi, scale = attn.feature_map, attn.head_dim**-0.25

    def features(x, weight):
        z = scale * x.double() @ weight.double().mT
        if attn.activation == "exp":
            return torch.cat([z.exp(), (-z).exp()], -1)
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], -1)

    groups = q.shape[1] // k.shape[1]
    keys = features(k, phi.key_weight).repeat_interleave(groups, 1)
    queries = features(q, phi.query_weight.repeat_interleave(groups, 0))
    products = (queries @ keys.mT).masked_fill(~visible, 0.0)
    return products / products.sum(-1, keepdim=True)


def _softmax(q, k, visible, dim=8):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (dim**-0.5 * q.double() @ k.double().mT).masked_fill(~visible, float("-inf"))
    return scores.softmax(-1)


def _kl(p, q):
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - q.clamp(min=1e-300).log()), 0.0).sum(-1)


@pytest.mark.parametrize("activation", ["softmax", "exp"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_that_of_the_papers_map(activation, shared, is_causal):
    attn = sq.create("hedgehog", 8, 4, 2, activation=activation, shared=shared)
    with torch.no_grad():
        attn.feature_map.query_weight += 0.3 * torch.randn_like(attn.feature_map.query_weight)
    assert (attn.feature_map.key_weight is attn.feature_map.query_weight) == shared
    q, k = _sample(heads=4, kv_heads=2)
    v = torch.randn(2, 2, 48, 5)
    visible = torch.ones(48, 48, dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    want = _weights(attn, q, k, visible) @ v.double().repeat_interleave(2, 1)
    got = attn(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert (got - want).abs().max() <= 1e-12


def test_starts_as_the_identity_and_keeps_large_inputs_finite():
    phi = HedgehogFeatures(4, kv_heads=3)
    assert torch.equal(phi.query_weight, torch.eye(4).repeat(3, 1, 1))
    x = 1e4 * torch.randn(1, 3, 5, 4)
    log = phi.keys(x, 0.5).log_scale
    assert log.isfinite().all()
    # The plain form loses features at such inputs, which is why the map is kept in log form.
    assert (log.exp() == 0).any()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_divergence_is_the_mean_kl(is_causal, masked):
    attn = sq.create("hedgehog", 8, 4, 2)
    q, k = _sample(heads=4, kv_heads=2)
    visible = torch.ones(2, 1, 48, 48, dtype=torch.bool)
    visible = visible.tril() if is_causal else visible
    key_mask = query_mask = None
    real = torch.ones(2, 48, dtype=torch.bool)
    if masked:
        key_mask = torch.rand(2, 48) > 0.3
        key_mask[:, 0] = True
        query_mask = real = torch.rand(2, 48) > 0.2
        visible = visible & key_mask[:, None, None]
    rows = _kl(_softmax(q, k, visible), _weights(attn, q, k, visible))
    want = rows.transpose(1, 2)[real].mean().item()
    got = attn.divergence(q, k, is_causal=is_causal, key_mask=key_mask, query_mask=query_mask)
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("activation", ["softmax", "exp"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rows", [None, 16])
def test_fit_brings_the_weights_closer_to_softmax(activation, is_causal, rows):
    attn = sq.create("hedgehog", 8, 4, 2, activation=activation)
    q, k = _sample(batch=4, heads=4, kv_heads=2)
    fresh_q, fresh_k = _sample(batch=4, heads=4, kv_heads=2, seed=1)
    before = attn.divergence(q, k, is_causal=is_causal), attn.divergence(fresh_q, fresh_k, is_causal=is_causal)
    with torch.no_grad():  # as an evaluation loop would call it
        losses = attn.fit(q, k, is_causal=is_causal, steps=100, lr=2e-2, rows=rows)
    after = attn.divergence(q, k, is_causal=is_causal), attn.divergence(fresh_q, fresh_k, is_causal=is_causal)
    assert len(losses) == 100
    assert after[0] < 0.8 * before[0]
    assert after[1] < 0.9 * before[1]  # on data it was not fitted to
    if rows is None:
        assert losses[0] == pytest.approx(before[0], rel=1e-5)


def test_fit_brings_the_output_closer_to_softmax():
    q, k = _sample(batch=4)
    v = torch.randn(4, 2, 48, 8)
    attn, exact = sq.create("hedgehog", 8, 2), sq.attention(q, k, v, "softmax", is_causal=True)
    before = (attn(q, k, v, is_causal=True) - exact).norm()
    attn.fit(q, k, is_causal=True, steps=150, lr=2e-2)
    assert (attn(q, k, v, is_causal=True) - exact).norm() < 0.9 * before


def test_fit_does_not_see_masked_tokens():
    q, k = _sample()
    mask = torch.rand(2, 48) > 0.4
    garbage = torch.where(mask[:, None, :, None], k, 50 * torch.randn_like(k))
    fitted = []
    for keys in (k, garbage):
        attn = sq.create("hedgehog", 8, 2)
        attn.fit(q, keys, key_mask=mask, query_mask=mask, steps=5)
        fitted.append(attn.feature_map.key_weight.detach())
    assert torch.equal(*fitted)
    unmasked = sq.create("hedgehog", 8, 2)
    unmasked.fit(q, garbage, steps=5)
    assert not torch.allclose(unmasked.feature_map.key_weight, fitted[0], atol=1e-3)


def test_fit_leaves_gradients_and_frozen_weights_alone():
    attn = sq.create("hedgehog", 8, 2)
    q, k = _sample()
    attn.feature_map.key_weight.requires_grad_(False)
    frozen = attn.feature_map.key_weight.clone()
    kept = attn.feature_map.query_weight.grad = torch.ones_like(attn.feature_map.query_weight)
    attn.fit(q, k, steps=3)
    assert attn.feature_map.query_weight.grad is kept
    assert torch.equal(attn.feature_map.key_weight, frozen)
    attn.feature_map.query_weight.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameters to train"):
        attn.fit(q, k, steps=3)


def test_bad_input():
    with pytest.raises(ValueError, match="pass heads="):
        sq.create("hedgehog", 8)
    with pytest.raises(ValueError, match="activation='relu' is not known"):
        sq.create("hedgehog", 8, 2, activation="relu")
    attn = sq.create("hedgehog", 8, 2)
    q, k = _sample()
    with pytest.raises(ValueError, match="as many queries as keys"):
        attn.fit(q, k[:, :, :5], is_causal=True)
    with pytest.raises(ValueError, match="sample tokens are needed"):
        attn.fit(q[:, :, :0], k)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        attn.fit(q, k, steps=0)
    with pytest.raises(TypeError, match="key_mask must be bool"):
        attn.fit(q, k, key_mask=torch.ones(2, 48))
