"""Evaluations in the report: reliability diagrams and robustness, whole, safe, and working in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from attemper.lab.evaluation.key_figures import over_seeds
from attemper.lab.report.reliability import reliability
from attemper.lab.report.study import render
from browser import browsing, chromium
from evaluated import made_up
from summaries import summary
from test_report import EVIL, whole


def evaluated(recipes: int = 3) -> dict[str, Any]:
    given = summary(recipes)
    for at, row in enumerate(given["recipes"]):
        row["evaluation"] = over_seeds([made_up(row["mean"], 0.02 * at), made_up(row["mean"], 0.01 * at)])
    return given


def test_an_evaluated_study_shows_its_figures_diagrams_and_curves() -> None:
    page = render(evaluated())
    text = whole(page).text
    for words in ("Evaluation", "Robustness", "PGD 8/255, %", "expected calibration error 10.00 ± 0.00 %", "fog"):
        assert words in text, words
    assert len(re.findall(r'aria-label="[^"]*Accuracy by confidence', page)) == 3
    for panel in ("Occlusion in the middle", "FGSM", "PGD", "Corruptions, mean"):
        assert f"<figcaption>{panel}" in page, panel
    assert "<figcaption>Occlusion anywhere" not in page, "there is nothing to draw in it"


def test_a_study_without_evaluations_has_no_such_sections() -> None:
    page = render(summary(3))
    assert 'id="evaluation"' not in page
    assert 'id="robustness"' not in page


def test_recipes_without_a_result_and_suites_that_were_not_asked_for_do_no_harm() -> None:
    given = evaluated()
    given["recipes"][0]["evaluation"] = None
    for part in ("bins", "robustness"):
        given["recipes"][1]["evaluation"].pop(part)
    page = render(given)
    whole(page)
    assert len(re.findall(r'aria-label="[^"]*Accuracy by confidence', page)) == 1
    for row in given["recipes"]:
        row["evaluation"] = None
    assert 'id="evaluation"' not in render(given)


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"set": "ImageNet-C", "side": 224, "exact": True}, "constants of ImageNet-C. A published mean over all"),
        ({"set": "CIFAR-10-C", "side": 32, "exact": False}, "They stand beside no published figures"),
        (None, "not the published ones"),
    ],
)
def test_the_page_says_which_published_figures_corruptions_may_stand_beside(constants: object, said: str) -> None:
    given = evaluated()
    for row in given["recipes"]:
        row["evaluation"]["corruption_constants"] = constants
    assert said in render(given)


def test_nothing_from_an_evaluation_becomes_markup() -> None:
    given = evaluated()
    found = given["recipes"][1]["evaluation"]
    found["figures"][0]["name"] = EVIL
    found["robustness"]["corruptions"][0]["kind"] = EVIL
    given["recipes"][0]["evaluation"]["corruption_constants"] = {"set": EVIL, "side": EVIL, "exact": False}
    bad = whole(render(given))
    assert "img" not in {tag for tag, _ in bad.attributes}
    assert EVIL in bad.text


def test_a_reliability_diagram_puts_marks_where_the_numbers_are() -> None:
    parts = [
        {"low": 0.5, "high": 0.6, "count": 30, "confidence": 0.55, "accuracy": 0.25},
        {"low": 0.9, "high": 1.0, "count": 10, "confidence": 1.0, "accuracy": 1.0},
        {"low": 0.6, "high": 0.9, "count": 0, "confidence": None, "accuracy": None},
    ]
    drawn = reliability(parts, title="T", height=264)  # 200 pixels between the axes' ends, from 22 to 222
    marks = re.findall(r'<use class="mark" href="#\w+" x="([\d.]+)%" y="([\d.]+)"', drawn)
    assert marks == [("55", "172.0"), ("100", "22.0")]
    assert '<line class="whisker" x1="55%" x2="55%" y1="112.0" y2="172.0"/>' in drawn, "from the diagonal to the mark"
    tall = re.findall(r'<rect class="band" x="([\d.]+)%" width="([\d.]+)%" y="[\d.]+" height="([\d.]+)"', drawn)
    assert tall == [("50", "10", "200.0"), ("90", "10", "66.7")]
    assert "30 of 40 predictions" in drawn
    rare = reliability([*parts, {**parts[1], "count": 5000}], title="T")
    assert rare.count('class="hollow"') == 2, "less than a hundredth of all predictions"
    assert "no data yet" in reliability([], title="T")


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here")
def test_the_page_works_in_a_browser_at_every_width_and_in_both_themes(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(evaluated(8)))
    program = chromium()
    assert program is not None
    with browsing(program, tmp_path / "profile") as browser:
        for width in (360, 1200):
            for dark in (False, True):
                browser.open(page, width=width, dark=dark)
                assert browser.complaints() == []
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
        hide = "document.querySelector('#robustness [data-switch=\"1\"]').click()"
        browser.evaluate(hide)
        shown = "[...document.querySelectorAll('#robustness [data-series=\"1\"]')].every(g => g.matches('.off'))"
        assert browser.evaluate(shown)


def test_the_page_of_one_run_begins_with_its_accuracy_and_what_so_many_images_can_tell() -> None:
    from attemper.lab.cli.evaluate import _facts

    said = _facts({"accuracy": 0.9, "images": 100, "spec": {"seed": 3}})
    for words in ("90.00 %", "82.56 to 94.48 %", "<dd>100</dd>", "<dd>3</dd>"):
        assert words in said
    assert _facts({"accuracy": None, "images": 0, "spec": {"seed": 3}}) == ""
