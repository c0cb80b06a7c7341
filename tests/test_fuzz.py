"""The public functions on inputs that nobody would think of: a right answer or a clear error, never anything else."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import subquad as sq
from subquad.mechanisms import MECHANISMS
from subquad.nn.config import ModelConfig

CASES = [(name, variant) for name, cls in MECHANISMS.items() for variant in cls.CONTRACT_VARIANTS]
# A refusal is an answer; anything else (IndexError, RuntimeError, a crash) is not.
REFUSALS = (ValueError, TypeError, NotImplementedError)


def tensor(draw: Any, shape: tuple[int, ...], dtype: torch.dtype, size: float) -> torch.Tensor:
    """Random numbers of that shape with any memory layout."""
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "expanded"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    if layout == "transposed":
        x = torch.randn(shape[0], shape[2], shape[1], shape[3], generator=generator).transpose(1, 2)
    elif layout == "strided":
        x = torch.randn(*shape[:3], 2 * shape[3], generator=generator)[..., ::2]
    elif layout == "expanded":
        x = torch.randn(shape[0], 1, *shape[2:], generator=generator).expand(shape)
    else:
        x = torch.randn(shape, generator=generator)
    return (x * size).to(dtype)


def _checked_call(draw: Any) -> bool:
    """One random call: refused with a reason (False), or an output that can be one (True)."""
    name, variant = draw(st.sampled_from(CASES))
    groups, kv_heads = draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 2))
    batch, width, value_width = draw(st.integers(1, 2)), draw(st.sampled_from([2, 8, 12, 16])), draw(st.integers(1, 9))
    keys = draw(st.integers(0, 40))
    queries = draw(st.sampled_from([keys, keys, draw(st.integers(0, 40))]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    size = draw(st.sampled_from([0.0, 1e-20, 0.3, 1.0, 5.0, 60.0]))
    is_causal = draw(st.booleans())
    q = tensor(draw, (batch, groups * kv_heads, queries, width), dtype, size)
    k = tensor(draw, (batch, kv_heads, keys, width), dtype, size)
    v = tensor(draw, (batch, kv_heads, keys, value_width), dtype, 1.0)
    mask = torch.rand(batch, keys) < draw(st.sampled_from([0.0, 0.5, 1.0])) if draw(st.booleans()) else None
    try:
        attend = sq.create(name, width, groups * kv_heads, kv_heads, **variant)
        try:
            attend.calibrate(q, k)
        except ValueError as error:
            assert str(error)
        out = attend(q, k, v, is_causal=is_causal, key_mask=mask).detach()
    except REFUSALS as error:
        assert len(str(error)) > 20, f"{name} {variant}: {error!r} says too little"
        return False
    except RuntimeError as error:
        assert "needs calibration" in str(error)  # there was not a single token to calibrate on
        return False
    assert out.shape == (batch, groups * kv_heads, queries, value_width)
    assert out.dtype == v.dtype
    if attend.signed or not out.numel():
        return True
    assert out.isfinite().all(), f"{name} {variant}"
    # Elsewhere weights need not sum to one, or mix values with signs.
    if name not in ("efficient", "separable-linformer", "linformer", "nystrom"):
        # Non-negative weights that sum to one, or no key at all: an output lies between the values and 0.
        bound = float(v.float().abs().max()) if v.numel() else 0.0
        assert float(out.float().abs().max()) <= bound * (1 + 2e-2) + 1e-6, f"{name} {variant}"
    return True


def test_attention_answers_or_refuses() -> None:
    """And answers more often than not: a library that refused everything would pass otherwise."""
    answered = []

    @settings(max_examples=400)
    @given(st.data())
    def calls(data: Any) -> None:
        answered.append(_checked_call(data.draw))

    calls()
    assert sum(answered) >= 0.6 * len(answered), f"{sum(answered)} of {len(answered)} calls were answered"


@settings(max_examples=150)
@given(st.data())
def test_scan_in_random_pieces_is_the_whole_call(data: Any) -> None:
    draw = data.draw
    name = draw(st.sampled_from(sq.list_mechanisms(causal=True, recurrent=True)))
    variant = draw(st.sampled_from(MECHANISMS[name].CONTRACT_VARIANTS))
    attend = sq.create(name, 8, 2, **variant).double()
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    length = sum(sizes)
    q, k, v = (tensor(draw, (1, 2, length, 8), torch.float64, 1.0) for _ in range(3))
    try:
        attend.calibrate(torch.randn(1, 2, 64, 8).double(), torch.randn(1, 2, 64, 8).double())
    except ValueError as error:
        assert "no calibration" in str(error)
    whole, state, outs = attend(q, k, v, is_causal=True), None, []
    for piece in torch.split(torch.arange(length), sizes):
        out, state = attend.scan(q[:, :, piece], k[:, :, piece], v[:, :, piece], state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-7, atol=1e-7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_config_is_refused_or_means_something(data: Any) -> None:
    config = ModelConfig(kind="decoder", layers=2, heads=2, dim=16, vocab=32, mechanism="linear", seed=0).to_dict()
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from([*config, "unknown"]))
        if data.draw(st.booleans()):
            config.pop(field, None)
        else:
            config[field] = data.draw(JSON)
    text = json.dumps(config)
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(text)))
        text = text[:cut]
    try:
        again = ModelConfig.from_json(text)
    except (ValueError, TypeError) as error:
        assert str(error)
    else:
        assert ModelConfig.from_json(again.to_json()) == again


@settings(max_examples=200)
@given(
    name=st.text(max_size=20) | st.sampled_from(sorted(MECHANISMS)),
    width=JSON,
    heads=JSON,
    option=st.text(max_size=10),
    value=JSON,
)
def test_create_answers_or_refuses(name: str, width: Any, heads: Any, option: str, value: Any) -> None:
    if isinstance(width, int) and width > 256:
        width = 256
    if isinstance(heads, int) and heads > 16:
        heads = 16
    try:
        made = sq.create(name, width, heads, **({option: value} if option else {}))
    except REFUSALS as error:
        assert str(error)
    else:
        assert made.head_dim == width


def test_options_of_any_type_are_refused_with_their_name() -> None:
    wrong = (object(), -1, 0, 1.5, "no such choice", [], {}, float("nan"))
    silent = []
    for name, cls in MECHANISMS.items():
        for option in cls.options():
            for value in wrong:
                try:
                    sq.create(name, 16, 2, **{option: value})
                except REFUSALS as error:
                    if option not in str(error):
                        silent.append(f"{name}({option}={value!r}): {error}")
                except Exception as error:
                    silent.append(f"{name}({option}={value!r}) raised {error!r}")
    if silent:
        pytest.fail("\n".join(silent))
