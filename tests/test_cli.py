"""The command line as a user meets it: its output and its exit status, some of it as a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

import subquad
from subquad.cli import main
from subquad.cli.terminal import progress, user_errors

MAIN = "from subquad.cli import main; main()"


def run(*arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "error", "-c", f"import sys\n{before}\n{MAIN}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Said(NamedTuple):
    returncode: int | str | None
    stdout: str
    stderr: str


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """said(*arguments): the command in this process, which has torch loaded; starting another one takes seconds."""

    def of(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        return Said(ended.value.code, *capsys.readouterr())

    return of


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_names_the_extra_and_exits_2(missing: str) -> None:
    done = run("mechanisms", before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 2
    assert 'pip install "subquad[cli]"' in done.stderr
    assert done.stdout == ""


def test_a_missing_package_is_named_with_its_extra() -> None:
    wanted = r'this command needs psutil, which is not installed: pip install "subquad\[lab\]"'
    with pytest.raises(typer.BadParameter, match=wanted), user_errors():
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")
    with pytest.raises(typer.BadParameter, match="No module named 'nowhere'"), user_errors():
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")


def test_version(said: Callable[..., Said]) -> None:
    assert said("--version").stdout.strip() == subquad.__version__


def test_mechanisms_lists_every_one() -> None:
    done = run("mechanisms")
    assert done.returncode == 0, done.stderr
    first_words = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert set(subquad.list_mechanisms()) <= first_words


def test_mechanisms_by_name(said: Callable[..., Said]) -> None:
    assert said("mechanisms", "linear", "lsh").stdout.count("equation") == 2
    assert "did you mean 'performer'" in " ".join(said("mechanisms", "perfomer").stderr.replace("│", " ").split())


def test_mechanisms_fits_a_narrow_terminal(said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert 50 < max(map(len, said("mechanisms").stdout.splitlines())) <= 60


def test_help_breaks_its_lines_where_the_terminal_ends(
    said: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = [line.strip() for line in said("plan", "--help").stdout.splitlines()]
    assert "whole model would take at that length" in " ".join(lines)
    assert "model would take" not in lines, "a line of the source became a line of the page"


BENCH = ("bench", "linear", "--heads", "2", "--head-dim", "8", "--runs", "2", "--threads", "1")


def test_bench_prints_a_table_and_writes_every_number(said: Callable[..., Said], tmp_path: Path) -> None:
    target = tmp_path / "new" / "bench.json"
    done = said(*BENCH, "--lengths", "32,16", "--json", str(target))
    assert done.returncode == 0, done.stderr
    assert "L=16 ms" in done.stdout
    assert "uniform" in done.stdout
    record = json.loads(target.read_text())
    assert record["complete"] is True
    assert record["machine"]["threads"] == 1
    cells = {(cell["mechanism"], cell["length"], cell["causal"]): cell for cell in record["cells"]}
    assert len(cells) == 3 * 2 * 2
    for (name, _, _), cell in cells.items():
        assert cell["status"] == "measured"
        assert len(cell["runs_ms"]) == 2
        assert cell["best_ms"] == min(cell["runs_ms"])
        if name == "softmax":
            assert all(error["relative_squared_error"] < 1e-10 for error in cell["errors"])
    assert os.listdir(target.parent) == ["bench.json"]  # no temporary file is left behind


def test_bench_in_a_pipe_prints_one_plain_line_per_result() -> None:
    done = run(*BENCH, "--lengths", "16")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("[1/6] softmax full L=16: ")
    assert lines[-1].startswith("[6/6] uniform causal L=16: ")
    assert "\x1b" not in done.stderr + done.stdout


def test_a_note_is_a_plain_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("copy") as step:
        step("resumed at step 3", 3, None)
        step("loss 1", 4, 6)
    assert capsys.readouterr().err == "resumed at step 3\n[4/6] loss 1\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminal")
def test_a_note_stays_above_the_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty

    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(theirs, "w") as screen, open(ours, "rb", buffering=0) as seen:
        monkeypatch.setattr(sys, "stderr", screen)
        with progress("copy") as step:
            step("resumed at step 3 [of 6]", 3, None)
            step("loss 1", 4, 6)
        shown = seen.read(1 << 16).decode()
    assert "resumed at step 3 [of 6]\r\n" in shown
    assert "copy: loss 1" in shown and "copy: resumed" not in shown


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    # Far more work than the test waits for: only the interrupt can end it.
    command = [sys.executable, "-c", MAIN, *BENCH, "--lengths", "16,60000", "--seconds", "600", "--json", str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "uniform" in line:  # the first length is complete, the second one runs
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in out
    record = json.loads(target.read_text())
    assert record["complete"] is False
    assert {cell["length"] for cell in record["cells"]} == {16}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (BENCH, "--json"),
        (("bench", "--compare", ".", "."), "--json"),
        (("plan", "taylor"), "--json"),
        (("error", "taylor"), "--json"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_measured(
    command: tuple[str, ...], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for target, message in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "nothing can be written there")):
        with pytest.raises(SystemExit) as stop:
            main([*command, option, str(target)])
        out, err = capsys.readouterr()
        assert stop.value.code == 2
        assert message in " ".join(err.replace("│", " ").split())
        assert out == ""
        assert "[1/" not in err  # the line of a first result
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--lengths", "12,x"), "512,1024,4096"),
        (("bench", "--lengths", "0"), "512,1024,4096"),
        (("bench", "no-such-mechanism"), "no-such-mechanism"),
        (("no-such-command",), "no-such-command"),
    ],
)
def test_wrong_arguments_exit_2_and_say_what_is_expected(
    said: Callable[..., Said], arguments: tuple[str, ...], message: str
) -> None:
    done = said(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_options_of_a_whole_model_need_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--batch", "4"])
    assert ended.value.code == 2
    assert "say how many --layers it has" in " ".join(capsys.readouterr().err.replace("│", " ").split())
