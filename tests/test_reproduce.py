"""`attemper reproduce`: the list of tables, what they cost, and published figures beside ours on terminal and page."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attemper.lab.cli import main
from attemper.lab.cli.executor_options import ExecutorOptions
from attemper.lab.errors import PlanError
from attemper.lab.report.study import render
from attemper.lab.study.beside_table import beside_lines, beside_table
from attemper.lab.study.in_process import InProcess
from attemper.lab.study.plan import Plan
from attemper.lab.study.published import catalogue, find_table
from attemper.lab.study.published.data_here import missing_data
from attemper.lab.study.reference import (
    Setting,
    check_metric,
    measured,
    read_reference,
    reference_for_readers,
    unit,
    with_changes,
)
from summaries import reproduced, summary

ROOT = Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------------------------------------------ the list
def test_the_list_has_every_table_with_its_place_its_rows_and_its_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["reproduce", "--data", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for table in catalogue():
        [line] = [line for line in lines if line.split(" ")[0] == table.key]
        assert re.search(rf"\b{len(table.rows)}\b" if table.rows else "–", line)
    shown = "\n".join(lines)
    assert "Table S5, section 2.7" in shown
    assert "no cifar10" in shown
    assert "no folder imagenet" in shown
    assert re.search(r"explicit-cifar10 .* 42 h$", shown, re.MULTILINE)
    assert re.search(r"cb-distilled-base .* ~ 1,158 h$", shown, re.MULTILINE)
    for word in ("smoke", "small", "full", "stored probes", "~: scaled by floating-point operations"):
        assert word in shown


def test_the_list_as_json_says_where_a_cost_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(found) == {table.key for table in catalogue()}
    whole = found["explicit-cifar10"]
    assert whole["runs"] == 800
    assert whole["scaled_by_operations"] is None
    assert "NVIDIA H200" in whole["cost_from"]
    assert found["graying-vit-base"]["scaled_by_operations"] == pytest.approx(35127656448 / 9197764608)
    assert found["graying-mae"]["waits_for"]
    assert found["dropkey-coco"]["gpu_hours"] is None  # no probe of such data is stored


def test_the_list_can_be_of_one_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--paper", "broadcasting", "--json"]) == 0
    names = [each["name"] for each in json.loads(capsys.readouterr().out)]
    assert names == [table.key for table in catalogue() if table.key.startswith("cb-")]
    assert main(["reproduce", "--paper", "dropkye"]) == 2
    assert "Did you mean 'DropKey'?" in capsys.readouterr().err
    assert main(["reproduce", "skipless", "--paper", "DropKey"]) == 2
    assert "--paper filters the list" in capsys.readouterr().err


def test_data_that_are_here_are_not_missed(tmp_path: Path) -> None:
    table = find_table("cb-cifar100")
    assert missing_data(table, tmp_path) == "cifar100"
    (tmp_path / "cifar-100-binary").mkdir()
    assert missing_data(table, tmp_path) is None
    assert missing_data(find_table("cb-branches"), tmp_path) == "folder imagenet"
    (tmp_path / "imagenet").mkdir()
    assert missing_data(find_table("cb-branches"), tmp_path) is None
    for table in catalogue():
        if table.can_run:
            assert missing_data(table, tmp_path, "smoke") is None


def test_cells_are_shown_also_of_a_table_that_cannot_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "explicit-gtzan", "--cells", "--scale", "full"]) == 0
    shown = capsys.readouterr().out
    assert "85.78 ± 0.65" in shown
    assert re.search(r"dropout rate p +as printed +0\.2 +as printed", shown)
    assert re.search(r"batch size +32 +not said +ours", shown)
    assert main(["reproduce", "dropkey-coco", "--cells"]) == 0
    assert re.search(r"DETR \+ DropKey +42\.9 +63\.4 +44\.7 +21\.1 +46\.7 +61\.8", capsys.readouterr().out)
    assert main(["reproduce", "graying-mae"]) == 2
    out, error = capsys.readouterr()
    assert re.search(r"MAE \+ fine-tune +83\.0 +83\.2", out)
    assert "cannot be run: it is two studies" in error


# ------------------------------------------------------------------------------------------------------ ours, by column
ROW: dict[str, Any] = {
    "name": "cb",
    "mean": 0.8,
    "deviation": 0.01,
    "parameters": 22_050_664,
    "others": {"AP50": {"mean": 0.62, "deviation": 0.01}},
    "flops": {"forward": 9_200_000_000, "step": 1},
    "cost": {"ratio": 1.02},
    "evaluation": {
        "figures": [
            {"name": "top-5", "mean": 0.95, "deviation": 0.001},
            {"name": "ECE", "mean": 0.03, "deviation": None},
        ],
        "robustness": {
            "occlusion": [
                {"kind": "centre", "share": 0.25, "accuracy": 0.7},
                {"kind": "random", "share": 0.25, "accuracy": 0.1},
            ],
            "attacks": [
                {"kind": "fgsm", "epsilon": 1 / 255, "accuracy": 0.2},
                {"kind": "pgd", "epsilon": 1 / 255, "accuracy": 0.1},
                {"kind": "fgsm", "epsilon": 8 / 255, "accuracy": 0.0},
            ],
        },
    },
}
BASE = {**ROW, "name": "none", "mean": 0.79, "flops": {"forward": 9_198_000_000}}


@pytest.mark.parametrize(
    ("metric", "value", "deviation"),
    [
        ("", 80.0, 1.0),
        ("top-5", 95.0, 0.1),
        ("ECE", 3.0, None),
        ("parameters", 22.050664, None),
        ("operations", 4.6, None),
        ("operations added", 1.0, None),
        ("step time", 1.02, None),
        ("FGSM 1/255", 20.0, None),
        ("FGSM 8/255", 0.0, None),
        ("PGD 1/255", 10.0, None),
        ("PGD 8/255", None, None),
        ("occluded 0.25", 70.0, None),
        ("occluded 0.5", None, None),
        ("test AP50", 62.0, 1.0),
        ("test AP large", None, None),
        ("gain ", 1.0, None),
        ("gain FGSM 1/255", 0.0, None),
        ("elsewhere", None, None),
    ],
)
def test_a_column_is_measured_by_its_metric(metric: str, value: float | None, deviation: float | None) -> None:
    found = measured(ROW, BASE, metric)
    assert found == (pytest.approx(value), pytest.approx(deviation))
    assert unit(metric) in ("%", "points", "M", "G", "×", "")


def test_what_was_not_evaluated_has_no_figure() -> None:
    bare = {"name": "x", "mean": None, "deviation": None, "flops": None, "cost": None, "parameters": None}
    for metric in (
        "",
        "top-5",
        "ECE",
        "parameters",
        "operations",
        "operations added",
        "step time",
        "PGD 1/255",
        "gain ",
    ):
        assert measured(bare, bare, metric) == (None, None)


@pytest.mark.parametrize("metric", ["accuracy", "FGSM", "FGSM x", "occluded", "gain gain top-5", "top 5"])
def test_a_metric_that_there_is_not_is_refused(metric: str) -> None:
    with pytest.raises(PlanError, match="No column is measured by"):
        check_metric(metric)


# ------------------------------------------------------------------------------------------------------- the reference
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "it needs the table and the source"),
        ({"table": "x"}, "it needs the table and the source"),
        ({"table": "x", "source": "y", "note": []}, "has no 'note'"),
        ({"table": 3, "source": "y"}, "are texts"),
        ({"table": "x", "source": "y", "notes": "z"}, "are lists"),
        ({"table": "x", "source": "y", "notes": [3]}, "are texts"),
        ({"table": "x", "source": "y", "settings": [{"name": "a"}]}, "is no setting"),
        ({"table": "x", "source": "y", "settings": [{"name": "a", "here": 3}]}, "is no setting"),
        ({"table": "x", "source": "y", "settings": [{"name": "a", "here": "b", "agrees": "yes"}]}, "is no setting"),
        ({"table": "x", "source": "y", "settings": ["a"]}, "is no setting"),
        ({"table": "x", "source": "y", "notes": ["a"] * 1000}, "at most"),
    ],
)
def test_a_reference_with_a_mistake_is_refused(given: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read_reference(given)


def test_a_reference_is_kept_by_the_plan_and_is_no_part_of_its_runs() -> None:
    whole = find_table("cb-robustness").plan("full")
    plan = Plan.from_dict(whole)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert plan.reference is not None
    bare = Plan.from_dict({key: value for key, value in whole.items() if key not in ("reference", "published")})
    assert bare.runs() == plan.runs()


def test_standings_are_told_in_a_sentence() -> None:
    reference = read_reference(
        {
            "table": "t",
            "source": "s",
            "another_task": "ImageNet-1K",
            "settings": [
                {"name": "lr", "here": "1", "printed": "1", "agrees": True},
                {"name": "epochs", "here": "4", "printed": "300"},
                {"name": "seeds", "here": "3"},
            ],
        }
    )
    assert reference is not None
    shown = reference_for_readers(reference, "digits")
    assert shown["standing"] == (
        "Settings: 1 as printed; 1 other than printed (epochs); 1 ours where the publication does not say (seeds)."
    )
    assert (
        shown["apart"] == "The figures were published for ImageNet-1K, and this ran on digits: no difference is taken."
    )
    assert Setting(name="a", here="b").standing == "ours"


def test_a_changed_plan_tells_its_settings_anew() -> None:
    plan = find_table("cb-cifar100").plan("full")
    part = with_changes(plan, {"task": "cifar100(train=500)", "epochs": 3})
    settings = {each["name"]: each for each in part["reference"]["settings"]}
    assert settings["epochs"] == {"name": "epochs", "here": "3", "printed": "DeiT's: 300", "agrees": False}
    assert settings["task"]["here"] == "cifar100(train=500)"
    assert not settings["task"]["agrees"]
    assert "another_task" not in part["reference"], "a part of the same data"
    assert (part["budget"]["epochs"], part["budget"]["warmup_epochs"]) == (3, 0.6), "no longer than the training"
    assert settings["warmup epochs"]["here"] == "0.6"
    other = with_changes(plan, {"task": "digits"})
    assert other["reference"]["another_task"] == "CIFAR-100"
    assert plan["budget"]["epochs"] == 300, "the table's own plan stays"


# ---------------------------------------------------------------------------------------------------- terminal and page
def terminal(given: dict[str, Any]) -> str:
    screen = Console(file=io.StringIO(), width=120)
    table = beside_table(given)
    assert table is not None
    screen.print(table)
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_published_ours_and_the_difference() -> None:
    given = reproduced(summary(4))
    shown = terminal(given)
    for row in given["recipes"]:
        first, second = row["beside"]
        sign = "−" if first["difference"] < 0 else "+"
        assert re.search(rf"{first['published']:.2f} ± 0.75 .* {sign}{abs(first['difference']):.2f}", shown)
        assert re.search(r"FGSM, % +11\.80 +– +–", shown), second
    assert beside_lines(given) == [given["reference"]["standing"]]
    assert beside_table(summary(4)) is None


def test_the_page_shows_columns_settings_and_notes() -> None:
    text = render(reproduced(summary()))
    for words in (
        'id="published-figures"',
        'id="settings-beside-those-printed"',
        "FGSM, %",
        "Ours: one step of 1/255.",
        "Source: table S2.",
        "other than printed",
        "our choice",
        "The text says something else.",
        "Settings: 1 as printed",
    ):
        assert words in text
    assert "no difference is taken" not in text
    assert "Ours and published" in text


def test_on_another_task_the_page_says_so_and_takes_no_difference() -> None:
    given = reproduced(summary(), another=True)
    text = render(given)
    section = text[text.index('id="published-figures"') : text.index('id="settings-beside-those-printed"')]
    assert "no difference is taken" in section
    assert "<svg" not in section.replace('<svg class="key"', ""), "no chart puts both on one axis"
    assert not re.search(r"[+−]\d+\.\d+</td>", section)


def test_a_table_without_figures_says_so_and_still_tells_its_settings() -> None:
    given = summary(2)
    given["reference"] = reproduced(summary(2))["reference"]
    text = render(given)
    assert "No figure was published for these rows" in text
    assert "The text says something else." in text
    assert 'id="settings-beside-those-printed"' in text
    assert 'id="published-figures"' not in render(summary(2))


def test_reproduce_runs_a_table_and_shows_published_figures_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutorOptions, "make", lambda self: InProcess("cpu"))
    words = ["reproduce", "skipless", "--seeds", "1", "--epochs", "1", "--task", "digits(train=60, test=20)"]
    assert main([*words, "--folder", str(tmp_path / "study")]) == 0
    shown = capsys.readouterr().out
    assert "The figures were published for CIFAR-10, and this ran on digits(" in shown
    assert re.search(r"no MLP skip +test accuracy, % +90\.00 +\d", shown)
    page = (tmp_path / "study" / "report.html").read_text()
    assert 'id="settings-beside-those-printed"' in page
    found = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert found["reference"]["table"] == "skipless"
    assert [cell["difference"] for row in found["recipes"] for cell in row["beside"]] == [None] * 3
