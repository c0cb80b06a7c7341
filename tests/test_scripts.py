"""What benchmarks, examples and the site import from the package is there: scripts that nobody runs every day."""

import ast
import importlib
import re
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
