"""What the README and the pages tell people to type works: Python blocks run, make targets and options exist."""

import ast
import re
from pathlib import Path

import pytest

import subquad as sq

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
WITH_PYTHON = [page for page in DOCS if "```python" in (ROOT / page).read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", [*PAGES, *WITH_PYTHON])
def test_every_python_block_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    assert len(blocks) == text.count("```python"), "a block is not closed or not at the start of a line"
    namespace: dict[str, object] = {"__name__": page}  # shared: later blocks go on from earlier ones, as a reader does
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, python block {number}", "exec"), namespace)


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
