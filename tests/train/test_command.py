"""`subquad train` as a user meets it, and the comparison of mechanisms."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from subquad.cli import main
from subquad.tasks import TASKS
from subquad.train.choices import label_of, parse_mechanism, parse_pairs
from subquad.train.compare import compare, comparison_table
from subquad.train.records import read_records

from .tiny_runs import QUICK, tiny

MAIN = "from subquad.cli import main; main()"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", MAIN, "train", *arguments], capture_output=True, text=True, check=False
    )


def test_train_writes_every_number_and_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    command = ["copy", "--set", "length=4", "--steps", "4", "--batch", "4", "--mechanism", "performer", "--option",
               "num_features=8", "--dim", "16", "--model", "dropout=0.1", "--log-every", "2", "--out", out]  # fmt: skip
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished at step 4: loss ")
    assert "[2/4] loss" in done.stderr
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
        (["copy", "--option", "num_features"], "expected name=value"),
        (["copy", "--option", "colour=3"], "has no option 'colour'"),
        (["text", "--data", "/no/such/file"], "does not exist"),
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
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
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
    assert [len(one["train"]) for one in written["runs"].values()] == [6, 6, 6]
    # The first weights are the same where shapes agree, and so are the first batch and its loss, nearly.
    first = [one["train"][0]["loss"] for one in written["runs"].values()]
    assert max(first) - min(first) < 0.5
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size[0] > 800
    accuracies = {label: one["metrics"]["accuracy"] for label, one in written["runs"].items()}
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


TINY = ["copy", "--set", "length=4", "--batch", "4", "--layers", "1", "--heads", "2", "--dim", "8", "--log-every", "1"]


def test_resume_reads_its_options_from_the_run_and_those_given_must_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["train", *TINY, "--steps", "3", "--lr", "0.002", "--option", "num_features=8", "--out", out])
    assert ended.value.code == 0, capsys.readouterr().err
    for agreeing in (
        [],
        ["copy", "--lr", "0.002"],
        ["--option", "num_features=8"],
        ["--mechanism", "performer:num_features=8"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *agreeing, "--resume", "--out", out])
        assert ended.value.code == 0, (agreeing, capsys.readouterr().err)
    for given, said in (
        (["--lr", "0.1"], "settings.lr: 0.002 there, 0.1 now"),
        (["text"], "the run to resume is of the task copy"),
        (["--option", "num_features=16"], "num_features: 8 there, 16 now"),
        (["--mechanism", "linear"], "model.mechanism"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["train", *given, "--resume", "--out", out])
        assert ended.value.code == 2
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_without_a_task_or_a_run_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", "--out", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "say what to train" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["checkpoint", "metrics"])
def test_a_full_disk_is_one_line_and_keeps_the_older_checkpoints(tmp_path: Path, what: str) -> None:
    # A limit on the size of a file fails like a full disk does, and needs no rights. The first weights fit in both
    # cases; with AdamW's moments the checkpoint after step 2 does not, or the event file grows beyond the limit.
    limit, steps = (38_000, 8) if what == "checkpoint" else (40_000, 400)
    code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n{MAIN}"
    saving = [
        "--save-every",
        "2" if what == "checkpoint" else "50",
        "--steps",
        str(steps),
        "--out",
        str(tmp_path / "r"),
    ]
    board = ["--no-tensorboard", "--dim", "16"] if what == "checkpoint" else []
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *TINY, *saving, *board], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "writing failed after step" in last and "--resume --out" in last
    kept = sorted(path.name for path in (tmp_path / "r/checkpoints").glob("step-*"))
    assert kept and kept[-1] in last
    done = run("--resume", "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"finished at step {steps}: ")


def test_what_follows_the_last_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["train", "text", "--set", "length=32", "--steps", "2", "--batch", "2", "--layers", "1", "--heads", "2",
              "--dim", "8", "--valid-examples", "2", "--out", out])  # fmt: skip
    said = capsys.readouterr().err
    assert ended.value.code == 0, said
    assert "[2/2] validating" in said and "[2/2] sampling from the trained model" in said
