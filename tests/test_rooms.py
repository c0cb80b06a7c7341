"""The house itself: who may import whom, how large a file may be, and that every module says what it offers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "subquad"
CORE = {"checks", "files", "plain_text", "state", "features", "kernels", "mechanisms"}
# Rooms by what they may import besides themselves, as CONTRIBUTING.md has it.
MAY_IMPORT = {
    "checks": set(),
    "files": set(),
    "plain_text": set(),
    "features": {"checks"},
    "state": {"checks", "features"},
    "kernels": {"checks", "state", "features"},
    "mechanisms": CORE,
    "planning": CORE,
    "nn": CORE,
    "parallel": CORE | {"nn"},
    "hf": CORE | {"nn", "planning"},
    "tasks": CORE | {"nn", "planning", "hf"},
    "train": CORE | {"nn", "planning", "hf", "tasks"},
    "lab": CORE | {"nn", "planning", "hf"},
    "cli": CORE | {"nn", "planning", "hf", "tasks", "train", "lab"},
}
# (importing file, what it imports): each crosses a border for a reason that is written there.
EXCEPTIONS = {
    ("mechanisms/__init__.py", "planning"),  # create("auto") asks for the crossover, when it is called
    ("train/compare.py", "lab"),  # machines are described in one way
    ("train/memory.py", "lab"),  # what is free is read in one way
}
LONGEST = 400
FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> list[str]:
    parts = ["subquad", *path.relative_to(SOURCE).with_suffix("").parts]
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that is imported from this package, inside functions too."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "subquad")
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            if source.split(".")[0] == "subquad":
                yield from ((source, alias.name) for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else None


def crossings() -> Iterator[tuple[str, str, str]]:
    """(file, its room, another room that it imports from)."""
    for path in FILES:
        relative = path.relative_to(SOURCE)
        own = relative.parts[0].removesuffix(".py")
        for module, name in imports(path):
            other = room_of(module) or room_of(f"{module}.{name}")
            if own in MAY_IMPORT and other not in (None, own):
                assert other is not None
                yield relative.as_posix(), own, other


def test_rooms_import_only_what_they_may() -> None:
    wrong = {(file, other) for file, own, other in crossings() if other not in MAY_IMPORT[own]}
    assert wrong == EXCEPTIONS  # none but these, and each of these is still needed


def test_every_room_is_known() -> None:
    found = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "_version", "__pycache__", "py.typed"} == set(MAY_IMPORT)


def test_files_stay_small_and_know_their_room() -> None:
    for folder in ("src", "tests", "benchmarks", "examples", "docs", "csrc"):
        for path in (REPOSITORY / folder).rglob("*"):
            if path.suffix in (".py", ".h", ".cpp", ".css", ".js", ".html"):
                assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST, path
                assert path.stem not in ("utils", "util", "helpers", "common", "misc", "manager"), path


def test_every_module_says_what_it_is_and_what_it_offers() -> None:
    offered: dict[str, set[str]] = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.Assign) and any(
                isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets
            ):
                offered[".".join(name_of(path))] = set(ast.literal_eval(node.value))
    modules = {".".join(name_of(path)) for path in FILES}
    for path in FILES:
        for module, name in imports(path):
            if module in offered and f"{module}.{name}" not in modules:
                assert not name or name in offered[module], f"{path} imports {name}, which {module} does not offer"
