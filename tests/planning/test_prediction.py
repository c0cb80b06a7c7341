"""predict_error: the closed form agrees with many draws where it speaks, the rest is measured and says so."""

import pytest
import torch

import subquad as sq
from subquad.features.coupling import orthogonal_gain, orthogonal_gain_trig
from subquad.planning.closed_form import MOST_KEYS, RELIABLE, _Gain, closed_form, refusal
from subquad.planning.piece import Piece, pick_rows

D = 16
FAMILIES = {
    "positive": {"features": "positive"},
    "hyperbolic": {"features": "hyperbolic"},
    "trig": {"features": "trig"},
    "oprf": {"features": "oprf"},
    "oprf antithetic": {"features": "oprf", "antithetic": True},
    "hyperbolic centred": {"features": "hyperbolic", "center": True},
}


def gaussian(kind="isotropic", rows=24, keys=96, heads=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, rows, D, generator=generator, dtype=torch.float64)
    k = torch.randn(1, heads, keys, D, generator=generator, dtype=torch.float64)
    if kind == "anisotropic":
        weights = torch.arange(1, D + 1, dtype=torch.float64) ** -0.5
        return 0.45 * weights * q, 0.45 * weights * k
    if kind == "shifted":
        return 0.25 * q + 0.15, 0.25 * k - 0.1
    return 0.3 * q, 0.3 * k


def over_draws(q, k, draws, **options):
    """The mean over draws of |A' - A|^2 / |A|^2, by the matrix itself."""
    eye = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
    exact = sq.attention(q, k, eye, "softmax")
    attend = sq.create("performer", D, k.shape[1], k.shape[1], seed=5, **options)
    if attend.uses_calibration:
        attend.calibrate(q, k)
    total = 0.0
    for _ in range(draws):
        total += float((attend(q, k, eye) - exact).square().sum() / exact.square().sum())
        attend.redraw()
    return total / draws


