"""The papers' experiments: what they measure of arms is what direct calls give."""

from __future__ import annotations

import copy
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError
from attemper.lab.experiments import runs as running_arms
from attemper.lab.experiments.branches import branch_conditions, gram_values, spectrum
from attemper.lab.experiments.catalogue import EXPERIMENTS, choose_arms, model_of
from attemper.lab.experiments.looks import patch_condition, token_conditions
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.registry import open_task
from attemper.probes import branch_jacobian, condition_number
from attemper.tempering.embedding import to_patches
from small_experiments import MODELS, SHAPE, TASK, one


@pytest.fixture(scope="module")
def digits() -> Any:
    return open_task(TASK, None)


# ----------------------------------------------------------------------------------------------------------------- arms
@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_every_arm_of_every_experiment_can_be_built_and_tempered(name: str) -> None:
    for arm in EXPERIMENTS[name].arms:
        attemper.apply(build_model(model_of(arm), SHAPE), arm.recipe)


def test_arms_without_any_skip_have_none() -> None:
    arms = {arm.name: build_model(model_of(arm, MODELS), SHAPE) for arm in EXPERIMENTS["skips"].arms}
    assert [(b.spatial_skip, b.channel_skip) for b in arms["mixer, no skip"].blocks] == [(False, False)] * 2
    assert [block.skip for block in arms["ResNet, no skip"].blocks] == [False] * 3
    assert [(b.spatial_skip, b.channel_skip) for b in arms["mixer, no spatial skip"].blocks] == [(False, True)] * 2


def test_arms_are_chosen_by_name_or_a_part_of_it() -> None:
    graying = EXPERIMENTS["graying"]
    assert len(graying.arms) == 13
    assert {arm.recipe.split("where=")[1].split(",")[0] for arm in graying.arms[1:]} == {"patches", "tokens"}
    assert len(choose_arms(graying, ["on patches"])) == 6
    assert [arm.name for arm in choose_arms(EXPERIMENTS["gradient-variance"], ["blur"])] == ["blur"]
    with pytest.raises(ParameterError, match=r"There is no arm 'blurr'\. There are: none; hardmask; blur"):
        choose_arms(EXPERIMENTS["gradient-variance"], ["blurr"])


