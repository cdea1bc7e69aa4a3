"""Targets for attention, feed-forward networks and blocks apart; and globs that match feed-forward networks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, ParameterError
from families import family
from plain_blocks import WIDTH, Attention, Mlp, tokens

RECIPE = "dropkey(0.5) + cb"


class Parts(nn.Module):
    """Blocks as lists of parts, as vit-pytorch has them: none of their names says what they are."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.ModuleList([Attention(), Mlp()]) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for attend, feed in self.layers:
            x = attend(x) + x
            x = feed(x) + x
        return x


def sites(handle: attemper.Tempered) -> dict[str, list[str]]:
    """Method → where it acts."""
    found: dict[str, list[str]] = {}
    for row in handle.summary():
        found.setdefault(row.method, []).append(row.site)
    return found


@pytest.mark.parametrize(
    "targets",
    [
        ["layers.1.0", "layers.1.1"], ["layers.1.0", "layers.1.*.*", "layers.1.1"], ["layers.1"],
        "layers.1*", ["layers.1.1", "layers.1"],
        {"attention": "layers.1", "mlp": "layers.1"}, {"attention": ["*.1.0"], "mlp": ["layers.1.1"]},
    ],
    ids=str,
)  # fmt: skip
def test_attention_and_feed_forward_networks_are_chosen_together(targets: object) -> None:
    model = Parts().train()
    found = sites(attemper.apply(model, RECIPE, targets=targets))
    assert found["dropkey"] == ["layers.1.0"]
    assert {name.partition(".fc")[0] for name in found["cb"]} == {"layers.1.1"}
    model(tokens())


def test_what_a_mapping_does_not_name_is_tempered_everywhere() -> None:
    model = Parts().train()
    found = sites(attemper.apply(model, RECIPE, targets={"mlp": "layers.2"}))
    assert found["dropkey"] == [f"layers.{i}.0" for i in range(3)]
    assert {name.partition(".fc")[0] for name in found["cb"]} == {"layers.2.1"}
    model(tokens())


def test_blocks_are_chosen_apart() -> None:
    model = attemper.apply(
        family("timm-vit").build(), "droppath(0.3) + cb", targets={"blocks": ["blocks.0", "blocks.2"]}
    )
    found = sites(model)
    assert set(found["droppath"]) == {"blocks.0", "blocks.2"}
    assert len(found["cb"]) == 3


class Named(nn.Module):
    """A feed-forward network whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


class WithNamed(Parts):
    def __init__(self) -> None:
        super().__init__(2)
        for layer in self.layers:
            layer[1] = Named()


def test_a_feed_forward_network_of_ones_own_is_known_where_it_is_named() -> None:
    with pytest.raises(NoSiteError, match="feed-forward networks"):
        attemper.apply(WithNamed(), "cb")
    model = WithNamed().train()
    found = sites(attemper.apply(model, "dropkey(0.1) + cb", targets={"mlp": "layers.*.1"}))
    assert found["dropkey"] == ["layers.0.0", "layers.1.0"]
    assert len(found["cb"]) == 2
    model(tokens())


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        ({}, ParameterError, "targets is empty; it must name some of attention, mlp, blocks"),
        ([], ParameterError, "targets is empty: nothing would be tempered"),
        ({"mlp": []}, ParameterError, r"targets\['mlp'\] is empty"),
        ({"mlps": ["a"]}, ParameterError, r"got 'mlps'\. Did you mean 'mlp'\?"),
        ({3: ["a"]}, ParameterError, "got 3"),
        (7, ParameterError, r"targets must be globs on module names.*got 7"),
        ([7], ParameterError, r"targets must be globs.*got \[7\]"),
        ({"attention": 7}, ParameterError, r"targets\['attention'\] must be globs.*got 7"),
        ({"mlp": ["nowhere.*"]}, NoSiteError, r"'nowhere\.\*' matches no module"),
        ({"attention": ["nowhere"], "mlp": ["layers.0.1"]}, NoSiteError, "'nowhere' matches no module"),
        ({"mlp": ["layers.*.0"]}, NoSiteError, r"'layers\.\*\.0' matches 3 modules \(Attention\), and no feed-forward"),
        ({"blocks": ["layers.*.0"]}, NoSiteError, r"'layers\.\*\.0' matches 3 modules.*and no block"),
        (["layers.*.1"], NoSiteError, "'dropkey.*has none that is recognised among the modules that targets= chooses"),
    ],
    ids=str,
)
def test_wrong_targets_are_named_and_leave_the_model_alone(targets: object, error: type, message: str) -> None:
    model = Parts()
    with pytest.raises(error, match=message):
        attemper.apply(model, RECIPE, targets=targets)
    assert type(model) is Parts
    assert not any("_attemper" in vars(module) for module in model.modules())


def test_a_module_that_is_named_as_attention_is_taken_at_its_word() -> None:
    model = Parts().train()
    attemper.apply(model, "dropkey(0.5)", targets={"attention": ["layers.0.1"]})
    with pytest.raises(attemper.errors.UnmetError, match=r"'layers\.0\.1' \(Mlp\).*no softmax"):
        model(tokens())


def test_targets_of_every_kind_survive_saving(tmp_path) -> None:
    given = {"attention": "layers.1*", "mlp": ("layers.0*", "layers.2*")}
    model = Parts()
    attemper.apply(model, "dropkey(0.5) + cb(cb_s)", targets=given).save(tmp_path)
    kept = {"attention": ["layers.1*"], "mlp": ["layers.0*", "layers.2*"]}
    record = next(file for file in tmp_path.iterdir() if file.suffix == ".json")
    assert json.loads(record.read_text())["options"]["targets"] == kept
    loaded = attemper.load(Parts(), tmp_path)
    assert loaded.control.options["targets"] == kept
    assert sites(loaded) == sites(attemper.Tempered.of(model))
    other = Parts()
    attemper.apply(other, "dropkey(0.5) + cb(cb_s)")
    with pytest.raises(attemper.errors.AlreadyAppliedError, match=r"on attention: layers\.1\*; mlp: layers\.0\*"):
        attemper.load(other, tmp_path)


def test_a_config_of_transformers_names_targets_of_every_kind(tmp_path) -> None:
    from transformers import ViTForImageClassification

    model = family("hf-vit").build()
    attemper.apply(model, "cb", targets={"mlp": ["vit.layers.0*"]})
    model.save_pretrained(tmp_path)
    loaded = ViTForImageClassification.from_pretrained(tmp_path)
    handle = attemper.load(loaded)
    assert handle.control.options["targets"] == {"mlp": ["vit.layers.0*"]}
    base = attemper.load(loaded.vit.__class__.from_pretrained(tmp_path))
    assert base.control.options["targets"] == {"mlp": ["layers.0*"]}
