"""PEFT's adapters before `apply` or after it: the same as on the merged model, or refused by name."""

import copy
import pickle
import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

import attemper

peft = pytest.importorskip("peft")

LAYERS = ["qkv", "attn.proj", "fc1", "fc2"]
EXPLICIT = "explicit(q=0.3, k=0.2, v=0.5, av=0.7, ff=0.4, p=0.3, expectation=exact)"
ARORA = "arora(q=0.3, k=0.2, v=0.5, ff=0.4)"
INSIDE_ATTENTION = [
    "dropkey(0.3)", "dropattention(0.3)", "hardmask(0.3)", "blur(sigma=1.0)", "drophead(0.4)", "dropconnect(0.3)",
    "droppath(0.4)", "layerdrop(0.4)", "skipless", "graying(dct, where=tokens)", "graying(dct)",
]  # fmt: skip
ON_LAYERS = ["ffdropout(0.3)", "cb", "cb(cb_s, position=mid)", "cb(cb, branch=both, position=front)"]


def vit() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=12, num_heads=2, depth=2, num_classes=3
    )
    return model.double().train()


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def adapted(model: nn.Module, **config) -> nn.Module:
    """The model with LoRA whose A and B are both other than 0."""
    torch.manual_seed(2)
    settings = {"r": 3, "target_modules": LAYERS, "init_lora_weights": False, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(**settings)).train()


def merged(**config) -> nn.Module:
    """A plain model with the weights that the adapted one has in effect, which is what it should be the same as."""
    return adapted(vit(), **config).merge_and_unload().train()


def in_order(order: str, recipe: str, make=vit, wrap=adapted, **config) -> tuple[nn.Module, attemper.Tempered]:
    """An adapted and tempered model; which came first is the question."""
    model = make()
    if order == "apply first":
        tempered = attemper.apply(model, recipe)
        return wrap(model, **config), tempered
    model = wrap(model, **config)
    return model, attemper.apply(model, recipe)


def outcome(model: nn.Module, inputs: Tensor) -> Tensor:
    torch.manual_seed(3)
    return model(inputs)


either_order = pytest.mark.parametrize("order", ["apply first", "adapters first"])

CONFIGS = {
    "lora": {},
    "rslora": {"use_rslora": True, "lora_alpha": 5},
    "bias": {"lora_bias": True},
    "some layers": {"target_modules": ["qkv", "fc2"]},
    "one block": {"target_modules": r"blocks\.1\..*(qkv|fc1)"},
}


PENALISED = [*((EXPLICIT, name) for name in CONFIGS), (ARORA, "lora"), (EXPLICIT.replace("exact", "paper"), "bias")]


@either_order
@pytest.mark.parametrize(("recipe", "name"), PENALISED)
def test_a_penalty_is_that_of_the_merged_model(order, recipe, name):
    config = CONFIGS[name]
    plain = merged(**config)
    tempered = attemper.apply(plain, recipe)
    wanted_out = outcome(plain, images())
    wanted = tempered.penalty()

    model, tempered = in_order(order, recipe, **config)
    out = outcome(model, images())
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(tempered.penalty(), wanted, rtol=1e-10, atol=0)


@either_order
def test_the_gradient_of_a_penalty_reaches_A_and_B_and_nothing_that_is_frozen(order):
    model, tempered = in_order(order, EXPLICIT)

    def penalty() -> Tensor:
        model(images())
        return tempered.penalty()

    penalty().backward()
    assert all((p.grad is not None) == ("lora_" in name) for name, p in model.named_parameters() if "blocks.0" in name)
    step = 1e-5
    for name in ("attn.qkv.lora_A", "attn.qkv.lora_B", "mlp.fc1.lora_A", "mlp.fc2.lora_B"):
        weight = model.get_submodule(f"base_model.model.blocks.1.{name}.default").weight
        with torch.no_grad():
            weight[1, 1] += step
            above = penalty()
        assert above == 0  # penalties are not taken without gradients
        above = penalty().detach()
        weight.data[1, 1] -= 2 * step
        below = penalty().detach()
        weight.data[1, 1] += step
        torch.testing.assert_close((above - below) / (2 * step), weight.grad[1, 1], rtol=1e-5, atol=1e-9)


