"""What the README and the pages tell people to type works: Python blocks run, make targets and options exist."""

import ast
import re
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import subquad as sq

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
WITH_PYTHON = [page for page in DOCS if "```python" in (ROOT / page).read_text(encoding="utf-8")]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a page takes from the hub is a small random one of the same kind; files are written elsewhere."""

    def small(name: str, dtype: str) -> transformers.PreTrainedModel:
        assert (name, dtype) == ("HuggingFaceTB/SmolLM2-135M", "float32")
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8192,
        ))  # fmt: skip

    def tokenizer(name: str) -> Callable[..., types.SimpleNamespace]:
        return lambda text, return_tensors: types.SimpleNamespace(input_ids=torch.tensor([list(text.encode())]))

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", small)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("Call me Ishmael. " * 500, encoding="utf-8")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("page", [*PAGES, *WITH_PYTHON])
def test_every_python_block_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    assert len(blocks) == text.count("```python"), "a block is not closed or not at the start of a line"
    namespace: dict[str, object] = {"__name__": page}  # shared: later blocks go on from earlier ones, as a reader does
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, python block {number}", "exec"), namespace)


def test_the_readme_is_short_and_knows_the_package() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 120
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(
        r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE
    )
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(extras)


def test_every_mechanism_written_out_in_the_pages_can_be_made() -> None:
    """In tables and sentences, {"mechanism": ...} is a promise too."""
    seen = 0
    for page in [*PAGES, *DOCS]:
        for text in re.findall(r'`({"mechanism": [^`]*})`', (ROOT / page).read_text(encoding="utf-8")):
            if "**" in text:
                continue  # the pattern, not an example of it
            seen += 1
            choice = ast.literal_eval(text)
            assert sq.create(choice.pop("mechanism"), head_dim=16, heads=2, **choice), f"{page}: {text}"
    assert seen


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell = "".join(
        re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
    targets = re.findall(r"^make ([a-z-]+)", shell, flags=re.MULTILINE)
    assert targets
    assert [t for t in targets if not re.search(rf"^{re.escape(t)}:", makefile, flags=re.MULTILINE)] == []
