"""create("auto"): decided once, from a table that is readable and can be overridden."""

import json

import pytest
import torch

import subquad as sq
from subquad.planning import crossover

pytestmark = pytest.mark.usefixtures("own_cache")


def test_softmax_below_and_the_mechanism_above():
    below = sq.create("auto", 16, length=299, crossover=300)
    above = sq.create("auto", 16, length=300, crossover=300, above="performer", num_features=32, seed=1)
    assert below.name == "softmax"
    assert above.name == "performer"
    assert sq.create("auto", 16, length=300, crossover=300).name == "multipole"
    assert above.config() == sq.create("performer", 16, num_features=32, seed=1).config()
    assert sq.create("auto", 16, length=10**6, crossover=300, above="linear").name == "linear"


def test_measured_once_and_kept_in_a_readable_file(monkeypatch):
    monkeypatch.setattr(crossover, "LENGTHS", (16, 32, 64))
    calls = []

    def seconds(attend, length, heads, is_causal, training):
        calls.append(length)
        return 1.0 if attend.name == "linear" else length / 32

    monkeypatch.setattr(crossover, "_seconds", seconds)
    first = sq.create("auto", 8, 2, length=33, above="linear")
    measured = len(calls)
    assert measured == 2 * (crossover.ROUNDS + 1) * 2  # it stops at the first length that pays
    again = sq.create("auto", 8, 2, length=31, above="linear")
    assert len(calls) == measured
    assert (first.name, again.name) == ("linear", "softmax")
    table = json.loads(crossover.cache_path().read_text())
    assert list(table.values()) == [32]


def test_interpolates_between_lengths(monkeypatch):
    monkeypatch.setattr(crossover, "LENGTHS", (64, 256))
    # Twice too slow at 64, twice as fast at 256: the crossover is their geometric mean.
    monkeypatch.setattr(
        crossover, "_seconds", lambda attend, length, *rest: 1.0 if attend.name == "linear" else length / 128
    )
    assert crossover.crossover_length(sq.create("linear", 8)) == 128


def test_never_faster_means_softmax(monkeypatch):
    monkeypatch.setattr(crossover, "LENGTHS", (16, 32))
    monkeypatch.setattr(crossover, "_seconds", lambda attend, *rest: 2.0 if attend.name == "linear" else 1.0)
    assert crossover.crossover_length(sq.create("linear", 8)) is None
    assert sq.create("auto", 8, length=10**9, above="linear").name == "softmax"


def test_a_value_in_the_file_overrides(monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", lambda attend, *rest: 1.0)
    attn = sq.create("linear", 8)
    crossover.crossover_length(attn)
    path = crossover.cache_path()
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), 5000)))
    assert crossover.crossover_length(attn) == 5000
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), "soon")))
    with pytest.raises(ValueError, match="positive integer or null"):
        crossover.crossover_length(attn)


def test_a_broken_or_unwritable_table_is_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(crossover, "_seconds", lambda attend, *rest: 1.0)
    path = crossover.cache_path()
    path.parent.mkdir(parents=True)
    path.write_text("{not json")
    assert crossover.crossover_length(sq.create("linear", 8)) == 128
    monkeypatch.setenv("SUBQUAD_CACHE", str(path))  # a file where a folder is needed
    assert crossover.crossover_length(sq.create("linear", 8)) == 128


def test_really_measures():
    """No stand-in for the clock: a number or None comes out, and the table holds it."""
    original = crossover.LENGTHS
    crossover.LENGTHS = (16, 32)
    try:
        value = crossover.crossover_length(sq.create("linear", 8), heads=1, is_causal=True, training=True)
    finally:
        crossover.LENGTHS = original
    assert value is None or 1 <= value <= 32
    assert list(crossover.read_table().values()) == [value]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({}, TypeError, "length="),
        ({"length": 0}, ValueError, "length must be at least 1"),
        ({"length": 10, "crossover": 0}, ValueError, "crossover must be at least 1"),
        ({"length": 10, "above": "perfomer"}, ValueError, "did you mean 'performer'"),
        ({"length": 10, "crossover": 5, "num_featurs": 3}, TypeError, "has no option"),
        ({"length": 10, "crossover": 5, "is_causal": "no"}, TypeError, "is_causal must be True or False"),
        ({"length": 10, "crossover": 5, "is_causal": True, "above": "clustered"}, ValueError, "clustered"),
    ],
)
def test_wrong_input(arguments, kind, message):
    with pytest.raises(kind, match=message):
        sq.create("auto", 16, **arguments)


def test_the_length_reaches_a_mechanism_that_is_made_for_one():
    assert sq.create("auto", 16, 2, length=700, crossover=5, above="linformer").length == 700


def test_the_result_runs():
    attn = sq.create("auto", 16, length=64, crossover=1, seed=0)
    assert attn(*torch.randn(3, 1, 2, 64, 16)).shape == (1, 2, 64, 16)
