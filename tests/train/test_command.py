"""`subquad train` as a user meets it, and the comparison of mechanisms."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from subquad.cli import main
from subquad.tasks import TASKS
from subquad.train import train
from subquad.train.choices import label_of, parse_mechanism, parse_pairs, parse_value
from subquad.train.collection import collect, comparison_table
from subquad.train.compare import compare
from subquad.train.records import read_records

from .tiny_runs import QUICK, tiny


def main_done(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 0


def test_train_writes_every_number_and_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    command = ["copy", "--set", "length=4", "--steps", "4", "--batch", "4", "--mechanism", "performer", "--option",
               "num_features=8", "--dim", "16", "--model", "dropout=0.1", "--log-every", "2", "--out", out]  # fmt: skip
    main_done(command)
    said = capsys.readouterr()
    assert said.out.startswith("finished at step 4: loss ")
    assert "[2/4] loss" in said.err
    data = json.loads((tmp_path / "run/run.json").read_text())
    assert data["model"]["mechanism"] == {"mechanism": "performer", "num_features": 8}
    assert data["model"]["dropout"] == 0.1
    assert [r["step"] for r in read_records(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"] == [2, 4]
    with pytest.raises(SystemExit) as ended:
        main(["train", *command, "--lr", "1"])
    assert ended.value.code == 2
    assert "settings.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["copies"], "did you mean 'copy'"),
        (["copy", "--mechanism", "performr"], "did you mean 'performer'"),
        (["copy", "--mechanism", "auto"], "'auto' is for sq.create alone"),
        (["copy", "--mechanism", "head-groups"], "`subquad convert` makes it"),
        (["copy", "--compare", "softmax,head-groups"], "'head-groups' needs groups"),
        (["copy", "--compare", "softmax,"], "--compare 'softmax,': an entry is empty"),
        ([], "the TASK is missing; expected one of ['copy', 'documents'"),
        (["copy", "--option", "num_features"], "expected name=value"),
        (["copy", "--option", "colour=3"], "has no option 'colour'"),
        (["text", "--data", "/no/such/file"], "does not exist"),
        (["copy", "--data", "any.txt"], "the task 'copy' makes its own data"),
    ],
)
def test_wrong_arguments_exit_2_without_a_traceback(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments, "--out", str(tmp_path / "out")])
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert ended.value.code == 2
    assert message in said and "'head-groups', 'hedgehog'" not in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["train", "copy", "--out", str(tmp_path / "file" / "run")])
    assert ended.value.code == 2
    assert "--out" in (said := capsys.readouterr().err) and "nothing can be written there" in said


def test_comparison_trains_each_on_the_same_data_and_draws_curves(tmp_path: Path) -> None:
    mechanisms: list[Any] = ["softmax", "linear", {"mechanism": "performer", "num_features": 8}]
    result = compare(tiny(), mechanisms, tmp_path, running=QUICK)
    labels = ["softmax", "linear", "performer-num_features8"]
    assert list(result["runs"]) == labels
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [[len(one["train"]) for one in runs] for runs in written["runs"].values()] == [[6], [6], [6]]
    # The first weights are the same where shapes agree, and so are the first batch and its loss, nearly.
    first = [one["train"][0]["loss"] for (one,) in written["runs"].values()]
    assert max(first) - min(first) < 0.5
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size[0] > 800
    accuracies = {label: one["metrics"]["accuracy"] for label, (one,) in written["runs"].items()}
    assert accuracies[written["best"]] == max(accuracies.values())
    drawing = (tmp_path / "curves.svg").read_text()
    assert "<svg" in drawing
    table = comparison_table(result).splitlines()
    assert [line.split()[0] for line in table] == ["mechanism", *labels]
    # Started again it goes on; the ones that are done are not trained anew.
    weights = (tmp_path / "linear/checkpoints/step-00000006/model.safetensors").stat().st_mtime_ns
    compare(tiny(), [*mechanisms, "taylor"], tmp_path, running=QUICK, resume=True)
    assert (tmp_path / "linear/checkpoints/step-00000006/model.safetensors").stat().st_mtime_ns == weights
    assert "taylor" in json.loads((tmp_path / "comparison.json").read_text())["runs"]
    page = (tmp_path / "index.html").read_text()
    assert all(f"<td>{label}</td>" in page for label in [*labels, "taylor"])
    assert page.count("<svg") == 1
    assert 'src="http' not in page and 'href="http' not in page  # nothing is fetched


def test_seeds_are_one_line_with_a_band_and_runs_are_gathered_from_their_folders(tmp_path: Path) -> None:
    result = compare(tiny(seed=5), ["softmax", "linear"], tmp_path / "both", seeds=2, running=QUICK)
    assert {label: [one["seed"] for one in runs] for label, runs in result["runs"].items()} == {
        "softmax": [5, 6], "linear": [5, 6]
    }  # fmt: skip
    assert [one["run"]["model"]["seed"] for one in result["runs"]["linear"]] == [5, 6]
    values = [one["metrics"]["accuracy"] for one in result["runs"]["linear"]]
    assert comparison_table(result).splitlines()[2].split()[1:4] == [
        f"{sum(values) / 2:.4f}", "±", f"{abs(values[0] - values[1]) / 2:.4f}"
    ]  # fmt: skip
    other = train(tiny(seed=5, optimizer="lion"), tmp_path / "lion", running=QUICK)
    folders = [*(tmp_path / "both/linear").iterdir(), tmp_path / "both/softmax/seed-5", tmp_path / "lion"]
    gathered = collect(folders)
    assert {label: len(runs) for label, runs in gathered["runs"].items()} == {
        "linear optimizer=adamw": 2, "softmax": 1, "linear optimizer=lion": 1
    }  # fmt: skip
    # A folder of several runs stands for all of them.
    whole = collect([tmp_path / "both/linear", tmp_path / "both"])
    assert {label: len(runs) for label, runs in whole["runs"].items()} == {"linear": 2, "softmax": 2}
    assert gathered["runs"]["linear optimizer=lion"][0]["metrics"] == other.metrics
    main_done(["--draw", ",".join(map(str, folders)), "--out", str(tmp_path / "page")])
    assert "linear optimizer=lion" in (tmp_path / "page/index.html").read_text()
    with pytest.raises(ValueError, match="runs of one task"):
        collect([])


def test_a_wrong_mechanism_in_a_comparison_is_found_before_any_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="causal"):
        compare(tiny(), ["linear", "linformer"], tmp_path / "out", running=QUICK)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="different mechanisms"):
        compare(tiny(), ["linear", "linear"], tmp_path / "out", running=QUICK)


def test_choices_of_the_command_line() -> None:
    assert parse_mechanism('["softmax", {"mechanism": "lsh", "rounds": 2}]') == [
        "softmax",
        {"mechanism": "lsh", "rounds": 2},
    ]
    assert parse_mechanism("linear", {"feature_map": "relu"}) == {"mechanism": "linear", "feature_map": "relu"}
    assert label_of(["softmax", {"mechanism": "lsh", "rounds": 2}]) == "softmax+lsh-rounds2"
    with pytest.raises(ValueError, match="was given before"):
        parse_pairs("--option", ["a=1", "a=2"])
    with pytest.raises(ValueError, match="is not JSON"):
        parse_mechanism("[softmax")


def test_the_help_names_every_task() -> None:
    from subquad.cli.train import train

    (option,) = train.__annotations__["task"].__metadata__
    assert all(name in option.help for name in TASKS)


def test_a_run_is_resumed_with_the_options_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    quick = ["--log-every", "1", "--no-tensorboard", "--cpu"]
    main_done(["copy", "--set", "length=4", "--steps", "3", "--batch", "4", "--dim", "16", "--mechanism",
               "lsh:rounds=1", "--seed", "4", "--out", out, *quick])  # fmt: skip
    before = json.loads((tmp_path / "run/run.json").read_text())
    for given in (
        [],
        ["copy"],
        ["copy", "--steps", "3", "--mechanism", "lsh:rounds=1", "--set", "length=4"],
        ["--option", "rounds=1"],
    ):
        main_done([*given, "--resume", "--out", out, *quick])
        assert "finished before" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/run.json").read_text()) == before
    for given, message in (
        (["--steps", "5"], "settings.steps: 3 there, 5 now"),
        (["--mechanism", "linear"], "model.mechanism"),
        (["--option", "rounds=2"], "model.mechanism.rounds: 1 there, 2 now"),
        (["--set", "length=5"], "options.length: 4 there, 5 now"),
        (["--seed", "5"], "settings.seed: 4 there, 5 now"),
        (["text"], "holds a run of task 'copy', not of 'text'"),
        (["--seeds", "2"], "--seeds belongs to --compare"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *given, "--resume", "--out", out, *quick])
        assert ended.value.code == 2
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    for arguments in (["--resume"], ["--resume", "--out", str(tmp_path / "nothing")], ["--draw", out]):
        with pytest.raises(SystemExit) as ended:
            main(["train", *arguments])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert any(part in said for part in ("--resume needs --out", "--draw needs --out", "holds no run"))


def test_a_comparison_is_resumed_with_the_options_it_was_started_with(tmp_path: Path) -> None:
    out = tmp_path / "both"
    quick = ["--no-tensorboard", "--cpu"]
    main_done(["copy", "--set", "length=4", "--steps", "2", "--batch", "4", "--dim", "16", "--compare",
               "linear,softmax", "--seeds", "2", "--out", str(out), *quick])  # fmt: skip
    shutil.rmtree(out / "softmax")
    before = (out / "linear/seed-1/checkpoints/step-00000002/model.safetensors").stat().st_mtime_ns
    main_done(["--resume", "--out", str(out), *quick])
    assert (out / "linear/seed-1/checkpoints/step-00000002/model.safetensors").stat().st_mtime_ns == before
    assert (out / "softmax/seed-1/result.json").is_file()


def test_from_names_a_run_or_its_checkpoint(tmp_path: Path) -> None:
    quick = ["copy", "--set", "length=4", "--steps", "2", "--batch", "4", "--dim", "16", "--no-tensorboard", "--cpu"]
    one, two = tmp_path / "one", tmp_path / "two"
    main_done([*quick, "--mechanism", "softmax", "--out", str(one)])
    main_done([*quick, "--mechanism", "linear", "--from", str(one), "--out", str(two)])
    assert json.loads((two / "run.json").read_text())["start"] == str(one / "checkpoints/step-00000002")
    main_done([*quick, "--resume", "--from", str(one), "--out", str(two), "--mechanism", "linear"])


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `subquad train` says where it refuses."""
    with pytest.raises(SystemExit) as ended:
        main(["train", *arguments])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


