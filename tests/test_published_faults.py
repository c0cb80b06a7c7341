"""Faults found in public implementations of linear attention, and the checks that would have caught them.

Each test runs one check twice: on this library, which passes, and on the wrong version written out here, which must
fail. Faults of projections and estimators are in features/test_statistics.py and features/test_hadamard.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

import subquad as sq
from subquad.features.random import ExponentialFeatures

D, L = 16, 48


def _inputs(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, L, D, generator=generator, dtype=torch.float64).to(dtype)
    return scale * q, scale * k, v


def _projection() -> Tensor:
    return sq.create("performer", D, num_features=64, features="positive", seed=0).feature_map.projection.as_matrix(
        torch.float64
    )


def _peer_features(x: Tensor, eps: float, *, is_query: bool, stabiliser_dims: tuple[int, ...] = (-1, -2)) -> Tensor:
    """exp(w.x - |x|^2/2 - max) + eps: the form that several libraries share."""
    x = x * D**-0.25
    dash = x @ _projection().mT
    stabiliser = dash.amax(-1, keepdim=True) if is_query else dash.amax(stabiliser_dims, keepdim=True)
    return torch.exp(dash - 0.5 * x.square().sum(-1, keepdim=True) - stabiliser) + eps


def _peer_causal(q: Tensor, k: Tensor, v: Tensor, eps: float) -> Tensor:
    phi_q, phi_k = _peer_features(q, eps, is_query=True), _peer_features(k, eps, is_query=False)
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def _ours_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sq.create("performer", D, num_features=64, features="positive", seed=0)(q, k, v, is_causal=True)


def _future_leak(attend) -> float:
    """How far earlier outputs move when only the last key changes."""
    q, k, v = _inputs()
    longer = k.clone()
    longer[:, :, -1] *= 3
    return (attend(q, k, v) - attend(q, longer, v))[:, :, :-1].abs().max().item()


def test_a_stabiliser_over_the_whole_sequence_with_epsilon_leaks_the_future():
    assert _future_leak(_ours_causal) < 1e-12
    assert _future_leak(lambda q, k, v: _peer_causal(q, k, v, 1e-4)) > 0.01
    # Without epsilon the shift cancels: the leak is the epsilon's.
    assert _future_leak(lambda q, k, v: _peer_causal(q, k, v, 0.0)) < 1e-9


def _signal(attend) -> float:
    """Length of the output's deviation from uniform attention."""
    q, k, v = _inputs()
    return (attend(q, k, v) - v.mean(-2, keepdim=True)).norm().item()


def test_epsilon_on_features_mixes_in_uniform_attention():
    def peer(eps):
        def attend(q, k, v):
            phi_q, phi_k = _peer_features(q, eps, is_query=True), _peer_features(k, eps, is_query=False)
            weights = phi_q @ phi_k.mT
            return weights @ v / weights.sum(-1, keepdim=True)

        return attend

    def ours(q, k, v):
        return sq.create("performer", D, num_features=64, features="positive", seed=0)(q, k, v)

    reference = _signal(peer(0.0))
    assert abs(_signal(ours) / reference - 1) < 1e-6
    assert _signal(peer(1e-2)) < 0.8 * reference


def _padding_error(attend) -> float:
    """Distance between a padded sequence and the same sequence without its padding."""
    q, k, v = _inputs()
    mask = torch.ones(2, L, dtype=torch.bool)
    mask[:, 20:] = False
    padded = attend(q, k, v, mask)[:, :, :20]
    alone = attend(q[:, :, :20], k[:, :, :20], v[:, :, :20], mask[:, :20])
    return (padded - alone).abs().max().item()


def test_padded_keys_must_leave_the_normaliser_too():
    attn = sq.create("linear", D)

    def values_only(q, k, v, mask):
        phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
        weights = phi_q @ phi_k.mT
        return weights @ v.masked_fill(~mask[:, None, :, None], 0.0) / weights.sum(-1, keepdim=True)

    def zeroed_keys(q, k, v, mask):
        return attn(q, k.masked_fill(~mask[:, None, :, None], 0.0), v.masked_fill(~mask[:, None, :, None], 0.0))

    assert _padding_error(lambda q, k, v, mask: attn(q, k, v, key_mask=mask)) < 1e-12
    assert _padding_error(values_only) > 0.1
    assert _padding_error(zeroed_keys) > 0.1


