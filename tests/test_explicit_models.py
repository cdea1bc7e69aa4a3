"""Explicit dropout and Arora's form on whole models, against what hooks on the plain model see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import attemper
from attemper.methods import ExplicitDropout
from attemper.methods.explicit import linear_square, logit_square
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
P = 0.3


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def inputs_of(modules, run):
    """What goes into some modules of a plain model."""
    seen = {name: [] for name in modules}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return seen


LAYERS = {
    "timm-vit": ("qkv", "fc1"),
    "timm-swin": ("qkv", "fc1"),
    "hf-bert": ("value", "intermediate.dense"),
    "nn-encoder": ("self_attn", "linear1"),
    "timm-cait": (("qkv", ".v"), "fc1"),
}


@pytest.mark.parametrize("name", list(LAYERS))
def test_the_terms_of_a_model_are_those_of_its_layers(name):
    family = FAMILY[name]
    model, (v_names, ff_name) = build(family).train(), LAYERS[name]
    endings = {"v": v_names if isinstance(v_names, tuple) else (v_names,), "ff1": (ff_name,)}
    found = {
        component: {n: m for n, m in model.named_modules() if n.endswith(ending)}
        for component, ending in endings.items()
    }
    seen = inputs_of(found["v"] | found["ff1"], lambda: call(model, family.inputs()))
    tempered = attemper.apply(model, ExplicitDropout(v=0.3, ff1=0.7, p=P))
    call(model, family.inputs())
    rows = tempered.penalties()
    assert tempered.penalty().item() == pytest.approx(sum(row.value for row in rows), rel=1e-5)
    for component, strength in {"v": 0.3, "ff1": 0.7}.items():
        ours = [row for row in rows if row.component == component]
        assert [row.block for row in ours] == list(range(family.blocks))
        assert len(ours) == len(found[component])
        for row, (where, layer) in zip(ours, found[component].items(), strict=True):
            assert where.startswith(row.site)
            (x,) = seen[where]
            weight = layer.in_proj_weight if isinstance(layer, nn.MultiheadAttention) else layer.weight
            if component == "v" and weight.shape[0] == 3 * x.shape[-1]:
                weight = weight[-x.shape[-1] :]
            tokens = x.shape[:-1].numel()
            by_hand = strength * P**2 / 2 * (x @ weight.T).square().sum() / tokens
            assert row.value == pytest.approx(by_hand.item(), rel=1e-4), row


def test_av_is_what_goes_into_the_output_projection_without_the_bias_of_the_values():
    family = FAMILY["timm-vit"]
    model = build(family).train()
    projections = {f"blocks.{i}.attn": block.attn.proj for i, block in enumerate(model.blocks)}
    seen = inputs_of(projections, lambda: call(model, family.inputs()))
    tempered = attemper.apply(model, ExplicitDropout(av=1, p=P))
    call(model, family.inputs())
    rows = tempered.penalties()
    assert [row.site for row in rows] == list(seen)
    for row, ((x,), block) in zip(rows, zip(seen.values(), model.blocks, strict=True), strict=True):
        bias = block.attn.qkv.bias.detach().chunk(3)[2]
        by_hand = P**2 / 2 * (x - bias).square().sum() / x.shape[:-1].numel()
        assert row.value == pytest.approx(by_hand.item(), rel=1e-4)


def test_exact_av_of_a_model_follows_its_padding_mask():
    family = FAMILY["hf-bert"]
    model = build(family).train()
    inputs = family.inputs()
    own = {f"bert.encoder.layer.{i}.attention.self": l.attention.self for i, l in enumerate(model.bert.encoder.layer)}
    seen = inputs_of(own, lambda: call(model, inputs))
    tempered = attemper.apply(model, ExplicitDropout(av=1, p=P, expectation="exact"))
    call(model, inputs)
    rows = {row.site: row.value for row in tempered.penalties()}
    padding = inputs["attention_mask"][:, None, None] == 0
    for where, module in own.items():
        (x,) = seen[where]
        q, k = (split(layer(x), 3) for layer in (module.query, module.key))
        a = (q @ k.mT / 4).masked_fill(padding, -torch.inf).softmax(-1)
        w_v = module.value.weight.unflatten(0, (3, -1))
        cross = (a @ (x[:, None] @ w_v.mT)).square().sum()
        diagonal = torch.einsum("bhia,baj,hj->", a.square(), x.square(), w_v.square().sum(1))
        by_hand = (P**2 * cross + P * (1 - P) * diagonal) / (2 * x.shape[0] * x.shape[1])
        assert rows[where] == pytest.approx(by_hand.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["timm-vit", "nn-mha", "timm-cait"])
@pytest.mark.parametrize("expectation", ["paper", "exact"])
def test_biases_have_no_influence(name, expectation):
    family = FAMILY[name]
    recipe = f"explicit(q=1, k=1, v=1, av=1, expectation={expectation})"

    def values(change, part):
        model = build(family).train()
        first = next(m for m in model.modules() if isinstance(m, nn.MultiheadAttention) or hasattr(m, "qkv"))
        bias = first.in_proj_bias if isinstance(first, nn.MultiheadAttention) else first.qkv.bias
        bias.data[part] += change
        tempered = attemper.apply(model, recipe)
        call(model, family.inputs())
        return {row.component: row.value for row in tempered.penalties() if row.block == 0}

    before = values(0.0, slice(None))
    assert values(0.5, slice(96, None)) == pytest.approx(before, rel=1e-4), "the values' bias"
    after = values(0.5, slice(0, 96))  # the biases of Q and K change attention itself, and so AV
    assert {c: after[c] for c in "qkv"} == pytest.approx({c: before[c] for c in "qkv"}, rel=1e-4)


def test_cross_attention_takes_queries_and_keys_from_their_own_tokens():
    family = FAMILY["nn-decoder"]
    model = build(family).train()
    crossing = {n: m for n, m in model.named_modules() if n.endswith("multihead_attn")}
    inputs = family.inputs()
    target = inputs_of(crossing, lambda: call(model, inputs))
    tempered = attemper.apply(model, ExplicitDropout(q=1, k=1, v=1, p=P, expectation="exact"))
    call(model, inputs)
    rows = {(row.site, row.component): row.value for row in tempered.penalties()}
    assert len(rows) == 2 * 3 * 3
    for where, ((x,), layer) in {n: (target[n], m) for n, m in crossing.items()}.items():
        memory = inputs["args"][1]
        w_q, w_k, w_v = layer.in_proj_weight.chunk(3)
        for component, square, tokens in (
            ("q", logit_square(x, w_q, x @ w_q.T, memory @ w_k.T, layer.num_heads, P, "exact"), 7),
            ("k", logit_square(memory, w_k, memory @ w_k.T, x @ w_q.T, layer.num_heads, P, "exact"), 10),
            ("v", linear_square(memory, w_v, P, "exact"), 10),
        ):
            assert rows[where, component] == pytest.approx(square.item() / (2 * 2 * tokens), rel=1e-4)


@pytest.mark.parametrize("expectation", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("heads", ["per_head", "joint"])
def test_keys_that_several_query_heads_share_count_for_each_of_them(heads, expectation):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    torch.manual_seed(0)
    grouped, full = (
        transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=20, num_key_value_heads=n, **sizes)).train()
        for n in (2, 4)
    )
    state = grouped.state_dict()
    for name, value in state.items():
        if "k_proj" in name or "v_proj" in name:
            value.add_(0.1)  # biases start at zero
            state[name] = value.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    rows = []
    for model in (grouped, full):
        options = {"p": P, "heads": heads, "expectation": expectation}
        tempered = attemper.apply(model, ExplicitDropout(q=1, k=1, v=1, av=1, **options))
        model(torch.arange(10).view(2, 5))
        rows.append({(row.block, row.component): row.value for row in tempered.penalties()})
    for (block, component), value in rows[0].items():
        factor = 2 if component == "v" else 1  # the projection itself is half as large
        assert rows[1][block, component] == pytest.approx(factor * value, rel=1e-4), component


def test_ff_sets_both_layers_and_lists_set_each_block():
    family = FAMILY["timm-vit"]
    inputs = family.inputs()

    def rows(recipe):
        model = build(family).train()
        tempered = attemper.apply(model, recipe)
        call(model, inputs)
        return {(row.block, row.component): row.value for row in tempered.penalties()}

    both, single = rows("explicit(ff=0.5)"), rows("explicit(ff1=0.5, ff2=0.5)")
    assert both == single
    assert {component for _, component in both} == {"ff1", "ff2"}
    listed = rows("explicit(v=[0.1, 0, 0.3], ff2=[0, 0.5, 0])")
    constant = rows("explicit(v=1, ff2=1)")
    assert set(listed) == {(0, "v"), (2, "v"), (1, "ff2")}
    for (where, strength), value in zip(
        {(0, "v"): 0.1, (2, "v"): 0.3, (1, "ff2"): 0.5}.items(),
        (listed[0, "v"], listed[2, "v"], listed[1, "ff2"]),
        strict=True,
    ):
        assert value == pytest.approx(strength * constant[where], rel=1e-5)
    arora_rows = rows("arora(q=1, ff=[0, 1, 0])")
    assert set(arora_rows) == {(0, "q"), (1, "q"), (2, "q"), (1, "ff1"), (1, "ff2")}


@pytest.mark.parametrize("names", [("cb(position=mid)", "explicit(ff=1)"), ("ffdropout(0.3)", "arora(ff=1)")])
def test_the_order_of_a_recipe_does_not_decide_what_a_penalty_sees(names):
    family = FAMILY["timm-vit"]
    inputs, values = family.inputs(), []
    for order in (names, names[::-1]):
        model = build(family).train()
        tempered = attemper.apply(model, " + ".join(order))
        torch.manual_seed(3)
        call(model, inputs)
        values.append([row.value for row in tempered.penalties()])
    assert values[0] == pytest.approx(values[1], rel=1e-6)


class Overwriting(nn.Module):
    """A block that overwrites what its layers gave, as memory-saving code does, with or without biases."""

    def __init__(self, bias):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, bias=bias, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 24, bias=bias), nn.ReLU(inplace=True), nn.Linear(24, 16, bias=bias))

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x).mul_(0.5)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_the_products_even_if_the_model_overwrites_its_outputs(bias):
    block = Overwriting(bias).double().train()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    tempered = attemper.apply(nn.Sequential(block), ExplicitDropout(v=1, ff=1, p=P, reduction="sum"))
    tempered.model(x)
    tempered.penalty().backward()
    given = {name: parameter.grad.clone() for name, parameter in block.named_parameters() if parameter.grad is not None}
    tempered.remove()
    block.zero_grad()
    first, _, last = block.mlp
    after = x + block.attn(x, x, x, need_weights=False)[0]
    hidden = first(after).relu()
    w_v = block.attn.in_proj_weight.chunk(3)[2]
    products = (x @ w_v.T, after @ first.weight.T, hidden @ last.weight.T)
    (P * P / 2 * sum(product.square().sum() for product in products)).backward()
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(given[name], parameter.grad, atol=1e-12, rtol=1e-10)
        elif name in given:
            assert name.endswith("bias"), name
            assert given[name].abs().max() < 1e-12, f"{name} has no part in the penalty"


def test_dropconnect_does_not_change_the_weights_that_are_penalised():
    family = FAMILY["timm-vit"]
    first = {}
    for recipe in ("explicit(v=1)", "dropconnect(0.5) + explicit(v=1)"):
        model = build(family).train()
        tempered = attemper.apply(model, recipe)
        call(model, family.inputs())
        first[recipe] = tempered.penalties()[0].value
    assert first["explicit(v=1)"] == pytest.approx(first["dropconnect(0.5) + explicit(v=1)"], rel=1e-5)
