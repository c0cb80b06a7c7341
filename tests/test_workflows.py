"""Workflows and templates, which only the host of the repository runs: parsed here, and what they name exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
pytestmark = pytest.mark.skipif(not GITHUB.exists(), reason="the source package leaves these files out")
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_exists(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True], "YAML reads the key `on` as a truth value"
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for job in workflow["jobs"].values():
        systems = job.get("strategy", {}).get("matrix", {}).get("os", [job["runs-on"]])
        assert all(re.match(r"(ubuntu|macos|windows)-", system) for system in systems)
        assert job["steps"][0]["uses"].startswith("actions/checkout@")
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            command = step.get("run", "")
            assert [t for t in re.findall(r"^make ([a-z-]+)", command) if t not in targets] == []
            assert [p for p in re.findall(r"\btests/\w+", command) if not (ROOT / p).exists()] == []
            assert all("@v" in used for used in [step.get("uses", "@v")])


def test_the_pythons_of_the_workflow_are_those_of_the_package() -> None:
    jobs = read(GITHUB / "workflows" / "tests.yml")["jobs"]
    tried = jobs["linux"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert tried == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={tried[0]}"' in project
    assert set(jobs["others"]["strategy"]["matrix"]["python"]) == {tried[0], tried[-1]}


def test_every_form_of_an_issue_can_be_shown() -> None:
    forms = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
    assert forms
    for form in map(read, forms):
        assert form["name"] and form["description"]
        names = [field["id"] for field in form["body"]]
        assert len(set(names)) == len(names)
        for field in form["body"]:
            assert field["type"] in {"textarea", "input", "checkboxes", "dropdown"}
            assert field["attributes"]["label"]
