"""The report in a real Chromium: opened from disk, clicked, typed at, on a phone, in the dark."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from attemper.lab.report.many import render as render_tasks
from attemper.lab.report.study import render
from attemper.lab.study.many import overview
from attemper.lab.study.summary_files import read_summary
from browser import Browser, browsing, chromium
from colours import palette
from summaries import STUDIES, poisoned, published_beside, summary


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


def test_every_series_is_seen_on_the_picture_of_the_page(
    browser: Browser, written: dict[str, Path], tmp_path: Path
) -> None:
    browser.open(written["usual"])
    browser.screenshot(tmp_path / "page.png")
    image_module = pytest.importorskip("PIL.Image")
    picture = np.asarray(image_module.open(tmp_path / "page.png").convert("RGB")).astype(np.int32)
    packed = (picture[..., 0] << 16) | (picture[..., 1] << 8) | picture[..., 2]
    for series in range(8):
        colour = palette()[f"s{series}"][0]
        assert (packed == int(colour[1:], 16)).any(), f"series {series} is nowhere to be seen"


SAVED = """(label) => {
  URL.createObjectURL = (blob) => { window.saved = blob; return "data:,"; };
  window.saved = undefined;
  [...document.querySelectorAll("button.save")].find((b) => b.getAttribute("aria-label") === label).click();
}"""
READ = """(async () => {
  for (let i = 0; i < 100 && !window.saved; i++) await new Promise((go) => setTimeout(go, 50));
  const bytes = new Uint8Array(await window.saved.arrayBuffer());
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
})()"""


def saved(browser: Browser, label: str) -> bytes:
    """What the page gives to be saved."""
    browser.evaluate(f"({SAVED})({label!r})")
    return base64.b64decode(browser.evaluate(READ))


def test_every_table_goes_out_as_csv_and_every_chart_as_png(browser: Browser, written: dict[str, Path]) -> None:
    browser.open(written["usual"])
    tables, charts = (
        browser.evaluate(f"document.querySelectorAll('{tag}').length") for tag in ("table", "figure.chart")
    )
    assert browser.evaluate("document.querySelectorAll('button.save').length") == tables + charts
    text = saved(browser, "CSV of Recipes and their results").decode("utf-8-sig")
    rows = list(csv.reader(io.StringIO(text)))
    recipes = published_beside(summary())["recipes"]
    assert len(rows) == len(recipes) + 1
    assert {len(row) for row in rows} == {len(rows[0])}
    assert {row[0].split(";")[0] for row in rows[1:]} == {recipe["name"] for recipe in recipes}
    image_module = pytest.importorskip("PIL.Image")
    data = saved(browser, "PNG of Test accuracy")
    assert data.startswith(b"\x89PNG")
    picture = np.asarray(image_module.open(io.BytesIO(data)).convert("RGB")).astype(np.int32)
    packed = (picture[..., 0] << 16) | (picture[..., 1] << 8) | picture[..., 2]
    for series in range(8):  # marks, in the colours of the page
        assert (packed == int(palette()[f"s{series}"][0][1:], 16)).any(), series
    assert browser.complaints() == []


def test_a_name_that_a_spreadsheet_would_compute_leaves_as_text(browser: Browser, tmp_path: Path) -> None:
    given = summary(3)
    given["recipes"][1]["name"] = "=1+1"
    (tmp_path / "page.html").write_text(render(given), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    assert "\"'=1+1" in saved(browser, "CSV of Recipes and their results").decode()


def test_a_filter_shows_some_recipes_only(browser: Browser, tmp_path: Path) -> None:
    pages = [Path(__file__).parents[1] / f"docs/results/{name}.html" for name in ("cifar10", "gtzan", "thumos14")]
    (tmp_path / "tasks.html").write_text(
        render_tasks(overview([read_summary(page) for page in pages])), encoding="utf-8"
    )
    browser.open(tmp_path / "tasks.html", width=390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate(WIDER) == []
    shown = "[...document.querySelectorAll('.sortable tbody tr')].filter((row) => !row.hidden).length"
    assert browser.evaluate(shown) == 12
    browser.evaluate(
        "(f => { f.value = 'DropKey'; f.dispatchEvent(new Event('input')); })(document.querySelector('[data-filter]'))"
    )
    assert browser.evaluate(shown) == 4
    assert browser.complaints() == []
