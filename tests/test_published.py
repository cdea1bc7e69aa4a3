"""The published tables: their figures, and plans whose recipes exist and fit the models that they name."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import ParameterError
from attemper.lab.call_syntax import parse_call
from attemper.lab.study.published import SCALES, Row, Table, catalogue, find_table
from attemper.lab.study.published.explicit import ABLATION, COLUMNS, RATES, STRENGTHS, main_rows
from attemper.lab.training.spec import Budget

TABLES = {table.key: table for table in catalogue()}
PLANS = [(key, scale) for key in TABLES for scale in SCALES]
VITS = {"vit-digits": 4, "vit-cifar": 7, "vit-tiny": 12, "vit-small": 12, "vit-base": 12}
"""The models that plans name, with their number of blocks."""


def recipes_of(plan: dict[str, Any]) -> dict[str, list[str]]:
    """Name → the recipes of every row of a plan, its braces opened."""
    found = {}
    for entry in plan["recipes"]:
        name, text = (entry, entry) if isinstance(entry, str) else (entry["name"], entry["recipe"])
        inside = re.fullmatch(r"\{(.*)\}", text)
        found[name] = re.split(r",\s*(?![^()]*\))", inside[1]) if inside else [text]
    return found


def test_the_catalogue_has_every_table_that_can_be_run_again() -> None:
    assert set(TABLES) == {
        "explicit-cifar10",
        "explicit-cifar100",
        "explicit-gtzan",
        "explicit-thumos",
        "explicit-thumos-activitynet",
        *(f"explicit-ablation-{rate}" for rate in ("1e-3", "5e-3", "1e-4", "5e-4")),
        "dropkey-schedules-cifar10",
        "dropkey-schedules-cifar100",
        "attentiondrop-cifar10",
        "attentiondrop-cifar100",
        "cb-cifar100",
        "skipless",
        "skipless-convmixer",
        "skipless-convmixer-bare",
    }
    assert len(catalogue()) == len(TABLES)


def test_the_figures_are_those_that_were_published() -> None:
    """A few of every table, copied by hand once more."""
    expected = {
        ("explicit-cifar10", "DropKey + implicit FF"): (85.45, 0.41),
        ("explicit-cifar10", "Arora K + explicit FF"): (47.01, 1.58),
        ("explicit-cifar10", "explicit V + explicit FF"): (86.38, 0.44),
        ("explicit-cifar100", "implicit FF"): (59.01, 1.13),
        ("explicit-cifar100", "explicit Q + explicit FF"): (53.79, 4.82),
        ("explicit-ablation-1e-3", "V 5e-4"): (86.38, 0.44),
        ("explicit-ablation-5e-3", "K 1e-3"): (79.56, 5.18),
        ("explicit-ablation-1e-4", "AV 5e-4"): (86.11, 0.41),
        ("explicit-ablation-5e-4", "Q 5e-3"): (68.81, 0.32),
        ("dropkey-schedules-cifar10", "increasing"): (96.6, None),
        ("dropkey-schedules-cifar100", "decreasing"): (79.2, None),
        ("explicit-gtzan", "explicit K + explicit FF"): (85.78, 0.65),
        ("explicit-thumos", "explicit V + explicit FF"): (64.68, 0.36),
        ("explicit-thumos-activitynet", "Arora K + explicit FF"): (44.52, 5.80),
        ("attentiondrop-cifar10", "blur + consistency"): (94.8, None),
        ("attentiondrop-cifar100", "R-Drop"): (75.0, None),
        ("cb-cifar100", "cb"): (75.43, None),
        ("skipless", "no attention skip"): (70.0, None),
    }
    for (key, name), figures in expected.items():
        [row] = [row for row in TABLES[key].rows if row.name == name]
        assert (row.value, row.deviation) == figures, (key, name)


def test_main_rows_of_explicit_dropout_are_the_best_cells_of_its_ablation() -> None:
    """What the paper's two tables say about each other: a slip in copying either would break it."""
    main = {row.name: (row.value, row.deviation) for row in main_rows("cifar10")}
    for component in ("Q", "K", "V", "AV"):
        cells = [cell for (name, _), row in ABLATION.items() if name == component for cell in row]
        assert len(cells) == len(STRENGTHS) * len(RATES)
        assert max(cells) == main[f"explicit {component} + explicit FF"]


