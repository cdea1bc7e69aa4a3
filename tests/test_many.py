"""Reports over many tasks: the same recipe in several studies, what it does in general, and what the page shows."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.lab.cli import main
from attemper.lab.errors import StudyError
from attemper.lab.report.many import render
from attemper.lab.study.many import improvement, overview
from attemper.lab.study.summary_files import read_summary

RESULTS = Path(__file__).parents[1] / "docs/results"
PAGES = [RESULTS / f"{name}.html" for name in ("cifar10", "gtzan", "thumos14")]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return overview([read_summary(page) for page in PAGES], [page.name for page in PAGES])


def test_recipes_of_several_studies_meet_in_one_row(found: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in found["recipes"]}
    assert set(rows) == {"dropkey(0.1)", "dropkey(0.2)", "cb(cb)", "explicit V + FF", "explicit K + FF", "arora FF"}
    cells = rows["dropkey(0.2)"]["cells"]
    assert cells[0] is None
    assert cells[1]["recipe"] == "dropattention(0.2, rescale=normalize)"  # the same thing, and the one that counts
    assert cells[2]["difference"]["mean"] == pytest.approx(0.0053, abs=1e-4)
    assert rows["dropkey(0.2)"]["tasks"] == 2
    assert rows["explicit V + FF"]["answers"] == {"better": 0, "equivalent": 0, "undecided": 1, "worse": 1}
    assert rows["explicit V + FF"]["cost"] == pytest.approx((1.10 + 1.24) / 2, abs=0.01)


def test_a_rank_is_the_best_where_everything_else_is_below(found: dict[str, Any]) -> None:
    ranks = {row["name"]: row["rank"] for row in found["recipes"]}
    assert ranks["dropkey(0.1)"] == ranks["dropkey(0.2)"] == 1
    assert ranks["explicit K + FF"] == max(ranks.values()) == len(found["recipes"]) + 1
    assert list(ranks.values()) == sorted(ranks.values())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.sampled_from([-0.1, 0.0, 0.1]), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_probability_of_improvement_is_a_mean_of_shares_with_ties_as_halves(changes: list[list[float]]) -> None:
    expected = np.mean([np.mean([1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in task]) for task in changes])
    result = improvement(changes)
    assert result is not None
    assert result["mean"] == pytest.approx(expected)
    if len(changes) == 1:
        assert result["low"] is None
    else:
        assert result["low"] is not None
        assert result["high"] is not None
        assert 0 <= result["low"] <= result["mean"] + 1e-9
        assert result["mean"] - 1e-9 <= result["high"] <= 1


def test_the_interval_has_the_spread_of_tasks_and_of_seeds_within_them() -> None:
    """Independent: variance of a two-stage bootstrap mean, worked out by hand."""
    tasks = [[1.0, 1.0, -1.0, 1.0], [1.0, -1.0, -1.0, -1.0], [1.0, 1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, -1.0]] * 5
    shares = np.array([np.mean(np.array(task) > 0) for task in tasks])
    within = np.mean(shares * (1 - shares) / 4)
    sigma = np.sqrt((shares.var() + within) / len(tasks))
    result = improvement(tasks)
    assert result is not None
    assert result["low"] is not None
    assert result["high"] is not None
    assert (result["high"] - result["low"]) / (2 * 1.96 * sigma) == pytest.approx(1, abs=0.1)


def test_seeds_that_a_study_lacks_do_not_count() -> None:
    assert improvement([[], [0.1]]) == {"mean": 1.0, "low": None, "high": None}
    assert improvement([[]]) is None
    with pytest.raises(StudyError, match="at least one"):
        overview([])


def study(*rows: tuple[str, str] | tuple[str, str, list[str]], title: str = "mine") -> dict[str, Any]:
    """A summary of rows (name, recipe, recipes of its grid), each of which reached the same on two seeds."""
    row = {"seeds": [0, 1], "test": [0.5, 0.6], "mean": 0.55, "difference": None, "decision": None, "cost": None}
    made = [
        {**row, "name": name, "recipe": recipe, "configurations": [{"recipe": one} for one in [recipe, *grid]]}
        for name, recipe, *more in rows
        for grid in more or [[]]
    ]
    plan = {"task": "digits", "model": "vit-digits"}
    return {"title": title, "plan": plan, "metric": "accuracy", "same": {}, "recipes": made}


def rows_of(*studies: dict[str, Any]) -> dict[str, list[str | None]]:
    whole = overview(list(studies))["recipes"]
    return {row["name"]: [cell and cell["recipe"] for cell in row["cells"]] for row in whole}


def test_a_baseline_may_have_any_name_and_is_never_a_recipe() -> None:
    named = study(("plain training", "none"), ("cb", "cb(cb)"))
    assert set(rows_of(named)) == {"cb(cb)"}
    assert set(rows_of(named, study(("none", "none"), ("cb", "cb(cb)")))) == {"cb(cb)"}
    # What does nothing is no baseline, though it computes the same.
    idle = study(("idle", "dropkey(0.0)"), ("none", "none"))
    assert rows_of(idle) == {"none": ["dropkey(0.0)"]}
    assert overview([idle])["baseline"]["cells"][0]["recipe"] == "none"


def test_recipes_meet_under_whatever_names_and_in_whatever_order_they_are_written() -> None:
    one = study(("none", "none"), ("my own drop", "dropkey(0.1)"), ("both", "cb(cb) + dropkey(0.3)"))
    two = study(("baseline", "none"), ("x", "dropattention(0.1, rescale=normalize)"), ("y", "dropkey(0.3) + cb(cb)"))
    assert rows_of(one, two) == {
        "dropkey(0.1)": ["dropkey(0.1)", "dropattention(0.1, rescale=normalize)"],
        "dropkey(0.3) + cb(cb)": ["cb(cb) + dropkey(0.3)", "dropkey(0.3) + cb(cb)"],
    }
    # Of one kind, the order counts: the second drops of what the first has left.
    one, two = (
        study(("none", "none"), (text, text)) for text in ("cb(cb) + ffdropout(0.1)", "ffdropout(0.1) + cb(cb)")
    )
    assert len(rows_of(one, two)) == 2


def test_settings_that_each_task_chose_meet_under_their_name() -> None:
    one = study(("none", "none"), ("dropkey", "dropkey(0.2)"), ("mild", "cb(cb)", ["cb(cb_s)"]))
    two = study(("none", "none"), ("dropkey", "dropkey(0.1)"), ("mild", "cb(cb_s)", ["cb(cb)"]))
    assert rows_of(one, two) == {"dropkey": ["dropkey(0.2)", "dropkey(0.1)"], "mild": ["cb(cb)", "cb(cb_s)"]}


def test_no_row_of_a_study_is_left_out() -> None:
    twice = study(("none", "none"), ("slow", "cb(cb)"), ("fast", "cb(cb)"))
    assert rows_of(twice) == {"cb(cb)": ["cb(cb)"], "fast": ["cb(cb)"]}


def test_the_page_names_tasks_recipes_and_verdicts_and_lets_nothing_through(found: dict[str, Any]) -> None:
    text = html.unescape(render(found))
    for task in found["tasks"]:
        assert task["title"] in text
        assert task["verdict"].replace("`", "") in re.sub("</?code>", "", text)
    for row in found["recipes"]:
        assert row["name"] in text
    assert "6 recipes on 3 tasks" in text
    cautious = [task for task in found["tasks"] if task["cautions"]]  # one paragraph each, however many lines
    assert render(found).count('class="notice"') == len(cautious) < sum(len(task["cautions"]) for task in cautious)
    evil = "</script><script>alert(1)</script>"
    found["tasks"][0]["title"] = found["recipes"][0]["name"] = evil
    assert evil not in render(found, command=evil)


def test_the_command_writes_one_page_over_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, PAGES)]) == 0
    assert "6 recipes on 3 tasks" in (tmp_path / "tasks.html").read_text()
    assert main(["report", str(PAGES[0]), "--out", "one.html"]) == 0
    assert "Undecided after 3 seeds" in (tmp_path / "one.html").read_text()
    assert main(["report", str(PAGES[0])]) == 2
    assert "say with --out" in capsys.readouterr().err
    (tmp_path / "mine.html").write_text("<p>my own</p>")
    assert main(["report", *map(str, PAGES), "--out", "mine.html"]) == 2
    assert main(["report"]) == 2
    assert "at least one study" in capsys.readouterr().err