@either_order
def test_penalties_follow_adapters_that_are_added_switched_off_and_merged(order):
    def value() -> float:
        model(images())
        return float(tempered.penalty().detach())

    def of_merged(names: list[str]) -> float:
        plain = copy.deepcopy(model).merge_and_unload(adapter_names=names).train()
        handle = attemper.Tempered.of(plain)
        plain(images())
        return float(handle.penalty().detach())

    model, tempered = in_order(order, EXPLICIT)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["qkv", "fc2"], init_lora_weights=False))
    both = ["default", "second"]
    first = value()
    model.base_model.set_adapter(both)
    assert value() == pytest.approx(of_merged(both), rel=1e-9) != pytest.approx(first)
    model.base_model.set_adapter("second")
    assert value() == pytest.approx(of_merged(["second"]), rel=1e-9)
    with model.disable_adapter():
        plain = vit()
        handle = attemper.apply(plain, EXPLICIT)
        plain(images())
        assert value() == pytest.approx(float(handle.penalty().detach()), rel=1e-9)
    model.base_model.set_adapter("default")
    model.merge_adapter()
    assert value() == pytest.approx(first, rel=1e-9)
    model.unmerge_adapter()
    assert value() == pytest.approx(first, rel=1e-9)


@either_order
@pytest.mark.parametrize("recipe", INSIDE_ATTENTION)
def test_what_acts_in_attention_and_on_blocks_does_the_same_as_on_the_merged_model(order, recipe):
    plain = merged()
    attemper.apply(plain, recipe)
    model, _ = in_order(order, recipe)
    torch.testing.assert_close(outcome(model, images()), outcome(plain, images()))
    assert not torch.equal(outcome(model, images()), outcome(adapted(vit()), images()))


@either_order
@pytest.mark.parametrize("recipe", ON_LAYERS)
def test_maps_of_tokens_act_round_the_adapters(order, recipe):
    plain = merged()
    attemper.apply(plain, recipe)
    model, tempered = in_order(order, recipe)
    wanted = outcome(plain, images())
    torch.testing.assert_close(outcome(model, images()), wanted)
    torch.testing.assert_close(outcome(pickle.loads(pickle.dumps(model)), images()), wanted)
    torch.testing.assert_close(outcome(copy.deepcopy(model).merge_and_unload().train(), images()), wanted)
    rows = [row.site for row in attemper.Tempered.of(model).summary()]
    assert len(rows) == len(set(rows))
    assert not any("base_layer" in site for site in rows)
    tempered.remove()
    assert torch.equal(outcome(model, images()), outcome(adapted(vit()), images()))