QUICK_OPTIONS = [
    "--set", "length=4", "--batch", "4", "--valid-every", "3", "--valid-examples", "4", "--no-tensorboard",
    "--dim", "16",
]  # fmt: skip


def test_a_comparison_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "both")
    main_done(["copy", "--compare", "softmax, linear", "--steps", "3", *QUICK_OPTIONS, "--out", out])
    kept = {path: path.read_bytes() for path in (tmp_path / "both").rglob("*.json")}
    for arguments, message in (
        (["--resume", "--out", out, "--steps", "9"], "settings.steps: 3 there, 9 now"),
        (["copy", "--compare", "taylor", *QUICK_OPTIONS, "--out", out], "holds a run already; say --resume"),
        (["--resume", "--out", out, "--compare", "linear"], "holds a comparison of ['softmax', 'linear']"),
        (["--resume", "--out", out, "--seeds", "2"], "with seeds=1, not of"),
        (["--resume", "--out", out, "--mechanism", "taylor"], "holds a comparison, so --mechanism"),
        (["copy", "--compare", "linear", "--mechanism", "lsh", "--out", "x"], "--compare names the mechanisms"),
        (["--draw", f"{out}/softmax", "--out", out], "holds a run or a comparison"),
        (["--draw", f"{out}/softmax", "--out", f"{out}/linear"], "holds a run or a comparison"),
        (["--draw", f"{out}/softmax", "--out", "x", "--steps", "3"], "so --steps has no meaning"),
    ):
        assert message in refused(arguments, capsys).replace("- ", "-")
    assert {path: path.read_bytes() for path in (tmp_path / "both").rglob("*.json")} == kept
    main_done(["--resume", "--out", out])
    main_done(["--draw", f"{out}/softmax, {out}/linear,{out}/softmax", "--out", str(tmp_path / "page")])
    drawn = json.loads((tmp_path / "page/comparison.json").read_text())
    assert {name: len(runs) for name, runs in drawn["runs"].items()} == {"softmax": 1, "linear": 1}
    main_done(["--draw", f"{out}/softmax", "--out", str(tmp_path / "page")])


