"""Reversible blocks: gradients of the plain computation, memory that does not grow with depth."""

import pytest
import torch

import subquad as sq
from subquad.nn import reversible


def gradients(model, run, seed=7):
    torch.manual_seed(seed)
    model.zero_grad()
    loss = run()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plainly(monkeypatch):
    """Let the reversible stack keep its whole graph, as any other module."""
    monkeypatch.setattr(reversible, "tracing", lambda x: True)


def assert_same(got, want, tolerance):
    assert abs(got[0] - want[0]) <= tolerance
    assert got[1].keys() == want[1].keys() and len(want[1]) > 10
    for name, grad in want[1].items():
        assert (got[1][name] - grad).abs().max() <= tolerance, name


@pytest.mark.parametrize("mechanism", ["performer", "softmax", "lsh", "linear", "hedgehog"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_equal_the_plain_ones(mechanism, dropout, monkeypatch, tokens):
    model = sq.nn.TransformerDecoder(
        layers=3, heads=2, dim=16, vocab=19, mechanism=mechanism, reversible=True, dropout=dropout, seed=0
    )
    ids, mask = tokens(2, 12), torch.arange(12) < torch.tensor([[12], [8]])

    def run():
        return model(ids, key_mask=mask)[mask].square().mean()

    got = gradients(model, run)
    plainly(monkeypatch)
    assert_same(got, gradients(model, run), 1e-6)


def test_dropout_does_something_and_leaves_the_generator_where_the_forward_left_it(tokens):
    model = sq.nn.TransformerDecoder(
        layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True, dropout=0.5
    )
    loss = model(tokens(1, 8)).square().mean()
    assert abs(loss - model(tokens(1, 8)).square().mean()) > 1e-4
    loss = model(tokens(1, 8)).square().mean()
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("which", ["the block's in evaluation mode", "one inside an attention layer"])
def test_dropout_wherever_it_is_drops_the_same_in_the_backward(which, monkeypatch, tokens):
    model = sq.nn.TransformerDecoder(
        layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True,
        dropout=0.5 if which.startswith("the block's") else 0.0,
    )  # fmt: skip
    if which.startswith("the block's"):  # Monte Carlo dropout
        model.eval()
        for part in model.modules():
            part.training = isinstance(part, torch.nn.Dropout)
    else:
        for attention in model.attentions():
            attention.dropout.p = 0.5

    def run():
        return model(tokens(2, 6)).square().mean()

    got = gradients(model, run)
    plainly(monkeypatch)
    assert_same(got, gradients(model, run), 1e-6)


@pytest.mark.parametrize("how", ["reversible", "checkpointed"])
def test_the_mode_of_the_forward_counts(how, monkeypatch, tokens):
    model = sq.nn.TransformerDecoder(
        layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=how == "reversible", dropout=0.5
    )
    model.checkpoint_activations(how == "checkpointed")

    def run():
        model.train()
        loss = model(tokens(2, 6)).square().mean()
        model.blocks[1].eval()
        model.blocks[0].feed.eval()
        return loss

    got = gradients(model, run)
    assert model.training and not any(part.training for part in model.blocks[1].modules())  # as before the backward
    plainly(monkeypatch)
    model.checkpoint_activations(False)
    assert_same(got, gradients(model, run), 1e-6)


def test_an_encoder_decoder_is_reversible_too(monkeypatch, tokens):
    model = sq.nn.EncoderDecoder(layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True).double()
    source = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)

    def run():
        return model(source, tokens(2, 6)).square().mean()

    got, grad = gradients(model, run), source.grad.clone()
    source.grad = None
    plainly(monkeypatch)
    assert_same(got, gradients(model, run), 1e-12)
    assert grad.abs().max() > 0 and (source.grad - grad).abs().max() <= 1e-12


def test_frozen_and_tied_parameters(monkeypatch, tokens):
    model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True).double()
    model.blocks[1].feed = model.blocks[0].feed
    model.blocks[0].attention.q.weight.requires_grad_(False)

    def run():
        return model(tokens(2, 6)).square().mean()

    got = gradients(model, run)
    assert "blocks.0.attention.q.weight" not in got[1] and "blocks.1.attention.q.weight" in got[1]
    plainly(monkeypatch)
    assert_same(got, gradients(model, run), 1e-12)


def test_activation_memory_does_not_depend_on_depth(tokens, saved_bytes):
    def kept(layers, **options):
        model = sq.nn.TransformerDecoder(layers=layers, heads=2, dim=16, vocab=19, mechanism="softmax", **options)
        return saved_bytes(lambda: model(tokens(2, 32)), without=model.parameters())

    assert kept(8, reversible=True) == kept(2, reversible=True)
    assert kept(8) > 2.5 * kept(2)


def test_autocast_is_the_same_in_the_backward(monkeypatch, tokens):
    model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            return model(tokens(2, 12)).float().square().mean()

    got = gradients(model, run)
    plainly(monkeypatch)
    want = gradients(model, run)
    assert got[0] == want[0]
    for name, grad in want[1].items():
        # The same bfloat16 products; only sums of gradients are rounded in another order.
        assert (got[1][name] - grad).abs().max() <= 2e-2 * grad.abs().max(), name


def test_a_changed_parameter_is_refused(tokens):
    model = sq.nn.TransformerDecoder(layers=2, heads=2, dim=16, vocab=19, mechanism="linear", reversible=True)
    loss = model(tokens(1, 5)).sum()
    with torch.no_grad():
        model.blocks[0].feed.up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


@pytest.mark.parametrize("how", ["reversible", "checkpointed"])
def test_what_changes_before_the_backward_is_refused(how, tokens):
    mechanism = {"mechanism": "performer", "num_features": 8, "seed": 0}
    model = sq.nn.TransformerDecoder(
        layers=2, heads=2, dim=16, vocab=19, mechanism=mechanism, reversible=how == "reversible", seed=0
    )
    if how == "checkpointed":
        model.checkpoint_activations()
    loss = model(tokens(2, 12)).square().sum()
    model.redraw()
    with pytest.raises(RuntimeError, match=r"call backward\(\) before optimizer.step\(\), redraw\(\)"):
        loss.backward()
    model(tokens(2, 12)).square().sum().backward()
