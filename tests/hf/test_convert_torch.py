"""torch's own attention modules: every layout and mask, and fused paths that never go around a conversion."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from subquad.hf import capture, convert, revert

from .zoo import Oracle

# torch's own warning about the nested tensors that its fused encoder makes of padded batches.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
WIDTH, HEADS = 32, 4


@pytest.fixture(autouse=True)
def _fast_path() -> Iterator[None]:
    """The fused paths are on, as they are by default."""
    assert torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.backends.mha.get_fastpath_enabled()


def encoder(**options: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True, **options)
    made = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options).eval()
    for parameter in made.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() > 1:
            parameter.mul_(3)  # attention far from uniform
    return made


def padded() -> tuple[Tensor, Tensor]:
    hidden = torch.zeros(3, 10, dtype=torch.bool)
    hidden[1, 6:], hidden[2, 3:] = True, True
    return torch.randn(3, 10, WIDTH), hidden


@pytest.mark.parametrize("mechanism", ["softmax", Oracle])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 20, "vdim": 24}, {"bias": False}])
def test_a_module_alone(mechanism: object, batch_first: bool, widths: dict[str, int]) -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **widths).eval()  # type: ignore[arg-type]
    q = torch.randn(2, 7, WIDTH)
    k, v = torch.randn(2, 9, widths.get("kdim", WIDTH)), torch.randn(2, 9, widths.get("vdim", WIDTH))
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    hidden[1, 5:] = True
    inputs = (q, k, v) if batch_first else tuple(x.transpose(0, 1) for x in (q, k, v))
    names = list(module.state_dict())
    wanted = module(*inputs, key_padding_mask=hidden)
    convert(module, mechanism)
    found = module(*inputs, key_padding_mask=hidden)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert (found[1] is None) == (mechanism is Oracle)
    revert(module)
    assert type(module) is nn.MultiheadAttention and list(module.state_dict()) == names
    torch.testing.assert_close(module(*inputs, key_padding_mask=hidden), wanted, rtol=0, atol=0)


def test_causal_and_unbatched() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).eval()
    x, causal = torch.randn(9, WIDTH), nn.Transformer.generate_square_subsequent_mask(9)
    wanted = [module(x, x, x, attn_mask=mask)[0] for mask in (causal, causal < 0)]
    full = module(x, x, x)[0]
    convert(module, Oracle)
    for mask, out in zip((causal, causal < 0), wanted, strict=True):
        torch.testing.assert_close(module(x, x, x, attn_mask=mask, is_causal=True)[0], out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module(x, x, x)[0], full, rtol=1e-4, atol=1e-5)
    odd = causal.clone()
    odd[5, 2] = -torch.inf
    with pytest.raises(ValueError, match=r"a converted MultiheadAttention \(oracle\) got an arbitrary 4D mask"):
        module(x, x, x, attn_mask=odd)
    with pytest.raises(ValueError, match="pass attn_mask as well"):
        module(x, x, x, is_causal=True)


@pytest.mark.parametrize("with_padding", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_fused_encoder_does_not_go_around_it(with_padding: bool, mode: type) -> None:
    """With torch's fused and nested paths on, an approximation must show, and an oracle must not."""
    x, hidden = padded()
    mask = {"src_key_padding_mask": hidden} if with_padding else {}
    real = ~hidden if with_padding else torch.ones_like(hidden)
    exact = encoder()
    with mode():
        wanted = exact(x, **mask)
        approximate, _ = convert(copy.deepcopy(exact), "performer", num_features=16, seed=0)
        assert ((approximate(x, **mask) - wanted)[real]).abs().max() > 1e-2
        oracle, _ = convert(copy.deepcopy(exact), Oracle)
        torch.testing.assert_close(oracle(x, **mask)[real], wanted[real], rtol=1e-3, atol=1e-4)
        revert(approximate)
        torch.testing.assert_close(approximate(x, **mask)[real], wanted[real], rtol=0, atol=0)
    assert approximate.use_nested_tensor == exact.use_nested_tensor


def test_one_layer_of_an_encoder() -> None:
    x, _ = padded()
    model = encoder()
    wanted = model(x)
    _, report = convert(model, "performer", layers=[1], num_features=16, seed=0)
    assert report.converted == [1]
    assert (model(x) - wanted).abs().max() > 1e-2
    first = encoder().layers[0](x)
    torch.testing.assert_close(model.layers[0](x), first, rtol=0, atol=0)