@pytest.mark.parametrize("column", COLUMNS)
def test_every_column_of_explicit_dropout_has_its_twelve_rows_and_one_without_dropout(column: str) -> None:
    rows = main_rows(column)
    assert rows[0].recipe == "none"
    assert rows[0].value is None
    assert len(rows) == 13
    assert all(row.value is not None and row.deviation is not None for row in rows[1:])


@pytest.mark.parametrize(("key", "scale"), PLANS)
def test_a_plan_is_whole(key: str, scale: str) -> None:
    plan = TABLES[key].plan(scale)
    known = {"title", "task", "model", "seeds", "budget", "lr", "recipes", "published"}
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


@pytest.mark.parametrize("key", TABLES)
def test_published_figures_stand_beside_the_published_task_only(key: str) -> None:
    table = TABLES[key]
    assert "published" not in table.plan("smoke")
    assert table.plan("smoke")["task"] in table.plan("smoke")["title"]
    for scale in ("small", "full"):
        plan = table.plan(scale)
        assert plan["task"].startswith(("cifar", "actions:", "mel:"))
        assert [row["value"] for row in plan.get("published", [])] == [
            row.value for row in table.rows if row.value is not None
        ]
        assert all(row["source"] == table.source for row in plan.get("published", []))


def runs(plan: dict[str, Any]) -> int:
    return plan["seeds"] * len(plan["lr"]) * sum(map(len, recipes_of(plan).values()))


@pytest.mark.parametrize("key", TABLES)
def test_scales_grow(key: str) -> None:
    smoke, small, full = (TABLES[key].plan(scale) for scale in SCALES)
    epochs = [runs(plan) * plan["budget"]["epochs"] for plan in (smoke, small, full)]
    assert epochs == sorted(epochs)
    assert smoke["task"] in ("digits", "planted", "tones"), "smoke runs need no files"
    assert epochs[0] <= 80, "more than a minute on a CPU"
    assert full["seeds"] == 5


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
    for table in catalogue():
        assert table.caveats
        assert ("†" in table.source) == any("third-party" in caveat for caveat in table.caveats)
    said = " ".join(find_table("explicit-cifar10").caveats)
    assert "most likely" in said
    assert "reduction=authors" in said


def like(depth: int) -> nn.Module:
    """A network as small as can be with the blocks of a model that a plan names: timm's ViT, with a class token."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=8, patch_size=4, embed_dim=8, depth=depth, num_heads=2, mlp_ratio=1, num_classes=4
    )


def placed_recipes() -> list[tuple[str, int]]:
    """Each recipe once for each number of blocks that it stands beside; λ does not matter to whether it fits."""
    plans = [table.plan(scale) for table in catalogue() for scale in SCALES]
    found = {
        (re.sub(r"\de-\d", "1e-3", texts[0]), VITS[parse_call(plan["model"])[0]])
        for plan in plans
        if parse_call(plan["model"])[0] in VITS
        for texts in recipes_of(plan).values()
    }
    return sorted(found)


@pytest.mark.parametrize(("recipe", "depth"), placed_recipes())
def test_every_recipe_fits_the_model_of_its_plan_and_trains(recipe: str, depth: int) -> None:
    network = like(depth)
    tempered = attemper.apply(network, recipe)
    images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
    loss = tempered.loss(lambda: network(images), lambda out: F.cross_entropy(out, labels[: len(out)]))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


def test_a_wrong_key_or_scale_is_answered_with_the_right_ones() -> None:
    with pytest.raises(ParameterError, match="Did you mean 'explicit-cifar10'"):
        find_table("explicit-cifar-10")
    with pytest.raises(ParameterError, match="smoke, small, full"):
        find_table("skipless").plan("huge")


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
