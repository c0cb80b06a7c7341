"""In the place of torch.nn.TransformerEncoder: equal outputs with softmax, any other mechanism on the same weights."""

import copy

import pytest
import torch
from torch import nn

import subquad as sq
from subquad.nn import TorchEncoderCall, from_torch

SETTINGS = [
    {},
    {"norm_first": True, "activation": "gelu", "batch_first": True},
    {"bias": False, "layer_norm_eps": 1e-3},
    {"activation": nn.GELU(approximate="tanh"), "batch_first": True},
    {"activation": nn.ReLU(), "norm_first": True},
]


def theirs(final=False, layers=2, **setting):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 2, 24, **setting)
    module = nn.TransformerEncoder(layer, layers, nn.LayerNorm(16) if final else None, enable_nested_tensor=False)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)  # torch starts with biases of 0 and norms of 1, which hides exchanged ones
    return module.double().eval()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("final", [False, True])
def test_softmax_gives_their_outputs(setting, final):
    module = theirs(final, **setting)
    ours = TorchEncoderCall.from_torch(module)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    src = x if setting.get("batch_first") else x.transpose(0, 1)
    assert (ours(src) - module(src)).abs().max() <= 1e-10
    got, want = ours(src, src_key_padding_mask=padding), module(src, src_key_padding_mask=padding)
    if not setting.get("batch_first"):
        got, want = got.transpose(0, 1), want.transpose(0, 1)
    assert (got[~padding] - want[~padding]).abs().max() <= 1e-10
    causal = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    want = module(src, mask=causal, is_causal=True)
    for call in ({"mask": causal}, {"is_causal": True}, {"mask": causal, "is_causal": True}, {"src_mask": causal == 0}):
        if "src_mask" in call:
            call = {"src_mask": ~call["src_mask"]}
        assert (ours(src, **call) - want).abs().max() <= 1e-10


def test_one_layer_and_gradients():
    module = theirs(batch_first=True)
    layer = module.layers[0]
    ours = from_torch(layer)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert len(ours.blocks) == 1
    assert (ours(x) - layer(x)).abs().max() <= 1e-10
    ours(x).square().sum().backward()
    layer(x).square().sum().backward()
    q, k, v = (getattr(ours.blocks[0].attention, name).weight.grad for name in "qkv")
    assert (torch.cat([q, k, v]) - layer.self_attn.in_proj_weight.grad).abs().max() <= 1e-9


def test_weights_are_not_rounded():
    module = theirs(final=True)
    for p in module.parameters():
        nn.init.normal_(p)  # float64, which float32 does not have
    ours = from_torch(module)
    layer, block = module.layers[0], ours.blocks[0]
    attention = block.attention
    for mine, weight in (
        (torch.cat([x.weight for x in (attention.q, attention.k, attention.v)]), layer.self_attn.in_proj_weight),
        (block.feed.up.weight, layer.linear1.weight),
        (ours.norm.bias, module.norm.bias),
    ):
        assert torch.equal(mine, weight)


def test_other_mechanisms_on_the_same_weights(each_mechanism):
    module = theirs(batch_first=True)
    ours = from_torch(module, each_mechanism, seed=0)
    ours.calibrate(torch.randn(2, 20, 16, dtype=torch.float64))
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    out = ours(x)
    assert out.shape == x.shape and bool(out.isfinite().all())
    assert {m.name for m in ours.mechanisms()} == {each_mechanism["mechanism"]}


def test_their_mode_dropout_and_dtype_are_kept():
    module = theirs(batch_first=True, dropout=0.25).float().train()
    ours = from_torch(module)
    assert ours.training and ours.config.dropout == 0.25 and ours.blocks[0].feed.up.weight.dtype == torch.float32
    before = copy.deepcopy(module.state_dict())
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_in_their_place_inside_a_model():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = theirs(batch_first=True)
            self.head = nn.Linear(16, 3).double()

        def forward(self, x, padding):
            return self.head(self.encoder(x, src_key_padding_mask=padding))

    tagger, x = Tagger().eval(), torch.randn(2, 6, 16, dtype=torch.float64)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    want = tagger(x, padding)
    tagger.encoder = TorchEncoderCall.from_torch(tagger.encoder)
    assert (tagger(x, padding) - want).abs().max() <= 1e-10


def test_what_does_not_fit_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="only relu and gelu"):
        from_torch(nn.TransformerEncoderLayer(16, 2, 24, activation=torch.tanh))
    with pytest.raises(ValueError, match=r"\['norm'\] follow from the module"):
        from_torch(theirs(), norm="pre")
    ours = TorchEncoderCall.from_torch(theirs(batch_first=True), "performer")
    with pytest.raises(ValueError, match="mask is not supported unless it is the causal one"):
        ours(torch.randn(1, 3, 16), mask=torch.eye(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="src must have three dimensions"):
        ours(torch.randn(3, 16))
    assert isinstance(ours.encoder, sq.nn.TransformerEncoder)


def test_float_masks_of_their_modules():
    encoder, x = theirs(batch_first=True).eval(), torch.randn(2, 6, 16, dtype=torch.float64)
    ours = TorchEncoderCall.from_torch(encoder)
    hidden = torch.zeros(2, 6, dtype=torch.bool)
    hidden[1, 4:] = True
    want = ours(x, src_key_padding_mask=hidden)[~hidden]
    for value in (float("-inf"), -1e9):
        mask = torch.zeros(2, 6, dtype=torch.float64).masked_fill(hidden, value)
        assert torch.equal(ours(x, src_key_padding_mask=mask)[~hidden], want)
        future = torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1).bool(), value)
        assert torch.equal(ours(x, mask=future), ours(x, is_causal=True))
    with pytest.raises(ValueError, match="src_key_padding_mask must be bool with True for hidden tokens, or float"):
        ours(x, src_key_padding_mask=torch.full((2, 6), -1.0, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        ours(x, src_key_padding_mask=torch.ones(2, 6, dtype=torch.int64))


@pytest.mark.parametrize(("setting", "what"), [
    ({"activation": "gelu"}, "activation='gelu', layer 0 has 'relu'"), ({"norm_first": True}, "norm_first=True"),
    ({"layer_norm_eps": 1e-2}, "eps=0.01"), ({"dropout": 0.3}, "dropout=0.3"),
])  # fmt: skip
def test_layers_that_differ_are_refused(setting, what):
    module = theirs()
    module.layers[1] = nn.TransformerEncoderLayer(16, 2, 24, **setting).double()
    with pytest.raises(ValueError, match=f"layer 1 has .*{what}"):
        from_torch(module)
    module.layers[1] = nn.TransformerEncoderLayer(16, 4, 24).double()
    with pytest.raises(ValueError, match="layer 1 has heads=4, layer 0 has 2"):
        from_torch(module)


def test_frozen_parameters_stay_frozen():
    module = theirs()
    module.layers[0].requires_grad_(False)
    ours = from_torch(module)
    assert not any(p.requires_grad for p in ours.blocks[0].parameters())
    assert all(p.requires_grad for p in ours.blocks[1].parameters())