# ----------------------------------------------------------------------------------------------- conditioning, directly
def trained(arm: str, task: Any, tmp_path: Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model of an arm as a run leaves it, its recipe, and what the experiment says of it."""
    job = one("skips", arm)
    found = running_arms.run_arm(job, task, tmp_path, torch.device("cpu"), lambda line: None)
    model = build_model(job.spec().model, task.shape)
    tempered = attemper.apply(model, job.arm.recipe)
    model.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["best"])
    return model.eval(), tempered, found


def images(task: Any, count: int) -> torch.Tensor:
    stored, _ = next(task.test().batches(torch.arange(count), count))
    return task.to_input(stored)


def inputs_of(model: nn.Module, x: torch.Tensor, *modules: nn.Module) -> list[torch.Tensor]:
    seen: dict[nn.Module, torch.Tensor] = {}
    hooks = [m.register_forward_pre_hook(lambda module, args: seen.update({module: args[0]})) for m in modules]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return [seen[module] for module in modules]


def test_attention_and_mlp_are_measured_as_the_probe_measures_them(digits: Any, tmp_path: Path) -> None:
    model, _, found = trained("ViT, no attention skip", digits, tmp_path)
    block, x = model.blocks[1], images(digits, 4)
    assert [(row["block"], row["branch"], row["has_skip"]) for row in found["branches"]] == [
        (0, "attention", False), (0, "MLP", True), (1, "attention", False), (1, "MLP", True),
    ]  # fmt: skip
    entering, mixed = inputs_of(model, x, block.norm1, block.norm2)
    branches = {
        "attention": (lambda t: block.attn(block.norm1(t)), block.norm1, entering),
        "MLP": (lambda t: block.mlp(block.norm2(t)), block.norm2, mixed),
    }
    for row in found["branches"][2:]:
        function, norm, given = branches[row["branch"]]
        alone = [branch_jacobian(function, each[None], norm=norm).condition for each in given]
        joined = [branch_jacobian(function, each[None], skip=True).condition for each in given]
        assert row["alone"] == pytest.approx(statistics.median(alone), rel=1e-6)
        assert row["with_skip"] == pytest.approx(statistics.median(joined), rel=1e-6)
        assert row["alone_lost"] == pytest.approx(2 / 16), "what the layer norm takes away of every token"
        assert row["with_skip_lost"] == 0
    behind = [inputs_of(model, images(digits, 64), part)[0] for part in (model.blocks[1], model.norm)]
    expected = [float(condition_number(tokens).median()) for tokens in behind]
    assert found["tokens"][1:] == pytest.approx(expected, rel=1e-6)


def plain_jacobian(function: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(function, x.double()).reshape(-1, x.numel())


def test_convolutional_branches_are_measured_as_a_plain_jacobian_has_them(digits: Any, tmp_path: Path) -> None:
    model, _, found = trained("mixer, no skip", digits, tmp_path / "mixer")
    assert [(row["branch"], row["has_skip"]) for row in found["branches"]] == [
        ("spatial", False),
        ("channel", False),
    ] * 2
    block = copy.deepcopy(model.blocks[0]).double()
    given = dict(
        zip(("spatial", "channel"), inputs_of(model, images(digits, 4), *model.blocks[0].children()), strict=True)
    )
    for row in found["branches"][:2]:
        branch, one_by_one = getattr(block, row["branch"]), given[row["branch"]]
        jacobians = [plain_jacobian(branch, x[None]) for x in one_by_one]
        alone = [float(condition_number(each)) for each in jacobians]
        joined = [float(condition_number(each + torch.eye(len(each)))) for each in jacobians]
        assert row["alone"] == pytest.approx(statistics.median(alone), rel=1e-6)
        assert row["with_skip"] == pytest.approx(statistics.median(joined), rel=1e-6)


def test_what_dead_units_lose_is_counted_and_left_out(digits: Any, tmp_path: Path) -> None:
    model, _, found = trained("ResNet, with skips", digits, tmp_path / "resnet")
    row = found["branches"][1]
    assert (row["block"], row["branch"], row["has_skip"]) == (1, "residual", True)
    block = copy.deepcopy(model.blocks[1]).double()
    (given,) = inputs_of(model, images(digits, 4), model.blocks[1].branch)
    shares, conditions, joined = [], [], []
    for x in given:
        sigma = torch.linalg.svdvals(plain_jacobian(block.branch, x[None]))
        kept = sigma[sigma > 1e-12 * sigma[0]]
        shares.append(1 - len(kept) / len(sigma))
        conditions.append(float(kept[0] / kept[-1]))
        whole = torch.linalg.svdvals(plain_jacobian(lambda t: block.shortcut(t) + block.branch(t), x[None]))
        whole = whole[whole > 1e-12 * whole[0]]
        joined.append(float(whole[0] / whole[-1]))
    assert row["alone_lost"] == pytest.approx(statistics.median(shares))
    assert row["alone_lost"] > 0
    assert row["alone"] == pytest.approx(statistics.median(conditions), rel=1e-6)
    assert row["with_skip"] == pytest.approx(statistics.median(joined), rel=1e-6)


def test_large_jacobians_are_measured_by_their_gram_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tall = torch.randn(30, 20, dtype=torch.float64)
    for each in (tall, tall.mT):
        torch.testing.assert_close(gram_values(each), torch.linalg.svdvals(each), rtol=1e-10, atol=0)
    model, x = build_model(MODELS["VIT"].replace("depth=2", "depth=4"), SHAPE).eval(), torch.randn(5, 1, 8, 8)
    whole = branch_conditions(model, x[:1])
    monkeypatch.setattr("attemper.lab.experiments.branches.SMALL", 100)
    some = branch_conditions(model, x)
    assert sorted({row["block"] for row in some}) == [0, 1, 3]
    for row in some:
        expected = next(r for r in whole if (r["block"], r["branch"]) == (row["block"], row["branch"]))
        assert row["alone"] == pytest.approx(expected["alone"], rel=1e-3)
        assert row["with_skip"] == pytest.approx(expected["with_skip"], rel=1e-6)
    monkeypatch.setattr("attemper.probes.jacobian.LIMITS", {"cpu": 3})
    assert spectrum(lambda t: 2 * t, torch.ones(1, 4)) is None


def test_models_whose_blocks_are_not_known_have_no_branches_and_no_parts() -> None:
    assert branch_conditions(nn.Linear(3, 3), torch.ones(1, 3)) == []
    with pytest.raises(NoSiteError, match="Linear has neither attention nor the parts"):
        token_conditions(nn.Linear(3, 3), torch.ones(1, 3))


@pytest.mark.parametrize(("where", "moved"), [("tokens", 1), ("patches", 0)])
def test_graying_is_seen_at_the_place_where_it_acts(where: str, moved: int) -> None:
    torch.manual_seed(0)
    model, x = build_model("vit-digits(depth=1)", SHAPE), torch.randn(4, 1, 8, 8)
    before = [patch_condition(model, x, ()), token_conditions(model, x)[0]]
    by_hand = condition_number(to_patches(x, (4, 4), (2, 2))).median()
    assert before[0] == pytest.approx(float(by_hand), rel=1e-6)
    tempered = attemper.apply(model, f"graying(kind=svd, where={where}, eps=0.5)")
    after = [patch_condition(model, x, tempered.methods), token_conditions(model, x)[0]]
    assert after[moved] == pytest.approx(before[moved] ** 0.5, rel=0.05)
    if where == "tokens":
        assert after[0] == before[0]


def test_a_patch_that_is_empty_does_not_make_the_condition_infinite() -> None:
    model, x = build_model("vit-digits(depth=1)", SHAPE), torch.randn(1, 1, 8, 8)
    x[..., 1::2, 1::2] = 0  # one pixel of every patch
    three = torch.linalg.svdvals(to_patches(x, (4, 4), (2, 2))[0, :, :3].double())
    assert patch_condition(model, x, ()) == pytest.approx(float(three[0] / three[2]), rel=1e-4)