class HandMade(nn.Module):
    """An adapter that nobody knows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.more = layer, nn.Linear(layer.in_features, layer.out_features, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.more(x)


@pytest.mark.parametrize("recipe", ["ffdropout(0.3)", "cb", "arora(ff=0.1)", "explicit(v=0.1)", "dropconnect(0.1)"])
def test_a_layer_that_is_wrapped_afterwards_in_a_way_that_is_not_known_is_refused_by_name(recipe):
    model = vit()
    attemper.apply(model, recipe)
    model.blocks[0].mlp.fc2 = HandMade(model.blocks[0].mlp.fc2)
    model.blocks[0].attn.qkv = HandMade(model.blocks[0].attn.qkv)
    with pytest.raises(attemper.errors.UnmetError, match=r"'(fc2|qkv)' of 'blocks\.0\..*HandMade"):
        model(images())


@pytest.mark.parametrize("recipe", ["ffdropout(0.3)", "arora(ff=0.1)", "explicit(v=0.1)", "dropconnect(0.1)"])
def test_a_layer_that_is_taken_out_afterwards_is_refused_by_name(recipe):
    model = vit()
    attemper.apply(model, recipe)
    model.blocks[0].mlp.fc2 = nn.Linear(48, 12, dtype=torch.float64)
    model.blocks[0].attn.qkv = nn.Linear(12, 36, dtype=torch.float64)
    with pytest.raises(attemper.errors.UnmetError, match=r"blocks\.0\..*Linear"):
        model(images())
    model.eval()(images())


def test_a_map_of_tokens_below_an_adapter_is_refused_by_name_where_only_a_part_of_the_model_runs():
    model, _ = in_order("apply first", "ffdropout(0.3)", target_modules=["fc2"])
    inside = model.base_model.model.blocks[0].mlp  # the whole model is not run, and so cannot put it right
    with pytest.raises(attemper.errors.UnmetError, match=r"'fc2' of 'blocks\.0\.mlp'.*peft\.tuners\.lora.*after"):
        inside(torch.randn(2, 5, 12, dtype=torch.float64))


def test_maps_of_tokens_are_not_refused_where_only_other_layers_are_wrapped():
    model, _ = in_order("apply first", "ffdropout(0.3)", target_modules=["qkv"])
    plain = merged(target_modules=["qkv"])
    attemper.apply(plain, "ffdropout(0.3)")
    torch.testing.assert_close(outcome(model, images()), outcome(plain, images()))


def test_a_patch_embedding_is_mapped_round_its_adapter():
    config = {"target_modules": ["patch_embed.proj", "qkv"]}
    plain = merged(**config)
    attemper.apply(plain, "graying(dct)")
    model, tempered = in_order("adapters first", "graying(dct)", **config)
    torch.testing.assert_close(outcome(model, images()), outcome(plain, images()))
    assert [row.site for row in tempered.summary()] == ["base_model.model.patch_embed.proj"]
    model, tempered = in_order("apply first", "graying(dct)", **config)
    torch.testing.assert_close(outcome(model, images()), outcome(plain, images()))
    tempered.remove()  # PEFT made layers of the class that it found
    untouched = adapted(vit(), **config)
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert [list(m.__dict__) for m in model.modules()] == [list(m.__dict__) for m in untouched.modules()]


@either_order
def test_dropconnect_refuses_adapters_that_drop_their_input(order):
    model, _ = in_order(order, "dropconnect(0.3)", lora_dropout=0.1)
    with pytest.raises(attemper.errors.ConflictError, match="lora_dropout=0"):
        model(images())


@either_order
def test_penalties_look_at_the_weight_and_not_at_what_an_adapter_drops(order):
    wanted, tempered = in_order(order, "arora(v=1.0)", target_modules=r"blocks\.0\.attn\.qkv")
    wanted(images())
    model, dropping = in_order(order, "arora(v=1.0)", target_modules=r"blocks\.0\.attn\.qkv", lora_dropout=0.5)
    model(images())
    expected = next(row.value for row in tempered.penalties() if row.block == 0)
    assert next(row.value for row in dropping.penalties() if row.block == 0) == pytest.approx(expected, rel=1e-9)


OTHERS = {
    "dora": (lambda: peft.LoraConfig(r=2, target_modules=LAYERS, use_dora=True, init_lora_weights=False), "Dora"),
    "loha": (lambda: peft.LoHaConfig(r=2, target_modules=LAYERS, init_weights=False), r"peft\.tuners\.loha"),
    "lokr": (lambda: peft.LoKrConfig(r=2, target_modules=LAYERS, init_weights=False), r"peft\.tuners\.lokr"),
    "ia3": (
        lambda: peft.IA3Config(target_modules=LAYERS, feedforward_modules=["fc2"], init_ia3_weights=False),
        r"peft\.tuners\.ia3",
    ),
    "oft": (lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=LAYERS, init_weights=False), "peft.*oft"),
    "vera": (lambda: peft.VeraConfig(r=2, target_modules=["qkv", "fc1"]), r"peft\.tuners\.vera"),
    "adalora": (lambda: peft.AdaLoraConfig(init_r=2, target_r=2, total_step=9, target_modules=LAYERS), "adalora"),
}


def other(model: nn.Module, kind: str) -> nn.Module:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, OTHERS[kind][0]()).train()


@pytest.mark.parametrize("recipe", [EXPLICIT, "explicit(v=0.1)", "arora(ff=0.1)", "dropconnect(0.1)"])
@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_whose_weight_is_not_known_are_refused_by_name_where_weights_are_needed(kind, recipe):
    with pytest.raises(attemper.errors.NoSiteError, match=OTHERS[kind][1]):
        attemper.apply(other(vit(), kind), recipe)
    model = vit()
    attemper.apply(model, recipe)
    with pytest.raises(attemper.errors.UnmetError, match=OTHERS[kind][1]):
        other(model, kind)(images())


@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters_change_nothing_for_methods_that_need_no_weight(kind):
    recipe = "cb(cb, branch=both)"
    model = other(vit(), kind)
    attemper.apply(model, recipe)
    plain = other(vit(), kind).merge_and_unload().train()
    attemper.apply(plain, recipe)
    torch.testing.assert_close(model(images()), plain(images()))
    model = other(vit(), kind)
    attemper.apply(model, "dropkey(0.3) + ffdropout(0.3)")
    assert not torch.allclose(model(images()), other(vit(), kind)(images()))
    model = other(vit(), kind)
    model.merge_adapter()
    attemper.apply(model, EXPLICIT)  # what is merged is the layer's own weight
    model(images())


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model.train()


@either_order
@pytest.mark.parametrize("recipe", [EXPLICIT, ARORA, "dropkey(0.3)", "dropconnect(0.3)", "cb(cb, branch=attention)"])
def test_an_adapted_multihead_attention_is_that_of_the_merged_model(order, recipe):
    config = {"target_modules": ["self_attn", "linear1", "linear2"]}
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = adapted(encoder(), **config).merge_and_unload().train()
    tempered = attemper.apply(plain, recipe)
    wanted = outcome(plain, x), tempered.penalty()
    model, tempered = in_order(order, recipe, make=encoder, **config)
    out = outcome(model, x)
    torch.testing.assert_close(out, wanted[0])
    penalty = tempered.penalty()
    torch.testing.assert_close(penalty, wanted[1])
    if penalty.requires_grad:
        penalty.backward()
        assert model.base_model.model.layers[0].self_attn.lora_A.default.weight.grad.norm() > 0


@either_order
def test_what_is_inside_a_peft_model_can_be_tempered_by_itself(order):
    model = adapted(vit())
    tempered = attemper.apply(model.base_model.model, EXPLICIT)
    model(images())
    inner = tempered.penalty()
    model, tempered = in_order(order, EXPLICIT)
    model(images())
    torch.testing.assert_close(tempered.penalty(), inner)


TRACED = [
    ("apply first", "arora(v=0.5, ff=0.4)"),
    ("apply first", "dropconnect(0.3)"),
    ("adapters first", "ffdropout(0.3) + dropconnect(0.3)"),
    ("adapters first", EXPLICIT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "recipe"), TRACED)
def test_adapted_models_are_traced_whole(order, recipe):
    torch._dynamo.reset()
    config = {"target_modules": r"blocks\.1\..*(qkv|fc2)"}
    model, tempered = in_order(order, recipe, **config)
    wanted = outcome(model, images()), tempered.penalty()
    out = outcome(torch.compile(model.base_model.model, fullgraph=True, backend="eager"), images())
    torch.testing.assert_close(out, wanted[0])
    torch.testing.assert_close(tempered.penalty(), wanted[1])


@either_order
def test_removing_leaves_a_peft_model_as_it_was(order):
    recipe = ARORA + " + dropkey(0.1)" + (" + cb" if order == "adapters first" else "")
    model, tempered = in_order(order, recipe)
    tempered.remove()
    untouched = adapted(vit())
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert [list(m.__dict__) for m in model.modules()] == [list(m.__dict__) for m in untouched.modules()]
    assert torch.equal(outcome(model, images()), outcome(untouched, images()))


@either_order
def test_eval_mode_is_untouched(order):
    model, _ = in_order(order, EXPLICIT + " + dropconnect(0.2)")
    assert torch.equal(model.eval()(images()), adapted(vit()).eval()(images()))


def test_a_tempered_layer_that_is_copied_for_training_is_refused_by_name():
    model, _ = in_order("apply first", "arora(ff=0.1)", target_modules=["qkv"], modules_to_save=["fc2"])
    with pytest.raises(attemper.errors.UnmetError, match=r"'fc2' of 'blocks.0.mlp'.*copy"):
        model(images())
    with pytest.raises(attemper.errors.NoSiteError, match="ModulesToSaveWrapper"):
        in_order("adapters first", "arora(ff=0.1)", target_modules=["qkv"], modules_to_save=["fc2"])
