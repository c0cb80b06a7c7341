"""The package as users receive it: metadata, sdist, wheels with and without the native kernels."""

import ast
import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import subquad

ROOT = Path(__file__).parent.parent
NATIVE = (".so", ".dylib", ".dll")
SMOKE = """
import pathlib, sys, torch, subquad
assert pathlib.Path(subquad.__file__).is_relative_to(sys.prefix), subquad.__file__
assert (pathlib.Path(subquad.__file__).parent / "py.typed").is_file()
q, k, v = torch.randn(3, 1, 2, 10, 16)
attend = subquad.create("performer", head_dim=16, num_features=32, seed=0)
out, state = attend.scan(q, k, v)
torch.testing.assert_close(out, attend(q, k, v, is_causal=True), rtol=1e-4, atol=1e-4)
try:
    attend(q, k, v, backend="native")
except ValueError as error:
    print(subquad.__version__, error)
else:
    print(subquad.__version__, "native")
"""


def build(kind: str, source: Path, target: Path, environment: dict[str, str] | None = None) -> Path:
    """Build with the tools of this environment (nothing is fetched) and return the one file that came out."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


def smoke(wheel: Path, folder: Path) -> str:
    """Install the wheel alone into an empty environment that sees torch, and use it there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # torch is gigabytes: borrow it by path. Appended last, so an editable subquad there stays behind the wheel's.
    borrow = f"import sys; sys.path.append({str(Path(torch.__file__).parent.parent)!r})\n"
    done = subprocess.run(
        [str(python), "-I", "-c", borrow + SMOKE], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_compiler(folder: Path) -> dict[str, str]:
    """An environment in which no program, hence no compiler, is on the PATH."""
    folder.mkdir()
    nowhere = str(folder / "no-compiler")
    kept = {key: value for key, value in os.environ.items() if key not in {"CFLAGS", "CXXFLAGS", "SUBQUAD_PURE"}}
    return kept | {"PATH": str(folder), "CC": nowhere, "CXX": nowhere}


# What a wheel takes from the system: no OpenMP runtime, which would fight torch's for the cores, and nothing of torch.
SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
SYSTEM |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def needed(library: Path) -> set[str]:
    """The shared libraries that an ELF file asks the loader for (DT_NEEDED, 64-bit little-endian)."""
    data = library.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    table, size, count = (int.from_bytes(data[at : at + n], "little") for at, n in ((0x28, 8), (0x3A, 2), (0x3C, 2)))
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    (dynamic,) = (header for header in headers if header[1] == 6)  # SHT_DYNAMIC
    entries = [struct.unpack_from("<qQ", data, dynamic[4] + at) for at in range(0, dynamic[5], 16)]
    names = headers[dynamic[6]][4]  # the string table that the section links to
    return {data[names + at : data.index(b"\0", names + at)].decode() for tag, at in entries if tag == 1}


def libraries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(NATIVE)]


def test_the_version_has_one_source() -> None:
    assert importlib.metadata.version("subquad") == subquad.__version__
    stated = re.findall(r"^__version__ = \"(.+)\"$", (ROOT / "src/subquad/_version.py").read_text(), flags=re.MULTILINE)
    assert stated == [subquad.__version__]
    assert f"\n## {subquad.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_installing_pulls_torch_only() -> None:
    required = [line for line in importlib.metadata.requires("subquad") or [] if "extra ==" not in line]
    assert [re.split(r"[<>=!~ ]", line)[0] for line in required] == ["torch"]


def test_constraints_pin_exact_versions_and_name_no_host() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    pinned = re.compile(r"[\w.-]+==[\w.]+(; python_version (<|>=) \"3\.\d+\")?")
    assert [line for line in lines if not pinned.fullmatch(line)] == []


def test_without_a_compiler_the_wheel_is_pure_and_works(tmp_path: Path) -> None:
    wheel = build("wheel", ROOT, tmp_path / "dist", without_compiler(tmp_path / "empty"))
    assert wheel.name == f"subquad-{subquad.__version__}-py3-none-any.whl"
    assert libraries(wheel) == []
    version, _, said = smoke(wheel, tmp_path / "venv").partition(" ")
    assert version == subquad.__version__
    assert "backend='native' cannot take this call: this installation was built without a C++ compiler" in said


