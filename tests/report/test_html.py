"""The report as a reader's browser shows it."""

from __future__ import annotations

import json
import re

import pytest
from browser import Browser, find_browser
from test_analyze import real_trace
from unionkit import make_stream, make_trace

from moetap.analysis.ledger import make_tier
from moetap.analysis.study import Options, study
from moetap.criteria import read_criteria
from moetap.report.html import report_html
from moetap.report.plots import plot_files, plots
from moetap.report.sections import Heading, Note
from moetap.report.study import sections


@pytest.fixture(scope="module")
def found():
    tiers = tuple(make_tier(g) for g in (8, 16, 24))
    return study([real_trace()], Options(read_criteria(), tiers, groups=20))


@pytest.fixture(scope="module")
def page(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_html([found]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find_browser() is None:
        pytest.skip("no Chromium or Chrome found; set MOETAP_BROWSER")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


MEASURE = """JSON.stringify({
  plots: [...document.querySelectorAll('figure.plot svg')].map(s => {
    const box = s.getBoundingClientRect();
    return [s.closest('figure').id, box.width, box.height, s.querySelectorAll('path,use').length]}),
  images: [...document.querySelectorAll('image')].map(i => i.getBoundingClientRect().width),
  width: document.documentElement.scrollWidth, window: document.documentElement.clientWidth,
  small: [...document.querySelectorAll('body *')].filter(e => !e.closest('svg') && e.offsetParent
    && [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())
    && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 80)),
  drawn: [...document.querySelectorAll('svg text')].map(
    t => t.getBoundingClientRect() && parseFloat(getComputedStyle(t).fontSize)
      * t.ownerSVGElement.getBoundingClientRect().width / t.ownerSVGElement.viewBox.baseVal.width),
  page: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.querySelector('svg text')).fill,
})"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser, page, found, width, scheme, tmp_path):
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page, width, scheme)
    seen = json.loads(browser.evaluate(MEASURE))
    assert browser.errors == []
    assert all(r.startswith(("file:", "data:")) for r in browser.requests), browser.requests
    assert [name for name, *_ in seen["plots"]] == [
        f"m0-plot-{p.key}"
        for s in ("union", "overflow", "ledger", "locality")
        for p in plots(found)
        if p.section == s
    ]
    assert len(seen["plots"]) == 7
    for name, wide, high, shapes in seen["plots"]:
        assert 300 < wide < 600 and high > 200 and shapes > 10, name
    assert seen["images"] and min(seen["images"]) > 0  # the heat map
    assert seen["width"] <= seen["window"]  # tables scroll inside their own box
    assert seen["small"] == []
    assert min(seen["drawn"]) >= 11.9
    dark = scheme == "dark"
    assert (seen["page"] == "rgb(22, 22, 22)") == dark
    assert (seen["ink"] == "rgb(230, 230, 230)") == dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_every_cell_of_the_terminal_is_in_the_page(found, page):
    text = page.read_text(encoding="utf-8")
    import html

    cells = [html.unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", text)]
    expected = []
    ordered = sorted(sections(found), key=lambda s: s.key != "verdict")
    for section in ordered:
        for part in section.parts:
            if not isinstance(part, Heading | Note):
                columns = [[getattr(c, "plain", c) for c in col.cells] for col in part.columns]
                expected += [cell for row in zip(*columns, strict=True) for cell in row]
    assert cells == expected


def test_self_contained(found, page):
    text = page.read_text(encoding="utf-8")
    assert len(text) < 3_000_000
    links = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert "<script" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', text)) <= set(ids)
    criteria = found.options.criteria
    assert criteria.sha256 in text and "[io_reduction]" in text
    assert found.traces[0].run_id in text


def test_names_are_escaped():
    trace = real_trace(id="<b>evil</b> & co")
    options = Options(read_criteria(), (make_tier(16),), groups=5, parts=frozenset(["union"]))
    text = report_html([study([trace], options)])
    assert "<b>evil" not in text and "&lt;b&gt;evil&lt;/b&gt; &amp; co" in text
    assert "verdicts" not in text.split("</style>")[1]  # only what was asked for


def test_incomplete_is_at_every_table_and_plot():
    trace = real_trace(complete=False, n_prompts=48)
    options = Options(read_criteria(), (make_tier(16),), groups=5)
    text = report_html([study([trace], options)])
    captions = re.findall(r"<caption>(.*?)</caption>", text)
    assert captions and all("INCOMPLETE TRACE" in c for c in captions)
    figures = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert figures and all("Incomplete trace" in f for f in figures)
    assert "INCOMPLETE: 6 of 48 streams" in text


def test_plot_files(found):
    files = dict(plot_files(found))
    assert len(files) == 7 * 4
    for name, content in files.items():
        start = b"\x89PNG" if name.endswith(".png") else b"<?xml"
        assert content.startswith(start)
    for plot in plots(found):
        light, dark = (files[f"{plot.key}{x}.svg"].decode() for x in ("", "-dark"))
        assert light != dark
        # Axes say what and in which unit.
        assert any(unit in light for unit in ("experts", "expert id", "GB", "%")), plot.key


def test_two_models():
    options = Options(read_criteria(), (make_tier(16),), groups=5)
    names = ("org/first", "org/second")
    studies = [study([real_trace(id=n, config_sha256=n)], options) for n in names]
    text = report_html(studies)
    section = text[text.index('<section id="all-comparison">') :].split("</section>")[0]
    assert "Models side by side" in section and "<figure" not in section
    assert all(f"<td>{name}</td>" in section for name in names)


def test_browser_shows_two_models(browser, tmp_path):
    options = Options(read_criteria(), (make_tier(16),), groups=5)
    path = tmp_path / "two.html"
    path.write_text(
        report_html([study([real_trace(id=n, config_sha256=n)], options) for n in "ab"]),
        encoding="utf-8",
    )
    browser.errors.clear()
    browser.open(path, 1400, "light")
    assert browser.errors == []
    assert len(json.loads(browser.evaluate(MEASURE))["plots"]) == 14


def test_without_an_executed_cell_plots_are_left_out_with_a_sentence():
    streams = [make_stream(f"s{i}", "code", [[set(), set()]] * 3, (2, 2)) for i in range(4)]
    trace = make_trace(real_trace().model, streams)
    options = Options(read_criteria(), (make_tier(16),), groups=5)
    nothing = study([trace], options)
    assert [plot.key for plot in plots(nothing)] == ["ledger"]
    text = report_html([nothing])
    assert text.count("<figure") == 1
    for sentence in (
        "Union by decode step: not drawn, no decode step was executed.",
        "Footprint by window: not drawn, no window was executed from end to end.",
        "Overlap with earlier steps: not drawn, no two steps can be compared.",
    ):
        assert sentence in text
    assert {name for name, _ in plot_files(nothing)} == {
        f"ledger{theme}.{kind}" for theme in ("", "-dark") for kind in ("png", "svg")
    }


def test_axes_say_share_of_what(found):
    files = dict(plot_files(found))
    assert b"share of (group, step, layer), %" in files["union-cdf.svg"]
    assert b"share of the layer's selections, %" in files["heat.svg"]


def test_fixed_before_looking_is_said_of_the_shipped_criteria_only(tmp_path):
    own = tmp_path / "mine.toml"
    own.write_text(read_criteria().text.replace("lanes = 4", "lanes = 2"))
    for criteria, said in ((read_criteria(), True), (read_criteria(own), False)):
        options = Options(criteria, (make_tier(16),), groups=5)
        text = report_html([study([real_trace()], options)])
        before = text.split("<pre")[0]  # the file itself may say so
        assert ("Fixed before looking" in before) == said
        assert f"Criteria: {criteria.name}, sha256" in before
