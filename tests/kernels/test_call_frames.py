"""The frames that docs/design.md lists for a causal call are those of the call."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import subquad as sq
from subquad.kernels.native import library

pytestmark = pytest.mark.usefixtures("built")

PACKAGE = Path(sq.__file__).parent
PAGE = Path(__file__).parent.parent.parent / "docs" / "design.md"


def listed(name: str) -> list[str]:
    """The lines "file function" of a mechanism on the page."""
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(rf"^{name} +mechanisms/base.py.*?(?=^\S)", page, re.DOTALL | re.MULTILINE)
    assert block is not None, name
    return [" ".join(line.removeprefix(name).split()[:2]) for line in block[0].splitlines()]


@pytest.mark.parametrize("name", ["performer", "hybrid", "local", "multipole"])
def test_frames_of_a_causal_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attn = sq.create(name, 8, 1)
    q, k, v = torch.randn(3, 1, 1, 300, 8)
    found: list[str] = []
    load = library.load

    def recorded() -> object:
        """Called last before the library itself."""
        frames = [(Path(frame.filename), frame.function) for frame in reversed(inspect.stack(0)[1:])]
        inside = [(path.relative_to(PACKAGE), function) for path, function in frames if PACKAGE in path.parents]
        found[:] = [f"{path.as_posix()} {function}" for path, function in inside if function != "library"]
        return load()

    attn(q, k, v, is_causal=True, backend="native")  # what is kept between calls is made
    monkeypatch.setattr(library, "load", recorded)
    attn(q, k, v, is_causal=True, backend="native")
    assert found == listed(name)
