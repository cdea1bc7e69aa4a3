"""Many methods at once: which go together, how recipes name them, and that a refusal leaves the model as it was."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import AttemperError, ConflictError, NoSiteError, ParameterError, RecipeError
from attemper.methods import Blur, ExplicitDropout, Skipless
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}

NAMES = [
    "dropkey", "dropattention", "hardmask", "blur", "consistency", "rdrop", "explicit", "arora", "cb", "graying",
    "skipless", "drophead", "layerdrop", "droppath", "ffdropout", "dropconnect",
]  # fmt: skip

RECIPES = [
    "dropkey(0.2, schedule=decreasing, share=queries)",
    "dropkey(0.2, structure=block, w=3, grid=[4, 4], prefix=1)",
    "dropattention(0.1, unit=column, w=2)",
    "dropattention(0.1, rescale=normalize, detach=true)",
    "hardmask(0.3, k=7, fill=neg_inf)",
    "hardmask(0.1, schedule=[0.1, 0.2, 0.3], k=0.25)",
    "blur(2.0, w=9)",
    "blur(1.0, grid=2d, size=[4, 4], prefix=1)",
    "consistency(0.5, direction=symmetric)",
    "rdrop(0.5)",
    "explicit(q=0.001, k=0.002, v=[0.1, 0.0, 0.3], av=0.5, ff=0.005, p=0.3, expectation=exact, heads=joint)",
    "explicit(ff1=0.1, ff2=0.2, conv=0.3, reduction=literal)",
    "arora(q=0.1, k=0.2, v=0.3, ff1=[0.1, 0.2, 0.3], ff2=0.1, p=0.5, reduction=authors)",
    "cb(hybrid, branch=both, position=mid)",
    "graying(svd, eps=0.8, where=tokens, rescale=false)",
    "skipless(both, blocks=[0, 2])",
    "drophead(0.1, schedule=increasing, match=mean)",
    "layerdrop(0.25)",
    "droppath(0.1, replace=true)",
    "ffdropout(0.2, replace=true)",
    "dropconnect(0.05)",
]


# ------------------------------------------------------------------------------------------------------------- recipes
def test_there_are_sixteen_methods_in_the_order_of_the_documentation():
    assert [method.name for method in attemper.list_methods()] == NAMES
    assert {attemper.parse(recipe)[0].name for recipe in RECIPES} == set(NAMES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_parameter_is_written_as_it_is_read(recipe):
    (method,) = attemper.parse(recipe)
    assert attemper.render([method]) == recipe
    assert attemper.parse(attemper.render([method])) == [method]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("explicit", "arora")])
def test_a_bare_name_is_the_method_with_its_defaults(name):
    (method,) = attemper.parse(name)
    assert method == type(method)()
    assert attemper.parse(attemper.render([method])) == [method]


@pytest.mark.parametrize("name", ["explicit", "arora"])
def test_a_penalty_without_any_strength_is_an_error_that_shows_an_example(name):
    with pytest.raises(RecipeError, match=rf"needs the strength of at least one component.*{name}\(v=5e-4"):
        attemper.parse(name)
    with pytest.raises(RecipeError, match=f"the arguments of {name} need their names"):
        attemper.parse(f"{name}(0.1)")


def test_all_of_them_stand_in_one_recipe():
    methods = attemper.parse(" + ".join({recipe.partition("(")[0]: recipe for recipe in RECIPES}.values()))
    assert len(methods) == len(NAMES)
    assert attemper.parse(attemper.render(methods)) == methods


# ------------------------------------------------------------------------------------------------------ what is refused
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("dropkey + consistency + rdrop", "two forms of one comparison; choose one"),
        ("explicit(av=1) + dropattention(0.1, rescale=inverted)", "needs rows of attention that sum to 1"),
        ("explicit(av=1) + drophead(0.1)", "needs rows of attention that sum to 1"),
        ("explicit(av=1, expectation=exact) + dropkey(0.1)", "needs attention's own weights, and dropkey makes them"),
        ("explicit(ff=1, reduction=authors) + arora(v=1)", "reduction=(mean|authors) and .* has reduction="),
        ("skipless + droppath(0.1)", "relies on the skip connection that skipless removes"),
        ("dropkey(0.1) + dropkey(0.2)", "'dropkey' stands 2 times"),
    ],
)
def test_pairs_that_make_no_sense_are_refused_with_the_reason(recipe, reason):
    for order in (recipe, " + ".join(reversed(recipe.split(" + ")))):
        model = build(FAMILY["timm-vit"])
        before = Snapshot(model)
        with pytest.raises(ConflictError, match=reason):
            attemper.apply(model, order)
        before.check(model)


@pytest.mark.parametrize(
    "recipe",
    [
        "explicit(v=1) + dropattention(0.1, rescale=inverted)",
        "explicit(v=1) + drophead(0.1)",
        "explicit(av=1) + dropattention(0.1, rescale=normalize)",
        "skipless + layerdrop(0.1)",
        "dropkey(0.1) + dropattention(0.1)",
        "explicit(v=1) + arora(v=1)",
        "explicit(v=1, reduction=literal) + arora(v=1, reduction=literal)",
    ],
)
def test_pairs_that_do_are_not(recipe):
    model = build(FAMILY["timm-vit"]).train()
    attemper.apply(model, recipe)
    assert call(model, FAMILY["timm-vit"].inputs()).isfinite().all()


def test_a_penalty_on_av_refuses_attention_dropout_of_the_models_own():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).train()
    tempered = attemper.apply(model, "explicit(av=1)")
    with pytest.raises(ConflictError, match=r"'layers.0.self_attn' has attention dropout of its own \(0.2\)"):
        model(torch.randn(2, 5, 16))
    tempered.remove()
    attemper.apply(model, "explicit(v=1)")
    model(torch.randn(2, 5, 16))


# --------------------------------------------------------------------------------------------------------- all at once
STOCHASTIC = (
    "dropkey(0.1) + dropattention(0.1) + hardmask(0.2, k=3) + blur(0.5) + drophead(0.1) + layerdrop(0.2) + "
    "ffdropout(0.1) + dropconnect(0.1)"
)
ARCHITECTURE = "cb(cb_s, branch=both) + graying(svd)"
EVERYTHING = [
    f"{STOCHASTIC} + droppath(0.2) + explicit(v=0.1, ff=0.1) + arora(q=0.1) + rdrop(0.5) + {ARCHITECTURE}",
    f"{STOCHASTIC} + explicit(q=0.1, expectation=exact) + consistency(0.5) + {ARCHITECTURE} + skipless(blocks=1)",
]


@pytest.mark.parametrize("recipe", EVERYTHING)
def test_many_methods_at_once_repeat_themselves_under_the_same_seed(recipe):
    family = FAMILY["timm-vit"]
    inputs = family.inputs()

    def run(seed):
        model = build(family).train()
        tempered = attemper.apply(model, recipe)
        torch.manual_seed(seed)
        loss = tempered.loss(lambda: call(model, inputs), lambda out: out.square().mean())
        loss.backward()
        return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}

    (first, grads), (again, same), (other, _) = run(0), run(0), run(1)
    assert first == again
    assert first != other
    assert all(torch.equal(grads[name], same[name]) for name in grads)
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("recipe", EVERYTHING)
def test_in_evaluation_the_architecture_is_all_that_is_left(recipe):
    family = FAMILY["timm-vit"]
    model, architecture, plain = (build(family).eval() for _ in range(3))
    tempered = attemper.apply(model, recipe)
    parts = [method for method in tempered.methods if method.name in ("cb", "graying", "skipless")]
    attemper.apply(architecture, parts)
    assert torch.equal(call(model, family.inputs()), call(architecture, family.inputs()))
    assert not torch.allclose(call(model, family.inputs()), call(plain, family.inputs()), atol=1e-4)
    assert tempered.penalties() == []
    tempered.remove()
    assert torch.equal(call(model, family.inputs()), call(plain, family.inputs()))


def test_remove_after_everything_leaves_no_trace():
    model = build(FAMILY["timm-vit"])
    before = Snapshot(model)
    for recipe in EVERYTHING:
        tempered = attemper.apply(model, recipe)
        call(model.train(), FAMILY["timm-vit"].inputs())
        tempered.remove()
        before.check(model)


# ----------------------------------------------------------------------------------------------------------- bad input
class Snapshot:
    """Classes, attributes, parameters and plain values of every module."""

    def __init__(self, model):
        self.modules = self.look(model)
        self.state = {key: value.clone() for key, value in model.state_dict().items()}

    @staticmethod
    def look(model):
        return {
            name: (
                type(module),
                list(module.__dict__),
                list(module._modules),
                {k: v for k, v in module.__dict__.items() if isinstance(v, int | float | str)} | {"training": None},
            )
            for name, module in model.named_modules()
        }

    def check(self, model):
        assert self.look(model) == self.modules
        assert list(model.state_dict()) == list(self.state)
        assert all(torch.equal(value, self.state[key]) for key, value in model.state_dict().items())


class Odd(nn.Module):
    """An attention whose projections have names that nobody expects."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x)[:, None] for layer in (self.alpha, self.beta, self.gamma))
        return nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


class OddModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Odd(), Odd()])

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


BAD = [
    ("timm-vit", "blur(1.0, w=4)", RecipeError, "w must be an odd integer of at least 1, got 4"),
    ("timm-vit", "graying(eps=0)", RecipeError, r"eps must be a number in \(0, 1\], got 0"),
    ("timm-vit", "graying(svd, eps=1.5)", RecipeError, r"eps must be a number in \(0, 1\], got 1.5"),
    ("timm-vit", "hardmask(0.1, k=0)", RecipeError, "k must be an integer of at least 1"),
    ("timm-vit-registers", "cb(gate)", NoSiteError, "needs a class token"),
    ("nn-encoder", "cb(hybrid)", NoSiteError, "needs a class token"),
    ("hf-bert", "graying", NoSiteError, "patch embedding"),
    ("timm-vit", "explicit(v=[0.1, 0.2])", ParameterError, "v of explicit.*the model has 3 blocks, the list has 2"),
    ("timm-vit", "arora(ff=[0.1, 0.2, 0.3, 0.4])", ParameterError, "the model has 3 blocks, the list has 4"),
    ("timm-vit", "explicit(v=nan)", RecipeError, "v must be a number of at least 0, got 'nan'"),
    ("timm-vit", ExplicitDropout, ParameterError, "needs the strength of at least one component"),
    ("timm-vit", "consistency(1.0)", ConflictError, "compares stochastic passes"),
    ("timm-vit", "cb + rdrop(1.0)", ConflictError, "compares stochastic passes"),
    ("timm-vit", "skipless(attention, blocks=[7])", ParameterError, "there is no block 7"),
    ("timm-vit", "dropkey(0.1, schedule=[0.1, 0.2])", ParameterError, "the model has 3 blocks"),
    ("nn-encoder", "blur(1.0, grid=2d)", ParameterError, "grid=2d needs the keys to lie on an image grid"),
    ("nn-mha", "ffdropout(0.1)", NoSiteError, "acts on feed-forward networks"),
    ("nn-mha", "explicit(ff=1)", NoSiteError, "acts on feed-forward networks"),
    ("nn-mha", "explicit(v=1, ff=1)", NoSiteError, "acts on feed-forward networks"),
    ("nn-mha", "explicit(conv=1)", NoSiteError, "acts on convolutions"),
    ("nn-mha", "explicit(v=1, conv=1)", NoSiteError, "acts on convolutions"),
    ("odd", "explicit(v=1)", NoSiteError, r"explicit needs the Q, K and V projections of 'blocks.0' \(Odd\)"),
    ("odd", "arora(q=1)", NoSiteError, r"arora needs the Q, K and V projections of 'blocks.0' \(Odd\)"),
    ("odd", "dropconnect(0.1)", NoSiteError, r"dropconnect needs the Q, K and V projections of 'blocks.0' \(Odd\)"),
    ("timm-vit", "dropkye(0.1)", RecipeError, "Did you mean 'dropkey'"),
]


