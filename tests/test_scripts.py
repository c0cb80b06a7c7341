"""What benchmarks, examples and the site import from the package is there: scripts that nobody runs every day."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "docs/site") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imported_names_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "subquad":
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_every_benchmark_is_in_the_index() -> None:
    folder = ROOT / "benchmarks"
    index = (folder / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in folder.iterdir() if path.suffix == ".py"}
    assert {name for name in names if f"`{name}`" not in index} == set()
    assert {name for name in re.findall(r"`(\w+\.py)`", index) if name not in names} == set()


def test_kept_experiments_are_those_that_are_described(tmp_path: Path) -> None:
    """A result in the docs whose row was changed or removed would name a command that no longer gives it."""
    kept = json.loads((ROOT / "docs/data/experiments.json").read_text(encoding="utf-8"))
    command = [sys.executable, str(ROOT / "benchmarks/experiments"), "list"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[0] for line in lines if line.endswith("kept")} == set(kept)
