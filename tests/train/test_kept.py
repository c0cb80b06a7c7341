"""Nothing is lost or mixed up: results of earlier steps, folders of others, refused and interrupted comparisons."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from subquad.cli import main
from subquad.tasks import DataError
from subquad.train import Run, loop, train
from subquad.train.choices import label_of, parse_mechanism
from subquad.train.compare import compare

from .tiny_runs import QUICK, tensors, tiny


def stopping(after: int) -> Any:
    """A log that fails after so many steps, as a machine that is switched off does."""

    def log(text: str, done: int, total: int | None) -> None:
        if text.startswith("loss") and done >= after:
            raise RuntimeError("switched off")

    return log


def test_a_run_that_goes_on_has_no_result_of_an_earlier_step(tmp_path: Path) -> None:
    stopped = train(tiny(steps=2000), tmp_path, running=replace(QUICK, hours=0.0))
    assert stopped.status == "stopped" and (tmp_path / "result.json").is_file()
    with pytest.raises(RuntimeError, match="switched off"):
        train(tiny(steps=2000), tmp_path, running=QUICK, resume=True, on_log=stopping(stopped.step + 3))
    assert not (tmp_path / "result.json").exists()


def test_a_finished_run_is_not_finished_again(tmp_path: Path) -> None:
    first = train(tiny(), tmp_path, running=QUICK)
    written = (tmp_path / "result.json").stat().st_mtime_ns
    assert train(tiny(), tmp_path, running=QUICK, resume=True) == first
    assert (tmp_path / "result.json").stat().st_mtime_ns == written


def test_faulty_validation_data_do_not_cost_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*args: Any, **options: Any) -> None:
        raise DataError("row 7 cannot be read")

    monkeypatch.setattr(loop, "validation_batches", faulty)
    with pytest.raises(DataError, match="row 7"):
        train(tiny(), tmp_path, running=replace(QUICK, save_every=100))
    assert (tmp_path / "checkpoints/step-00000003/state.json").is_file()


def test_features_of_the_other_run_are_kept_with_its_weights(tmp_path: Path) -> None:
    mechanism = {"mechanism": "performer", "num_features": 8, "center": True}
    train(tiny(mechanism), tmp_path / "one", running=QUICK)
    run = Run.of("copy", mechanism, model={"dim": 16}, settings=dict(tiny().settings.to_dict(), seed=3), length=4,
                 start=tmp_path / "one")  # fmt: skip
    train(run, tmp_path / "two", running=QUICK)
    before, first = tensors(tmp_path / "one", 6), tensors(tmp_path / "two", 0)
    assert any("mean" in name for name in first)
    assert all(torch.equal(x, first[name]) for name, x in before.items())


# -- comparisons ---------------------------------------------------------------------------------------------------


def test_a_comparison_takes_no_folder_of_others(tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run", running=QUICK)
    for resume in (False, True):
        with pytest.raises(ValueError, match="holds a single run"):
            compare(tiny(), ["linear", "softmax"], tmp_path / "run", running=QUICK, resume=resume)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/index.html").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        compare(tiny(), ["linear", "softmax"], tmp_path / "other", running=QUICK)
    with pytest.raises(SystemExit):
        main(["train", "--draw", str(tmp_path / "run"), "--out", str(tmp_path / "other")])
    assert (tmp_path / "other/index.html").read_text() == "mine"
    assert not (tmp_path / "run/comparison.json").exists()


def test_a_comparison_is_resumed_with_its_own_options_only(tmp_path: Path) -> None:
    compare(tiny(), ["linear", "softmax"], tmp_path, seeds=2, running=QUICK)
    before = (tmp_path / "comparison.json").read_text()
    with pytest.raises(ValueError, match=r"settings.seed: 0 there, 5 now"):
        compare(tiny(seed=5), ["linear", "softmax"], tmp_path, seeds=2, running=QUICK, resume=True)
    assert (tmp_path / "comparison.json").read_text() == before
    again = compare(tiny("softmax"), ["linear", "softmax"], tmp_path, seeds=2, running=QUICK, resume=True)
    assert again["runs"].keys() == {"linear", "softmax"}


def test_a_refused_comparison_leaves_nothing_that_refuses_the_corrected_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be divided"):
        compare(tiny(accumulate=3), ["linear", "softmax"], tmp_path, running=QUICK)
    assert compare(tiny(accumulate=2), ["linear", "softmax"], tmp_path, running=QUICK)["best"] is not None


def test_a_comparison_that_cannot_be_drawn_is_refused_before_any_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        compare(tiny(), ["linear", "softmax"], tmp_path / "out", running=QUICK)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_in_the_last_validation_ends_a_comparison(tmp_path: Path) -> None:
    def log(text: str, done: int, total: int | None) -> None:
        if text.startswith("linear: loss") and done == 6:
            os.kill(os.getpid(), signal.SIGINT)

    result = compare(tiny(), ["linear", "softmax"], tmp_path, running=QUICK, on_log=log)
    assert result["interrupted"] and list(result["runs"]) == ["linear"]
    assert result["runs"]["linear"][0]["status"] == "finished"
    again = compare(tiny(), ["linear", "softmax"], tmp_path, running=QUICK, resume=True)
    assert not again["interrupted"] and list(again["runs"]) == ["linear", "softmax"]


def test_a_damaged_comparison_is_named(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text(json.dumps({"plan": {}}))
    with pytest.raises(ValueError, match=r"comparison.json cannot be read \(it has no 'run'\)"):
        compare(tiny(), ["linear", "softmax"], tmp_path, running=QUICK, resume=True)


# -- what is typed -------------------------------------------------------------------------------------------------


def test_names_of_folders_have_a_length_that_fits() -> None:
    groups = [{"heads": [n], "mechanism": {"mechanism": "local", "window": 100 + n}} for n in range(12)]
    names = {label_of({"mechanism": "head-groups", "groups": groups[:count]}) for count in (11, 12)}
    assert len(names) == 2 and max(map(len, names)) <= 120


def test_what_is_said_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("performer:num_features=8", '{"mechanism": "performer", "num_features": 8}'):
        with pytest.raises(ValueError, match=r"--option num_features: .* says it already"):
            parse_mechanism(text, {"num_features": 16})
    assert parse_mechanism('{"mechanism": "performer"}', {"num_features": 16})["num_features"] == 16
    with pytest.raises(SystemExit):
        main(["train", "copy", "--layers", "2", "--model", "layers=3", "--out", str(tmp_path / "run")])
    assert "--layers says it already" in capsys.readouterr().err


def test_seeds_and_data_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"below 2\^63"):
        tiny(seed=1 << 63)
    with pytest.raises(DataError, match="data must be the path of a file or a folder, or hub:NAME, got 5"):
        Run.of("text", "linear", data=5)


def test_a_data_set_of_the_hub_does_not_move() -> None:
    one, two = (Run.of("text", "linear", data=data) for data in ("hub:alice/stories", "hub:bob/stories"))
    assert one.changes(two) == ["options.data: 'hub:bob/stories' there, 'hub:alice/stories' now"]
    assert Run.of("text", "linear", data="a/book.txt").changes(Run.of("text", "linear", data="b/book.txt")) == []
