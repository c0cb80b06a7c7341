"""Local attention: the set of keys is the stated one, padding takes no place, and the state is a window."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import subquad as sq


def _inputs(length, batch=2, heads=2, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, batch, heads, length, width, generator=generator, dtype=torch.float64).unbind()


def _weights(attn, length, **call):
    """The attention matrix itself: the output for values that are the unit vectors."""
    q, k, _ = _inputs(length, 1, 1)
    return attn(q, k, torch.eye(length, dtype=torch.float64)[None, None], **call)[0, 0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (1, 0), (3, 2), (0, 3), (12, 1)])
def test_every_token_sees_exactly_its_neighbourhood(window, sinks, is_causal):
    length = 20
    attn = sq.create("local", 8, window=window, sinks=sinks)
    seen = _weights(attn, length, is_causal=is_causal) > 0
    for i in range(length):
        for j in range(length):
            near = abs(i - j) <= window or j < sinks or i < sinks
            assert seen[i, j] == (near and (not is_causal or j <= i)), (i, j)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_longer_than_the_sequence_is_softmax_attention(is_causal):
    q, k, v = _inputs(40)
    want = sq.attention(q, k, v, "softmax", is_causal=is_causal)
    for options in ({"window": 39}, {"window": 1000}, {"window": 0, "sinks": 40}):
        assert (sq.attention(q, k, v, "local", is_causal=is_causal, **options) - want).abs().max() <= 1e-12
    assert (sq.attention(q, k, v, "local", is_causal=is_causal, window=38) - want).abs().max() > 1e-6


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_takes_no_place_in_the_window(side, is_causal, sinks):
    attn = sq.create("local", 8, window=3, sinks=sinks)
    q, k, v = _inputs(20, 1)
    alone = attn(q, k, v, is_causal=is_causal)
    at = {"left": 0, "right": 20, "inside": 9}[side]
    padded = [torch.cat([x[:, :, :at], torch.full_like(x[:, :, :5], 7.0), x[:, :, at:]], 2) for x in (q, k, v)]
    mask = torch.ones(1, 25, dtype=torch.bool)
    mask[:, at : at + 5] = False
    out = attn(*padded, is_causal=is_causal, key_mask=mask)
    assert (out[:, :, mask[0]] - alone).abs().max() <= 1e-12
    assert (out[:, :, ~mask[0]] == 0).all()
    # Positions in the padded sequence, the usual definition, are wrong where padding stands between tokens, and take
    # the padding for global tokens where it stands first.
    row, column = torch.arange(25)[:, None], torch.arange(25)
    visible = ((row - column).abs() <= 3) | (column < sinks) | (row < sinks)
    visible = visible & mask & (column <= row if is_causal else True)
    usual = torch.nn.functional.scaled_dot_product_attention(*padded, attn_mask=visible)
    differs = (usual[:, :, mask[0]] - alone).abs().max() > 1e-3
    assert differs == (side == "inside" or (side == "left" and sinks > 0))


@pytest.mark.parametrize("sinks", [0, 2])
def test_decoding_after_a_padded_prefill_equals_decoding_alone(sinks):
    attn = sq.create("local", 8, window=4, sinks=sinks)
    q, k, v = _inputs(16, 3)
    lengths = [10, 6, 1]
    mask = torch.arange(10) < torch.tensor(lengths)[:, None]
    _, state = attn.scan(*(x[:, :, :10] for x in (q, k, v)), key_mask=mask)
    assert state.count.tolist() == lengths
    together, _ = attn.scan(*(x[:, :, 10:] for x in (q, k, v)), state)
    for i, length in enumerate(lengths):
        own = [torch.cat([x[i : i + 1, :, :length], x[i : i + 1, :, 10:]], 2) for x in (q, k, v)]
        alone = attn(*own, is_causal=True)[:, :, length:]
        assert (together[i : i + 1] - alone).abs().max() <= 1e-12


@hypothesis.given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 6), st.integers(0, 4))
@hypothesis.settings(max_examples=40)
def test_merged_states_are_the_state_of_the_whole(sizes, window, sinks):
    attn = sq.create("local", 8, window=window, sinks=sinks)
    q, k, v = _inputs(sum(sizes) + 5)
    ends = list(itertools.accumulate(sizes, initial=0))
    mask = torch.rand(2, ends[-1], generator=torch.Generator().manual_seed(1)) > 0.3
    pieces = [attn.absorb(k[:, :, a:b], v[:, :, a:b], key_mask=mask[:, a:b]) for a, b in itertools.pairwise(ends)]
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = sq.merge(merged, piece)
    whole = attn.absorb(k[:, :, : ends[-1]], v[:, :, : ends[-1]], key_mask=mask)
    assert torch.equal(merged.count, whole.count)
    tail = [x[:, :, ends[-1] :] for x in (q, k, v)]
    want, _ = attn.scan(*tail, whole)
    assert (attn.scan(*tail, merged)[0] - want).abs().max() <= 1e-12
    assert (attn.scan(*tail, whole, backend="reference")[0] - want).abs().max() <= 1e-12


def test_the_state_does_not_grow():
    attn = sq.create("local", 8, window=4, sinks=2)
    q, k, v = _inputs(300)
    shapes = []
    for length in (1, 300):
        _, state = attn.scan(*(x[:, :, :length] for x in (q, k, v)))
        shapes.append([leaf.shape for leaf in torch.utils._pytree.tree_leaves(state)])
    assert shapes[0] == shapes[1]
    # Nor does it hold on to the tokens it came from: a view would.
    for held in (*state.window, *state.sinks):
        assert held.untyped_storage().nbytes() == held.numel() * held.element_size()
    assert torch.equal(state.window.k, k[:, :, -4:])
    assert torch.equal(state.sinks.v, v[:, :, :2])
    half = [x.bfloat16() for x in (q, k, v)]
    out, state = attn.scan(*half)
    assert out.dtype == torch.bfloat16
    assert state.window.k.dtype == state.sinks.v.dtype == torch.float32


@pytest.mark.parametrize("backend", [None, "reference"])
def test_read_stands_where_the_next_token_would(backend):
    attn = sq.create("local", 8, window=4, sinks=2)
    q, k, v = _inputs(20)
    state = attn.absorb(k[:, :, :12], v[:, :, :12])
    state = attn.absorb(k[:, :, 12:], v[:, :, 12:], state)
    places = [0, 1, 16, 17, 18, 19]
    want = sq.attention(q, k[:, :, places], v[:, :, places], "softmax")
    assert (attn.read(q, state, backend=backend) - want).abs().max() <= 1e-12
    few = attn.absorb(k[:, :, :1], v[:, :, :1])
    assert (attn.read(q, few, backend=backend) - v[:, :, :1]).abs().max() <= 1e-12
    none = attn.absorb(k[:, :, :0], v[:, :, :0])
    assert (attn.read(q, none, backend=backend) == 0).all()
    empty = sq.create("local", 8, window=0)
    assert (empty.read(q, empty.absorb(k, v), backend=backend) == 0).all()


def test_the_backward_keeps_memory_of_the_length_and_not_of_the_window(saved_bytes):
    attn = sq.create("local", 8, window=256)
    kept = {}
    for length in (2048, 4096):
        q, k, v = (torch.randn(1, 2, length, 8).requires_grad_() for _ in range(3))
        kept[length] = saved_bytes(lambda x=(q, k, v): attn(*x, is_causal=True, chunk_size=256))
    # q, k, v, padded k and v, and a window per chunk: well under twenty times 8 numbers per token and head, where the
    # scores alone would be over 256.
    assert kept[4096] < 4 * 2 * 4096 * 8 * 20
    assert kept[4096] < 2.2 * kept[2048]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"window": 2.0}, TypeError, "window must be an integer"),
        ({"sinks": -2}, ValueError, "sinks must be at least 0"),
        ({"windows": 3}, TypeError, "did you mean 'window'"),
        ({"sinks": 1, "global_tokens": 1}, TypeError, "global_tokens is another name of sinks"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("local", 8, **options)


def test_what_has_no_meaning_is_refused():
    attn = sq.create("local", 8, window=3)
    q, k, v = _inputs(10)
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 10"):
        attn(q[:, :, :4], k, v)
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        attn(q, k, v, chunk_size=0)
    _, state = attn.scan(q, k, v)
    other = sq.create("local", 8, window=4)
    with pytest.raises(ValueError, match="window=3"):
        other.scan(q, k, v, state)
    with pytest.raises(ValueError, match="different features"):
        sq.merge(state, other.absorb(k, v))
    with pytest.raises(ValueError, match="merge: the states differ in batch, heads or value width"):
        sq.merge(state, attn.absorb(k[:1], v[:1]))
    with pytest.raises(TypeError, match="state must be a State"):
        attn.read(q, None)