def test_a_whole_transformer_with_masks() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(WIDTH, HEADS, 1, 1, 48, batch_first=True).eval()
    source, hidden = padded()
    target = torch.randn(3, 6, WIDTH)
    call = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6),
        "src_key_padding_mask": hidden,
        "memory_key_padding_mask": hidden,
        "tgt_is_causal": True,
    }
    with torch.no_grad():
        wanted = model(source, target, **call)
        _, report = convert(model, Oracle)
        assert report.converted == [0, 1, 2]
        torch.testing.assert_close(model(source, target, **call), wanted, rtol=1e-3, atol=1e-4)


def test_training_through_it() -> None:
    model = encoder().train()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    convert(model, "hedgehog")
    model(padded()[0]).square().mean().backward()
    learned = [p for n, p in model.named_parameters() if "subquad" in n]
    assert learned and all(p.grad is not None and torch.isfinite(p.grad).all() for p in learned)


def test_state_dict_round_trip() -> None:
    x, _ = padded()
    model, _ = convert(encoder(), "performer", num_features=16, seed=0)
    other, _ = convert(encoder(), "performer", num_features=16, seed=1)
    assert (other(x) - model(x)).abs().max() > 1e-3
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def test_modules_with_keys_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
        convert(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), "linear")


def test_capture_sees_through_the_fused_path() -> None:
    x, hidden = padded()
    model = encoder()
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=hidden)
        samples = capture(model, [{"src": x, "src_key_padding_mask": hidden}])
        assert [tuple(s.q[0].shape) for s in samples] == [(3, 4, 10, 8)] * 2
        assert samples[0].key_mask[0] is not None and torch.equal(samples[0].key_mask[0], ~hidden)
        weight, bias = model.layers[0].self_attn.in_proj_weight, model.layers[0].self_attn.in_proj_bias
        q = (x @ weight[:WIDTH].T + bias[:WIDTH]).unflatten(-1, (HEADS, 8)).transpose(1, 2)
        torch.testing.assert_close(samples[0].q[0], q, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x, src_key_padding_mask=hidden), wanted, rtol=0, atol=0)


class _Doubled(nn.MultiheadAttention):
    """What somebody may have made of torch's module."""

    def forward(self, query: Tensor, *args: Tensor, **options: bool) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        out, weights = super().forward(query, *args, **options)
        return 2 * out + query, weights


class _Net(nn.Module):
    def __init__(self, *kinds: type[nn.MultiheadAttention]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, HEADS, batch_first=True) for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x)[0]
        return x


def test_a_class_below_torchs_own_keeps_its_forward() -> None:
    torch.manual_seed(0)
    net, x = _Net(_Doubled, nn.MultiheadAttention).eval(), torch.randn(2, 10, WIDTH)
    want = net(x)
    exact, _ = convert(copy.deepcopy(net), "softmax")
    assert torch.equal(exact(x), want) and torch.equal(revert(exact)(x), want)
    converted, report = convert(copy.deepcopy(net), {"mechanism": "multipole", "chunk": 64})
    assert report.converted == [1] and "its class _Doubled may compute more" in str(report.layers[0].reason)
    assert torch.allclose(converted(x), want, atol=1e-5)
    back = revert(converted)
    assert [type(layer) for layer in back.layers] == [_Doubled, nn.MultiheadAttention]
    assert torch.equal(back(x), want)
    with pytest.raises(ValueError, match="its class _Doubled may compute more"):
        convert(net, "linear", layers=[0])
    assert torch.equal(net(x), want)


def test_a_window_does_not_take_two_sequences_of_one_length_for_one() -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval(), torch.randn(2, 10, WIDTH)
    converted, _ = convert(copy.deepcopy(attention), "local", window=20)
    assert torch.allclose(converted(x, x, x)[0], attention(x, x, x)[0], atol=1e-5)
    placed = x + 1  # positions that only queries and keys are given
    assert torch.allclose(converted(placed, placed, x)[0], attention(placed, placed, x)[0], atol=1e-5)
    memory = torch.randn(2, 10, WIDTH)
    with pytest.raises(ValueError, match="query is another tensor than key and value, which is cross attention"):
        converted(x, memory, memory)


def test_keys_of_another_width_are_cross_attention() -> None:
    module, _ = convert(nn.MultiheadAttention(32, 4, kdim=16, vdim=16, batch_first=True), "local", window=2)
    q, k, v = torch.randn(1, 6, 32), torch.randn(1, 6, 16), torch.randn(1, 6, 16)
    with pytest.raises(ValueError, match="which is cross attention"):
        module(q, k, v)
