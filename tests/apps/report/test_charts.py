"""The HTML around the charts: definitions of every metric, legends of buttons, no markup in names."""

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megamoe.apps.report.charts import charts, definition, legend_of, shared_legend
from megamoe.apps.report.comparison import band_curve, comparison_sections
from megamoe.apps.report.figures import figure_of
from megamoe.apps.report.page import main_of
from megamoe.apps.report.panels import Curve, Panel, Section
from megamoe.apps.report.run_statistics import read_run
from megamoe.apps.report.sections import run_sections
from megamoe.metrics import names
from tests.apps.report.test_report import full_rows, make_run


class Elements(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def two_layers() -> Section:
    """Two panels of the same two curves."""
    curves = [
        Curve(name, [1.0, 2.0], [3.0, 4.0], depth) for name, depth in (("layer 01", 0.0), ("layer 02", 1.0))
    ]
    return Section("Balance", "", [Panel("one", "a (1)", curves), Panel("two", "b (1)", curves)])


def test_every_panel_says_what_its_metrics_are(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", full_rows()))
    panels = [it for section in run_sections(run.rows) for it in section.panels]
    panels += [it for section in comparison_sections([run, run]) for it in section.panels]
    assert len(panels) > 35
    for panel in panels:
        assert panel.keys, panel.title
        told = html.unescape(definition(panel, panel.title))
        for key in panel.keys:
            metric = names.metric_of(key)
            assert metric is not None and f"<code>{key}</code>" in told
            assert metric.formula.split("`")[0].split("[")[0] in told
            assert not metric.formula.startswith(("the same", "of ")), f"{key}: this stands alone here"


def test_a_definition_is_text_with_code_and_without_links() -> None:
    told = definition(Panel("Own time", "t (s)", keys=(names.OWN_S,)), "x")
    assert "own time (stragglers)" in told and "](#" not in told
    told = definition(Panel("L", "l (nats)", keys=(names.LM_LOSS,)), "Loss: L")
    assert "<code>train.label_smoothing</code>" in told and "<code>train/lm_loss</code> (nats)" in told
    assert "n_i is the load" in definition(Panel("i", "i (1)", keys=("moe/<layer>/imbalance",)), "x")
    assert definition(Panel("own", "own (1)", keys=("unknown/of/nobody",)), "x") == ""


def test_a_legend_that_all_panels_share_stands_once() -> None:
    section = two_layers()
    assert [it.name for it in shared_legend(section)] == ["layer 01", "layer 02"]
    (text,) = charts([section])
    assert text.count('class="legend"') == 1 and text.index('class="legend"') < text.index("<figure>")
    other = Section(
        "Balance", "", [*section.panels, Panel("three", "c (1)", legend_of(section.panels[0])[::-1])]
    )
    assert shared_legend(other) == [] and charts([other])[0].count('class="legend"') == 3


def test_entries_are_buttons_and_everything_has_its_own_name() -> None:
    sections = run_sections(full_rows())
    elements = Elements(main_of("run", "", [], sections)).found
    ids = [of["id"] for _, of in elements if "id" in of]
    assert len(ids) == len(set(ids))
    entries = [of for tag, of in elements if tag == "button" and "data-curve" in of]
    assert len(entries) > 8 and all(of["aria-pressed"] == "true" and of["type"] == "button" for of in entries)
    plots = [of for _, of in elements if of.get("class") == "plot"]
    assert plots and all(of["role"] == "img" and of["aria-label"] for of in plots)
    links = [of["href"] for tag, of in elements if tag == "a"]
    assert len(links) == len(sections) and all(link is not None and link[1:] in ids for link in links)


def test_entries_name_the_traces_that_they_hide() -> None:
    panels = [panel for section in run_sections(full_rows()) for panel in section.panels if legend_of(panel)]
    assert panels
    for panel in panels:
        groups = {trace.legendgroup for trace in figure_of(panel).data}
        entries = {html.escape(curve.name, quote=False) for curve in legend_of(panel)}
        assert entries <= groups, panel.title
        assert groups - entries <= {html.escape(it.name, quote=False) for it in panel.curves if not it.named}


def test_a_name_cannot_become_markup() -> None:
    curves = [Curve('<b>"x', [1.0], [2.0], "blue"), Curve("y", [1.0], [2.0], "orange")]
    (text,) = charts([Section("<i>", "<u>", [Panel('<s>"', "a (1)", curves, ("train/<script>",))])])
    assert not re.search(r"<(b|u|s|script)>", text) and "<i>" not in text
    assert (
        '<button type="button" aria-pressed="true" id="&lt;i&gt;: &lt;s&gt;&quot;: &lt;b&gt;&quot;x"' in text
    )


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_hover_text_of_seeds_has_mean_deviation_and_range(seeds: int) -> None:
    found = [([10, 20], [2.0 + seed, 5.0 * (1 + seed)]) for seed in range(seeds)]
    curve = band_curve("row", found, "blue")  # type: ignore[arg-type]
    line = figure_of(Panel("p", "y (1)", [curve])).data[-1]
    if seeds == 1:
        assert line.customdata is None and "±" not in line.hovertemplate
        return
    assert list(line.y) == [3, 10]
    # 2, 3, 4 and 5, 10, 15: deviations of the sample 1 and 5.
    assert [list(it) for it in line.customdata] == [[1, 2, 4], [5, 5, 15]]
    assert (
        "± %{customdata[0]:.2~g}, from %{customdata[1]:.5~g} to %{customdata[2]:.5~g}" in line.hovertemplate
    )
