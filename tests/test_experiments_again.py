"""What published experiments found comes out again from the files of their runs, without training anything."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from attemper.errors import ParameterError
from attemper.lab.cli.experiment import write
from attemper.lab.experiments.again import put_together
from attemper.lab.experiments.charts import strength_lines, strength_names
from attemper.lab.experiments.tables import differences, markdown, sections
from attemper.lab.tasks.registry import open_task
from small_experiments import TASK, experiment

ROOT = Path(__file__).resolve().parents[1]


def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("experiments", ROOT / "benchmarks" / "experiments.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["experiments"] = module
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- what is published
def published() -> list[Path]:
    return list(script().FILES)


def same(ours: Any, kept: Any) -> None:
    """The same but for the last bits, which means and quantiles of another build of numpy may have."""
    assert type(ours) is type(kept)
    if isinstance(ours, dict):
        assert list(ours) == list(kept)
        for name in ours:
            same(ours[name], kept[name])
    elif isinstance(ours, list):
        assert len(ours) == len(kept)
        for one, other in zip(ours, kept, strict=True):
            same(one, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(kept, rel=1e-9, abs=1e-12)
    else:
        assert ours == kept


@pytest.mark.parametrize("path", published(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_published_file_is_what_its_runs_come_to(path: Path) -> None:
    found = script().found_in(path)
    same(found, json.loads(path.read_text(encoding="utf-8")))
    table = path.with_suffix(".md").read_text(encoding="utf-8")
    assert markdown(found) + "\n" == table, f"run python benchmarks/experiments.py: {path.name} has other tables"
    assert path.with_suffix(".png").stat().st_size > 1000


def test_every_page_shows_the_tables_of_its_files() -> None:
    tables = script()
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.MARKED.search(text), f"{page} shows no tables"
        assert tables.fill(text, page.parent) == text, f"run python benchmarks/experiments.py: {page} has other tables"
    shown = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    for path in tables.FILES:
        assert f"experiment: {path.name} " in shown


def test_a_changed_figure_is_noticed() -> None:
    tables = script()
    folder = ROOT / "docs" / "results" / "cifar10-skips"
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "65.76 ± 0.29" in page
    changed = page.replace("65.76 ± 0.29", "66.76 ± 0.29")
    assert tables.fill(changed, folder) == page


def test_of_the_runs_on_cifar10_none_is_missing() -> None:
    for name, runs in (("skips", 27), ("graying", 39), ("gradient-variance", 15)):
        found = put_together(ROOT / "docs" / "results" / f"cifar10-{name}")
        assert found["missing"] == []
        assert sum(len(arm["seeds"]) for arm in found["arms"]) == runs


# ----------------------------------------------------------------------------------------------------- putting together
def fake_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(job: Any, *_: Any) -> dict[str, Any]:
        return {
            "test": 0.5 + 0.01 * job.seed + (0.1 if "cb_s" in job.arm.name else 0.0), "train": 0.5,
            "status": "finished", "parameters": 1, "flops": None, "seconds": 1.0, "versions": {"torch": "x"},
            "entropy": [0.5, None],
        }  # fmt: skip

    monkeypatch.setattr("attemper.lab.experiments.running.run_arm", fake)
    monkeypatch.setattr("attemper.lab.experiments.running.check_run", lambda *_: None)


def test_runs_of_a_folder_come_to_what_the_command_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    digits = open_task(TASK, None)
    whole = experiment("entropy-cb", digits, seeds=2, out=tmp_path)
    write(whole, tmp_path)
    assert put_together(tmp_path) == whole
    kept = sorted((tmp_path / "entropy-cb-runs").glob("*.json"))
    for path in kept:  # made under other versions, and named after them
        record = json.loads(path.read_text()) | {"key": "other"}
        path.with_name(path.name[: path.name.rindex("-")] + "-0123456789abcdef.json").write_text(json.dumps(record))
        path.unlink()
    assert put_together(tmp_path) == whole
    gone = next((tmp_path / "entropy-cb-runs").glob("cb-seed1-*.json"))
    gone.unlink()
    assert put_together(tmp_path)["missing"] == ["cb, seed 1"]


def test_a_folder_that_cannot_be_put_together_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_runs(monkeypatch)
    with pytest.raises(ParameterError, match="has no file that tells of an experiment"):
        put_together(tmp_path)
    write(experiment("entropy-cb", open_task(TASK, None), out=tmp_path), tmp_path)
    runs = tmp_path / "entropy-cb-runs"
    path = next(runs.glob("cb-seed0-*.json"))
    shutil.copy(path, runs / "cb-seed0-0123456789abcdef.json")
    with pytest.raises(ParameterError, match="has more than one run of cb, seed 0"):
        put_together(tmp_path)
    shutil.rmtree(runs)
    with pytest.raises(ParameterError, match="has no finished run of 'entropy-cb'"):
        put_together(tmp_path)


# ---------------------------------------------------------------------------------------------------------- differences
def arm(name: str, model: str, test: list[float | None], seeds: list[int] | None = None) -> dict[str, Any]:
    return {"name": name, "model": model, "seeds": seeds or list(range(len(test))), "test": test}


def test_differences_are_paired_by_seed_within_one_model() -> None:
    none, better = [0.50, 0.52, 0.55], [0.53, 0.53, 0.60]
    arms = [
        arm("none", "VIT", none),
        arm("other network", "RESNET(x=1)", [0.9, 0.8, 0.7]),
        arm("better", "VIT(y=2)", [better[2], better[0], better[1]], [2, 0, 1]),
        arm("once", "VIT", [0.9], [1]),
    ]
    ((ours, theirs, found),) = differences({"arms": arms})
    assert (ours["name"], theirs["name"], found.seeds) == ("better", "none", 3)
    expected = stats.ttest_rel(better, none)
    interval = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(statistics_mean(better, none))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.p == pytest.approx(expected.pvalue)


def statistics_mean(ours: list[float], theirs: list[float]) -> float:
    return sum(a - b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def test_p_is_corrected_for_all_comparisons_of_the_table() -> None:
    folder = ROOT / "docs" / "results" / "cifar10-skips"
    found = put_together(folder)
    compared = differences(found)
    raw = sorted(
        stats.ttest_rel(ours["test"], [theirs["test"][theirs["seeds"].index(s)] for s in ours["seeds"]]).pvalue
        for ours, theirs, _ in compared
    )
    smallest = min(1.0, raw[0] * len(raw))
    table = sections(found)["differences"]
    shown = [float(line.split("|")[-2]) for line in table.splitlines()[4:]]
    assert len(shown) == len(compared) == 6
    assert min(shown) == pytest.approx(smallest, abs=5e-4)


# --------------------------------------------------------------------------------------------------------------- over ε
def test_everything_over_strength_begins_with_the_arm_without() -> None:
    arms = [
        {"name": "none", "mean": 0.5},
        {"name": "svd, ε = 0.5", "mean": 0.7},
        {"name": "svd, ε = 0.9", "mean": 0.6},
        {"name": "dct, ε = 0.95", "mean": None},
    ]
    found = {"arms": arms}
    assert strength_names(found) == ["none", "0.95", "0.9", "0.5"]
    assert strength_lines(found, lambda each: each["mean"]) == {
        "svd": [0.5, None, 0.6, 0.7],
        "dct": [0.5, None, None, None],
    }
    assert strength_names({"arms": arms[:1]}) == []
