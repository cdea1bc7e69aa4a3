"""The published tables: their figures, and plans whose recipes exist and fit the models that they name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import attemper
from attemper.errors import ParameterError
from attemper.lab.study.plan import Plan
from attemper.lab.study.published import SCALES, Row, Table, catalogue, find_table, tables_of
from attemper.lab.study.published.explicit import STRENGTHS
from attemper.lab.study.reference import METRICS, check_metric
from attemper.lab.training.spec import Budget

TABLES = {table.key: table for table in catalogue()}
RUN = [key for key, table in TABLES.items() if table.can_run]
PLANS = [(key, scale) for key in RUN for scale in SCALES]


def recipes_of(plan: dict[str, Any]) -> dict[str, list[str]]:
    """Name → the recipes of every row of a plan, its braces opened."""
    found = {}
    for entry in plan["recipes"]:
        name, text = (entry, entry) if isinstance(entry, str) else (entry["name"], entry["recipe"])
        inside = re.fullmatch(r"\{(.*)\}", text)
        found[name] = re.split(r",\s*(?![^()]*\))", inside[1]) if inside else [text]
    return found


def test_the_catalogue_has_every_table_of_the_papers() -> None:
    assert set(TABLES) == {
        *("explicit-cifar10", "explicit-cifar100", "explicit-gtzan", "explicit-thumos", "explicit-thumos-activitynet"),
        *(f"explicit-ablation-{rate}" for rate in ("1e-3", "5e-3", "1e-4", "5e-4")),
        *("cb-distilled-tiny", "cb-distilled-small", "cb-distilled-base", "cb-robustness"),
        *("cb-pvt", "cb-localvit", "cb-pvtv2", "cb-swin", "cb-cifar100", "cb-branches", "cb-positions"),
        *("cb-ade20k", "cb-vqa"),
        *(f"dropkey-{model}" for model in ("t2t-14", "t2t-19", "volo-d1", "volo-d2", "deit-b")),
        *("dropkey-cifar10", "dropkey-cifar100", "dropkey-schedules-cifar10", "dropkey-schedules-cifar100"),
        "dropkey-coco",
        *("attentiondrop-cifar10", "attentiondrop-cifar100", "attentiondrop-wmt", "attentiondrop-overhead"),
        *(f"graying-{what}" for what in ("vit-small", "vit-base", "swin", "cait", "pvtv2", "kappa", "mae")),
        *("skipless", "skipless-convmixer", "skipless-convmixer-bare", "skipless-resnet", "skipless-resnet-bare"),
    }
    assert len(catalogue()) == len(TABLES)


def test_a_table_that_cannot_be_run_says_why_and_has_no_plan() -> None:
    waiting = {key: table for key, table in TABLES.items() if not table.can_run}
    assert set(waiting) == {"attentiondrop-overhead", "graying-kappa", "graying-mae"}
    for table in waiting.values():
        assert table.waits_for
        with pytest.raises(ParameterError, match=re.escape(table.waits_for)):
            table.plan("smoke")
    assert all(not TABLES[key].waits_for for key in RUN)
    assert TABLES["graying-mae"].figures[0].cell("MAE + fine-tune", "Graying").value == 83.2, "its cells are there"


@pytest.mark.parametrize("column", ["cifar10", "cifar100", "gtzan", "thumos", "thumos-activitynet"])
def test_every_column_of_explicit_dropout_has_its_twelve_rows_and_one_without_dropout(column: str) -> None:
    rows = TABLES[f"explicit-{column}"].rows
    assert rows[0].recipe == "none"
    assert rows[0].value is None
    assert len(rows) == 13
    assert all(row.value is not None and row.deviation is not None for row in rows[1:])


def test_context_broadcasting_has_every_variant_at_every_branch_and_position() -> None:
    """And the published failure, whose cells are dashes."""
    for key, option, places in (
        ("cb-branches", "branch", ("mlp", "attention", "both")),
        ("cb-positions", "position", ("front", "mid", "end")),
    ):
        recipes = {row.name: row.recipe for row in TABLES[key].rows}
        expected = {f"{v}, {place}": f"cb({v}, {option}={place})" for v in ("cb", "gate", "hybrid") for place in places}
        assert recipes == {"none": "none"} | expected
    [failing] = [row for row in TABLES["cb-branches"].rows if row.name == "hybrid, both"]
    assert failing.value is None
    assert [cell.text for cell in failing.cells] == ["–", "–", "+3.6"]


@pytest.mark.parametrize(("key", "scale"), PLANS)
def test_a_plan_is_whole(key: str, scale: str) -> None:
    plan = TABLES[key].plan(scale)
    known = {"title", "task", "model", "seeds", "budget", "lr", "recipes", "published", "evaluate", "reference"}
    assert set(plan) <= known
    Budget.from_dict(plan["budget"])
    assert plan["lr"]
    assert all(isinstance(rate, float) for rate in plan["lr"])
    recipes = recipes_of(plan)
    assert len(recipes) == len(plan["recipes"]), "two rows have one name"
    assert recipes["none"] == ["none"], "no baseline to compare with"
    texts = [tuple(sorted(texts)) for texts in recipes.values()]
    assert len(set(texts)) == len(texts), "two rows are the same"
    assert {row["name"] for row in plan.get("published", ())} <= set(recipes)
    assert "λ" not in str(plan["recipes"])


@pytest.mark.parametrize(("key", "scale"), PLANS)
def test_every_recipe_of_a_plan_can_be_read(key: str, scale: str) -> None:
    for texts in recipes_of(TABLES[key].plan(scale)).values():
        for text in texts:
            methods = attemper.parse(text)
            assert attemper.parse(attemper.render(methods)) == methods


@pytest.mark.parametrize("key", RUN)
def test_published_figures_stand_beside_every_scale_and_another_task_is_named(key: str) -> None:
    table = TABLES[key]
    for scale in SCALES:
        plan = table.plan(scale)
        reference = plan["reference"]
        main = [row for row in plan.get("published", []) if "metric" not in row]
        assert [row["value"] for row in main] == [row.value for row in table.rows if row.value is not None]
        assert reference["table"] == key
        assert reference["notes"]
        same = plan["task"].partition("(")[0] == table.plan("full")["task"].partition("(")[0]
        assert same == ("another_task" not in reference), (key, scale)
        if not same:
            assert plan["task"] in plan["title"]
    assert "another_task" in table.plan("smoke")["reference"]


@pytest.mark.parametrize("key", RUN)
def test_every_column_has_a_metric_that_there_is_or_says_what_measures_it(key: str) -> None:
    table = TABLES[key]
    assert not table.columns[0].metric, "the first column is the task's own metric"
    for column in table.columns:
        check_metric(column.metric)
        assert column.metric != "elsewhere" or column.condition
    assert all(len(row.cells) in (0, len(table.columns)) or len(table.columns) > len(row.cells) for row in table.rows)
    assert "elsewhere" in METRICS


@pytest.mark.parametrize("key", RUN)
def test_settings_tell_what_is_printed_what_is_ours_and_whether_they_agree(key: str) -> None:
    """What a setting says of a plan is what the plan has."""
    table = TABLES[key]
    for scale in SCALES:
        plan = table.plan(scale)
        settings = {each["name"]: each for each in plan["reference"]["settings"]}
        assert len(settings) == len(plan["reference"]["settings"])
        assert settings["task"]["here"] == plan["task"]
        assert settings["epochs"]["here"] == str(plan["budget"]["epochs"])
        assert settings["seeds"]["here"] == str(plan["seeds"])
        assert {name.replace("_", " ") for name in plan["budget"]} <= set(settings)
        for setting in settings.values():
            assert set(setting) <= {"name", "here", "printed", "agrees"}
            assert not setting.get("agrees") or setting["printed"]
    assert Plan.from_dict(table.plan("full")).reference is not None


def test_settings_agree_with_the_supplement_where_it_names_them() -> None:
    """DeiT's training, no repeated augmentation for Ti and S, ViT-B's warm-up of 10 and drop path of 0.2."""
    for key in ("cb-cifar100", "cb-distilled-tiny", "cb-distilled-small", "cb-branches", "cb-positions", "cb-swin"):
        budget = TABLES[key].plan("full")["budget"]
        assert budget.get("repeats", 1) == 1
        assert all(word in budget["augment"] for word in ("erasing(0.25", "randaugment(", "mixup(0.8)", "cutmix(1.0)"))
        assert TABLES[key].plan("full")["lr"] == [5e-4 * budget["batch_size"] / 512], "DeiT's rule"
    small = TABLES["cb-cifar100"].plan("small")
    assert small["lr"] == [5e-4 * small["budget"]["batch_size"] / 512]
    base = TABLES["cb-distilled-base"].plan("full")
    assert base["budget"]["warmup_epochs"] == 10.0
    assert base["budget"]["repeats"] == 3
    assert "drop_path_rate=0.2" in base["model"]
    epochs = {key: TABLES[f"cb-{key}"].plan("full")["budget"]["epochs"] for key in ("pvt", "pvtv2", "swin", "localvit")}
    assert epochs == {"pvt": 120, "pvtv2": 120, "swin": 120, "localvit": 150}


def test_a_published_rate_stands_beside_that_rate() -> None:
    rates = {"dropkey-schedules-cifar10": "0.3", "dropkey-schedules-cifar100": "0.3"}
    rates |= {key: "0.2" for key in RUN if key.startswith("explicit-") and "ablation" not in key}
    for key, rate in rates.items():
        for row in TABLES[key].rows:
            if row.value is not None:
                assert re.search(rf"\((p=)?{rate}[,)]|p={rate}", row.recipe), (key, row)


def runs(plan: dict[str, Any]) -> int:
    return plan["seeds"] * len(plan["lr"]) * sum(map(len, recipes_of(plan).values()))


@pytest.mark.parametrize("key", RUN)
def test_scales_grow(key: str) -> None:
    smoke, small, full = (TABLES[key].plan(scale) for scale in SCALES)
    epochs = [runs(plan) * plan["budget"]["epochs"] for plan in (smoke, small, full)]
    assert epochs == sorted(epochs)
    made_up = ("digits", "planted", "tones", "noise", "numerals", "boxes", "shapes", "vqa:shapes")
    assert smoke["task"].partition("(")[0] in made_up, "smoke runs need no files"
    assert epochs[0] <= 80, "more than a minute on a CPU"
    assert full["seeds"] == (5 if full["task"].startswith(("cifar", "mel:", "actions:")) else 3)


def test_full_scale_searches_what_the_paper_searched() -> None:
    plan = find_table("explicit-cifar10").plan("full")
    assert plan["lr"] == [1e-3, 5e-3, 1e-4, 5e-4]
    assert plan["budget"]["epochs"] == 200
    recipes = recipes_of(plan)
    assert recipes["explicit V + explicit FF"] == [
        f"explicit(v={strength}, ff={strength}, p=0.2, reduction=authors)" for strength in STRENGTHS
    ]
    assert recipes["DropKey + implicit FF"] == ["dropkey(0.2) + ffdropout(0.2)"]
    assert runs(plan) == 5 * 4 * (4 + 9 * 4)


@pytest.mark.parametrize(("key", "scale"), PLANS)
def test_a_table_knows_how_many_runs_its_plan_has(key: str, scale: str) -> None:
    assert TABLES[key].runs(scale) == runs(TABLES[key].plan(scale))


def test_every_penalty_says_its_reduction_and_all_of_a_row_the_same() -> None:
    for key, scale in PLANS:
        for texts in recipes_of(TABLES[key].plan(scale)).values():
            for text in texts:
                assert text.count("explicit(") + text.count("arora(") == text.count("reduction=authors")


def test_caveats_say_what_is_not_known() -> None:
    for table in map(find_table, RUN):
        assert table.caveats
        assert ("†" in table.source) == any("third-party" in caveat for caveat in table.caveats)
    said = " ".join(find_table("explicit-cifar10").caveats)
    assert "most likely" in said
    assert "reduction=authors" in said


def test_a_wrong_key_or_scale_is_answered_with_the_right_ones() -> None:
    with pytest.raises(ParameterError, match="Did you mean 'explicit-cifar10'"):
        find_table("explicit-cifar-10")
    with pytest.raises(ParameterError, match="smoke, small, full"):
        find_table("skipless").plan("huge")
    with pytest.raises(ParameterError, match="There are: explicit-cifar10, "):
        find_table("nothing like it")
    with pytest.raises(ParameterError, match="begin so: dropkey-t2t-14, "):
        find_table("dropkey-")
    with pytest.raises(ParameterError, match="DropKey, AttentionDrop"):
        tables_of("mamba")


def test_tables_are_found_by_their_paper() -> None:
    papers = {"Explicit dropout", "Context broadcasting", "DropKey", "AttentionDrop", "Always Skip Attention"}
    assert {table.paper for table in catalogue()} == papers
    assert {table.paper for table in tables_of("skip")} == {"Always Skip Attention"}
    assert [table.key for table in tables_of("graying")] == [key for key in TABLES if key.startswith("graying-")]
    assert sum(len(tables_of(paper)) for paper in papers) == len(TABLES)


def test_a_plan_is_a_copy_that_may_be_changed() -> None:
    table: Table = find_table("skipless")
    before = table.plan("small")
    changed = table.plan("small")
    changed["budget"]["epochs"] = 1
    changed["recipes"].append("cb")
    changed["published"][0]["value"] = 0.0
    assert table.plan("small") == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        Row(name="a", recipe="none").name = "b"  # type: ignore[misc]
