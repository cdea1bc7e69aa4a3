"""The recipe in the config of a model of Transformers: who reads it, what it says, and what is wrong with it."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import Tempered
from attemper.errors import AlreadyAppliedError, NoSiteError, ParameterError, RecipeWarning, UnreadableError
from families import HF_IMAGE, build, call, family, hf
from saved_models import VIT, Case, loaded


# ------------------------------------------------------------------------------------------ with a head and without
def test_from_a_model_with_a_head_to_one_without_and_back(tmp_path: Path) -> None:
    import transformers

    tempered = Case(family("hf-vit"), "cb(cb_s)", ("vit.layers.0*", "*layers.2")).tempered()
    tempered.model.save_pretrained(tmp_path / "head")
    base, _ = loaded(transformers.ViTModel, tmp_path / "head", add_pooling_layer=False)
    handle = attemper.load(base)
    assert handle.control.options["targets"] == ["layers.0*", "*layers.2"]
    x = family("hf-vit").inputs()
    assert torch.equal(call(base, x), tempered.model.vit(**x).last_hidden_state)

    base.save_pretrained(tmp_path / "base")
    again, _ = loaded(transformers.ViTModel, tmp_path / "base", add_pooling_layer=False)
    attemper.load(again)
    assert torch.equal(call(again, x), call(base, x))
    head, _ = loaded(transformers.AutoModelForImageClassification, tmp_path / "base")
    assert attemper.load(head).control.options["targets"] == ["vit.layers.0*", "*layers.2"]
    assert torch.equal(head.vit(**x).last_hidden_state, call(base, x))


def test_a_part_that_is_saved_alone_is_restored_or_refused(tmp_path: Path) -> None:
    import transformers

    x = family("hf-vit").inputs()
    plain = attemper.apply(build(family("hf-vit")).eval(), "cb", targets="vit.layers.1*").model
    plain.vit.save_pretrained(tmp_path / "right")
    part, _ = loaded(transformers.ViTModel, tmp_path / "right", add_pooling_layer=False)
    attemper.load(part)
    assert torch.equal(call(part, x), plain.vit(**x).last_hidden_state)

    VIT.tempered().model.vit.save_pretrained(tmp_path / "lost")
    part, _ = loaded(transformers.ViTModel, tmp_path / "lost", add_pooling_layer=False)
    with pytest.raises(UnreadableError, match=r"such as attemper\.CB.*Only the part 'vit' of the tempered model"):
        attemper.load(part)
    assert not hasattr(part, "attemper")


class Two(nn.Module):
    """A model of one's own round one of Transformers', with blocks of its own."""

    def __init__(self, backbone: nn.Module, blocks: int) -> None:
        super().__init__()
        self.backbone = backbone
        layers = [nn.TransformerEncoderLayer(48, 2, 32, dropout=0.0, batch_first=True) for _ in range(blocks)]
        self.more = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.more(self.backbone(x).last_hidden_state)
        return out


def vit() -> Any:
    return hf("ViTConfig", "ViTModel", **HF_IMAGE, add_pooling_layer=False)()


def test_what_a_wrapper_tempered_is_not_lost_in_silence(tmp_path: Path) -> None:
    import transformers

    tempered = attemper.apply(Two(vit(), 1), "cb")
    tempered.model.backbone.save_pretrained(tmp_path / "part")
    backbone = transformers.ViTModel.from_pretrained(tmp_path / "part")
    with pytest.raises(UnreadableError, match=r"model of 4 blocks \('backbone' of it was saved\); this ViTModel has 3"):
        attemper.load(backbone)
    with pytest.raises(ParameterError, match=r"part 'backbone'.*attemper\.load\(model\.backbone\)"):
        attemper.load(Two(backbone, 1))
    with pytest.warns(RecipeWarning, match=r"model\.backbone \(ViTModel\) was trained with 'cb\(cb\)'"):
        attemper.apply(Two(backbone, 1), "dropkey(0.1)")

    tempered.save(tmp_path / "whole")
    other = Two(vit(), 1)
    attemper.load(other, tmp_path / "whole")
    x = family("hf-vit").inputs()["pixel_values"]
    assert torch.equal(tempered.model.eval()(x), other.eval()(x))


# ---------------------------------------------------------------------------------------------- what the config says
def test_the_config_is_touched_only_while_it_is_saved(tmp_path: Path) -> None:
    model = build(family("hf-vit"))
    other = type(model)(model.config)  # two models that share the object
    before = copy.deepcopy(model.config.__dict__)
    tempered = attemper.apply(model, "cb(cb_s)")
    assert model.config.__dict__ == before
    model.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "other")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["attemper"]["recipe"] == "cb(cb_s)"
    assert "attemper" not in json.loads((tmp_path / "other" / "config.json").read_text())
    tempered.remove()
    model.save_pretrained(tmp_path / "plain")
    assert "attemper" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert type(model) is type(other)
    assert "_attemper" not in model.vit.__dict__
    assert not hasattr(model.config, "attemper")


def test_the_config_has_the_rates_of_now_and_copies_have_it_too(tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.set_rate(0.25)
    for number, model in enumerate((copy.deepcopy(tempered.model), pickle.loads(pickle.dumps(tempered.model)))):
        model.save_pretrained(tmp_path / str(number))
        other, _ = loaded(type(tempered.model), tmp_path / str(number))
        assert attemper.load(other).methods == tempered.methods
        assert torch.equal(VIT.outputs(other), VIT.outputs(tempered.model))
    part = pickle.dumps(tempered.model.vit.layers[0])
    assert len(part) < len(pickle.dumps(tempered.model)) / 2


def test_remove_after_load_gives_back_what_from_pretrained_made(tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path)
    model, _ = loaded(type(tempered.model), tmp_path)
    before, entry = VIT.outputs(model), copy.deepcopy(model.config.__dict__)
    attemper.load(model).remove()
    assert torch.equal(VIT.outputs(model), before)
    assert model.config.__dict__ == entry
    assert type(model) is type(build(VIT.family)), "type(tempered_model).from_pretrained gives no nested class"


def test_apply_says_what_a_checkpoint_was_trained_with(tmp_path: Path) -> None:
    saved = attemper.apply(build(family("hf-vit")), "cb + dropkey(0.1)", targets="vit.layers.0*").model
    saved.save_pretrained(tmp_path)

    def model() -> Any:
        return type(saved).from_pretrained(tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attemper.apply(model(), "dropkey(0.1) + cb", targets=["vit.layers.0*"])
    for recipe, options in (("dropkey(0.2)", {"targets": "vit.layers.0*"}), ("cb + dropkey(0.1)", {}), ("none", {})):
        with pytest.warns(RecipeWarning) as caught:
            attemper.apply(model(), recipe, **options)
        message = str(caught[0].message)
        assert "was trained with 'cb(cb) + dropkey(0.1)' on vit.layers.0*" in message
        assert f"'{attemper.render(attemper.parse(recipe))}'" in message
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        untouched = model()
        with pytest.raises(RecipeWarning):
            attemper.apply(untouched, "dropkey(0.2)")
        assert type(untouched) is type(model())


def test_apply_says_that_learnt_parameters_start_afresh(tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path)
    model, _ = loaded(type(tempered.model), tmp_path)
    with pytest.warns(RecipeWarning, match=r"its parameters as they start\. attemper\.load\(model\) restores"):
        attemper.apply(model, VIT.recipe)
    attemper.load(model)
    assert torch.equal(VIT.outputs(model), VIT.outputs(tempered.model))


def test_load_onto_a_tempered_model(tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path)
    model, _ = loaded(type(tempered.model), tmp_path)
    with pytest.warns(RecipeWarning):
        handle = attemper.apply(model, "skipless")
    with pytest.raises(AlreadyAppliedError, match=r"trained with 'cb\(cb_s\) \+ dropkey\(0\.1\)'.*'skipless"):
        attemper.load(model)
    handle.remove()
    with pytest.warns(RecipeWarning):
        attemper.apply(model, "cb(cb_s)")
    with pytest.warns(RecipeWarning, match="stays tempered with"):
        attemper.load(model)
    assert torch.equal(VIT.outputs(model), VIT.outputs(tempered.model))


# --------------------------------------------------------------------------------------------------- what goes wrong
def entry(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["attemper"])
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def rewritten(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def executable(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))


def outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    index = {"weight_map": {"attemper.CB_VIT_LAYERS_0_MLP_OUTPUT": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


GATE = "attemper.CB_VIT_LAYERS_0_MLP_OUTPUT"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "lost parameter": (rewritten(lambda t: t.pop(GATE)), "does not have it"),
    "twice": (rewritten(lambda t: t.update({"vit." + GATE: torch.ones(48)})), "has it 2 times"),
    "other shape": (rewritten(lambda t: t.update({GATE: torch.ones(7)})), "has the shape [7]"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "should have one file of weights"),
    "damaged weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
    "executable": (executable, "cannot be read as weights"),
    "outside": (outside, "does not name files beside it"),
    "gone": (lambda folder: folder.rename(folder.with_name("moved")), "which is no folder here"),
}


@pytest.mark.parametrize("what", WRONG)
def test_parameters_that_are_not_found_are_an_error_and_never_start_afresh(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    tempered = VIT.tempered()
    tempered.model.save_pretrained(folder)
    model, _ = loaded(type(tempered.model), folder)
    change, message = WRONG[what]
    change(folder)
    with pytest.raises(UnreadableError) as caught:
        attemper.load(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(NoSiteError):
        Tempered.of(model)
    assert not any(name.startswith("attemper.") for name in model.state_dict())


CONFIG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "newer": (entry(lambda e: e.update(colour="red")), "does not know what it holds: colour"),
    "unknown method": (entry(lambda e: e.update(recipe="dropkye")), "unknown method 'dropkye'"),
    "foreign": (entry(lambda e: e.clear()), "names no recipe"),
    "other place": (entry(lambda e: e["parameters"][0].update(place="vit.layers.9.mlp")), "as parameters of"),
    "fewer blocks": (entry(lambda e: e.update(blocks=12)), "a model of 12 blocks; this ViT"),
}


@pytest.mark.parametrize("what", CONFIG)
def test_a_config_that_cannot_be_read_is_an_error(what: str, tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path)
    change, message = CONFIG[what]
    change(tmp_path)
    model, _ = loaded(type(tempered.model), tmp_path)
    with pytest.raises(UnreadableError) as caught:
        attemper.load(model)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_a_model_of_the_folder_takes_its_parameters(tmp_path: Path) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path / "one")
    with pytest.raises(UnreadableError, match="was not loaded from"):
        attemper.load(build(VIT.family), tmp_path / "one")
    with pytest.raises(UnreadableError, match="says nothing of a recipe"):
        attemper.load(build(VIT.family))
    (tmp_path / "one").rename(tmp_path / "before")
    model, _ = loaded(type(tempered.model), tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    attemper.load(model, tmp_path / "after")
    assert torch.equal(VIT.outputs(model), VIT.outputs(tempered.model))
    build(VIT.family).save_pretrained(tmp_path / "plain")
    with pytest.raises(UnreadableError, match="says nothing of a recipe"):
        attemper.load(loaded(type(build(VIT.family)), tmp_path / "plain")[0], tmp_path / "plain")
    with pytest.raises(UnreadableError, match=r"neither attemper\.json nor config\.json"):
        attemper.load(build(VIT.family), tmp_path / "nowhere")


def test_variants_and_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tempered = VIT.tempered()
    tempered.model.save_pretrained(tmp_path, variant="new")
    model, _ = loaded(type(tempered.model), tmp_path, variant="new")
    asked: list[Any] = []

    def snapshot(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    model.name_or_path = model.config._name_or_path = "someone/model"
    attemper.load(model)
    assert asked == [("someone/model", {"revision": None, "local_files_only": True})]
    assert torch.equal(VIT.outputs(model), VIT.outputs(tempered.model))
    (tmp_path / "model.new.safetensors").rename(tmp_path / "model.a.safetensors")
    (tmp_path / "model.b.safetensors").write_bytes(b"")
    attemper.Tempered.of(model).remove()
    with pytest.raises(UnreadableError, match=r"has several: model\.a\.safetensors, model\.b\.safetensors"):
        attemper.load(model)
