"""Sparse attention: the pattern is the paper's, no key counts twice, and the cost is L sqrt(L)."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import subquad as sq
from subquad.kernels.windowed_linear.chunked.windows import dense_partial
from subquad.state import join


def _inputs(length, batch=1, heads=1, width=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, batch, heads, length, width, generator=generator, dtype=torch.float64).unbind()


def _weights(attn, length, is_causal):
    q, k, _ = _inputs(length)
    return attn(q, k, torch.eye(length, dtype=torch.float64)[None, None], is_causal=is_causal)[0, 0]


PATTERNS = [
    {"stride": 5},
    {"stride": 1},
    {"pattern": "fixed", "stride": 5, "summary": 2},
    {"pattern": "fixed", "stride": 4, "summary": 4},
    {"pattern": "fixed", "stride": 1, "summary": 1},
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", PATTERNS)
def test_every_token_sees_exactly_its_pattern(options, is_causal):
    length, stride, summary = 23, options["stride"], options.get("summary")
    weights = _weights(sq.create("sparse", 8, **options), length, is_causal)
    for i in range(length):
        for j in range(length):
            if summary is None:
                seen = abs(i - j) <= stride or (i - j) % stride == 0
            else:
                seen = i // stride == j // stride or j % stride >= stride - summary
            assert (weights[i, j] > 0) == (seen and (not is_causal or j <= i)), (i, j)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", PATTERNS)
def test_rows_sum_to_one(options, is_causal):
    assert (_weights(sq.create("sparse", 8, **options), 23, is_causal).sum(-1) - 1).abs().max() <= 1e-12


def test_no_key_counts_twice():
    q, k, v = _inputs(30)
    place = torch.arange(30)
    offset = place[:, None] - place
    window, column = (offset >= 0) & (offset <= 6), (offset >= 0) & (offset % 6 == 0)
    got = sq.attention(q, k, v, "sparse", is_causal=True, stride=6)
    union = dense_partial(q, k, v, (window | column)[None], 8**-0.5).finish()
    assert (got - union).abs().max() <= 1e-12
    # The two halves of the pattern as the paper writes them share the token itself and the one `stride` before it.
    twice = join(*(dense_partial(q, k, v, part[None], 8**-0.5) for part in (window, column))).finish()
    assert (twice - union).abs().max() > 1e-2


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "options", [{"stride": 40}, {"stride": 500}, {"stride": 1}, {"pattern": "fixed", "stride": 40}]
)
def test_a_stride_of_the_whole_length_is_softmax_attention(options, is_causal):
    q, k, v = _inputs(40)
    want = sq.attention(q, k, v, "softmax", is_causal=is_causal)
    assert (sq.attention(q, k, v, "sparse", is_causal=is_causal, **options) - want).abs().max() <= 1e-12


@pytest.mark.parametrize("options", PATTERNS)
def test_a_causal_row_does_not_feel_how_long_the_sequence_is(options):
    attn = sq.create("sparse", 8, **options)
    q, k, v = _inputs(60)
    whole = attn(q, k, v, is_causal=True)
    for length in (1, 2, 17, 59):
        prefix = attn(*(x[:, :, :length] for x in (q, k, v)), is_causal=True)
        assert (whole[:, :, :length] - prefix).abs().max() <= 1e-12
    # A stride taken from the length would make it feel just that.
    short, long = (
        sq.attention(*(x[:, :, :n] for x in (q, k, v)), "sparse", is_causal=True, stride=round(n**0.5))
        for n in (17, 60)
    )
    assert (long[:, :, :17] - short).abs().max() > 1e-3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", PATTERNS)
@pytest.mark.parametrize("at", [0, 9, 20])
def test_padding_takes_no_place_in_the_pattern(options, is_causal, at):
    attn = sq.create("sparse", 8, **options)
    q, k, v = _inputs(20)
    padded = [torch.cat([x[:, :, :at], torch.full_like(x[:, :, :3], 7.0), x[:, :, at:]], 2) for x in (q, k, v)]
    mask = torch.ones(1, 23, dtype=torch.bool)
    mask[:, at : at + 3] = False
    out = attn(*padded, is_causal=is_causal, key_mask=mask)
    assert (out[:, :, mask[0]] - attn(q, k, v, is_causal=is_causal)).abs().max() <= 1e-12
    assert (out[:, :, ~mask[0]] == 0).all()


@pytest.mark.parametrize("options", PATTERNS)
@pytest.mark.parametrize("chunk_size", [1, 6, 100])
def test_chunk_size_changes_neither_output_nor_gradient(options, chunk_size):
    attn = sq.create("sparse", 8, **options)
    results = []
    for call in ({"backend": "reference"}, {"chunk_size": chunk_size}):
        args = [x.clone().requires_grad_() for x in _inputs(37, 2, 2)]
        out = attn(*args, is_causal=True, **call)
        results.append([out, *torch.autograd.grad(out.square().sum(), args)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-12


@pytest.mark.parametrize("pattern", ["strided", "fixed"])
def test_operations_grow_as_the_length_to_three_halves(pattern):
    counts = []
    for length in (1024, 4096):
        attn = sq.create("sparse", 8, pattern=pattern, stride=int(length**0.5), summary=1)
        q, k, v = torch.randn(3, 1, 1, length, 8)
        with FlopCounterMode(display=False) as counter:
            attn(q, k, v, is_causal=True, backend="chunked")  # torch counts its own operations
        counts.append(counter.get_total_flops())
        assert counts[-1] >= 4 * 8 * length**1.5  # the products themselves are counted
    # Blocks of the window are at least 64 wide, so short sequences pay a little more than their share.
    assert 4**1.2 < counts[1] / counts[0] <= 4**1.6


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"stride": None}, TypeError, "stride must be an integer"),
        ({"pattern": "fixd"}, ValueError, "did you mean 'fixed'"),
        ({"pattern": "fixed", "stride": 4, "summary": 5}, ValueError, "summary=5 must be at most stride=4"),
    ],
)
def test_wrong_options(options, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("sparse", 8, **options)


def test_cross_attention_is_refused_with_the_reason():
    q, k, v = _inputs(10)
    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 10: in cross attention"):
        sq.attention(q[:, :, :4], k, v, "sparse")


def test_neither_threads_nor_padding_change_a_bit():
    q, k, v = (x.float() for x in _inputs(300, 2, 2))
    mask = torch.rand(2, 300, generator=torch.Generator().manual_seed(0)) > 0.3
    before = torch.get_num_threads()
    for options in ({"stride": 17}, {"pattern": "fixed", "stride": 17, "summary": 3}):
        attn = sq.create("sparse", 8, **options)
        for is_causal in (False, True):
            alone = attn(*(x[:1, :, mask[0]] for x in (q, k, v)), is_causal=is_causal)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                out = attn(q, k, v, is_causal=is_causal, key_mask=mask)
                assert torch.equal(out[:1, :, mask[0]], alone)
    torch.set_num_threads(before)


@pytest.mark.parametrize("options", PATTERNS)
def test_not_even_nan_is_seen_outside_the_pattern(options):
    """Weights of 0 do not meet hidden values that are not numbers."""
    q, k, v = (x.float() for x in _inputs(60))
    bad = 41
    k[:, :, bad] = v[:, :, bad] = float("nan")
    out = sq.attention(q, k, v, "sparse", is_causal=True, **options)
    assert out[:, :, :bad].isfinite().all()
    assert out[:, :, bad].isnan().all()