@pytest.mark.parametrize("projection", ["gaussian", "orthogonal", "hadamard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_closed_form_is_within_20_percent_of_many_draws(family, projection):
    q, k = gaussian()
    options = {"num_features": 256, "projection": projection, **FAMILIES[family]}
    found = sq.predict_error(q, k, "performer", **options)
    assert found.method == "closed form" and found.error <= RELIABLE
    assert over_draws(q, k, 40, **options) / found.error == pytest.approx(1.0, abs=0.2)
    assert found.low < found.error < found.high


@pytest.mark.parametrize("kind", ["anisotropic", "shifted"])
@pytest.mark.parametrize("family", ["hyperbolic", "oprf antithetic", "hyperbolic centred"])
def test_on_other_data(kind, family):
    q, k = gaussian(kind)
    options = {"num_features": 256, **FAMILIES[family]}
    found = sq.predict_error(q, k, "performer", **options)
    assert found.method == "closed form"
    assert over_draws(q, k, 80, **options) / found.error == pytest.approx(1.0, abs=0.2)


def test_where_rare_draws_carry_the_error_it_does_not_speak():
    """A small error of large norms: the mean over six hundred draws is still 40 % below it."""
    q, k = gaussian("anisotropic")
    attend = sq.create("performer", D, num_features=256, seed=0)
    error, _, holds = closed_form(attend, Piece(1.6 * q, 1.6 * k, None, tokens=96))
    assert error < RELIABLE and not holds


@pytest.mark.parametrize("dim", [8, 32])
def test_what_orthogonal_rows_share_sums_to_the_closed_form_on_the_diagonal(dim):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(6, dim, generator=generator, dtype=torch.float64)
    z = z / z.norm(dim=-1, keepdim=True) * torch.tensor([0.1, 0.5, 0.8, 1.0, 1.3, 1.5], dtype=torch.float64)[:, None]
    norms = z.square().sum(-1)
    for trig, known in ((False, orthogonal_gain), (True, orthogonal_gain_trig)):
        found = _Gain(dim, trig, float(norms.max())).matrix(z @ z.mT, norms)
        assert torch.allclose(found.diagonal(), known(dim, norms), rtol=2e-3)


def test_heads_masks_and_causal_rows():
    """Every head its own scale, so that a mixed-up head or mask shows: against the same sum, pair by pair."""
    generator = torch.Generator().manual_seed(2)
    q = torch.tensor([0.1, 0.2, 0.3, 0.35]).view(1, 4, 1, 1) * torch.randn(1, 4, 20, D, generator=generator)
    k = 0.4 * torch.randn(1, 2, 20, D, generator=generator)
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, 14:] = False
    attend = sq.create("performer", D, 4, 2, num_features=64, features="positive", projection="gaussian", seed=0)
    piece = Piece(q, k, None, tokens=20, scale=0.25, is_causal=True, key_mask=mask)
    error, per_head, _ = closed_form(attend, piece)
    wrong, whole = torch.zeros(4), torch.zeros(4)
    for head in range(4):
        for i in range(14):
            x, y = 0.5 * q[0, head, i].double(), 0.5 * k[0, head // 2, : i + 1].double()
            a = torch.softmax(y @ x, 0)
            c = torch.expm1((x + y) @ (x + y).mT) / 64
            wrong[head] += (a.square() * (c.diagonal() - 2 * (c @ a) + a @ c @ a)).sum()
            whole[head] += a.square().sum()
    assert torch.allclose(torch.tensor(per_head), wrong / whole, rtol=1e-5)
    assert error == pytest.approx(float(wrong.sum() / whole.sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("mechanism", "options", "said"),
    [
        ("performer", {"features": "sderf"}, "one scale per direction"),
        ("performer", {"features": "relu"}, "another kernel"),
        ("performer", {"norms": "sqrt"}, "biased"),
        ("performer", {"projection": "simplex"}, "far from orthogonal"),
        ("performer", {"projection": "hadamard", "blocks": 1}, "far from orthogonal"),
        ("nystrom", {"landmarks": 8}, "no closed form"),
        ("taylor", {"degree": 1}, "no closed form"),
        ("hybrid", {"window": 4}, "no closed form"),
    ],
)
def test_everything_else_is_measured_and_says_why(mechanism, options, said):
    q, k = (x.float() for x in gaussian(rows=96))
    found = sq.predict_error(q, k, mechanism, **options)
    assert found.method == "measured" and said in found.reason
    assert 0 <= found.low <= found.error <= found.high
    assert "measured on 96 tokens" in str(found)


def test_beyond_its_range_it_is_measured_and_the_interval_holds_other_draws():
    q, k = (x.float() for x in gaussian(rows=96))
    found = sq.predict_error(2.2 * q, 2.2 * k, "performer", num_features=64)
    assert found.method == "measured" and "holds up to" in found.reason
    assert found.low <= over_draws(2.2 * q.double(), 2.2 * k.double(), 24, num_features=64) <= found.high


def test_too_many_keys_and_values_are_measured():
    q, k = (x.float() for x in gaussian(rows=8, keys=MOST_KEYS + 1))
    assert refusal(sq.create("performer", D), Piece(q, k, None, tokens=MOST_KEYS + 1)) is not None
    assert "too many pairs" in sq.predict_error(q, k, "performer", num_features=32).reason
    v = torch.randn(1, 1, MOST_KEYS + 1, 4) + 5.0
    found = sq.predict_error(q, k, "performer", v=v, num_features=32)
    assert found.criterion == "output" and found.uniform < 0.05


def test_exact_attention_has_no_error():
    q, k = gaussian()
    found = sq.predict_error(q.float(), k.float(), "softmax")
    assert (found.error, found.method) == (0.0, "exact")


def test_an_object_is_taken_as_it_is_and_left_as_it_was():
    q, k = (x.float() for x in gaussian(rows=96))
    attend = sq.create("performer", D, num_features=16, seed=3)
    before = {name: x.clone() for name, x in attend.state_dict().items()}
    assert sq.predict_error(3 * q, 3 * k, attend).draws == 6
    assert all(torch.equal(before[name], x) for name, x in attend.state_dict().items())
    with pytest.raises(RuntimeError, match="calibrate"):
        sq.predict_error(q, k, sq.create("performer", D, 1, features="sderf"))


def test_torch_generator_is_left_alone():
    q, k = (x.float() for x in gaussian(rows=96))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sq.predict_error(2 * q, 2 * k, "performer")
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_tensors():
    q, k = (x.float() for x in gaussian())
    for x, message in ((k[:, :, :0], "at least one query"), (k * float("nan"), "k must be finite")):
        with pytest.raises(ValueError, match=message):
            sq.predict_error(q, x, "performer")
    with pytest.raises(ValueError, match="as many queries as keys"):
        sq.predict_error(q, k, "performer", is_causal=True)
    with pytest.raises(ValueError, match="scale must be a finite number or None"):
        sq.predict_error(q, k, "performer", scale="x")
    with pytest.raises(ValueError, match="must name its mechanism"):
        sq.predict_error(q, k, "hybrid", far={"num_features": 8})


def test_unknown_mechanisms_are_refused_by_name():
    q, k = gaussian()
    with pytest.raises(ValueError, match=r"'performr' is not known; .*did you mean 'performer'"):
        sq.predict_error(q, k, "performr")
    with pytest.raises(TypeError, match="must be a name, a Mechanism class or a Mechanism object, got dict"):
        sq.predict_error(q, k, {"mechanism": "linear"})


def test_what_is_exact_does_not_depend_on_the_mechanism():
    q, k = gaussian(kind="shifted", rows=40, keys=40)
    found = [sq.predict_error(q.float(), k.float(), name).uniform for name in ("linear", "taylor", "efficient")]
    assert found == pytest.approx([found[0]] * 3)


def test_padding_has_no_part_in_the_calibration():
    generator = torch.Generator().manual_seed(0)
    q, k = 0.4 * torch.randn(2, 1, 2, 80, D, generator=generator)
    q, mask = q + 1, torch.arange(80)[None] < 20
    for options in ({"mechanism": "taylor", "degree": 1}, {"mechanism": "performer", "num_features": 32}):
        call = {**options, "center": True, "seed": 0}
        want = sq.predict_error(q[:, :, :20], k[:, :, :20], **call).error
        for garbage in (0.0, 5.0):
            padded = [x.masked_fill(~mask[:, None, :, None], garbage) for x in (q, k)]
            assert sq.predict_error(*padded, key_mask=mask, **call).error == pytest.approx(want, rel=0.05)
            choice = sq.plan(
                *padded, key_mask=mask, target_error=0.5, mechanisms=[options["mechanism"]], times=False
            ).choices
            assert min(one.error for one in choice) < 2 * want


def test_short_inputs_are_measured_without_noise():
    """With the made-up values of another seed the same number comes out, that of the whole matrix."""
    q, k = torch.randn(2, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.softmax(q @ k.mT / 2, -1)
    off = sq.create("taylor", 4, degree=1)(q, k, torch.eye(8).expand(1, 2, 8, 8)) - weights
    for seed in range(3):
        found = sq.predict_error(q, k, "taylor", degree=1, seed=seed)
        assert found.error == pytest.approx(float(off.square().sum() / weights.square().sum()), rel=1e-4)


@pytest.mark.parametrize("name", ["clustered", "improved-clustered", "nystrom"])
def test_padded_queries_have_no_part_in_the_prediction(name):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 60, D, generator=generator)
    mask = torch.rand(2, 60, generator=generator) > 0.3
    attend = sq.create(name, D, 2, **({"landmarks": 8} if name == "nystrom" else {"clusters": 8, "seed": 0}))
    exact, real = sq.attention(q, k, v, "softmax", key_mask=mask), mask[:, None, :, None]
    off = attend(q, k, v, key_mask=mask, query_mask=mask) - exact
    want = (off * real).square().sum() / (exact * real).square().sum()
    assert Piece(q, k, v, tokens=120, key_mask=mask).error(attend) == pytest.approx(float(want), rel=1e-4)


def test_every_sequence_counts_or_none_is_promised():
    """Flat and sharp sequences by turns: whichever come first, the closed form is of all of them."""
    generator = torch.Generator().manual_seed(1)
    q, k = 0.2 * torch.randn(2, 4, 2, 40, D, generator=generator)
    turns = torch.tensor([1.5, 1.0, 1.5, 1.0])[:, None, None, None]
    found = sq.predict_error(turns * q, turns * k, "performer", num_features=256)
    again = sq.predict_error(*((turns * x).roll(1, 0) for x in (q, k)), "performer", num_features=256)
    assert found.method == again.method == "closed form" and found.sequences == found.batch == 4
    assert again.error == pytest.approx(found.error, rel=1e-6)
    sharp = sq.predict_error(turns**3 * q, turns**3 * k, "performer", num_features=256)
    assert sharp.method == "measured"
    many = sq.predict_error(*(0.2 * torch.randn(2, 40, 2, 60, D, generator=generator)), "taylor")
    assert (many.sequences, many.batch) == (34, 40) and "on 60 tokens of 34 of 40 sequences" in str(many)
    large = sq.predict_error(*(0.2 * torch.randn(2, 20, 2, 60, D, generator=generator)), "performer", num_features=256)
    assert large.method == "measured" and "20 sequences of 60 keys" in large.reason
    assert "sequences" not in str(large)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_large_query_is_not_overlooked(is_causal):
    generator = torch.Generator().manual_seed(1)
    q, k = 0.2 * torch.randn(2, 1, 1, 200, D, generator=generator)
    attend = sq.create("performer", D, 1, num_features=512, seed=0)
    q[:, :, 137] *= 9
    error, _, holds = closed_form(attend, Piece(q, k, None, tokens=200, is_causal=is_causal))
    assert not holds and error > 1e-3
    rows, stands = pick_rows(q[0, 0], 40, is_causal=is_causal)
    assert float(stands[rows == 137]) == 1.0
    assert len(rows.unique()) == len(rows) <= 40 and float(stands.sum()) == pytest.approx(200)


def padded(x, mask, garbage):
    """x (1, H, n, C) at the n real places of the mask, garbage at the others."""
    wide = torch.full((1, x.shape[1], len(mask), x.shape[-1]), garbage)
    wide[:, :, mask] = x
    return wide


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [("local", {"window": 8}), ("taylor", {"degree": 2}), ("clustered", {"clusters": 8, "seed": 0}),
     ("performer", {"num_features": 512}), ("performer", {"num_features": 16})],
)  # fmt: skip
def test_padding_is_neither_looked_at_nor_counted(name, options, is_causal):
    """Wherever it stands and whatever it holds: what is said is said of the real tokens."""
    if is_causal and name == "clustered":
        return
    generator = torch.Generator().manual_seed(0)
    q, k, v = 0.3 * torch.randn(3, 1, 2, 90, D, generator=generator)
    place = torch.arange(3000)
    masks = (place >= 2910, place < 90, torch.zeros(3000).scatter(0, 33 * torch.arange(90), 1.0) > 0)
    for values in (None, v):
        call = {"is_causal": is_causal, "seed": 0, **options}
        want = sq.predict_error(q, k, name, v=values, **call)
        for mask, garbage in zip(masks, (0.0, 20.0, 1e30), strict=True):
            wide = None if values is None else padded(v, mask, garbage)
            found = sq.predict_error(
                padded(q, mask, garbage), padded(k, mask, garbage), name, v=wide, key_mask=mask[None], **call
            )
            assert (found.error, found.low, found.high) == pytest.approx((want.error, want.low, want.high), rel=1e-4)
            assert (found.uniform, found.tokens, found.method) == (pytest.approx(want.uniform), 90, want.method)


@pytest.mark.parametrize("name", ["taylor", "clustered"])
def test_padded_keys_of_cross_attention_and_of_sequences_that_differ(name):
    generator = torch.Generator().manual_seed(0)
    options = {"clusters": 4, "seed": 0} if name == "clustered" else {"degree": 2}
    for queries in (30, 80):
        q, k = torch.randn(4, 2, queries, D, generator=generator), torch.randn(4, 2, 80, D, generator=generator)
        v = torch.randn(4, 2, 80, 5, generator=generator).sign()
        mask = torch.rand(4, 80, generator=generator) < torch.tensor([0.3, 0.9, 0.0, 0.6])[:, None]
        attend = sq.create(name, D, 2, **options)
        wrong = whole = 0.0
        for i in (0, 1, 3):
            asked = q[i : i + 1] if queries < 80 else q[i : i + 1, :, mask[i]]
            alone = Piece(asked, k[i : i + 1, :, mask[i]], v[i : i + 1, :, mask[i]], tokens=80, cross=queries < 80)
            wrong, whole = wrong + float(alone.squares(attend).sum()), whole + alone.norm
        piece = Piece(q, k, v, tokens=320, key_mask=mask)
        assert (piece.sequences, piece.given, piece.tokens) == (3, 3, int(mask.sum(1).max()))
        assert piece.error(attend) == pytest.approx(wrong / whole, rel=1e-4)
        assert Piece(q, k, v, tokens=80, key_mask=mask).tokens == piece.tokens  # the longest, if it is only one


def test_a_mask_without_any_token_is_refused():
    q, k = (x.float() for x in gaussian(rows=96))
    with pytest.raises(ValueError, match="key_mask leaves no query with a key"):
        sq.predict_error(q, k, key_mask=torch.zeros(1, 96, dtype=torch.bool))
