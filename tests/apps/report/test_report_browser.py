"""The pages of the report in a real browser, without a screen: drawn, zoomed, hovered, clicked, printed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megamoe.apps.report.page import write_page, write_report
from megamoe.apps.report.run_statistics import read_run
from tests.apps.report.test_report import full_rows
from tests.support.apps.browser import CHROMIUM, Page, opened

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine"),
]

PLOT = "document.querySelector('[id=\"Loss: Loss\"]')"
Y_RANGE = f"{PLOT}._fullLayout.yaxis.range"
ALL_DRAWN = "Promise.all(places().map(draw)).then(() => places().length)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in full_rows()))
    (folder / "config.yaml").write_text("name: run\nmoe: {num_experts: 3}\n")
    write_report(folder)
    write_page([read_run(folder), read_run(another_seed(folder))], folder / "comparison.html")
    return folder


def another_seed(folder: Path) -> Path:
    """The run again with losses that are higher by 1."""
    other = folder.parent / "run_2"
    other.mkdir()
    rows = [
        row | {"val/lm_loss": row["val/lm_loss"] + 1} if "val/lm_loss" in row else row for row in full_rows()
    ]
    (other / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (other / "config.yaml").write_text("name: run_2\nseed: 2\nmoe: {num_experts: 3}\n")
    return other


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page, folder: Path) -> Page:
    browser.events.clear()
    browser.show(1280, 900)
    browser.open((folder / "report.html").as_uri())
    browser.wait_for(f"{PLOT}.dataset.drawn === 'linear'")
    return browser


def luminance(colour: str) -> float:
    return sum(float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 765


def test_every_panel_is_drawn_without_network_or_errors(page: Page, folder: Path) -> None:
    assert page.run(ALL_DRAWN) > 20
    assert page.run("places('[data-drawn]').every((it) => it.querySelector('svg.main-svg') !== null)")
    titles = page.run(
        "places().flatMap((it) => [it._fullLayout.xaxis.title.text, it._fullLayout.yaxis.title.text])"
    )
    assert titles and all(title.endswith(")") for title in titles)
    assert page.problems() == [] and page.requested() == [(folder / "report.html").as_uri()]
    assert page.run("fetch('https://example.org').then(() => 'asked', () => 'refused')") == "refused"


def test_the_mean_of_seeds_tells_its_spread(page: Page, folder: Path) -> None:
    page.open((folder / "comparison.html").as_uri())
    plot = "document.getElementById('Loss: Validation loss')"
    page.wait_for(f"{plot}?.dataset.drawn === 'linear'")
    x, y = page.middle_of('[id="Loss: Validation loss"] .nsewdrag')
    page.hover(x, y)
    page.hover(x + 5, y)
    told = page.wait_for(f"{plot}.querySelector('.hoverlayer')?.textContent")
    # Steps 1, 3 and 4 have losses of 8, 4.5 and 5, and of 1 more: their deviation is 1 / sqrt(2).
    assert "5 ± 0.71, from 4.5 to 5.5" in told and "run (2 seeds)" in told


def test_an_entry_of_the_legend_is_a_button_that_hides_its_curves(page: Page) -> None:
    shown = f"{PLOT}.data.filter((it) => it.visible !== false).length"
    before = page.run(shown)
    page.run("document.getElementById('Loss: Loss: training (smoothed)').focus()")
    page.press(" ")
    page.wait_for(f"{shown} === {before - 2}")  # the smoothed curve and the recorded one
    assert page.run("document.activeElement.ariaPressed") == "false"
    page.press("Enter")
    page.wait_for(f"{shown} === {before}")


def test_a_definition_opens_and_closes_by_keys(page: Page) -> None:
    page.run("document.getElementById('definition of Loss: Loss').querySelector('summary').focus()")
    page.press("Enter")
    told = page.wait_for("document.querySelector('details.definition[open] dl')?.innerText")
    assert "train/lm_loss (nats)" in told and "mean cross entropy" in told
    page.press("Enter")
    page.wait_for("document.querySelector('details.definition[open]') === null")


def test_the_button_makes_the_axis_logarithmic_and_back(page: Page) -> None:
    page.click("section:has([id='Loss: Loss']) button.log")
    page.wait_for(f"{PLOT}._fullLayout.yaxis.type === 'log'")
    low, high = page.run(Y_RANGE)
    assert 0 < low < high < 1  # powers of ten around 2.25 to 8
    page.click("section:has([id='Loss: Loss']) button.log")
    page.wait_for(f"{PLOT}._fullLayout.yaxis.type === 'linear'")


@pytest.mark.parametrize("name", ["report.html", "comparison.html"])
def test_light_and_dark_and_a_phone(page: Page, folder: Path, name: str) -> None:
    page.open((folder / name).as_uri())
    page.run(ALL_DRAWN)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    back = "getComputedStyle(document.body).backgroundColor"
    assert luminance(page.run(ink)) < 0.5 < luminance(page.run(back))
    page.show(1280, 900, "dark")
    page.wait_for(f"{ink} !== 'rgb(95, 102, 115)'")
    assert luminance(page.run(back)) < 0.2 and luminance(page.run(ink)) > 0.5
    page.show(390, 844)
    page.wait_for("places().every((it) => it._fullLayout.width <= 390)")
    assert page.run("document.documentElement.scrollWidth") == 390, "the page is not wider than the phone"
    assert page.run(
        "[...document.querySelectorAll('figure')].every((it) => it.getBoundingClientRect().right <= 390)"
    )


def test_without_scripts_the_tables_are_shown(page: Page) -> None:
    page.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        page.send("Page.reload")
        page.wait_for("document.querySelector('noscript section')?.textContent.includes('need JavaScript')")
        assert page.run("document.querySelector('.plot').getBoundingClientRect().height") == 0
    finally:
        page.send("Emulation.setScriptExecutionDisabled", value=False)
