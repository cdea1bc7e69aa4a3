"""`tempered.save` and `attemper.load`: what is loaded computes what was saved, to the last bit, or says why not."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

import attemper
from attemper import Tempered
from attemper.errors import (
    AlreadyAppliedError,
    NoSiteError,
    ParameterError,
    RecipeWarning,
    UnreadableError,
    UnsavableError,
)
from attemper.files import WEIGHTS
from attemper.methods import DropKey, Method
from attemper.methods.base import Paper
from attemper.ops.perturbation import Perturbation
from attemper.recipe import as_methods, render
from attemper.tempering.records import Record, read_record
from families import build, call, family
from test_recipe import dropattentions, dropkeys

RECORD = "attemper.json"


class Tied(nn.Module):
    """A model of one's own whose head is its embedding, with strides of its own and two views that overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.turned = nn.Parameter(torch.randn(16, 16).T)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        both = torch.randn(17)
        self.register_buffer("scale", both[:16])
        self.register_buffer("shift", both[1:])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens)) @ self.turned
        out: Tensor = self.head(x * self.scale + self.shift)
        return out


def tied() -> nn.Module:
    torch.manual_seed(3)
    return Tied()


def small() -> nn.Module:
    """A model whose weights are never the same twice."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def train(model: nn.Module) -> None:
    """Move every parameter, those that methods added among them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


Case = tuple[Callable[[], nn.Module], dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {
    "timm-vit": lambda: (lambda: build(family("timm-vit")), family("timm-vit").inputs()),
    "nn-encoder": lambda: (lambda: build(family("nn-encoder")), family("nn-encoder").inputs()),
    "tied": lambda: (tied, {"args": (torch.arange(12).view(2, 6),)}),
}
RECIPES = {
    "timm-vit": [
        "cb", "cb(cb_s)", "cb(gate)", "cb(hybrid, branch=both)", "graying(dct)", "graying(svd)", "skipless(both)",
        "cb(cb_s, position=front) + dropkey(0.2, schedule=decreasing) + explicit(v=1e-3)",
    ],
    "nn-encoder": ["cb(cb_s, branch=both)", "skipless(mlp, blocks=[1])", "dropkey(0.3) + drophead(0.2)"],
    "tied": ["cb(cb_s)", "cb + dropattention(0.2)"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "recipe"), [(name, recipe) for name in RECIPES for recipe in RECIPES[name]])
def test_a_loaded_model_computes_what_the_saved_one_did(name: str, recipe: str, tmp_path: Path) -> None:
    make, inputs = MODELS[name]()
    model = make()
    tempered = attemper.apply(model, recipe)
    train(model)
    tempered.save(tmp_path / "new" / "folder")
    other = make()
    again = attemper.load(other, tmp_path / "new" / "folder")
    assert again.model is other
    assert again.methods == tempered.methods
    assert again.summary() == tempered.summary()
    assert torch.equal(call(model.eval(), inputs), call(other.eval(), inputs))
    torch.manual_seed(1)
    first = call(model.train(), inputs)
    torch.manual_seed(1)
    assert torch.equal(first, call(other.train(), inputs))
    again.remove()
    assert list(other.state_dict()) == list(make().state_dict())


def test_tied_tensors_are_in_the_file_once_and_stay_tied(tmp_path: Path) -> None:
    model = tied()
    attemper.apply(model, "cb(cb_s)").save(tmp_path)
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        names = set(file.keys())
    assert names == set(model.state_dict()) - {"head.weight"}
    other = Tied()
    attemper.load(other, tmp_path)
    assert other.head.weight is other.embed.weight
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_folder_holds_two_files_and_says_what_wrote_it(tmp_path: Path) -> None:
    attemper.apply(build(family("timm-vit")), "cb(cb_s)").save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD, WEIGHTS]
    record = json.loads((tmp_path / RECORD).read_text())
    assert record["recipe"] == "cb(cb_s)"
    assert record["versions"].keys() == {"attemper", "torch", "timm"}
    assert record["versions"]["torch"] == torch.__version__
    assert [(p["place"], p["shape"]) for p in record["parameters"]] == [(f"blocks.{i}.mlp", [48]) for i in range(3)]


# ----------------------------------------------------------------------------------------------- recipe and options
def test_every_keyword_of_apply_is_saved_and_restored(tmp_path: Path) -> None:
    keywords = {p.name: p for p in inspect.signature(attemper.apply).parameters.values() if p.kind == p.KEYWORD_ONLY}
    del keywords["mesh"]  # of the processes that run now
    other: dict[str, Any] = {"targets": "layers.1*", "impl": "reference", "auto_penalty": True}
    given_options = {name: other.get(name, True) for name in keywords}
    attemper.apply(small(), "explicit(v=1e-3)", **given_options).save(tmp_path)
    loaded = attemper.load(small(), tmp_path)
    assert loaded.control.options == {**given_options, "targets": ["layers.1*"]}
    assert loaded.control.auto_penalty
    assert {row.block for row in loaded.summary()} == {1}


