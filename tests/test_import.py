"""`import subquad` costs what `import torch` costs: each check runs in a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LAZY = ["hf", "lab", "nn", "parallel"]
# Parts of torch that `import torch` leaves out because they take long to load; neither may we load them.
HEAVY = ["torch._dynamo", "torch._inductor", "torch.onnx", "triton"]


def modules_after(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def added() -> set[str]:
    """Names in sys.modules after `import subquad` that `import torch` had not put there."""
    return modules_after("import subquad") - modules_after("import torch")


def test_import_loads_torch_and_the_core_only(added: set[str]) -> None:
    allowed = sys.stdlib_module_names | {"torch", "subquad"}
    foreign = sorted(name for name in added if name.split(".")[0] not in allowed)
    assert foreign == []
    assert "subquad" in added


def test_import_loads_no_heavy_part_of_torch(added: set[str]) -> None:
    assert sorted(name for name in added if name.startswith(tuple(HEAVY))) == []


@pytest.mark.parametrize("package", LAZY)
def test_optional_packages_are_lazy(added: set[str], package: str) -> None:
    assert (
        sorted(name for name in added if name == f"subquad.{package}" or name.startswith(f"subquad.{package}.")) == []
    )


def test_a_lazy_package_loads_on_first_use() -> None:
    assert "subquad.lab.measure" in modules_after("import subquad; subquad.lab.machine")


def test_the_command_line_module_needs_no_typer() -> None:
    loaded = modules_after("sys.modules['typer'] = None; sys.modules['rich'] = None; import subquad.cli")
    assert "subquad.cli" in loaded


def test_without_numpy_nothing_is_said() -> None:
    code = "import sys; sys.modules['numpy'] = None; import subquad"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


MISSING = [
    ("safetensors", "import subquad.train", "train"),
    ("accelerate", "from subquad.train.distributed import Workers; Workers('no', 'cpu')", "train"),
    ("PIL", "from subquad.tasks.image_files import read_images; read_images('.', 'train')", "train"),
    ("tensorboard", "from subquad.train.records import Records; Records(Path('x'), 0, tensorboard=True)", "train"),
    ("matplotlib", "from subquad.train.curves import draw_page; draw_page({}, Path('x'))", "lab"),
]
# One process for all, since starting one takes seconds: before each, what an earlier one has imported is forgotten.
WITHOUT = """
import json, sys
from pathlib import Path
import subquad
said = []
for missing, statement, _ in json.loads(sys.argv[1]):
    ours = ("subquad.train", "subquad.tasks")
    for name in [n for n in sys.modules if n.startswith(ours) or n.split(".")[0] == missing]:
        del sys.modules[name]
    sys.modules[missing] = None
    try:
        exec(statement)
    except ImportError as error:
        said.append(str(error))
    del sys.modules[missing]
print(json.dumps(said))
"""


def test_a_missing_package_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    command = [sys.executable, "-c", WITHOUT, json.dumps(MISSING)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for (missing, _, extra), said in zip(MISSING, json.loads(done.stdout), strict=True):
        assert f'which is not installed: pip install "subquad[{extra}]"' in said, missing


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    import subquad

    with pytest.raises(AttributeError, match="no_such_name"):
        subquad.no_such_name  # noqa: B018
    assert not hasattr(subquad, "no_such_name")
