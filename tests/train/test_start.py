"""First weights from another run, with the same mechanism or another."""

import json
from pathlib import Path

import pytest
import torch

from subquad.train import Run, load_trained, train
from subquad.train.compare import compare
from subquad.train.records import read_records

from .tiny_runs import QUICK, tensors, tiny


def started(folder: Path, mechanism: object = "performer", **more: object) -> Run:
    run = tiny(mechanism, **more)  # type: ignore[arg-type]
    return Run.of(run.task, mechanism, model=run.model, settings=run.settings.to_dict(), start=folder)


def test_shared_weights_come_from_the_other_run_and_the_mechanism_is_its_own(tmp_path: Path) -> None:
    train(tiny("softmax"), tmp_path / "softmax", running=QUICK)
    run = started(tmp_path / "softmax", {"mechanism": "performer", "num_features": 8, "center": True})
    assert run.start == str(tmp_path / "softmax/checkpoints/step-00000006")
    train(run, tmp_path / "performer", running=QUICK)
    before, first = tensors(tmp_path / "softmax", 6), tensors(tmp_path / "performer", 0)
    assert all(torch.equal(x, first[name]) for name, x in before.items())
    assert any("mechanism.feature_map" in name for name in first.keys() - before.keys())
    # Validated before its first step: what the other's weights are worth with this mechanism.
    valid = [r for r in read_records(tmp_path / "performer/metrics.jsonl") if r["kind"] == "valid"]
    assert [r["step"] for r in valid] == [0, 3, 6]


def test_the_same_mechanism_starts_where_the_other_run_ended(tmp_path: Path) -> None:
    mechanism = {"mechanism": "performer", "num_features": 8}
    train(tiny(mechanism, redraw_every=2), tmp_path / "one", running=QUICK)
    # Another seed would draw other features; the run goes on with those that the weights were trained with.
    train(started(tmp_path / "one", mechanism, seed=3), tmp_path / "two", running=QUICK)
    before, first = tensors(tmp_path / "one", 6), tensors(tmp_path / "two", 0)
    assert all(torch.equal(x, first[name]) for name, x in before.items())
    _, model, _ = load_trained(tmp_path / "one")
    assert model.state_dict().keys() == first.keys()


def test_a_resumed_run_needs_its_origin_no_more(tmp_path: Path) -> None:
    train(tiny("softmax"), tmp_path / "one", running=QUICK)
    run = started(tmp_path / "one", "linear")
    train(run, tmp_path / "two", running=QUICK)
    whole = tensors(tmp_path / "two", 6)
    for step in (4, 6):
        for file in (tmp_path / f"two/checkpoints/step-{step:08d}").iterdir():
            file.unlink()
        (tmp_path / f"two/checkpoints/step-{step:08d}").rmdir()
    (tmp_path / "one").rename(tmp_path / "elsewhere")
    train(Run.read(tmp_path / "two"), tmp_path / "two", running=QUICK, resume=True)
    assert all(torch.equal(x, whole[name]) for name, x in tensors(tmp_path / "two", 6).items())


def test_all_of_a_comparison_start_from_the_same_weights(tmp_path: Path) -> None:
    train(tiny("softmax"), tmp_path / "one", running=QUICK)
    run = started(tmp_path / "one", "softmax", steps=2)
    result = compare(run, ["softmax", "linear"], tmp_path / "both", running=QUICK)
    last = json.loads((tmp_path / "one/result.json").read_text())["metrics"]["loss"]
    first = {label: one["valid"][0] for label, (one,) in result["runs"].items()}
    assert first["softmax"]["loss"] == pytest.approx(last)
    assert first["linear"]["loss"] != pytest.approx(last)


def test_another_model_is_refused_and_what_differs_is_named(tmp_path: Path) -> None:
    train(tiny("softmax"), tmp_path / "one", running=QUICK)
    with pytest.raises(ValueError, match=r"nothing was loaded.*there.*here.*only the mechanism may differ"):
        train(started(tmp_path / "one", "linear", model={"dim": 32}), tmp_path / "two", running=QUICK)
    with pytest.raises(ValueError, match=r"layers is \d there, \d here; only the mechanism may differ"):
        train(started(tmp_path / "one", "linear", model={"layers": 2}), tmp_path / "two", running=QUICK)
    assert not (tmp_path / "two").exists()
    for wrong, message in ((tmp_path / "no", "does not exist"), (tmp_path, "holds no checkpoint")):
        with pytest.raises(ValueError, match=message):
            started(wrong)
