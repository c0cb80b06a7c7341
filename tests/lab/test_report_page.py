"""The page in a real browser: it opens from disk, draws every figure, and its switches work."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from subquad.lab.report import Outcome

from .report_case import TINY

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the browser's driver, at its end

FIGURES = {"tradeoff", "speed", "memory", "error-features", "error-projections", "published", "projections",
           "generation-time", "generation-memory", "spectrum", "rank"}  # fmt: skip


def _browser_path() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    reason = "no Chromium on the PATH (Debian: apt-get install chromium); `make test` installs it where it may"
    if os.environ.get("SUBQUAD_REQUIRE_BROWSER") == "1":
        pytest.fail(f"SUBQUAD_REQUIRE_BROWSER is set, and there is {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = _browser_path()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # No sandbox: tests often run as root in a container, and the page is our own file.
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(browser: Any, outcome: Outcome) -> str:
    return outcome.page.resolve().as_uri()


class Opened:
    """The page in a window of its own, with everything it said and asked for."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=true]", timeout=60_000)

    def drawn(self, figure: str) -> list[dict[str, Any]]:
        """The traces that plotly has drawn, as many as there are paths on the screen."""
        script = """id => {
            const place = document.getElementById(`plot-${id}`);
            const shown = place.querySelectorAll('.scatterlayer .trace').length;
            return (place.data || []).slice(0, shown).map(t => ({name: t.name, y: t.y, colour: t.line.color}));
        }"""
        return list(self.page.evaluate(script, figure))

    def scale(self, figure: str) -> tuple[str, str]:
        both = self.page.evaluate(
            "id => { const l = document.getElementById(`plot-${id}`)._fullLayout;"
            " return [l.xaxis.type, l.yaxis.type]; }",
            figure,
        )
        return both[0], both[1]


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    window = Opened(browser, address, 1280, "light")
    yield window
    window.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_figure_draws_without_an_error_or_a_request(browser: Any, address: str, width: int, scheme: str) -> None:
    window = Opened(browser, address, width, scheme)
    for figure in sorted(FIGURES):
        assert window.drawn(figure), figure
    assert window.said == []
    assert window.asked == [address]
    assert window.page.evaluate("document.documentElement.scrollWidth") <= width
    assert window.page.evaluate("document.documentElement.dataset.theme") == scheme
    window.context.close()


def test_a_mechanism_switched_off_leaves_every_figure(opened: Opened) -> None:
    before = {figure: [line["name"] for line in opened.drawn(figure)] for figure in FIGURES}
    assert "linear" in before["speed"]
    assert "linear" in before["memory"]
    opened.page.click("#chips button[data-key=linear]")
    for figure in ("speed", "memory", "generation-time"):
        names = [line["name"] for line in opened.drawn(figure)]
        assert names == [name for name in before[figure] if name != "linear"]
    opened.page.click("#none")
    assert "switched off" in opened.page.inner_text("#plot-speed")
    opened.page.click("#all")
    assert {figure: [line["name"] for line in opened.drawn(figure)] for figure in FIGURES} == before
    assert opened.said == []


def test_log_and_linear(opened: Opened) -> None:
    assert opened.scale("speed") == ("log", "log")
    opened.page.click("#figure-speed .axes button[data-value=linear]")
    assert opened.scale("speed") == ("linear", "linear")
    assert opened.scale("memory") == ("log", "log")
    opened.page.click("#figure-speed .axes button[data-value=log]")
    assert opened.scale("speed") == ("log", "log")
    assert opened.said == []


def test_selectors_show_other_numbers(opened: Opened) -> None:
    first = {line["name"]: line["y"] for line in opened.drawn("speed")}
    opened.page.click("#figure-speed .segment button[data-value=gain]")
    gains = {line["name"]: line["y"] for line in opened.drawn("speed")}
    assert gains["softmax"] == [1] * len(TINY.lengths)
    expected = [s / x for s, x in zip(first["softmax"], first["linear"], strict=True)]
    assert gains["linear"] == pytest.approx(expected)
    before = opened.drawn("error-features")
    opened.page.select_option("#figure-error-features select[data-name=by]", "gaussian")
    assert opened.drawn("error-features") != before


def test_hovering_tells_the_value(opened: Opened) -> None:
    point = opened.page.locator("#plot-speed .scatterlayer .trace .points path").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.wait_for_selector("#plot-speed .hoverlayer .hovertext", timeout=10_000)
    said = opened.page.text_content("#plot-speed .hoverlayer .hovertext")
    assert said.startswith("softmax")
    assert re.search(r"\d (µs|ms|s)\b.*usual run", said), said


def test_theme_and_tabs_and_tables(opened: Opened) -> None:
    light = {line["name"]: line["colour"] for line in opened.drawn("speed")}
    opened.page.click("#theme")
    dark = {line["name"]: line["colour"] for line in opened.drawn("speed")}
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert dark["performer"] != light["performer"]
    tabs = opened.page.locator(".tabs button")
    tabs.nth(1).click()
    assert opened.page.locator("#use .use:visible").count() == 1
    opened.page.click("#figure-speed summary")
    opened.page.wait_for_selector("#figure-speed tbody tr")  # drawn on "toggle", which comes after the click returns
    assert opened.page.locator("#figure-speed tbody tr").count() == len(light)
    assert opened.said == []


def test_the_path_to_the_file_may_hold_anything(browser: Any, address: str, tmp_path: Path) -> None:
    folder = tmp_path / "with spaces & ümläuts #1"
    folder.mkdir()
    copied = folder / "index.html"
    copied.write_bytes(Path(address.removeprefix("file://")).read_bytes())
    window = Opened(browser, copied.as_uri(), 800, "light")
    assert window.drawn("speed")
    assert window.said == []
    window.context.close()
