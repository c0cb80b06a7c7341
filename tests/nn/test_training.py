"""What training needs: compile, autocast, checkpointing, copies, and redraws that resume exactly."""

import copy
import io

import pytest
import torch

import subquad as sq
from subquad.nn import RedrawSchedule


@pytest.mark.parametrize(("mechanism", "layers"), [("performer", 2), ("softmax", 1)])
def test_compiles_without_graph_breaks(mechanism, layers, decoder, tokens):
    assert_compiles(decoder(mechanism, layers=layers), tokens(2, 12))


@pytest.mark.deep  # tracing takes seconds; the contract tests compile each mechanism by itself in any case
def test_compiles_with_every_mechanism(each_causal, decoder, tokens):
    assert_compiles(decoder(each_causal, layers=1), tokens(2, 12))


def assert_compiles(model, ids):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, want = compiled(ids), model(ids)
    assert (got - want).abs().max() <= 1e-10
    mine = torch.autograd.grad(got.square().sum(), model.blocks[0].attention.v.weight)[0]
    theirs = torch.autograd.grad(want.square().sum(), model.blocks[0].attention.v.weight)[0]
    assert (mine - theirs).abs().max() <= 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"reversible": True},
        {"normalization": "rms", "activation": "swiglu", "positions": "sinusoidal", "kv_heads": 1},
        {"norm": "post", "positions": "learned", "max_length": 12},
    ],
)
def test_every_kind_of_block_compiles(options, decoder, tokens):
    model, ids = decoder("linear", layers=1, **options), tokens(2, 12)  # tracing takes seconds per layer
    mask = torch.arange(12) < torch.tensor([[12], [7]])
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, want = compiled(ids, key_mask=mask), model(ids, key_mask=mask)
    assert (got - want)[mask].abs().max() <= 1e-10


@torch.no_grad()
def test_a_scan_step_compiles(decoder, tokens):
    model, ids = decoder("performer", layers=1), tokens(2, 6)
    torch._dynamo.reset()
    _, states = model.scan(ids)
    step = torch.compile(lambda x, states: model.scan(x, states), fullgraph=True, backend="aot_eager")
    for i in range(3):
        got, after = step(ids[:, i : i + 1], states)
        want, states = model.scan(ids[:, i : i + 1], states)
        assert (got - want).abs().max() <= 1e-10
        assert torch.equal(after.length, states.length)


def test_bfloat16_autocast_is_finite_and_close(each_causal, decoder, tokens):
    model, ids = decoder(each_causal, dtype=torch.float32).train(), tokens(2, 16)
    exact = model(ids).detach()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) > 10 and all(bool(g.isfinite().all()) for g in grads)
    assert bool(logits.isfinite().all())
    if each_causal["mechanism"] != "lsh":  # whose buckets may change with the last bit of a query
        assert (logits.float() - exact).norm() <= 0.1 * exact.norm()


def test_checkpointing_gives_the_same_gradients_in_less_memory(decoder, tokens, saved_bytes):
    model, ids = decoder(["performer", "softmax"], dropout=0.2, layers=2).train(), tokens(2, 12)

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        losses = []

        def forward():
            losses.append(model(ids).square().sum())
            return losses[0]

        kept = saved_bytes(forward, without=model.parameters())
        losses[0].backward()
        return kept, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain_bytes, want = gradients()
    assert model.checkpoint_activations() is model
    fewer_bytes, got = gradients()
    assert len(got) == len(want) > 10
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(got, want, strict=True))
    assert fewer_bytes < 0.6 * plain_bytes
    model.checkpoint_activations(False)
    assert gradients()[0] == plain_bytes


def test_copies_and_files(decoder, tokens):
    model, ids = decoder(["performer", "hybrid"]), tokens(1, 7)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(ids), model(ids))
    _, states = model.scan(ids)
    assert torch.equal(twin.scan(ids, states)[0], model.scan(ids, states)[0])
    twin.redraw()
    assert not torch.equal(twin(ids), model(ids))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = sq.nn.TransformerDecoder.from_config(model.config).double().eval()
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(ids), model(ids))
    # No two entries share memory, which file formats for weights require.
    places = [x.untyped_storage().data_ptr() for x in model.state_dict().values() if x.numel()]
    assert len(places) == len(set(places))


