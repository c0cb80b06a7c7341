"""The README as a package index shows it: links and pictures with the address of the repository in front.

In the repository relative links work everywhere, also in a fork or a clone; on an index they lead nowhere. The build
calls `dynamic_metadata` (`[[tool.dynamic-metadata]]` in pyproject.toml).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")


def absolute(text: str, repository: str, revision: str) -> str:
    """Markdown whose relative links lead to files of the repository at that revision.

    >>> absolute("![plot](docs/a.svg) [docs](docs/b.md)", "https://host/us", "v1")
    '![plot](https://host/us/raw/v1/docs/a.svg) [docs](https://host/us/blob/v1/docs/b.md)'
    """

    def made(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        return f"{picture}{label}({repository}/{'raw' if picture else 'blob'}/{revision}/{path})"

    return RELATIVE.sub(made, text)


def dynamic_metadata(_settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Called by the build: the field `readme`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    page = absolute(text, project["urls"]["Source"], f"v{project['version']}")
    return {"readme": {"content-type": "text/markdown", "text": page}}
