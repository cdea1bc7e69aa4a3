"""The report: one page from a summary, whole and safe whatever the study gave, and working in a real browser."""

from __future__ import annotations

import copy
import html.parser
import itertools
import json
import re
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml

from attemper.lab.report import charts
from attemper.lab.report.charts import Axis, Bar, Curve, Point, Row
from attemper.lab.report.page import Section, page
from attemper.lab.report.scale import make_scale, number, shorten
from attemper.lab.report.study import render
from colours import palette
from summaries import EVIL, STUDIES, diverged, poisoned, published_beside, summary, unfinished, without_cost

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
    known = ("± one standard deviation", "±0.50 points", "± 0.78", "± of the test sample")
    said = Outline(text).text
    for words in known:
        said = said.replace(words, "")
    assert "±" not in said
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


def test_a_very_wide_interval_does_not_press_the_numbers_together() -> None:
    rows = [Row(label=str(at), value=1.0 + at) for at in range(3)]
    plain = charts.dots(rows, title="T", axis=Axis(label="X"))
    wide = charts.dots([*rows[1:], Row(label="0", value=1.0, low=-1e3, high=1e3)], title="T", axis=Axis(label="X"))

    def spread(chart: str) -> float:
        places = [float(x) for x in re.findall(r'<use [^>]* x="([\d.]+)%"', chart)]
        return max(places) - min(places)

    assert spread(wide) > spread(plain) / 5
    [(left, right)] = re.findall(r'class="interval" x1="([\d.]+)%" x2="([\d.]+)%"', wide)
    assert 0 <= float(left) < 5
    assert 95 < float(right) <= 100


def test_epochs_are_whole_numbers() -> None:
    chart = charts.lines(
        [Curve(label="a", x=[1, 2, 3], y=[1.0, 2.0, 3.0])], title="T", x=Axis(label="X"), y=Axis(label="")
    )
    assert re.findall(r'<text class="tick" [^>]*>([^<]*)<', chart) == ["1", "2", "3"]


def test_a_budget_is_told_by_what_is_not_usual() -> None:
    given = summary(2)
    given["plan"]["budget"] = {"epochs": 20, "batch_size": 128, "clip": None, "compile": False, "ema": 0.99}
    assert "epochs 20, batch size 128, ema 0.99" in whole(render(given)).text


@pytest.mark.parametrize(("epochs", "whole"), [(2, True), (5, True), (40, False)])
def test_only_of_a_long_training_the_first_epochs_may_lie_outside(epochs: int, whole: bool) -> None:
    curve = Curve(label="a", series=0, x=list(range(1, epochs + 1)), y=[100.0, *([1.0] * (epochs - 1))])
    fitted, focused = (
        charts.lines([curve], title="T", x=Axis(label="X"), y=Axis(label="Y"), focus=focus) for focus in (0.0, 0.2)
    )
    assert (fitted == focused) == whole


def test_a_gap_in_a_curve_is_a_gap() -> None:
    assert CHARTS["lines"].count("<polyline") == 2
    assert CHARTS["lines"].count("<polygon") == 2


def test_other_pages_can_be_made_of_sections() -> None:
    text = page("Bench", [Section(heading="Step time", body=CHARTS["dots"], lead="<b>"), Section(heading="B", body="")])
    outline = whole(text)
    assert ("a", {"href": "#step-time"}) in outline.attributes
    assert "<b>" in outline.text


# -------------------------------------------------------------------------------------------------------------- colours
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


def declarations(rule: str) -> dict[str, str]:
    """What the style sheet says of a class that marks have."""
    style = resources.files("attemper.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    found = re.search(rf"^\.{rule} \{{ (.*?) \}}", style, re.MULTILINE)
    assert found is not None, rule
    return dict(part.strip().split(": ", 1) for part in found[1].split(";") if part.strip())


def blended(colour: str, below: str, opacity: float) -> str:
    pairs = [(int(colour[at : at + 2], 16), int(below[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(opacity * over + (1 - opacity) * under):02x}" for over, under in pairs)


MARKS = {
    "mark": "fill", "hollow": "stroke", "single": "stroke", "interval": "stroke", "whisker": "stroke", "line": "stroke",
    "band": "stroke", "bar": "fill",
}  # fmt: skip
"""Everything that is drawn for a number, and which of its paints shows it."""


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", MARKS)
def test_every_mark_stands_out_from_what_is_below_it(name: str, theme: int) -> None:
    """Three to one, as the guidelines ask of graphics, with the opacity that the style sheet gives it."""
    colours = {name: pair[theme] for name, pair in palette().items()}
    said, zone = declarations(name), declarations("zone")
    assert said[MARKS[name]] == "var(--c)"
    opacity = float(said.get(f"{MARKS[name]}-opacity", "1")) * float(said.get("opacity", "1"))
    shaded = blended(colours[zone["fill"][6:-1]], colours["page"], float(zone["fill-opacity"]))
    grounds = [colours["page"], colours["card"], *([shaded] if name in ("mark", "interval", "whisker") else [])]
    for series in range(8):
        for ground in grounds:
            seen = blended(colours[f"s{series}"], ground, opacity)
            assert contrast(seen, ground) >= 3, (series, ground, contrast(seen, ground))


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
