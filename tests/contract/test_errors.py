"""Contract 10: wrong input raises an error that says the argument, what was given, what is expected."""

import pytest
import torch

import subquad as sq


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q must have 4 dimensions"),
        (lambda q, k, v: (q, k[..., 0], v), ValueError, "k must have 4 dimensions"),
        (lambda q, k, v: (q.long(), k, v), TypeError, "q must be a floating-point tensor"),
        (lambda q, k, v: (q, k, v.int()), TypeError, "v must be a floating-point tensor"),
        (lambda q, k, v: (q, k, [1.0]), TypeError, "v must be a tensor"),
        (lambda q, k, v: (q[..., :7], k, v), ValueError, "head width 7"),
        (lambda q, k, v: (q, k[..., :7], v), ValueError, "head width 7"),
        (lambda q, k, v: (q, k[:, :, :5], v), ValueError, "k and v must agree"),
        (lambda q, k, v: (q, k[:, :1], v), ValueError, "k and v must agree"),
        (lambda q, k, v: (q[:1], k, v), ValueError, "same batch size"),
        (lambda q, k, v: (q.half(), k, v), ValueError, "share device and dtype"),
        (lambda q, k, v: (q, k.half(), v), ValueError, "share device and dtype"),
        (lambda q, k, v: (torch.cat([q, q[:, :1]], 1), k, v), ValueError, "heads"),
    ],
)
def test_wrong_tensors(first_case, change, kind, message):
    attn, inputs = first_case.make(), first_case.inputs(length=6)
    with pytest.raises(kind, match=message):
        attn(*change(*inputs))


@pytest.mark.parametrize("argument", ["key_mask", "query_mask"])
def test_wrong_masks(first_case, argument):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=6)
    with pytest.raises(ValueError, match=rf"{argument} must have shape \(batch, length\)"):
        attn(q, k, v, **{argument: torch.ones(2, 5, dtype=torch.bool)})
    with pytest.raises(TypeError, match=f"{argument} must be bool"):
        attn(q, k, v, **{argument: torch.ones(2, 6)})
    with pytest.raises(TypeError, match=f"{argument} must be a bool tensor"):
        attn(q, k, v, **{argument: [True] * 6})


def test_an_attention_mask_is_refused_by_name(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=6)
    with pytest.raises(ValueError, match="attn_mask is not supported"):
        attn(q, k, v, attn_mask=torch.ones(6, 6, dtype=torch.bool))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "big", True])
def test_wrong_scale(first_case, scale):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=6)
    with pytest.raises(ValueError, match="scale must be a finite number"):
        attn(q, k, v, scale=scale)


def test_a_state_of_another_dtype_device_or_batch(first_recurrent_case):
    case = first_recurrent_case
    attn, (q, k, v) = case.make(), case.inputs(length=6, dtype=torch.float32)
    _, state = attn.scan(q, k, v)
    with pytest.raises(ValueError, match=r"the state is torch.float32, tokens of torch.float64 need one of"):
        attn.scan(q.double(), k.double(), v.double(), state)
    with pytest.raises(ValueError, match="the state is on cpu, the tokens are on meta"):
        attn.scan(q.to("meta"), k.to("meta"), v.to("meta"), state)
    with pytest.raises(ValueError, match=r"the state has \(batch, heads, value width\)"):
        attn.scan(q[:1], k[:1], v[:1], state)
    with pytest.raises((ValueError, NotImplementedError), match=r"the state has \(batch|has no absorb/read"):
        attn.read(q[:1], state)
    if case.cls.constant_memory:  # the others hold the tokens themselves
        out, _ = attn.scan(q.bfloat16(), k.bfloat16(), v.bfloat16(), state)
        assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("name", sq.list_mechanisms())
def test_a_switch_takes_true_and_false_alone(name):
    """`--option center=no` arrives as the text 'no', which Python counts as true."""
    for option in (option for option, default in sq.describe(name)["options"].items() if isinstance(default, bool)):
        for value in ("no", 1, None):
            with pytest.raises(TypeError, match=f"{option} must be True or False, got {value!r}"):
                sq.create(name, 8, 2, **{option: value})


def test_unknown_options_name_the_valid_ones(first_case):
    with pytest.raises(TypeError, match="has no option 'no_such_option'"):
        sq.create(first_case.name, 8, 2, **{**first_case.options, "no_such_option": 1})


def test_unknown_backend_is_refused(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=6)
    with pytest.raises(ValueError, match="backend='cuda-magic' is not known"):
        attn(q, k, v, backend="cuda-magic")