def test_the_cumulative_sum_runs_over_tokens():
    attn = sq.create("linear", D)
    q, k, v = _inputs()
    want = attn(q, k, v, is_causal=True, backend="reference")

    def summed(axis):
        phi_q, phi_k = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
        state = (phi_k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(axis)
        total = phi_k.cumsum(axis)
        return (phi_q.unsqueeze(-1) * state).sum(-2) / (phi_q * total).sum(-1, keepdim=True)

    assert (attn(q, k, v, is_causal=True) - want).abs().max() < 1e-12
    assert (summed(2) - want).abs().max() < 1e-12
    assert (summed(1) - want).abs().max() > 0.1


def test_an_untrained_module_has_a_projection_and_keeps_it_in_eval_mode():
    attn = sq.create("performer", D, num_features=32).eval()
    assert attn.feature_map.projection.as_matrix().abs().sum() > 0
    q, k, v = _inputs()
    assert torch.equal(attn(q, k, v), attn(q, k, v))
    assert torch.equal(attn(q, k, v), attn.train()(q, k, v))


def test_the_stabiliser_of_one_head_does_not_touch_another():
    attn = sq.create("performer", D, num_features=64, features="positive", seed=0)
    q, k, v = _inputs(dtype=torch.float32)
    quieter = k.clone()
    quieter[0, 0] *= 40  # long keys have tiny positive features: far below those of the other head
    exact = attn(q.double(), quieter.double(), v.double(), is_causal=True, backend="reference")

    def shared_maximum(k):
        """One maximum over heads, as in the recurrent form of a public library; the rest is exact."""
        x, y = k * D**-0.25, q * D**-0.25
        log_k = x @ _projection().float().mT - 0.5 * x.square().sum(-1, keepdim=True)
        log_q = y @ _projection().float().mT
        phi_k = torch.exp(log_k - log_k.amax((1, 2, 3), keepdim=True))
        weights = (torch.exp(log_q - log_q.amax(-1, keepdim=True)) @ phi_k.mT).tril()
        return weights @ v / weights.sum(-1, keepdim=True)

    ours = attn.scan(q, quieter, v)[0]
    assert (ours - exact).abs().max() < 1e-2
    assert (ours[0, 1] - attn.scan(q, k, v)[0][0, 1]).abs().max() < 1e-5
    assert not shared_maximum(quieter)[0, 0].isfinite().all()


def test_a_step_does_not_change_the_callers_state():
    attn = sq.create("linear", D)
    q, k, v = _inputs()
    _, state = attn.scan(q, k, v)
    kept = state.weighted.clone()
    token = [x[:, :, :1] for x in (q, k, v)]
    _, after = attn.scan(*token, state)
    assert torch.equal(state.weighted, kept)

    def in_place(weighted, k, v):
        """S += phi(k) v^T, as published decoders do it."""
        return weighted.add_(attn.feature_map.keys(k, 1.0).values.mT @ v)

    changed = in_place(state.weighted, *token[1:])
    assert torch.allclose(changed, after.weighted, atol=1e-5)  # the same step
    assert not torch.equal(state.weighted, kept)  # and the caller's state is gone


def test_forms_do_not_differ_in_their_defaults():
    """A public library scales queries in its chunked form and not in its recurrent one."""
    q, k, v = _inputs()
    for name in sq.list_mechanisms(kernelised=True, causal=True):
        attn = sq.create(name, D, 2)
        parallel = attn(q, k, v, is_causal=True)
        steps, state = [], None
        for i in range(L):
            out, state = attn.scan(*(x[:, :, i : i + 1] for x in (q, k, v)), state)
            steps.append(out)
        assert (torch.cat(steps, 2) - parallel).abs().max() < 1e-10
    attn = sq.create("linear", D)
    halved = attn(q, k, v, is_causal=True, scale=0.25)
    assert (halved - attn(q, k, v, is_causal=True)).abs().max() > 1e-3


def test_states_are_not_rebuilt_by_subtraction():
    """Rebuilding S_{i-1} = S_i - phi(k_i) v_i^T backwards leaves a residue in float32; storing checkpoints does not."""
    steps = 4096
    generator = torch.Generator().manual_seed(0)
    k = torch.rand(steps, 8, generator=generator)
    v = torch.randn(steps, 4, generator=generator)
    products = k.unsqueeze(-1) * v.unsqueeze(-2)
    state = torch.zeros(8, 4)
    for product in products:
        state = state + product
    for product in reversed(products.unbind()):
        state = state - product
    assert state.abs().max() > 1e-5  # the wrong way: it should be exactly zero

    # Ours: the gradient of the first key through thousands of steps, in float32, against float64.
    def first_key_gradient(dtype):
        attn = sq.create("linear", 8)
        inputs = [x.to(dtype)[None, None].requires_grad_() for x in (k, k, v)]
        attn(*inputs, is_causal=True, chunk_size=64)[:, :, -1].sum().backward()
        return inputs[1].grad[0, 0, 0].double()

    exact = first_key_gradient(torch.float64)
    assert (first_key_gradient(torch.float32) - exact).norm() <= 1e-4 * exact.norm()


def test_chunk_size_is_a_number_of_tokens_not_of_chunks():
    attn = sq.create("performer", D, num_features=16, seed=0)
    seen = []
    original = ExponentialFeatures.keys

    def spy(self, k, scale):
        seen.append(k.shape[-2])
        return original(self, k, scale)

    ExponentialFeatures.keys = spy
    try:
        attn(*_inputs(), is_causal=True, chunk_size=20, backend="chunked")
    finally:
        ExponentialFeatures.keys = original
    assert seen == [20, 20, 8]
