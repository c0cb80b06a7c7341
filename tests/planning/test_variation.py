"""Which draw a plan names, and how it sees that inputs differ: by disjoint parts with keys of their own."""

import math
import statistics

import pytest
import torch

import subquad as sq
from subquad.planning import cost
from subquad.planning.candidates import ladders
from subquad.planning.judging import seeds_tried, with_seed
from subquad.planning.measuring import Piece
from subquad.planning.variation import Parts, best_draw

D = 16
FORM = {"is_causal": False, "scale": None, "key_mask": None, "seed": 0}


@pytest.fixture(autouse=True)
def _no_clock(own_cache, monkeypatch):
    monkeypatch.setattr(cost, "LENGTHS", (128, 256, 512))
    monkeypatch.setattr(cost, "seconds_of", lambda call, inputs, training: 1e-9 * inputs[0].shape[-2])


def inputs(seed, *, length=512, heads=2, batch=1, size=0.8):
    """A few strong directions: errors differ between draws and between inputs."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, D + 1) ** -1.0
    q, k = torch.randn(2, batch, heads, length, D, generator=generator)
    factor = (size * D**0.5 / float(weights.pow(4).sum().sqrt())) ** 0.5
    return factor * weights * q, factor * weights * k


def piece_of(q, k, **form):
    return Piece(q, k, None, tokens=q.shape[0] * q.shape[2], **{**FORM, **form})


def drawn_settings():
    """One step of every ladder that draws something."""
    seen = {}
    for ladder in ladders(None, is_causal=False, cross=False):
        options = ladder.steps[0]
        if options != (own := with_seed(ladder.mechanism, options, 5)):
            seen[f"{ladder.mechanism} {options.get('features', '')} {'far' in options}"] = (ladder.mechanism, own)
    return seen


@pytest.mark.parametrize("name", drawn_settings())
def test_a_seed_means_the_same_draw_for_the_whole_layer(name):
    """A plan looks at some heads; the layer made with its options must give those heads the same output."""
    mechanism, options = drawn_settings()[name]
    q, k = inputs(0, length=96, heads=4)
    v = torch.randn(1, 4, 96, D, generator=torch.Generator().manual_seed(1))
    some = torch.tensor([1, 3])
    outs = []
    for heads in (torch.arange(4), some):
        attend = sq.create(mechanism, D, len(heads), **options)
        if attend.uses_calibration:
            attend.calibrate(q[:, heads], k[:, heads])
        outs.append(attend(q[:, heads], k[:, heads], v[:, heads]))
    torch.testing.assert_close(outs[0][:, some], outs[1], rtol=1e-4, atol=1e-5)


def test_the_plan_names_the_draw_that_it_measured():
    q, k = inputs(0)
    answer = sq.plan(q, k, target_error=0.5, mechanisms=["performer"], seed=40)
    best = answer.best
    assert best is not None, str(answer)
    assert 40 <= best.options["seed"] < 40 + best.draws
    attend = best.create(D, 2)
    if attend.uses_calibration:
        attend.calibrate(q, k)
    found = piece_of(q, k, seed=40).error(attend)
    # The error said is that one, with what choosing it has flattered it.
    assert found <= best.error * 1.001
    assert best.error <= 2 * found
    assert best.error < best.error_high
    assert f"seed={best.options['seed']}" in best.label


def test_a_far_field_has_its_seed_too():
    q, k = inputs(0, size=0.5)
    answer = sq.plan(q, k, target_error=0.5, mechanisms=["hybrid"])
    far = [c.options["far"] for c in answer.choices if c.mechanism == "hybrid"]
    drawn = [options for options in far if options["mechanism"] == "performer"]
    assert drawn
    assert all(isinstance(options["seed"], int) for options in drawn)


def test_redraws_judge_the_mean_and_leave_objects_alone():
    q, k = inputs(0)
    given = sq.create("performer", D, 2, num_features=64, features="oprf", antithetic=True, seed=3)
    key = given.feature_map.draw_key()
    (one,) = [c for c in sq.plan(q, k, target_error=0.6, mechanisms=[given]).choices if c.given is given]
    mean = sq.plan(q, k, target_error=0.6, mechanisms=[given], redraws=True)
    (several,) = [c for c in mean.choices if c.given is given]
    assert given.feature_map.draw_key() == key
    assert (one.draws, one.error_over_draws) == (1, None)
    assert one.measured_error == pytest.approx(piece_of(q, k).error(given))
    assert several.draws > 1
    assert several.error_over_draws == several.measured_error
    assert "mean over draws" in "".join(mean.notes)


@pytest.mark.parametrize("redraws", [False, True])
def test_clusters_and_buckets_are_judged_by_their_mean(redraws):
    """They are made of the data at hand: no draw of theirs is good for the next input, so none is named."""
    q, k = inputs(0, length=64)
    answer = sq.plan(q, k, target_error=0.6, mechanisms=["clustered", "lsh"], redraws=redraws)
    drawn = [choice for choice in answer.choices if choice.mechanism != "softmax"]
    assert {choice.mechanism for choice in drawn} == {"clustered", "lsh"}
    assert all("seed" not in choice.options for choice in drawn)
    assert all(choice.error_over_draws == choice.measured_error for choice in drawn)


def test_the_best_draw_is_the_best_and_others_are_worse():
    q, k = inputs(0)
    parts = Parts(piece_of(q, k), seed=0, most_scores=None)
    options = {"num_features": 32, "features": "oprf", "antithetic": True}
    made = [sq.create("performer", D, 2, seed=seed, **options) for seed in range(8)]
    totals = [float(parts.squares(attend).sum()) for attend in made]
    best = best_draw(parts, [lambda attend=attend: attend for attend in made], target=min(totals) / 2)
    assert best.tried < 8  # the target is out of reach: no need to try them all
    best = best_draw(
        parts, [lambda attend=attend: attend for attend in made], 2 * min(totals) / float(parts.sizes.sum())
    )
    assert best.tried == 8
    assert totals[best.index] == min(totals)
    assert best.others == pytest.approx(statistics.fmean(totals) / min(totals), rel=1e-6)
    assert best.others > 1
    assert best.flattered >= 1


class _Alike:
    """Parts on which every draw has the same error of 1, but for noise: the best one is best by chance."""

    pieces = (None,) * 4
    sizes = torch.ones(4, 1, dtype=torch.float64)

    def __init__(self, generator):
        self.generator = generator

    def squares(self, attend):
        return torch.rand(4, 1, generator=self.generator, dtype=torch.float64) + 0.5

    def deviation(self, squares):
        return 0.0


def test_choosing_is_paid_for():
    """The error of the chosen draw is too good by far; with what the parts left out show, it is not."""
    generator = torch.Generator().manual_seed(0)
    seen, said = [], []
    for _ in range(400):
        parts = _Alike(generator)
        every = [parts.squares(None) for _ in range(12)]
        parts.squares = lambda attend: attend
        best = best_draw(parts, [lambda one=one: one for one in every], target=1.0)
        seen.append(float(every[best.index].mean()))
        said.append(seen[-1] * best.flattered)
    assert statistics.fmean(seen) < 0.85
    assert statistics.fmean(said) == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize(("batch", "parts"), [(1, 4), (2, 4), (4, 4)])
def test_parts_are_disjoint_and_complete(batch, parts):
    q, k = inputs(0, length=128, batch=batch)
    piece = piece_of(q, k)
    found = Parts(piece, seed=0, most_scores=None)
    assert len(found.pieces) == parts
    assert sum(part.k.shape[2] for part in found.pieces) == batch * 128
    every = torch.cat([part.k.transpose(1, 2).reshape(-1, 2, D) for part in found.pieces])
    torch.testing.assert_close(every, piece.k.transpose(1, 2).reshape(-1, 2, D))


def test_parts_leave_padding_out():
    q, k = inputs(0, length=128)
    mask = torch.ones(1, 128, dtype=torch.bool)
    mask[:, 40:] = False
    found = Parts(piece_of(q, k, key_mask=mask), seed=0, most_scores=None)
    assert len(found.pieces) == 2
    assert math.isfinite(found.deviation(found.squares(sq.create("performer", D, num_features=32, seed=0))))


def test_keys_that_all_rows_share_are_seen_to_differ():
    """A polynomial on norms of long tails: rows agree with each other, one input with the next does not.

    Of the errors on eight inputs, the deviation from one to the next must be what the parts say, within a factor of
    2.5, where rows alone say a fraction of it.
    """
    errors, by_rows, by_parts = [], [], []
    attend = sq.create("taylor", D, degree=2)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 1, 1, 1024, D, generator=generator)
        q, k = (0.55 * torch.exp(0.35 * torch.randn(*x.shape[:3], 1, generator=generator)) * x for x in (q, k))
        piece = piece_of(q, k)
        found = piece.measure(attend)
        errors.append(math.log(found.error))
        by_rows.append(found.deviation / found.error)
        parts = Parts(piece, seed=0, most_scores=None)
        by_parts.append(parts.deviation(parts.squares(attend)))
    between = statistics.stdev(errors)
    assert between / 2.5 < statistics.median(by_parts) < 2.5 * between
    assert statistics.median(by_rows) < statistics.median(by_parts)


def test_parts_that_agree_say_so():
    generator = torch.Generator().manual_seed(0)
    q, k = 0.3 * torch.randn(2, 1, 2, 1024, D, generator=generator)
    parts = Parts(piece_of(q, k), seed=0, most_scores=None)
    attend = sq.create("performer", D, num_features=64, seed=0)
    assert parts.deviation(parts.squares(attend)) < 0.15


def test_what_draws_nothing_is_tried_once():
    assert seeds_tried(sq.create("taylor", D, degree=2)) == 1
    assert seeds_tried(sq.create("hybrid", D, 2, far={"mechanism": "taylor", "degree": 1, "center": True})) == 1
    assert seeds_tried(sq.create("hybrid", D, far={"mechanism": "performer", "seed": 0})) > 1
    assert seeds_tried(sq.create("clustered", D, seed=0)) > 1
