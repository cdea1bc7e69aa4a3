"""Fine-tuning: weights that fit are loaded, the head is new, and every recipe starts from the same weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from attemper.errors import ParameterError, UnreadableError
from attemper.files import read_weights
from attemper.lab.cli import main
from attemper.lab.models.heads import head_parameters
from attemper.lab.models.registry import build_model
from attemper.lab.models.starting import start_from
from attemper.lab.study.comparison import compare
from attemper.lab.study.in_process import InProcess
from attemper.lab.tasks.base import ImageTask, InputShape
from attemper.lab.tasks.fingerprint import of_tensors
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import MemorySource
from attemper.lab.training.hashes import with_hashes
from attemper.lab.training.initial import depths, freeze, initial_model, parameter_scales
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = "vit-digits(depth=2, width=16, heads=2, mlp=16)"
DRAWN = TINY.replace("digits", "cifar")
"""Its head does not start at zero."""
CPU = torch.device("cpu")


def spec(model: str = TINY, recipe: str = "none", seed: int = 0, **budget: Any) -> RunSpec:
    given = {"epochs": 1, "batch_size": 64, "warmup_epochs": 0.2, "lr": 3e-3, **budget}
    return RunSpec(task="digits", model=model, recipe=recipe, seed=seed, budget=Budget(**given))


def shape(size: int = 8, classes: int = 10, channels: int = 1) -> InputShape:
    return InputShape(channels, size, size, classes)


def some_of_the_digits(name: str, wanted: range) -> ImageTask:
    """The digits of a few classes, numbered from 0."""
    whole = open_task("digits")
    assert isinstance(whole, ImageTask)

    def part(source: Any) -> MemorySource:
        kept = torch.isin(source.targets, torch.tensor(list(wanted))).nonzero().flatten()
        return MemorySource(source.images[kept], source.targets[kept] - wanted.start)

    pool, held_out = part(whole.pool()), part(whole.held_out())
    return ImageTask(
        name=name,
        shape=InputShape(1, 8, 8, len(wanted)),
        fingerprint=of_tensors(pool.images, pool.targets),
        pool=lambda: pool,
        held_out=lambda: held_out,
        classes=tuple(map(str, wanted)),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on the first half of the digits."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    task = some_of_the_digits("first", range(5))
    run(dataclasses.replace(spec(epochs=6), task="first"), task, folder=folder, device="cpu")
    return folder


def file_of(folder: Path, model: str = TINY, inputs: InputShape | None = None, seed: int = 1) -> str:
    """Weights that nobody has trained, in a file."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weights.safetensors"
    save_file(build_model(model, inputs or shape()).state_dict(), path)
    return str(path)


# ------------------------------------------------------------------------------------------------------- what it is for
def test_what_was_learnt_on_half_of_the_classes_helps_on_the_others(trained: Path) -> None:
    task = some_of_the_digits("second", range(5, 10))
    begun = dataclasses.replace(spec(epochs=2), task="second")
    tuned = dataclasses.replace(begun, budget=dataclasses.replace(begun.budget, init=str(trained)))
    cold, warm = (run(each, task, device="cpu") for each in (begun, tuned))
    assert warm["train"]["loss"] < cold["train"]["loss"] - 0.1
    assert warm["start"]["renewed"] == ["head.weight", "head.bias"], "of as many classes, but not of the same ones"
    assert not warm["start"]["ignored"]
    assert not warm["start"]["missing"]
    assert warm["start"]["share"] == 1
    assert "start" not in cold


def test_every_recipe_starts_from_the_same_weights_and_every_seed_has_a_head_of_its_own(trained: Path) -> None:
    task = some_of_the_digits("second", range(5, 10))

    def begun(recipe: str, seed: int) -> dict[str, Tensor]:
        learner = Learner(spec(DRAWN, recipe, seed, init=str(trained)), task, CPU)
        return {name: value.clone() for name, value in learner.model.state_dict().items() if "attemper" not in name}

    plain, tempered, other = begun("none", 0), begun("dropkey(0.5) + cb + explicit(v=1e-3)", 0), begun("none", 1)
    assert plain.keys() == tempered.keys()
    assert all(torch.equal(plain[name], tempered[name]) for name in plain)
    assert {name for name in plain if not torch.equal(plain[name], other[name])} == {"head.weight"}


