"""What our studies found comes out again from the results that are kept, and nothing is left out of the page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
import types
from pathlib import Path

import pytest
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("evidence", ROOT / "benchmarks" / "evidence.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evidence"] = module
    spec.loader.exec_module(module)
    return module


def test_every_page_shows_what_its_results_come_to(script: types.ModuleType) -> None:
    pages = script.pages()
    assert {page.name for page in pages} >= {"README.md", "index.md", "cifar10.md", "gtzan.md", "thumos14.md"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert script.fill(text) == text, f"run python benchmarks/evidence.py: {page} shows something else"


def test_a_changed_figure_is_noticed(script: types.ModuleType) -> None:
    text = (RESULTS / "index.md").read_text(encoding="utf-8")
    assert "+3.78 (+2.23 to +5.32)" in text
    assert script.fill(text.replace("+3.78 (+2.23", "+4.78 (+2.23")) == text


def test_no_study_is_left_out(script: types.ModuleType) -> None:
    """Whatever holds accuracies by recipe and seed is in the tables, or is named below them."""
    shown = {kept.file for kept in script.KEPT}
    pages = {page.name for page in RESULTS.glob("*.html")}
    records = {path for path in RESULTS.rglob("*.json") if not path.parent.name.endswith("runs")}
    found = {
        str(path.relative_to(RESULTS)) for path in records if "arms" in json.loads(path.read_text(encoding="utf-8"))
    }
    left = (pages | found) - shown
    assert left == {"entropy-cb.json", "entropy-dropkey.json", "mae-cifar100.html", "pets-heads.html"}
    below = (RESULTS / "index.md").read_text(encoding="utf-8").rpartition("Not in these tables")[2]
    assert "README.md#entropy-with-and-without-context-broadcasting" in below
    assert "mae-cifar100.md" in below
    for kept in script.KEPT:
        assert (RESULTS / kept.page.partition("#")[0]).is_file()


def test_intervals_are_those_of_paired_t_tests_as_wide_as_their_correction_asks(script: types.ModuleType) -> None:
    checked = 0
    for kept in script.KEPT:
        summary = script.summary_of(kept.file)
        none = next(row for row in summary["recipes"] if row["recipe"] == "none")
        before = dict(zip(none["seeds"], none["test"], strict=True))
        for _, row in (pair for pair in script.compared(kept.digits) if pair[0] is kept):
            changes = [value - before[seed] for seed, value in zip(row["seeds"], row["test"], strict=True)]
            mean, count = math.fsum(changes) / len(changes), len(changes)
            error = math.sqrt(math.fsum((c - mean) ** 2 for c in changes) / (count - 1) / count)
            reach = stats.t.ppf(1 - row["difference"]["level"] / 2, count - 1) * error
            assert row["difference"]["mean"] == pytest.approx(mean, abs=1e-12)
            assert row["difference"]["low"] == pytest.approx(mean - reach, abs=1e-9)
            assert row["difference"]["high"] == pytest.approx(mean + reach, abs=1e-9)
            assert row["difference"]["level"] <= 0.05
            answer = row["decision"]["answer"]
            assert (answer == "better") == (mean - reach > 0)
            assert (answer == "worse") == (mean + reach < 0 and answer != "equivalent")
            checked += 1
    assert checked == sum(map(len, (list(script.compared(False)), list(script.compared(True)))))


def test_the_chart_has_every_comparison_on_real_data_but_those_without_skips(script: types.ModuleType) -> None:
    marks = script.marks()
    rows = [row for _, row in script.compared(digits=False)]
    assert len(marks) == sum("skipless" not in row["recipe"] for row in rows)
    assert [mark.value for mark in marks] == sorted((mark.value for mark in marks), reverse=True)
    assert sum(mark.strong for mark in marks) == 3
    assert (RESULTS / "evidence.png").stat().st_size > 1000


def test_the_readme_counts_as_the_page_does(script: types.ModuleType) -> None:
    counts = script.counts(digits=False)
    assert counts in (ROOT / "README.md").read_text(encoding="utf-8")
    numbers = re.findall(r"\d+", counts)
    assert int(numbers[0]) == sum(map(int, numbers[1:]))
    choosing = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"of {numbers[0]} comparisons with `none`" in choosing


def test_what_the_guide_quotes_of_our_studies_stands_on_the_pages_that_it_links() -> None:
    """Row by row: differences with a sign, and intervals."""
    docs, quoted = ROOT / "docs", 0
    for line in (docs / "choosing.md").read_text(encoding="utf-8").splitlines():
        figures = re.findall(r"[+−]\d+\.\d\d(?= )", line) + re.findall(r"\(\d\.\d\d to \d\.\d\d\)", line)
        pages = [docs / name for name in re.findall(r"\]\((results/[^)#]+)", line)]
        text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        for figure in figures if line.startswith("|") else []:
            low, high = re.findall(r"\d+\.\d\d", figure)[:2] if "to" in figure else ("", "")
            stands = f"({low} to {high})" in text or f"(+{low} to +{high})" in text if low else figure in text
            assert stands, (figure, line)
            quoted += 1
    assert quoted >= 8
    index = (RESULTS / "index.md").read_text(encoding="utf-8")
    total, worse, undecided = re.findall(r"On digits, (\d+) .*? (\d+) worse, .*? (\d+) undecided", index)[0]
    guide = (docs / "choosing.md").read_text(encoding="utf-8")
    assert f"of {total} comparisons {undecided} are undecided and {'two' if worse == '2' else worse} are worse" in guide