def test_chunk_size_must_be_positive(kernelised_case):
    attn, (q, k, v) = kernelised_case.make(), kernelised_case.inputs(length=6)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        attn(q, k, v, chunk_size=-4)
    with pytest.raises(TypeError, match="chunk_size must be an integer"):
        attn(q, k, v, chunk_size=2.5)


def test_states_of_others_are_refused(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs(length=6)
    _, state = attn.scan(q, k, v)
    with pytest.raises(TypeError, match="state must be"):
        attn.scan(q, k, v, {"weighted": 1})
    with pytest.raises(ValueError, match="state"):
        attn.scan(q, k, v, state, scale=0.123)


def test_states_of_another_draw_are_refused(seeded_recurrent_case):
    attn, (q, k, v) = seeded_recurrent_case.make(), seeded_recurrent_case.inputs(length=6)
    _, state = attn.scan(q, k, v)
    attn.redraw()
    with pytest.raises(ValueError, match="draw"):
        attn.scan(q, k, v, state)
    _, other = attn.scan(q, k, v)
    with pytest.raises(ValueError, match="different features"):
        sq.merge(state, other)


def test_states_of_other_shapes_are_refused(recurrent_case):
    attn, (q, k, v) = recurrent_case.make(), recurrent_case.inputs(length=6)
    _, state = attn.scan(q, k, v)
    with pytest.raises(ValueError, match="batch"):
        attn.scan(q[:1], k[:1], v[:1], state)
    _, narrow = attn.scan(q, k, v[..., :3])
    with pytest.raises(ValueError, match=r"width|shape"):
        attn.scan(q, k, v, narrow)
    with pytest.raises(ValueError, match=r"width|shape" if attn.merges else "cannot be cut into chunks again"):
        sq.merge(state, narrow)


@pytest.mark.parametrize("name", sq.list_mechanisms(recurrent=True))
def test_states_of_other_precisions_are_refused(name):
    attn = sq.create(name, 4, 2)
    mine, theirs = (attn.scan(*torch.randn(3, 1, 2, 6, 4, dtype=kind))[1] for kind in (torch.float32, torch.float64))
    with pytest.raises(ValueError, match=r"the states are of torch\.float32 and torch\.float64; absorb"):
        sq.merge(mine, theirs)


def test_query_heads_must_fit_the_state(absorbing_case):
    attn, (q, k, v) = absorbing_case.make(), absorbing_case.inputs(heads=3, kv_heads=2, length=6)
    state = attn.absorb(k, v)
    attn.heads = None  # as where it was made without
    with pytest.raises(ValueError, match="q has 3 heads, not a multiple of the state's 2"):
        attn.read(q, state)


def test_calibration_takes_masks_like_calls(calibrated_case):
    attn, (q, k, _) = calibrated_case.make(), calibrated_case.inputs(length=6)
    before = {name: x.clone() for name, x in attn.named_buffers()}
    for argument in ("key_mask", "query_mask"):
        with pytest.raises(TypeError, match=f"{argument} must be bool"):
            attn.calibrate(q, k, **{argument: torch.ones(2, 6, dtype=torch.int64)})
        with pytest.raises(ValueError, match=f"{argument} must have shape"):
            attn.calibrate(q, k, **{argument: torch.ones(12, dtype=torch.bool)})
    assert all(torch.equal(x, before[name]) for name, x in attn.named_buffers())


def test_nan_is_never_hidden(case):
    attn, (q, k, v) = case.make(), case.inputs(length=20)
    for is_causal in case.causal_modes:
        for index in (0, 1, 2) if attn.uses_keys else (0, 2):
            inputs = [q.clone(), k.clone(), v.clone()]
            inputs[index][0, 0, 10, 2] = float("nan")
            out = attn(*inputs, is_causal=is_causal)
            assert out[0, 0].isnan().any()
            assert out[1].isfinite().all()


def test_torchs_own_arguments(first_case):
    attn, (q, k, v) = first_case.make(), first_case.inputs(length=6)
    want = attn(q, k, v)
    assert torch.equal(attn(q, k, v, None, 0.0, False, scale=None, enable_gqa=False), want)
    with pytest.raises(ValueError, match="attn_mask is not supported"):
        attn(q, k, v, torch.ones(6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dropout_p=0\.1 is not supported"):
        attn(q, k, v, dropout_p=0.1)
    with pytest.raises(TypeError, match="is_causal must be True or False"):
        attn(q, k, v, is_causal="no")
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        attn(q, k, v, chunk_size=-1)
