"""What published tables cost to run again: estimated from stored probes, which are those of the documents."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import pytest

from attemper.lab.study.published import catalogue, find_table
from attemper.lab.study.published.costs import basis, cost_of, probes, ratio_of, stored
from attemper.lab.tasks.base import InputShape
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.flops import count_flops
from attemper.lab.training.spec import Budget, RunSpec

ROOT = Path(__file__).resolve().parents[1]


def test_a_cost_is_samples_over_the_stored_rate() -> None:
    """800 runs of 200 epochs of 35,000 images less what is left of batches, at 37,000 a second with everything."""
    found = cost_of(find_table("explicit-cifar10"))
    assert found is not None
    assert found.scaled is None
    batches = -(-35_000 // 128)
    assert found.gpu_hours == pytest.approx(800 * 200 * batches * 128 / 37_000 / 3600)


def test_a_cost_of_another_model_is_scaled_by_operations_and_says_so() -> None:
    small, large = cost_of(find_table("graying-vit-small")), cost_of(find_table("graying-vit-base"))
    assert small is not None
    assert large is not None
    assert small.scaled is None
    assert large.scaled == pytest.approx(stored()["forward"][VIT_B] / stored()["forward"][VIT_S])
    assert large.text.endswith("~")
    assert f"times {large.scaled:.2g}" in basis(large)
    rows = {name: len(find_table(f"graying-{name}").rows) for name in ("vit-small", "vit-base")}
    assert large.gpu_hours / small.gpu_hours == pytest.approx(
        large.scaled * rows["vit-base"] / rows["vit-small"], rel=0.02
    )


VIT_S = "timm:vit_small_patch16_224(drop_path_rate=0.1) @ folder:imagenet"
VIT_B = "timm:vit_base_patch16_224(drop_path_rate=0.1) @ folder:imagenet"


def test_recipes_take_what_was_measured_of_their_methods() -> None:
    probe = next(each for each in probes() if each.ratios)
    assert ratio_of("none", probe) == 1
    assert ratio_of("cb(cb_s)", probe) == 1.19
    assert ratio_of("explicit(v=λ, ff=λ, p=0.2)", probe) == 1.531
    assert ratio_of("dropattention(0.1) + ffdropout(0.1) + rdrop", probe) == pytest.approx(1.103 * 1.859)


def test_what_cannot_be_estimated_is_not() -> None:
    assert cost_of(find_table("dropkey-coco")) is None, "nor of boxes, masks and questions"
    assert cost_of(find_table("attentiondrop-wmt")) is None, "no probe is of text"
    known = [table.key for table in catalogue() if table.can_run and cost_of(table) is None]
    assert set(known) == {"attentiondrop-wmt", "dropkey-coco", "cb-ade20k", "cb-vqa"}


def test_stored_probes_are_those_of_the_documents() -> None:
    """They were copied by hand: the pages that they come from say the same."""
    by_name = {probe.name: probe for probe in probes()}
    planning = (ROOT / "docs" / "planning.md").read_text()
    vit = by_name["ViT-S/16 at 224"]
    table = dict(re.findall(r"^\| `([a-z]+)[^|]*\| (\d+) ms", planning, re.MULTILINE))
    table |= dict(re.findall(r"had `(cb)` among its recipes then: (\d+) ms", planning))
    assert f"{vit.samples_per_second:,.0f}" in planning
    for name, ratio in vit.ratios.items():
        assert ratio == pytest.approx(int(table[name]) / int(table["none"]), abs=5e-4)
    results = ROOT / "docs" / "results"
    assert "37,000 images/s all in all" in (results / "cifar10.md").read_text()
    assert by_name["vit-cifar"].samples_per_second == 37_000
    assert "35 runs in 34 s with five processes" in (results / "gtzan.md").read_text()
    assert by_name["encoder on GTZAN"].samples_per_second == pytest.approx(35 * 20 * 560 / 34, rel=1e-3)
    assert "12 runs in 2 min 20 s with four processes" in (results / "thumos14.md").read_text()
    assert by_name["encoder-thumos"].samples_per_second == pytest.approx(12 * 8 * 18194 / 140, rel=1e-3)
    step = json.loads((ROOT / "benchmarks" / "results" / "step-h200.json").read_text())
    [passes] = [row["ratio"] for row in step["rows"] if "consistency" in row["recipe"]]
    assert stored()["passes"]["consistency"] == pytest.approx(passes, abs=5e-4)


def operations(model: str) -> int:
    """What a forward pass of a stored model computes, counted here."""
    text, _, task = model.partition(" @ ")
    size, classes = (224, 1000) if task == "folder:imagenet" else (32, int(task.removeprefix("cifar")))
    shape = InputShape(3, size, size, classes)
    noise = open_task(f"noise(size={size}, classes={shape.classes}, train=4, test=1)")
    spec = RunSpec(task=noise.name, model=text, recipe="none", seed=0, budget=Budget())
    found = count_flops(spec, noise, 1)
    assert found is not None
    return found["forward"]


@pytest.mark.parametrize(
    "model", ["vit-cifar @ cifar10", "vit-tiny @ cifar10", "resnet @ cifar10", "convmixer @ cifar10"]
)
def test_stored_operations_are_those_that_are_counted(model: str) -> None:
    assert operations(model) == stored()["forward"][model]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [m for m in stored()["forward"] if m.endswith(("imagenet", "cifar100")) and "cait" not in m]
)
def test_all_stored_operations_are_those_that_are_counted(model: str) -> None:
    """CaiT's cannot be counted so: its mixing of heads takes the counter out."""
    assert operations(model) == stored()["forward"][model]


def test_figures_and_probes_are_in_the_package() -> None:
    folder = resources.files("attemper.lab.study.published").joinpath("data")
    assert {each.name for each in folder.iterdir()} >= {"cb.toml", "explicit.toml", "h200.json"}
    text = (ROOT / "pyproject.toml").read_text()
    assert '"attemper.lab.study.published" = ["data/*.toml", "data/*.json"]' in text
