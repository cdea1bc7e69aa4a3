"""Verdicts: better, worse, equivalent or undecided, in words, with what must be known before them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attemper.lab.study.assessment import assess
from attemper.lab.study.sameness import originals, plainest, trained_alike

Values = list[float | None]
BASE: Values = [0.80, 0.82, 0.81, 0.79, 0.80]
BETTER: Values = [0.85, 0.875, 0.86, 0.842, 0.849]
LIKE: Values = [0.81, 0.80, 0.82, 0.79, 0.80]
CLOSE: Values = [0.8005, 0.8195, 0.8101, 0.7903, 0.7998]


def row(name: str, test: Values, **more: Any) -> dict[str, Any]:
    recipe = "none" if name == "none" else f"{name}(0.1)"
    known = [value for value in test if value is not None]
    base = {
        "name": name,
        "recipe": recipe,
        "lr": 1e-3,
        "configurations": [],
        "seeds": list(range(len(test))),
        "test": test,
        "validation": [None if value is None else value + 0.001 * at for at, value in enumerate(test)],
        "train": test,
        "mean": sum(known) / len(known) if known else None,
        "diverged": 0,
    }
    return {**base, **more}


def told(baseline: Values, *, missing: int = 0, failed: int = 0, margin: Any = None, **others: Values) -> Any:
    """A summary of these test values, assessed."""
    rows = [row("none", baseline), *(row(name, test) for name, test in others.items())]
    plan = {"seeds": list(range(len(baseline))), "margin": margin}
    return assess({"metric": "accuracy", "plan": plan, "recipes": rows, "missing": missing, "failed": failed})


def answers(summary: Any) -> dict[str, str]:
    return {row["name"]: row["decision"]["answer"] for row in summary["recipes"] if row["decision"]}


def test_the_four_answers_are_said_apart() -> None:
    found = told(BASE, margin=1.0, dropkey=BETTER, cb=LIKE, graying=CLOSE, blur=[v - 0.03 - 0.001 * v for v in BASE])
    assert answers(found) == {"dropkey": "better", "cb": "undecided", "graying": "equivalent", "blur": "worse"}
    said = found["verdict"]
    assert said.startswith("dropkey is better than the baseline `none` by +5.12 points, adjusted interval +4.70")
    assert "p < 0.001 after correction for 4 comparisons." in said
    assert "blur (−3.08 points) is worse than the baseline." in said
    assert "equivalent to the baseline: any difference is smaller than 1.00 points." in said
    assert "Undecided after 5 seeds, compared with the baseline: cb (+0.00 points, adjusted interval" in said
    assert "seeds more would decide" in said
    assert "or more could be seen here" in said


def test_equal_recipes_and_too_few_seeds_are_two_different_answers() -> None:
    few = told(BASE, cb=LIKE)["verdict"]
    assert few.startswith("Undecided after 5 seeds, compared with the baseline `none`: cb")
    assert "No recipe is better" not in few
    enough = told(BASE, margin=1.0, graying=CLOSE)["verdict"]
    assert enough.startswith("No recipe is better than the baseline `none`, and that is no lack of seeds.")


def test_a_real_difference_that_does_not_matter_is_equivalent() -> None:
    found = told(BASE, margin=2.0, cb=[v + 0.005 + 0.0001 * at for at, v in enumerate(BASE)])
    assert found["recipes"][1]["decision"]["answer"] == "equivalent"
    assert found["recipes"][1]["decision"]["real"]


def test_one_seed_is_undecided() -> None:
    said = told([0.8], cb=[0.9])["verdict"]
    assert said.startswith("Undecided: one seed cannot tell a difference from chance; here cb came out highest, +10.00")
    assert "better than" not in said


def test_the_same_difference_on_every_seed_leaves_nothing_to_judge_by() -> None:
    said = told([0.75, 0.5], cb=[1.0, 0.75])["verdict"]
    assert "cb is undecided: it differs by +25.00 points on every seed alike" in said
    assert "is better" not in said


def test_missing_runs_come_first() -> None:
    said = told(BASE, missing=3, failed=1, cb=LIKE)["verdict"]
    assert said.startswith(
        "Not complete: 3 runs are missing (1 given up after errors), so what follows is provisional."
    )


def test_nothing_to_compare_is_said_too() -> None:
    assert "nothing to compare" in told(BASE)["verdict"]
    assert "can be compared with the baseline `none` yet" in told([None], cb=[0.5])["verdict"]


# ------------------------------------------------------------------------------------------------------ the same things
def test_recipes_that_are_the_same_thing_are_counted_once() -> None:
    apart = told(BASE, dropkey=LIKE, cb=BETTER)
    double = told(BASE, dropkey=LIKE, other=LIKE, cb=BETTER)
    assert double["same"] == {"other": "dropkey"}
    assert "other is the same thing as dropkey and counted once." in double["verdict"]
    levels = {row["name"]: row["difference"]["adjusted"] for row in apart["recipes"][1:]}
    assert {row["name"]: row["difference"]["adjusted"] for row in double["recipes"][1:]} == {
        **levels,
        "other": levels["dropkey"],
    }


def test_a_recipe_that_did_nothing_is_called_so() -> None:
    found = told(BASE, cb=list(BASE), blur=LIKE)
    assert found["same"] == {"cb": "none"}
    assert "cb did nothing: every run went exactly as the baseline's." in found["verdict"]
    assert answers(found)["cb"] == "equivalent"
    assert "after correction" not in found["verdict"]


def test_equal_accuracies_of_two_seeds_may_be_chance_but_equal_curves_are_not() -> None:
    a, b = row("a", [0.5, 0.6]), row("b", [0.5, 0.6])
    assert not trained_alike(a, b)
    a["curves"] = b["curves"] = [[{"train_loss": 1.25}], [{"train_loss": 1.5}]]
    assert trained_alike(a, b)
    assert not trained_alike(a, {**b, "curves": [[{"train_loss": 1.25}], [{"train_loss": 1.25}]]})


@given(st.floats(0.01, 0.9), st.sampled_from(["constant", "decreasing"]))
def test_normalised_attention_dropout_is_known_to_be_dropkey(p: float, schedule: str) -> None:
    both = f"dropattention({p}, schedule={schedule}, rescale=normalize)"
    assert plainest(both) == plainest(f"dropkey({p}, schedule={schedule})")
    for other in (f"dropattention({p})", f"dropattention({p}, unit=column, rescale=normalize)"):
        assert plainest(other) != plainest(f"dropkey({p})")


def test_what_is_the_same_by_its_text_needs_no_runs_to_be_known() -> None:
    rows = [row("dropkey", [None] * 3), row("second", [None] * 3), row("third", [None] * 3)]
    rows[1]["recipe"], rows[2]["recipe"] = "dropattention(0.1, rescale=normalize)", "dropattention(0.1)"
    assert originals(rows) == {"second": "dropkey"}


def test_what_diverged_before_its_first_epoch_was_over_is_not_the_same_thing() -> None:
    a, b = row("a", BASE, diverged=5), row("b", BASE, diverged=5)
    assert not trained_alike(a, b)
    assert trained_alike({**a, "diverged": 0}, {**b, "diverged": 0})


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1", "balanced_accuracy"])
def test_equal_scores_on_few_items_are_undecided_by_whatever_metric(metric: str) -> None:
    rows = [row("none", BASE[:3]), row("cb", BASE[:3])]
    for at, each in enumerate(rows):
        each |= {"details": {"runs": 3, "items": 100}, "curves": [[{"train_loss": 1.0 + at}]] * 3}
    plan = {"seeds": [0, 1, 2], "margin": 0.5}
    found = assess({"metric": metric, "plan": plan, "recipes": rows})
    assert answers(found) == {"cb": "undecided"}
    assert "cb is undecided: it scored what the baseline did on every seed, and with so few" in found["verdict"]
    assert "seeds more would decide." in found["verdict"]
    rows[0]["details"] = {"runs": 3, "items": 100_000}
    assert answers(assess({"metric": metric, "plan": plan, "recipes": rows})) == {"cb": "equivalent"}


# ------------------------------------------------------------------------------------------------------------- cautions
def details(right: int, wrong: int, classes: int = 2, runs: int = 5) -> dict[str, Any]:
    confusion = [[right if a == b else wrong for a in range(classes)] for b in range(classes)]
    return {"classes": [str(at) for at in range(classes)], "confusion": confusion, "runs": runs}


def cautions_of(**changes: Any) -> str:
    rows = [row("none", BASE, **changes), row("cb", LIKE, **changes)]
    return "\n".join(assess({"metric": "accuracy", "plan": {"seeds": [0, 1, 2, 3, 4]}, "recipes": rows})["cautions"])


def test_a_baseline_near_chance_is_said_first() -> None:
    said = cautions_of(details=details(250, 250), mean=0.51)
    assert said.startswith(
        "Near chance: the baseline reaches 51.0 %, and naming the most frequent class every time 50.0"
    )
    assert "Near chance" not in cautions_of(details=details(450, 50), mean=0.9)
    skewed = {"classes": ["a", "b"], "confusion": [[400, 50], [30, 20]], "runs": 5}
    assert "Near chance" in cautions_of(details=skewed, mean=0.84)


def test_a_small_test_set_is_said() -> None:
    assert "Few test items: 60." in cautions_of(details=details(120, 30))
    assert "Few test items" not in cautions_of(details=details(400, 100))
    assert "100. One of them is 1 point, and" in cautions_of(details=details(200, 50))


def test_runs_that_all_end_too_early_are_said() -> None:
    ends = {"epochs": [15] * 5}
    assert "Every run was best at its last epoch" in cautions_of(chosen_epochs=[15] * 5, **ends)
    assert "last epoch" not in cautions_of(chosen_epochs=[15, 15, 15, 15, 14], **ends)


def test_divergence_is_said() -> None:
    assert "Runs diverged with none (2 of 5), cb (2 of 5)" in cautions_of(diverged=2)


@pytest.mark.parametrize(("chosen", "said"), [(1e-4, True), (5e-4, False), (1e-3, True)])
def test_a_strength_at_the_edge_of_its_grid_is_said(chosen: float, said: bool) -> None:
    grid = [{"recipe": f"explicit(v={v}, ff={v})", "lr": 1e-3, "chosen": v == chosen} for v in (1e-4, 5e-4, 1e-3)]
    found = cautions_of(configurations=grid)
    assert (f"cb: the chosen v = ff = {chosen:g} is at the edge" in found) == said
    assert "lr" not in found