def test_a_study_of_fine_tuning_is_looked_at_without_the_weights_at_hand(trained: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((trained / "model.safetensors").read_bytes())
    budget = {"epochs": 1, "batch_size": 256, "warmup_epochs": 0, "init": str(moved), "freeze": "backbone"}
    plan = {"task": "digits(train=300, test=60)", "model": TINY, "seeds": 1, "budget": budget, "recipes": ["none"]}
    summary = compare(plan, tmp_path / "study", costs=False, executor=InProcess("cpu"))
    assert summary["complete"]
    moved.unlink()
    assert main(["study", "status", str(tmp_path / "study")]) == 0
    (result,) = (json.loads(path.read_text()) for path in (tmp_path / "study" / "runs").glob("*.json"))
    assert result["start"]["loaded"]
    assert result["spec"]["budget"]["init_hash"]


# ------------------------------------------------------------------------------------------------------- what is loaded
def test_the_head_is_kept_only_where_that_is_asked_for_and_possible(tmp_path: Path) -> None:
    path = file_of(tmp_path, DRAWN)
    kept, report = initial_model(spec(DRAWN, init=path, keep_head=True), shape())
    fresh, _ = initial_model(spec(DRAWN, init=path), shape())
    given = read_weights(path).tensors
    assert report is not None
    assert report.renewed == ()
    assert torch.equal(kept.state_dict()["head.weight"], given["head.weight"])
    assert not torch.equal(fresh.state_dict()["head.weight"], given["head.weight"])
    with pytest.raises(ParameterError, match=r"keep_head is true, and .* has no head for 7 classes"):
        initial_model(spec(init=path, keep_head=True), shape(classes=7))
    with pytest.raises(ParameterError, match="keep_head is true, and training starts from no weights"):
        initial_model(spec(keep_head=True), shape())


def test_positions_and_patches_are_resampled_for_other_images_and_colours(tmp_path: Path) -> None:
    model = "timm:vit_tiny_patch16_224(depth=1, embed_dim=16, num_heads=2, patch_size=4, num_classes=10)"
    torch.manual_seed(0)
    source = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=16, num_heads=2, patch_size=4, img_size=16)
    smooth = torch.linspace(-1, 1, 4)[:, None, None] + 2 * torch.linspace(-1, 1, 4)[None, :, None]
    source.pos_embed.data[:, 1:] = smooth.expand(4, 4, 16).reshape(1, 16, 16)
    path = tmp_path / "w.safetensors"
    save_file(source.state_dict(), path)
    model = "timm:vit_tiny_patch16_224(depth=1, embed_dim=16, num_heads=2, patch_size=4)"
    built, report = initial_model(spec(model, init=str(path)), shape(size=32, channels=3))
    assert report is not None
    assert report.resampled == ("pos_embed",)
    found = built.state_dict()["pos_embed"]
    assert torch.equal(found[:, 0], source.pos_embed[:, 0]), "the class token has no place in the image"
    grid = found[0, 1:, 0].reshape(8, 8)
    for axis in (0, 1):
        assert (grid.diff(dim=axis) >= -1e-6).all(), "what rose before rises still"
    assert torch.allclose(grid.mean(), torch.tensor(0.0), atol=1e-5)
    gray, report = initial_model(spec(model, init=str(path)), shape(size=16))
    assert report is not None
    assert report.resampled == ("patch_embed.proj.weight",)
    image = torch.rand(1, 1, 16, 16)
    assert torch.allclose(gray.patch_embed(image), source.patch_embed(image.expand(1, 3, 16, 16)), atol=1e-5), (
        "a gray image is embedded as it was in three equal colours"
    )
    _, report = initial_model(spec(model.replace("size=4", "size=8"), init=str(path)), shape(size=32, channels=3))
    assert report is not None
    assert report.resampled == ("patch_embed.proj.weight",)


def test_tables_of_relative_positions_are_resampled() -> None:
    options: dict[str, Any] = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "patch_size": 2, "num_classes": 3}
    small = timm.create_model("swin_tiny_patch4_window7_224", img_size=16, window_size=4, **options)
    large = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=8, **options)
    report = start_from(large, small.state_dict(), source="swin", classes=3)
    assert {name.rpartition(".")[2] for name in report.resampled} == {"relative_position_bias_table"}
    assert report.share == 1