def test_a_schedule_that_is_a_function_is_saved_as_its_rates(tmp_path: Path) -> None:
    tempered = attemper.apply(small(), DropKey(0.3, schedule=lambda l, blocks: (l + 1) / (4 * blocks)))
    tempered.save(tmp_path)
    loaded = attemper.load(small(), tmp_path)
    assert [row.rate for row in loaded.summary()] == [row.rate for row in tempered.summary()] == [0.125, 0.25]


def test_rates_are_saved_as_they_are_now(tmp_path: Path) -> None:
    tempered = attemper.apply(small(), "dropkey(schedule=[0.1, 0.4])")
    tempered.set_rate(0.2)
    tempered.save(tmp_path)
    assert [row.rate for row in attemper.load(small(), tmp_path).summary()] == pytest.approx([0.05, 0.2])


@dataclasses.dataclass(frozen=True)
class Unregistered(Method, Perturbation):
    name: ClassVar[str] = "unregistered"
    summary: ClassVar[str] = ""
    paper: ClassVar[Paper] = Paper("", "")


def test_a_method_that_no_recipe_can_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tempered = attemper.apply(small(), Unregistered())
    with pytest.raises(UnsavableError, match=r"'unregistered' cannot be written.*attemper\.methods"):
        tempered.save(tmp_path)
    assert not list(tmp_path.iterdir())


OTHERS = (
    "hardmask(0.1)", "blur(0.2)", "consistency(0.5)", "rdrop(1.0)", "explicit(v=0.0005)", "explicit(q=[1e-05, 0.1])",
    "arora(v=0.1)", "cb(cb_s, branch=both)", "graying(svd)", "skipless(mlp, blocks=[0, 2])", "drophead(0.1)",
    "layerdrop(0.2)", "droppath(0.1, replace=true)", "ffdropout(0.1)", "dropconnect(0.1)",
)  # fmt: skip


METHODS = [method for text in OTHERS for method in as_methods(text)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.sampled_from(METHODS) | dropkeys() | dropattentions(), max_size=4, unique_by=lambda method: method.name
    ),
    st.none() | st.lists(st.text(min_size=1), min_size=1),
    st.booleans(),
)
def test_any_recipe_goes_through_the_file_unchanged(
    methods: list[Method], targets: list[str] | None, auto: bool
) -> None:
    options = {"targets": targets, "impl": "auto", "auto_penalty": auto}
    record = Record(render(methods), options, 3, "", "", (), {"attemper": "0"}, {"b": "a"}, "00")
    defaults = {"targets": None, "impl": "auto", "auto_penalty": False}
    read = read_record(json.loads(json.dumps(record.to_dict())), "it", defaults)
    assert read == record
    assert read.methods == methods


# -------------------------------------------------------------------------------------- onto a model that is tempered
def test_a_model_with_the_same_recipe_gets_the_weights(tmp_path: Path) -> None:
    model, other = small(), small()
    attemper.apply(model, "cb(cb_s) + dropkey(0.1)").save(tmp_path)
    handle = attemper.apply(other, "dropkey(0.1) + cb(cb_s)")
    assert attemper.load(other, tmp_path).control is handle.control
    x = torch.randn(2, 5, 16)
    assert torch.equal(model.eval()(x), other.eval()(x))


