"""The pages build without warnings: every link leads somewhere, every name in the reference exists."""

import json
import os
import subprocess
import sys
from pathlib import Path

import subquad as sq

ROOT = Path(__file__).parent.parent


def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "mechanisms" / "hybrid" / "index.html").read_text(encoding="utf-8")
    catalogue = (tmp_path / "site" / "mechanisms" / "index.html").read_text(encoding="utf-8")
    assert "softmax over &#124;i - j&#124; &lt;= window" in catalogue
    theory = (tmp_path / "site" / "theory" / "index.html").read_text(encoding="utf-8")
    assert "softmax kernel is e<sup>x.y</sup>" in theory
    assert "γ_d(v) = 1 − e^{−v}" in theory, "code is left as it was written"
    for tag in ('src="http', 'rel="stylesheet" href="http', 'rel="preconnect"'):
        assert tag not in page


def test_tables_in_the_pages_are_up_to_date() -> None:
    """They are committed filled, so that the pages can be read in the repository too."""
    command = [sys.executable, "docs/site/tables.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}run: python docs/site/tables.py"


def test_every_mechanism_has_a_page_and_a_picture() -> None:
    measured = json.loads((ROOT / "docs" / "data" / "error-time.json").read_text(encoding="utf-8"))["points"]
    assert {point["mechanism"] for point in measured} == {*sq.list_mechanisms(), "uniform"}
    for name in sq.list_mechanisms():
        assert (ROOT / "docs" / "mechanisms" / f"{name}.md").is_file(), name
        assert (ROOT / "docs" / "figures" / f"{name}.svg").is_file(), name
