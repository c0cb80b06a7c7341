"""Every example runs, on small settings, and says something."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "choose.py": ["--length", "128", "--target-error", "0.3"],
    "convert_model.py": ["--num-features", "16"],
    "error_curves.py": ["--length", "64", "--num-features", "16,32"],
    "generate.py": ["--tokens", "5"],
    "search_documents.py": ["--length", "600"],
    "train_long.py": ["--length", "64", "--steps", "3"],
}


def test_every_example_is_run_and_listed() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(SMALL)
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [name for name in SMALL if f"examples/{name}" not in listed] == []


@pytest.mark.parametrize("name", sorted(SMALL))
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # In this process: loading torch, its optimisers and transformers takes far longer than what the examples do.
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_one_runs_as_a_command_of_its_own() -> None:
    name = "generate.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *SMALL[name]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
