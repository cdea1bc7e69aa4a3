"""The report: one page from a summary, whole and safe whatever the study gave, and working in a real browser."""

from __future__ import annotations

import copy
import html.parser
import itertools
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from attemper.report import Section, charts, page, render
from attemper.report.charts import Axis, Bar, Curve, Point, Row
from attemper.report.scale import make_scale, number, shorten
from browser import Browser, browsing, chromium
from summaries import published_beside, summary

EVIL = """</script><script>window.hurt=1</script><img src=x onerror="window.hurt=1">'"&"""
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Outline(html.parser.HTMLParser):
    """Reads a page, and notices tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data


def whole(text: str) -> Outline:
    outline = Outline(text)
    assert not outline.wrong
    assert not outline.open, "a tag is never closed"
    ids = [attributes["id"] for _, attributes in outline.attributes if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", outline.text.lower())
    assert "None" not in outline.text
    return outline


def unfinished() -> dict[str, Any]:
    given = summary(4, complete=False)
    given["recipes"][1].update(missing=3, test=[0.8, 0.82, None, None, None], difference=None, rank=None)
    given["recipes"][2].update(
        missing=5, mean=None, deviation=None, difference=None, rank=None, cost=None, curves=[], rates=[], lr=None
    )
    for part in ("test", "train", "validation"):
        given["recipes"][2][part] = [None] * 5
    return given


def diverged() -> dict[str, Any]:
    given = summary(3)
    broken = given["recipes"][1]
    broken["diverged"] = 2
    for curve in broken["curves"][:2]:
        del curve[6:]
        curve[-1].update(train_loss=None, train_accuracy=None, penalty=None, validation=None)
        curve[-2]["validation"]["loss"] = 9_000.0
    return given


def equal() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"]:
        recipe.update(test=[0.5] * 5, train=[0.5] * 5, mean=0.5, deviation=0.0)
        if recipe["difference"]:
            recipe["difference"] = {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "adjusted": 1.0}
        recipe["cost"].update(ratio=1.0, low=1.0, high=1.0)
        for curve in recipe["curves"]:
            for at in curve:
                at.update(train_loss=1.0, train_accuracy=0.5, validation={"accuracy": 0.5, "loss": 1.0})
    return given


def without_cost() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"]:
        recipe["cost"] = None
    return given


def long_names() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"][1:]:
        recipe["name"] = recipe["recipe"] = "explicit(" + ", ".join(f"v{i}=0.0005" for i in range(30)) + recipe["name"]
    return given


STUDIES = {
    "usual": lambda: published_beside(summary()),
    "unfinished": unfinished,
    "diverged": diverged,
    "one seed": lambda: summary(3, seeds=1),
    "one epoch": lambda: summary(3, epochs=1),
    "no cost": without_cost,
    "fifteen recipes": lambda: summary(15, epochs=200),
    "long names": long_names,
    "all equal": equal,
    "only none": lambda: summary(1),
    "empty": lambda: summary(0, verdict="", complete=False),
}


# -------------------------------------------------------------------------------------------------- what is on the page
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_gives_a_whole_page_of_less_than_300_kilobytes(name: str) -> None:
    text = render(STUDIES[name]())
    whole(text)
    assert len(text.encode()) < 300_000


def test_the_page_says_what_was_compared_and_what_came_out() -> None:
    given = published_beside(summary())
    text = whole(render(given)).text
    for expected in (
        given["title"],
        given["verdict"],
        given["command"],
        "vit-cifar",
        "2.15.0",
        "Explicit dropout, table 1",
    ):
        assert expected in text
    for recipe in given["recipes"]:
        assert recipe["name"] in text
        assert f"{100 * recipe['mean']:.2f} ± {100 * recipe['deviation']:.2f}" in text


def test_the_plan_on_the_page_reads_back_as_the_plan() -> None:
    given = summary()
    given["plan"]["title"] = "a: 'b' # <c>"
    given["plan"]["recipes"][1] = {"name": "x", "recipe": "explicit(v={1e-4,5e-4}, ff=5e-4)"}
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", render(given), re.DOTALL)
    assert yaml.safe_load(html.unescape(blocks[1])) == given["plan"]


def test_the_data_on_the_page_are_the_summary_without_its_curves() -> None:
    given = published_beside(summary())
    given["recipes"][0]["deviation"] = float("nan")
    block = re.search(r'<script type="application/json" id="summary">(.*?)</script>', render(given), re.DOTALL)
    assert block
    found = json.loads(block[1])
    expected = copy.deepcopy(given)
    expected["recipes"][0]["deviation"] = None
    for recipe in expected["recipes"]:
        del recipe["curves"]
    by_name = {recipe["name"]: recipe for recipe in found.pop("recipes")}
    assert by_name == {recipe["name"]: recipe for recipe in expected.pop("recipes")}
    assert found == expected


def test_the_same_summary_gives_the_same_page_and_is_left_alone() -> None:
    given = summary(3)
    before = copy.deepcopy(given)
    assert render(given) == render(given)
    assert given == before


def test_missing_and_diverged_runs_are_said_at_the_top() -> None:
    assert "not complete: 8 runs are missing" in whole(render(unfinished())).text
    assert "diverged, with the number of them: dropkey(0.1) (2)" in whole(render(diverged())).text
    assert "One seed only" in whole(render(summary(2, seeds=1))).text
    text = whole(render(summary(2))).text
    assert "missing" not in text
    assert "diverged" not in text


def test_one_seed_has_no_interval_and_no_deviation() -> None:
    text = render(summary(3, seeds=1))
    assert "±" not in Outline(text).text.replace("± one standard deviation", "")
    assert 'class="interval"' not in text.split('id="generalisation-gap"')[0]


def test_sections_without_anything_to_show_are_left_out() -> None:
    text = render(without_cost())
    assert 'id="cost"' not in text
    assert "step time" not in Outline(text).text
    assert 'id="published-figures"' not in text
    assert 'id="cost"' in render(summary(3))


def test_the_interval_of_a_mean_is_students() -> None:
    from scipy import stats

    given = summary(2)
    test = [100 * value for value in given["recipes"][1]["test"]]
    low, high = stats.t.interval(0.95, 4, np.mean(test), stats.sem(test))
    [chart] = re.findall(r"<figcaption>Test accuracy<.*?</figure>", render(given), re.DOTALL)
    values = [100 * value for recipe in given["recipes"] for value in recipe["test"]]
    ends = [stats.t.interval(0.95, 4, np.mean(v), stats.sem(v)) for v in (values[:5], values[5:])]
    scale = make_scale([*values, *(float(end) for pair in ends for end in pair)])
    assert f'x1="{100 * scale.at(low):.2f}%" x2="{100 * scale.at(high):.2f}%"' in chart


def test_a_recipe_has_one_colour_and_mark_everywhere_and_the_baseline_the_neutral_one() -> None:
    text = render(summary(15))
    looks = re.findall(r'<button type="button" data-switch="(\d+)".*?<g class="([^"]*)">.*?href="#(\w+)"', text)
    assert len(looks) == 15
    assert len({(colour, mark) for _, colour, mark in looks}) == 15
    legend = dict(
        re.findall(r'<svg class="key".*?<g class="([^"]*)">.*?</svg><span>([^<]*)', text.split('id="cost"')[1])
    )
    assert [name for look, name in legend.items() if look == "s0"] == ["none"]


# --------------------------------------------------------------------------------------------------------- safe to open
def poisoned() -> dict[str, Any]:
    given = published_beside(summary(4))
    given.update(title=EVIL, verdict=EVIL, command=EVIL, versions={EVIL: EVIL}, metric="accuracy")
    given["plan"].update(task=EVIL, model=EVIL, budget={EVIL: EVIL})
    for recipe in given["recipes"][1:]:
        recipe.update(name=recipe["name"] + EVIL, recipe=EVIL)
        recipe["published"] = {"value": 80.0, "deviation": None, "source": EVIL}
        recipe["rates"] = [{"method": EVIL, "block": 0, "rate": 0.1}, {"method": EVIL + "2", "block": 0, "rate": None}]
        recipe["configurations"][0]["recipe"] = EVIL
    return given


def test_nothing_from_the_summary_becomes_markup() -> None:
    clean, bad = whole(render(published_beside(summary(4)))), whole(render(poisoned()))
    assert "img" not in {tag for tag, _ in bad.attributes}
    assert sum(tag == "script" for tag, _ in bad.attributes) == sum(tag == "script" for tag, _ in clean.attributes)
    assert not any(name.startswith("on") for _, attributes in bad.attributes for name in attributes)
    assert EVIL in bad.text


def test_the_page_refers_to_nothing_outside_itself() -> None:
    for tag, attributes in whole(render(published_beside(summary(4)))).attributes:
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
        assert "style" not in attributes, "the policy allows no style attributes"


# --------------------------------------------------------------------------------------------------------------- charts
@pytest.mark.parametrize(
    "values", [[], [None], [3.0], [3.0, 3.0], [0.0], [-2.0, 5.0], [1e-9, 1e9], [float("nan"), 1.0]]
)
@pytest.mark.parametrize("log", [False, True])
def test_a_scale_shows_every_number_and_has_ticks_on_it(values: list[float | None], log: bool) -> None:
    scale = make_scale(values, log=log)
    known = [v for v in values if v is not None and np.isfinite(v) and (v > 0 or not log)]
    assert all(0 <= scale.at(v) <= 1 for v in known)
    assert 1 <= len(scale.ticks) <= 12
    assert all(-1e-9 <= scale.at(tick) <= 1 + 1e-9 for tick in scale.ticks)
    labels = [scale.label(tick) for tick in scale.ticks]
    assert len(set(labels)) == len(labels), "two ticks read the same"


def test_numbers_and_names_are_written_for_people() -> None:
    assert number(-1.25, 1) == "−1.2"
    assert number(-0.001, 2) == "0.00"
    assert number(float("inf")) == "–"
    assert shorten("x" * 9, 9) == "x" * 9
    assert len(shorten("x" * 99, 9)) == 9


CHARTS = {
    "dots": charts.dots(
        [Row(label="a", value=1.0, low=0.5, high=1.5, points=[(0.9, "seed 0")], note="1.0"), Row(label="b", series=1)],
        title="T",
        axis=Axis(label="X", rule=0.0),
    ),
    "lines": charts.lines(
        [Curve(label="a", x=[1, 2, 3], y=[1.0, None, 3.0], low=[0.5, None, 2.0], high=[1.5, None, 4.0])],
        title="T",
        x=Axis(label="X"),
        y=Axis(label="Y", log=True),
    ),
    "scatter": charts.scatter(
        [
            Point(label="a", x=1.0, y=2.0, x_range=(0.9, 1.1), y_range=(1.5, 2.5)),
            Point(label="b", x=1.0, y=2.0, series=1),
        ],
        title="T",
        x=Axis(label="X"),
        y=Axis(label="Y"),
    ),
    "bars": charts.bars([Bar(label="0", value=0.1), Bar(label="1", value=None)], title="T", x="X", y=Axis(label="Y")),
}


@pytest.mark.parametrize("kind", CHARTS)
def test_every_chart_has_a_title_axis_labels_a_description_and_values_to_point_at(kind: str) -> None:
    outline = whole(CHARTS[kind])
    [svg] = [attributes for tag, attributes in outline.attributes if tag == "svg" and "role" in attributes]
    assert svg["role"] == "img"
    assert (svg["aria-label"] or "").startswith("T. ")
    assert re.search(r"a: [13]", svg["aria-label"] or "") or kind == "bars"
    assert "X" in outline.text
    assert any(tag == "title" for tag, _ in outline.attributes)


@pytest.mark.parametrize("draw", [charts.dots, charts.lines, charts.scatter, charts.bars])
def test_a_chart_without_data_says_so(draw: Any) -> None:
    axes = {"axis": Axis(label="X")} if draw is charts.dots else {"x": Axis(label="X"), "y": Axis(label="Y")}
    if draw is charts.bars:
        axes["x"] = "X"
    assert "no data yet" in whole(draw([], title="T", **axes)).text


def test_a_gap_in_a_curve_is_a_gap() -> None:
    assert CHARTS["lines"].count("<polyline") == 2
    assert CHARTS["lines"].count("<polygon") == 2


def test_other_pages_can_be_made_of_sections() -> None:
    text = page("Bench", [Section(heading="Step time", body=CHARTS["dots"], lead="<b>"), Section(heading="B", body="")])
    outline = whole(text)
    assert ("a", {"href": "#step-time"}) in outline.attributes
    assert "<b>" in outline.text


# -------------------------------------------------------------------------------------------------------------- colours
def palette() -> dict[str, tuple[str, str]]:
    style = resources.files("attemper.report").joinpath("page.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)}


def linear(colour: str) -> Any:
    value = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """As the Web Content Accessibility Guidelines define it."""
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_series_stand_out_from_the_page(theme: int) -> None:
    colours = {name: pair[theme] for name, pair in palette().items()}
    for name in ("ink", "soft", "accent", "good", "bad"):
        assert contrast(colours[name], colours["page"]) >= 4.5, name
    assert contrast(colours["warn"], colours["warn-page"]) >= 4.5
    for series in range(8):
        assert contrast(colours[f"s{series}"], colours["page"]) >= 3, series


# Machado, Oliveira and Fernandes, 2009, at full severity: what linear RGB becomes to a reader without one kind of cone.
SIGHT = {
    "all": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(rgb: Any) -> Any:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_series_can_be_told_apart_whatever_cones_a_reader_has(theme: int, sight: str) -> None:
    seen = [lab(np.array(SIGHT[sight]) @ linear(palette()[f"s{series}"][theme])) for series in range(8)]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


# ------------------------------------------------------------------------------------------------------- a real browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = chromium()
    if program is None:
        pytest.skip("no Chromium on this machine: install Debian's `chromium`, or name one in CHROMIUM")
    with browsing(program, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {}
    for name, build in {**STUDIES, "poisoned": poisoned}.items():
        paths[name] = folder / f"{name}.html"
        paths[name].write_text(render(build()), encoding="utf-8")
    return paths


COLUMN = """(title) => {
  const table = document.querySelector(".sortable");
  const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent.startsWith(title));
  return [...table.tBodies[0].rows].map((row) => row.cells[at].dataset.key ?? null);
}"""
CLICK = """(title) => {
  const buttons = [...document.querySelectorAll(".sortable th button")];
  const button = buttons.find((button) => button.textContent.startsWith(title));
  button.click();
  return button.closest("th").getAttribute("aria-sort");
}"""
WIDER = """[...document.querySelectorAll("body *")].filter((element) =>
  element.getBoundingClientRect().right > innerWidth + 1 && !element.closest(".scroll, pre, .symbols, .unseen")
).map((element) => element.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("name", [*STUDIES, "poisoned"])
def test_the_page_opens_from_disk_without_complaint_or_request(
    browser: Browser, written: dict[str, Path], name: str
) -> None:
    browser.open(written[name])
    assert browser.complaints() == []
    assert browser.requests() == [written[name].resolve().as_uri()]
    assert browser.evaluate("window.hurt") is None


@pytest.mark.parametrize("name", [*STUDIES, "poisoned"])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, written: dict[str, Path], name: str) -> None:
    browser.open(written[name], width=360, height=740)
    assert browser.evaluate("document.documentElement.scrollWidth") == 360
    assert browser.evaluate(WIDER) == []