def test_half_precision_weights_keep_float32_projections(decoder, tokens):
    model = decoder("performer", dtype=torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    assert model.mechanisms()[0].feature_map.projection.as_matrix().dtype == torch.float32
    logits, _ = model.scan(tokens(1, 8))
    assert logits.dtype == torch.bfloat16 and bool(logits.isfinite().all())


def train(model, schedule, optimizer, steps, first=0):
    for step in range(first, first + steps):
        schedule.step()
        ids = torch.randint(0, 19, (2, 10), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def make(seed=0):
    torch.manual_seed(1)
    model = sq.nn.TransformerDecoder(2, 2, 16, 19, {"mechanism": "performer", "num_features": 16}, seed=seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), RedrawSchedule(model, every=3)


def test_redrawing_resumes_exactly():
    model, optimizer, schedule = make()
    want = train(model, schedule, optimizer, 8)
    assert [m.feature_map.projection.draw_key()[1] for m in model.mechanisms()] == [2, 2]

    model, optimizer, schedule = make()
    train(model, schedule, optimizer, 4)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
    other, optimizer, schedule = make(seed=77)  # another seed: what is loaded decides
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    assert torch.equal(train(other, schedule, optimizer, 4, first=4), want)


def test_nothing_is_redrawn_before_the_first_step_or_after_the_last():
    model, optimizer, schedule = make()
    train(model, schedule, optimizer, 3)
    assert [m.feature_map.projection.draw_key()[1] for m in model.mechanisms()] == [0, 0]
    train(model, schedule, optimizer, 3)
    assert [m.feature_map.projection.draw_key()[1] for m in model.mechanisms()] == [1, 1]


def test_wrong_schedules_are_refused():
    model, _, schedule = make()
    with pytest.raises(ValueError, match="every must be at least 1"):
        RedrawSchedule(model, every=0)
    with pytest.raises(TypeError, match="redraw"):
        RedrawSchedule(torch.nn.Linear(1, 1), every=1)
    with pytest.raises(ValueError, match="'every' and 'steps'"):
        schedule.load_state_dict({"steps": 3})
    assert schedule.state_dict() == {"every": 3, "steps": 0}


@pytest.mark.parametrize("mechanism", ["performer", "linear", "softmax"])
def test_a_model_learns_to_copy(mechanism):
    """A loss that does not fall would mean that something is disconnected."""
    torch.manual_seed(0)
    model = sq.nn.TransformerDecoder(2, 2, 32, 8, mechanism, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    half = torch.randint(0, 8, (16, 6))
    ids = torch.cat([half, half], 1)
    for _ in range(150):
        loss = torch.nn.functional.cross_entropy(model(ids)[:, 5:-1].flatten(0, 1), ids[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert torch.equal(model.generate(half, 6, temperature=0), half)


def test_redraws_are_the_same_on_every_rank(decoder):
    """Whatever each process has drawn from its own generator in between."""
    one, other = decoder(["performer", "hybrid"]), decoder(["performer", "hybrid"])
    first = one.state_dict()["blocks.0.attention.mechanism.feature_map.projection.seed"].clone()
    for model, drawn in ((one, 3), (other, 11)):
        torch.manual_seed(drawn)
        schedule = RedrawSchedule(model, every=2)
        for _ in range(5):
            torch.rand(drawn)
            schedule.step()
    random = [name for name in one.state_dict() if ".projection." in name]
    assert len(random) >= 4
    for name in random:
        assert torch.equal(one.state_dict()[name], other.state_dict()[name])
    assert torch.equal(one.state_dict()["blocks.0.attention.mechanism.feature_map.projection.seed"], first)
    draws = [x for name, x in one.state_dict().items() if name.endswith(".draws")]
    assert [int(x) for x in draws] == [2, 2]