@pytest.mark.parametrize("prefix", ["backbone.", "module.", "vit."])
def test_a_prefix_of_other_peoples_wrappers_does_not_matter(prefix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = build_model(TINY, shape())
    path = tmp_path / "w.pt"
    torch.save({"state_dict": {f"{prefix}{name}": value for name, value in source.state_dict().items()}}, path)
    built, report = initial_model(spec(init=str(path)), shape(classes=3))
    assert report is not None
    assert report.share == 1
    assert torch.equal(built.state_dict()["blocks.1.mlp.fc1.weight"], source.state_dict()["blocks.1.mlp.fc1.weight"])


def test_what_a_file_lacks_and_what_it_has_too_much_is_said(tmp_path: Path) -> None:
    path = file_of(tmp_path, "vit-digits(depth=3, width=16, heads=2, mlp=16)")
    _, deeper = initial_model(spec(init=path), shape(classes=3))
    assert deeper is not None
    assert {name[:9] for name in deeper.ignored} == {"blocks.2."}
    _, shallower = initial_model(spec(TINY.replace("depth=2", "depth=4"), init=path), shape())
    assert shallower is not None
    assert {name[:9] for name in shallower.missing} == {"blocks.3."}
    assert "ignored (blocks.2." in str(deeper)
    assert "missing (blocks.3." in str(shallower)
    assert "only" not in str(deeper)
    _, mostly_new = initial_model(spec(TINY.replace("depth=2", "depth=12"), init=path), shape())
    assert "that is only" in str(mostly_new)


def test_weights_of_another_model_are_refused_and_the_model_named(tmp_path: Path) -> None:
    other = file_of(tmp_path, "resnet(depth=8, width=4)", shape(channels=1))
    with pytest.raises(ParameterError, match=r"Nothing of '.*' fits the model: it has .*, and the model .*Choose"):
        initial_model(spec(init=other), shape())
    wide = file_of(tmp_path / "wide", "vit-digits(depth=2, width=32, heads=2, mlp=16)")
    with pytest.raises(ParameterError, match=r"is \(.*\) there and \(.*\) in the model"):
        initial_model(spec(init=wide), shape())
    with pytest.raises(UnreadableError, match=r"^init: There is no file 'nowhere.pt'"):
        initial_model(spec(init="nowhere.pt"), shape())


def test_keys_depend_on_the_weights_and_not_on_where_they_lie(tmp_path: Path) -> None:
    task = open_task("digits")
    files = [file_of(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, moved, other = (with_hashes(spec(init=path), task) for path in files)
    assert one.key("x") == moved.key("x") != other.key("x")
    assert spec().key("x") == RunSpec.from_dict(spec().to_dict()).key("x") != one.key("x")
    with pytest.raises(ParameterError, match="has no key before the weights to start from are known"):
        spec(init=files[0]).key("x")
    swapped = dataclasses.replace(one, budget=dataclasses.replace(one.budget, init=files[2]))
    with pytest.raises(ParameterError, match=r"init_hash is .*, and '.*' have .*: they are others"):
        initial_model(swapped, task.shape)


# --------------------------------------------------------------------------------------------------- hubs and libraries
def test_without_a_network_the_name_of_a_hub_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for model in ("timm:vit_tiny_patch16_224(pretrained=true)", "hf:nobody/has-this"):
        assert main(["compare", "--task", "noise(size=16, classes=3)", "--model", model, "--folder", "x"]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1, told
        assert "could not be had" in told
        assert "--init" in told
    assert not (tmp_path / "x").exists()


def test_a_model_of_transformers_comes_from_a_folder_with_its_weights(tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=4
    )
    config.num_labels = 7
    torch.manual_seed(0)
    source = AutoModelForImageClassification.from_config(config)
    source.save_pretrained(tmp_path / "owner" / "name")
    model, report = initial_model(spec(f"hf:{tmp_path}/owner/name"), shape(size=32, classes=3, channels=3))
    assert report is not None
    assert report.share == 1
    assert {name.rpartition(".")[2] for name in report.resampled} == {"position_embeddings"}
    assert {name.partition(".")[0] for name in report.renewed} == {"classifier"}
    assert model(torch.rand(2, 3, 32, 32)).logits.shape == (2, 3)
    built = build_model(f"hf:{tmp_path}/owner/name(image_size=16)", shape(size=16, classes=3, channels=3))
    name = "vit.embeddings.patch_embeddings.projection.weight"
    assert torch.equal(built.state_dict()[name], source.state_dict()[name]), "with its weights, unless asked otherwise"


def test_timms_weights_go_through_the_same_door(monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model
    torch.manual_seed(3)
    stored = create("vit_tiny_patch16_224", depth=1).state_dict()

    def create_model(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        model: nn.Module = create(name, **({"depth": 1} | options))
        if pretrained:
            assert not options
            model.load_state_dict(stored)
        return model

    monkeypatch.setattr(timm, "create_model", create_model)
    model, report = initial_model(spec("timm:vit_tiny_patch16_224(pretrained=true)"), shape(size=32, channels=3))
    assert report is not None
    assert report.resampled == ("pos_embed",)
    assert report.share == 1
    assert torch.equal(model.state_dict()["blocks.0.attn.qkv.weight"], stored["blocks.0.attn.qkv.weight"])
    with pytest.raises(ParameterError, match="has trained weights of its own: leave one of them out"):
        initial_model(spec("timm:vit_tiny_patch16_224(pretrained=true)", init="w.pt"), shape(size=32, channels=3))


# ----------------------------------------------------------------------------------------- rates by depth, frozen parts
def test_a_rate_falls_by_the_same_factor_from_block_to_block(tmp_path: Path) -> None:
    task = open_task("digits")
    learner = Learner(spec(recipe="dropkey(0.1) + layerdrop(0.2)", layer_decay=0.5), task, CPU)
    learner.set_lr(1.0)
    rates = {id(p): group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(p)] for name, p in learner.model.named_parameters()}
    assert found["head.weight"] == found["norm.bias"] == 1
    assert found["blocks.1.attn.qkv.weight"] == found["blocks.1.norm1.weight"] == 0.5
    assert found["blocks.0.mlp.fc1.bias"] == 0.25
    assert found["cls_token"] == found["pos_embed"] == found["patch_embed.proj.weight"] == 0.125
    learner.set_lr(0.2)
    assert {round(group["lr"] / 0.2, 4) for group in learner.optimizer.param_groups} == {1, 0.5, 0.25, 0.125}
    with pytest.raises(ParameterError, match=r"layer_decay is 0\.5, and Linear has no blocks"):
        parameter_scales(nn.Linear(2, 2), 0.5)


def test_blocks_in_stages_and_of_other_libraries_have_a_depth_each() -> None:
    swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=8, depths=(1, 2), num_heads=(1, 2), img_size=56)
    found = depths(swin)
    assert found["patch_embed.proj.weight"] == 0
    assert max(found.values()) == found["head.fc.weight"] == 4
    assert found["layers.1.blocks.1.norm1.weight"] == 3
    vit = build_model(
        "hf:vit(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, patch_size=4)", shape(16, 3, 3)
    )
    found = depths(vit)
    assert max(found.values()) == found["classifier.weight"] == 4
    assert found["vit.embeddings.cls_token"] == 0
    assert sorted(set(found.values())) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("recipe", ["none", "explicit(v=1e-3, ff=1e-3) + dropkey(0.2)"])
def test_what_is_frozen_stays_and_the_rest_learns(recipe: str, trained: Path) -> None:
    task = some_of_the_digits("second", range(5, 10))
    for frozen, moves in (("backbone", {"head"}), ("stem", {"head", "blocks", "norm"})):
        learner = Learner(spec(recipe=recipe, init=str(trained), freeze=frozen), task, CPU)
        learner.to_training()
        before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
        inputs, targets = task.shape.example(8)
        learner.learn(inputs, targets)
        changed = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
        assert {name.partition(".")[0] for name in changed} == moves


def test_frozen_batch_norms_keep_their_statistics() -> None:
    task = open_task("digits")
    learner = Learner(spec("resnet(depth=8, width=4)", freeze="backbone"), task, CPU)
    learner.to_training()
    before = {name: value.clone() for name, value in learner.model.named_buffers()}
    learner.learn(*task.shape.example(8))
    with learner.evaluating():
        pass
    learner.learn(*task.shape.example(8))
    assert all(torch.equal(value, before[name]) for name, value in learner.model.named_buffers())


def test_a_head_is_found_by_declaration_name_or_size() -> None:
    deit = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, num_classes=5)
    assert head_parameters(deit, 5) == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    assert head_parameters(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), 3) == {"2.weight", "2.bias"}
    assert head_parameters(nn.ReLU(), 3) == frozenset()
    with pytest.raises(ParameterError, match="freeze is 'stem', and no block was found in Linear"):
        freeze(nn.Linear(2, 2), "stem", 2)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"layer_decay": 0}, "layer_decay is 0.0; it must be above 0 and at most 1"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5; it must be above 0 and at most 1"),
        ({"freeze": "all"}, "freeze is 'all'; it must be 'none', 'stem' or 'backbone'"),
        ({"keep_head": 1}, "keep_head is 1; it must be true or false"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(budget: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        spec(**budget)