def test_a_script_that_is_not_ours_does_not_run(browser: Browser, written: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    evil = '<script>window.hurt=1</script><img src="https://example.org/x.png" onerror="window.hurt=1">'
    broken.write_text(
        written["usual"].read_text(encoding="utf-8").replace("</main>", evil + "</main>"), encoding="utf-8"
    )
    browser.open(broken)
    assert browser.evaluate("window.hurt") is None
    assert any("Content Security Policy" in complaint for complaint in browser.complaints())


def test_headings_sort_the_table_and_missing_values_stay_below(browser: Browser, written: dict[str, Path]) -> None:
    browser.open(written["unfinished"])
    assert browser.evaluate(f"({CLICK})('test')") == "ascending"
    rising = browser.evaluate(f"({COLUMN})('test')")
    assert rising[-1] is None
    assert [float(value) for value in rising[:-1]] == sorted(float(value) for value in rising[:-1])
    assert browser.evaluate(f"({CLICK})('test')") == "descending"
    falling = browser.evaluate(f"({COLUMN})('test')")
    assert falling == [*reversed(rising[:-1]), None]
    assert browser.evaluate(f"({CLICK})('recipe')") == "ascending"
    names = browser.evaluate(f"({COLUMN})('recipe')")
    assert names == sorted(names)
    assert browser.evaluate("document.querySelectorAll('.sortable [aria-sort]:not([aria-sort=none])').length") == 1
    assert "Sorted by recipe" in browser.evaluate("document.getElementById('told').textContent")


def test_plots_draw_in_view_and_marks_lie_where_the_numbers_are(browser: Browser, written: dict[str, Path]) -> None:
    browser.open(written["usual"])
    sizes = browser.evaluate(
        "[...document.querySelectorAll('svg.plot')].map(s => [s.getBoundingClientRect().width, s.getBBox().height])"
    )
    assert len(sizes) >= 10
    assert all(width > 100 and height > 50 for width, height in sizes)
    recipes = published_beside(summary())["recipes"]
    means = sorted((recipe["mean"] for recipe in recipes), reverse=True)
    places = browser.evaluate(
        "[...document.querySelector('#accuracy svg.plot').querySelectorAll('use')]"
        ".map(u => u.getBoundingClientRect()).map(r => r.left + r.width / 2)"
    )
    assert len(places) == len(means)
    slope, offset = np.polyfit(means, places, 1)
    assert slope > 0
    assert np.allclose(slope * np.array(means) + offset, places, atol=1.0)
    lengths = browser.evaluate("[...document.querySelectorAll('polyline')].map(line => line.getTotalLength())")
    assert len(lengths) >= 4 * len(recipes)
    assert min(lengths) > 300


def test_everything_can_be_reached_and_used_by_keyboard(browser: Browser, written: dict[str, Path]) -> None:
    browser.open(written["usual"])
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    wanted = {"theme": False, "sort": False, "scroll": False, "switch": False}
    for _ in range(60):
        browser.press("Tab")
        seen = browser.evaluate(
            "(e => e.id === 'theme' ? 'theme' : e.dataset.first ? 'sort' : e.className === 'scroll' ? 'scroll' "
            ": e.dataset.switch ? 'switch' : '')(document.activeElement)"
        )
        if not seen or wanted[seen]:
            continue
        wanted[seen] = True
        outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"focus on {seen} cannot be seen"
        if seen == "sort":
            browser.press("Enter")
            assert browser.evaluate("document.activeElement.closest('th').ariaSort") == "ascending"
        if seen == "switch":
            browser.press(" ")
            assert browser.evaluate("document.activeElement.ariaPressed") == "false"
    assert all(wanted.values()), wanted


def test_a_legend_hides_and_shows_a_recipe_in_all_panels(browser: Browser, written: dict[str, Path]) -> None:
    browser.open(written["fifteen recipes"])
    shown = "new Set([...document.querySelectorAll('[data-series]:not(.off)')].map(g => g.dataset.series)).size"
    assert browser.evaluate(shown) == 6
    assert browser.evaluate("document.querySelector('[data-switch=\"0\"]').ariaPressed") == "true"
    browser.evaluate("document.querySelector('[data-all=show]').click()")
    assert browser.evaluate(shown) == 15
    browser.evaluate("document.querySelector('[data-switch=\"3\"]').click()")
    assert browser.evaluate("document.querySelectorAll('[data-series=\"3\"].off').length") >= 4
    assert browser.evaluate(shown) == 14


def test_the_theme_follows_the_system_until_the_reader_chooses(browser: Browser, written: dict[str, Path]) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    browser.open(written["usual"], dark=True)
    dark = browser.evaluate(background)
    browser.open(written["usual"])
    light = browser.evaluate(background)
    assert dark != light
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(background) == dark
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(background) == light
    browser.evaluate("localStorage.clear()")


def test_every_series_is_seen_on_the_picture_of_the_page(browser: Browser, written: dict[str, Path], tmp_path: Path) -> None:
    browser.open(written["usual"])
    browser.screenshot(tmp_path / "page.png")
    image_module = pytest.importorskip("PIL.Image")
    picture = np.asarray(image_module.open(tmp_path / "page.png").convert("RGB")).astype(np.int32)
    packed = (picture[..., 0] << 16) | (picture[..., 1] << 8) | picture[..., 2]
    for series in range(8):
        colour = palette()[f"s{series}"][0]
        assert (packed == int(colour[1:], 16)).any(), f"series {series} is nowhere to be seen"