def test_a_comparison_tries_every_mechanism_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both"
    arguments = ["copy", "--compare", "softmax,linformer", "--steps", "3", *QUICK_OPTIONS, "--out", str(out)]
    assert "linformer cannot be causal" in refused(arguments, capsys)
    assert not out.exists()


def test_running_is_that_of_the_last_start(tmp_path: Path) -> None:
    out = tmp_path / "run"
    main_done(["copy", "--mechanism", "linear", "--steps", "8", *QUICK_OPTIONS, "--save-every", "2", "--keep", "50",
               "--out", str(out)])  # fmt: skip
    shutil.rmtree(out / "checkpoints/step-00000008")
    main_done(["--resume", "--out", str(out)])
    assert len(list((out / "checkpoints").iterdir())) == 5 and not (out / "tensorboard").exists()
    main_done(["--resume", "--out", str(out), "--keep", "1"])
    assert json.loads((out / "running.json").read_text())["keep"] == 1
    main_done(["--resume", "--out", str(out), "--hours", "1"])


def test_words_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["copy", "--model", "mechanism=linear"], "model: mechanism='linear' is not taken there; name it with"),
        (["copy", "--model", "vocab=32"], "model: vocab=32 is not taken there; it follows from the task"),
        (["copy", "--mechanism", "[]"], "'[]' names no mechanism"),
        (["text", "--set", "data=a", "--data", "b"], "--data b and --set data=a name the same"),
        (["--resume", "--out", str(tmp_path / "nowhere")], "holds no run, nothing was started"),
    ):
        assert message in refused([*arguments, "--steps", "1"], capsys)
    assert parse_value("True") is True and parse_value("None") is None
    assert len(label_of([{"mechanism": "performer", "num_features": 256}] * 20)) < 200
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    assert "runs/TASK-MECHANISM" in said and "default: (multipole)" in said


def test_the_recurrent_baseline_of_speech_is_a_choice() -> None:
    assert parse_mechanism("bilstm") == "bilstm"


def test_the_same_seed_twice_and_empty_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        train(tiny(steps=2), tmp_path / name, running=QUICK)
    with pytest.raises(ValueError, match="the same run with seed 0, which would count twice"):
        collect([tmp_path / "a", tmp_path / "b"])
    for arguments, message in (
        (["--draw", f"{tmp_path / 'a'},", "--out", str(tmp_path / "page")], "an entry is empty"),
        (["copy", "--mechanism", "", "--out", str(tmp_path / "c")], "the mechanism is empty"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *arguments])
        assert ended.value.code == 2 and message in capsys.readouterr().err