def test_a_required_native_build_does_not_fall_back(tmp_path: Path) -> None:
    environment = without_compiler(tmp_path / "empty") | {"SUBQUAD_REQUIRE_NATIVE": "1"}
    with pytest.raises(AssertionError, match="SUBQUAD_REQUIRE_NATIVE"):
        build("wheel", ROOT, tmp_path / "dist", environment)


def test_the_sdist_holds_files_of_the_repository_only(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("which files belong to the repository is known in a clone alone")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    new = ["git", "ls-files", "--others", "--exclude-standard"]  # being worked on: not stray
    tracked += subprocess.run(new, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        found = {one.name.split("/", 1)[1] for one in archive.getmembers() if one.isfile() or one.issym()}
        described = archive.extractfile(f"subquad-{subquad.__version__}/PKG-INFO")
        assert described is not None
        page = described.read().decode()
    assert found - set(tracked) == {"PKG-INFO"}
    assert not any(name.startswith((".ci", ".github", ".coverage")) for name in found)
    # The description that an index shows: relative links lead nowhere there, and what they lead to must exist.
    (source,) = re.findall(r"^Project-URL: Source, (.+)$", page, flags=re.MULTILINE)
    links = re.findall(r"\]\(([^)]+)\)", page)
    own = [link.removeprefix(f"{source}/") for link in links if link.startswith(source)]
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"raw/v{subquad.__version__}/docs/figures/error-time.svg" in own
    assert [link for link in own if not (ROOT / link.split("/", 2)[2]).exists()] == []


@pytest.mark.deep
def test_the_sdist_is_complete_and_builds_a_working_wheel(tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
        archive.extractall(tmp_path / "source", filter="data")
    expected = {"pyproject.toml", "LICENSE", "README.md", "CMakeLists.txt", "src/subquad/py.typed"}
    assert expected <= names
    assert any(name.startswith("csrc/") for name in names)
    assert not any(name.startswith((".venv", "build/", "dist/")) or name.endswith((".pyc", *NATIVE)) for name in names)
    (source,) = (tmp_path / "source").iterdir()
    wheel = build("wheel", source, tmp_path / "dist")
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        assert re.fullmatch(rf"subquad-{subquad.__version__}-py3-none-(?!any).+\.whl", wheel.name)
        assert libraries(wheel)
        assert all(name.startswith("subquad/kernels/") for name in libraries(wheel))
        assert smoke(wheel, tmp_path / "venv") == f"{subquad.__version__} native"
        if sys.platform.startswith("linux"):
            with zipfile.ZipFile(wheel) as archive:
                library = Path(archive.extract(libraries(wheel)[0], tmp_path))
            assert needed(library) <= SYSTEM
    else:
        assert libraries(wheel) == []
        assert smoke(wheel, tmp_path / "venv").startswith(f"{subquad.__version__} backend='native'")


def test_binary_wheels_are_tested_with_what_their_tests_need() -> None:
    """cibuildwheel copies only what is listed beside the installed wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.split("[tool.cibuildwheel]")[1].split("[tool.ruff]")[0]
    listed = ast.literal_eval(re.findall(r"^test-sources = (\[.*\])$", section, flags=re.MULTILINE)[0])
    (command,) = re.findall(r'^test-command = "(.*)"$', section, flags=re.MULTILINE)
    assert all((ROOT / path).exists() for path in listed)
    assert "pyproject.toml" in listed and "tests/conftest.py" in listed
    assert any(path in command for path in listed if path.startswith("tests/") and "conftest" not in path)


@pytest.mark.deep
def test_the_tests_of_binary_wheels_run_beside_the_wheel_alone(tmp_path: Path) -> None:
    """What cibuildwheel does after building, as far as finding and importing the tests."""
    for path in ("pyproject.toml", "tests/conftest.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "tests/kernels", tmp_path / "tests/kernels", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "tests/kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "test_native.py" in done.stdout