@pytest.mark.parametrize(("name", "recipe", "error", "message"), BAD)
def test_bad_input_is_told_and_leaves_the_model_exactly_as_it_was(name, recipe, error, message):
    model = OddModel() if name == "odd" else build(FAMILY[name])
    before = Snapshot(model)
    with pytest.raises(error, match=message) as caught:
        attemper.apply(model, recipe if isinstance(recipe, str) else recipe())
    assert isinstance(caught.value, AttemperError)
    before.check(model)


def goes_behind(case):
    name, recipe, *_ = case
    other = ("rdrop", "consistency", "skipless", "ffdropout")
    return isinstance(recipe, str) and name not in ("odd", "nn-mha") and not any(word in recipe for word in other)


@pytest.mark.parametrize(("name", "recipe", "error", "message"), [case for case in BAD if goes_behind(case)])
def test_a_bad_method_behind_good_ones_leaves_it_so_too(name, recipe, error, message):
    model = build(FAMILY[name])
    before = Snapshot(model)
    good = "ffdropout(0.1, replace=true)" if recipe.startswith("cb") else "cb(cb_s) + droppath(0.1, replace=true)"
    with pytest.raises(error, match=message):
        attemper.apply(model, f"{good} + {recipe}")
    before.check(model)


def test_methods_are_values():
    assert ExplicitDropout(v=1) == ExplicitDropout(v=1.0)
    assert hash(Skipless(blocks=[0, 1])) == hash(Skipless(blocks=(0, 1)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Blur().sigma = 2.0
    assert copy.deepcopy(Blur(2.0, w=7)) == Blur(2.0, w=7)


@pytest.mark.parametrize(
    "recipe", ["dropkey(0.2) + layerdrop(0.3)", pytest.param("blur + droppath(0.2)", marks=pytest.mark.slow)]
)
def test_methods_on_attention_and_on_blocks_compile_together(recipe):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 16)
    attemper.apply(model, recipe)
    outputs = []
    for run in (model, torch.compile(model, backend="eager", fullgraph=True)):
        torch.manual_seed(0)
        outputs.append(run(x))
    torch.testing.assert_close(*outputs)
