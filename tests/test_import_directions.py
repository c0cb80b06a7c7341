"""Which package may import which, how long a file may be, and that every module says what it offers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src" / "subquad"
CORE = {"checks", "files", "plain_text", "state", "rollback", "features", "kernels", "mechanisms"}
# Packages by what they may import besides themselves, as CONTRIBUTING.md has it.
MAY_IMPORT = {
    "checks": set(),
    "files": set(),
    "plain_text": set(),
    "features": {"checks"},
    "state": {"checks", "features"},
    "rollback": {"checks", "state"},
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
# Near 300 lines, up to this where splitting would cut an idea.
LONGEST = 600
# Backends of one operator: whoever reads one of them needs no other.
BACKENDS = ("kernels/reference.py", "kernels/chunked", "kernels/native", "kernels/experimental")
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


def package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else None


def crossings() -> Iterator[tuple[str, str, str]]:
    """(file, its package, another package that it imports from)."""
    for path in FILES:
        relative = path.relative_to(SOURCE)
        own = relative.parts[0].removesuffix(".py")
        for module, name in imports(path):
            other = package_of(module) or package_of(f"{module}.{name}")
            if own in MAY_IMPORT and other not in (None, own):
                assert other is not None
                yield relative.as_posix(), own, other


def test_packages_import_only_what_they_may() -> None:
    wrong = {(file, other) for file, own, other in crossings() if other not in MAY_IMPORT[own]}
    assert wrong == EXCEPTIONS  # none but these, and each of these is still needed


def test_backends_never_import_each_other() -> None:
    names = {".".join(["subquad", *Path(place).with_suffix("").parts]): place for place in BACKENDS}
    for path in FILES:
        own = path.relative_to(SOURCE).as_posix()
        for module, name in imports(path):
            for other, place in names.items():
                if any(own.startswith(b) for b in BACKENDS) and f"{module}.{name}".startswith(f"{other}."):
                    assert own.startswith(place), f"{own} imports {module}.{name}"


def test_nobody_imports_private_names() -> None:
    for path in FILES:
        for module, name in imports(path):
            assert not name.startswith("_") or name.startswith("__") or name == "_version", f"{path}: {module}.{name}"


def test_every_package_is_known() -> None:
    found = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert found - {"__init__", "_version", "__pycache__", "py.typed"} == set(MAY_IMPORT)


def test_files_are_short_and_named_after_what_they_hold() -> None:
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