@pytest.mark.parametrize(
    ("recipe", "options"), [("dropkey(0.1)", {}), ("cb + skipless(mlp)", {}), ("cb", {"targets": "layers.0*"})]
)
def test_another_architecture_is_refused_and_the_model_stays_as_it_was(
    recipe: str, options: dict[str, Any], tmp_path: Path
) -> None:
    attemper.apply(small(), "cb + dropkey(0.1)").save(tmp_path)
    model = small()
    attemper.apply(model, recipe, **options)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(AlreadyAppliedError, match=r"trained with 'cb\(cb\) \+ dropkey\(0\.1\)'.*tempered with"):
        attemper.load(model, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_recipe_for_training_is_a_warning_that_names_both(tmp_path: Path) -> None:
    model, other = small(), small()
    attemper.apply(model, "cb + dropkey(0.1)").save(tmp_path)
    attemper.apply(other, "cb + dropattention(0.3)")
    with pytest.warns(RecipeWarning, match=r"trained with 'cb\(cb\) \+ dropkey.*stays .* 'cb\(cb\) \+ dropattention"):
        loaded = attemper.load(other, tmp_path)
    assert [method.name for method in loaded.methods] == ["cb", "dropattention"]
    x = torch.randn(2, 5, 16)
    assert torch.equal(model.eval()(x), other.eval()(x))


# ------------------------------------------------------------------------------------------------- damaged and foreign
def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        record = json.loads((folder / RECORD).read_text())
        change(record)
        (folder / RECORD).write_text(json.dumps(record))

    return damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut json": (lambda f: (f / RECORD).write_text((f / RECORD).read_text()[:-30]), "no JSON, or damaged"),
    "bytes": (lambda f: (f / RECORD).write_bytes(b"\xff\xfe\x00"), "no JSON, or damaged"),
    "brackets": (lambda f: (f / RECORD).write_text("[" * 100_000), "no JSON, or damaged"),
    "a list": (lambda f: (f / RECORD).write_text("[1]"), "holds a JSON list"),
    "foreign json": (lambda f: (f / RECORD).write_text('{"name": "x"}'), "names no recipe"),
    "no json": (lambda f: (f / RECORD).unlink(), f"has no {RECORD}: it was not written"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
    "other weights": (lambda f: flip(f / WEIGHTS), "SHA-256"),
    "cut weights": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "SHA-256"),
    "no digest": (edited(lambda r: r.update(digest="")), "SHA-256"),
    "newer": (edited(lambda r: r.update(colour="red")), "does not know what it holds: colour"),
    "newer option": (edited(lambda r: r["options"].update(mode="x")), "does not know what it holds: mode"),
    "newer format": (edited(lambda r: r.update(format=2)), "format 2"),
    "unknown method": (edited(lambda r: r.update(recipe="dropkye(0.1)")), "unknown method 'dropkye'"),
    "long recipe": (edited(lambda r: r.update(recipe=f"dropkey({'9' * 5000})")), "recipe that cannot be read"),
    "missing field": (edited(lambda r: r.pop("tied")), "'tied' is missing or wrong"),
    "wrong field": (edited(lambda r: r.update(blocks="many")), "'blocks' is missing or wrong"),
    "wrong target": (edited(lambda r: r["options"].update(targets=7)), "'targets' is wrong"),
    "wrong parameter": (edited(lambda r: r["parameters"].append({"name": 1})), "no name, place or shape"),
    "other parameters": (edited(lambda r: r["parameters"].pop()), "as parameters of"),
    "other recipe": (edited(lambda r: r.update(recipe="cb", parameters=[])), "it has besides attemper.CB_LAYERS_0"),
    "other blocks": (edited(lambda r: r.update(blocks=7)), "a model of 7 blocks"),
    "other place": (edited(lambda r: r["options"].update(targets=["nowhere"])), "matches no module"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_or_foreign_is_one_line_and_leaves_the_model_alone(what: str, tmp_path: Path) -> None:
    attemper.apply(small(), "cb(cb_s) + dropkey(0.1)").save(tmp_path)
    damage, message = DAMAGE[what]
    damage(tmp_path)
    model = small()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnreadableError) as caught:
        attemper.load(model, tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(NoSiteError):
        Tempered.of(model)


def test_weights_of_another_model_do_not_fit(tmp_path: Path) -> None:
    attemper.apply(build(family("nn-encoder")), "dropkey(0.1)").save(tmp_path)
    layer = nn.TransformerEncoderLayer(48, 4, 32, dropout=0.0, batch_first=True)
    with pytest.raises(UnreadableError, match=r"does not fit this TransformerEncoder: other shapes have layers\.0"):
        attemper.load(nn.TransformerEncoder(layer, 3), tmp_path)


def test_a_folder_must_be_named_and_values_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="name the folder"):
        attemper.load(small())
    with pytest.raises(ParameterError, match="meta device"):
        attemper.load(small().to("meta"), tmp_path)
    with pytest.raises(ParameterError, match="needs a torch"):
        attemper.load("model", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UnreadableError, match=f"has no {RECORD}"):
        attemper.load(small(), tmp_path / "nowhere")


# ------------------------------------------------------------------------------------------------------ what is saved
class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def get_extra_state(self) -> Any:
        return {"epoch": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsavableError, match="'_extra_state' in the state dict is a dict"):
        attemper.apply(Extra(), "dropkey(0.1)").save(tmp_path)
    with pytest.raises(UnsavableError, match="meta device"):
        attemper.apply(small().to("meta"), "dropkey(0.1)").save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_what_was_tempered_can_be_saved(tmp_path: Path) -> None:
    whole = nn.Sequential(small())
    tempered = attemper.apply(whole[0], "cb(cb_s)")
    with pytest.raises(UnsavableError, match=r"applied to '0'.*Tempered\.of\(model\.0\)"):
        Tempered.of(whole).save(tmp_path)
    tempered.save(tmp_path)
    with pytest.raises(AlreadyAppliedError, match="the part '0' is tempered"):
        attemper.load(whole, tmp_path)
    tempered.remove()
    with pytest.raises(NoSiteError, match="not tempered any more"):
        tempered.save(tmp_path)


def test_copies_and_pickles_can_be_saved_and_none_is_a_recipe(tmp_path: Path) -> None:
    model = small()
    attemper.apply(model, "cb(cb_s)", targets="layers.0*")
    for number, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        train(other)
        Tempered.of(other).save(tmp_path / str(number))
        loaded = small()
        attemper.load(loaded, tmp_path / str(number))
        x = torch.randn(2, 5, 16)
        assert torch.equal(other.eval()(x), loaded.eval()(x))
    attemper.apply(small(), "none").save(tmp_path / "none")
    assert attemper.load(small(), tmp_path / "none").methods == ()


def test_parameters_of_modules_with_names_alike_are_two() -> None:
    first, second = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(OrderedDict([("a", nn.Sequential(first)), ("a_0", second)]))
    attemper.apply(model, "cb(cb_s)")
    assert len([name for name in model.state_dict() if name.startswith("attemper.")]) == 2
