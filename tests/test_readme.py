"""What the README and CONTRIBUTING tell people to type works: their Python runs, their make targets exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_runs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    assert len(blocks) == text.count("```python"), "a block is not closed or not at the start of a line"
    namespace: dict[str, object] = {"__name__": page}  # shared: later blocks go on from earlier ones, as a reader does
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{page}, python block {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell = "".join(
        re.findall(r"^```sh\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
    targets = re.findall(r"^make ([a-z-]+)", shell, flags=re.MULTILINE)
    assert targets
    assert [t for t in targets if not re.search(rf"^{re.escape(t)}:", makefile, flags=re.MULTILINE)] == []
