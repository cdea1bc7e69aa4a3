"""How penalties are collected: once per forward pass, whatever runs the pass, and by loops that cannot be changed."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.errors import ConflictError, UnmetError
from attemper.tempering.attention import AttentionAction
from attemper.tempering.subclassing import is_tempered, state_of
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
RECIPE = "explicit(q=0.3, v=0.2, av=0.1, ff=0.4)"


def encoder(layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).train()


def tokens(seed=0):
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same(given, expected, tolerance=1e-6):
    assert given.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(given[name], expected[name], atol=tolerance, rtol=1e-5, msg=lambda m, n=name: n + m)


def step(model, tempered, run=None):
    """Penalty, rows and gradients of one training step."""
    model.zero_grad()
    out = (model if run is None else run)(tokens())
    penalty = tempered.penalty()
    (out.square().mean() + penalty).backward()
    rows = [(row.block, row.component, row.value) for row in tempered.penalties()]
    return penalty.item(), rows, gradients(model)


@pytest.fixture(scope="module")
def plain_step():
    model = encoder()
    return step(model, attemper.apply(model, RECIPE))


# -------------------------------------------------------------------------------------------------- the ledger itself
def test_penalty_is_the_sum_of_the_rows_and_clears_them():
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    model(tokens())
    rows = tempered.penalties()
    first = tempered.penalty()
    assert first.item() == pytest.approx(sum(row.value for row in rows), rel=1e-6)
    assert first.item() > 0
    assert tempered.penalties() == rows, "those taken last stay readable"
    assert tempered.penalty().item() == 0.0


@pytest.mark.parametrize("recipe", [RECIPE, f"dropkey(0.3) + consistency(0.5) + {RECIPE}"])
@pytest.mark.parametrize("share", [0.25, torch.tensor(0.25), lambda: 0.25])
def test_a_share_scales_what_methods_add_and_nothing_else(recipe, share):
    """A loop that gives its loss the factor itself gets the whole at that factor."""
    found = []
    for scaled in (True, False):
        model = encoder()
        tempered = attemper.apply(model, recipe)
        torch.manual_seed(1)
        task = 0.25 if scaled else 1.0
        loss = tempered.loss(
            lambda m=model: m(tokens()), lambda out, f=task: f * out.square().mean(), share=share if scaled else 1.0
        )
        (loss if scaled else 0.25 * loss).backward()
        found.append(gradients(model))
    assert_same(*found)


def test_under_auto_penalty_the_rows_of_the_last_pass_stay_readable():
    model, twin = encoder(), encoder()
    tempered, by_hand = attemper.apply(model, RECIPE, auto_penalty=True), attemper.apply(twin, RECIPE)
    tempered.loss_scale = 1.0
    model(tokens()).square().mean().backward()
    twin(tokens())
    assert [(row.component, row.value) for row in tempered.penalties()] == [
        (row.component, row.value) for row in by_hand.penalties()
    ]


def test_rows_tell_block_and_component():
    model = encoder()
    tempered = attemper.apply(model, "explicit(q=1, ff=1) + arora(v=1)")
    model(tokens())
    rows = [(row.block, row.method, row.component, row.site) for row in tempered.penalties()]
    for block in range(2):
        site = f"layers.{block}"
        assert sorted(row for row in rows if row[0] == block) == [
            (block, "arora", "v", f"{site}.self_attn"),
            (block, "explicit", "ff1", site),
            (block, "explicit", "ff2", site),
            (block, "explicit", "q", f"{site}.self_attn"),
        ]


def test_gradients_are_those_of_a_loss_written_by_hand():
    model = encoder(1)
    by_hand, layer = copy.deepcopy(model), model.layers[0]
    tempered = attemper.apply(model, "explicit(v=0.3, ff1=0.5, p=0.2)")
    (model(tokens()).square().mean() + tempered.penalty()).backward()

    x, layer = tokens(), by_hand.layers[0]
    attended = layer.norm1(x + layer.self_attn(x, x, x)[0])
    v, ff = x @ layer.self_attn.in_proj_weight[32:].T, attended @ layer.linear1.weight.T
    penalty = 0.2**2 / 2 / 10 * (0.3 * v.square().sum() + 0.5 * ff.square().sum())
    (by_hand(x).square().mean() + penalty).backward()
    assert_same(gradients(model), gradients(by_hand))


@pytest.mark.parametrize("family", ["timm-vit", "timm-swin", "hf-bert", "hf-pvt", "torchvision-swin"])
def test_every_parameter_under_a_penalty_gets_its_gradient(family):
    model = build(FAMILY[family]).train()
    tempered = attemper.apply(model, "explicit(q=1, k=1, v=1, av=1, ff=1)")
    call(model, FAMILY[family].inputs())
    tempered.penalty().backward()
    for site in {row.site for row in tempered.penalties()}:
        module = model.get_submodule(site)
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters()), site


def test_a_block_whose_strengths_are_zero_is_left_alone():
    model = encoder(3)
    attemper.apply(model, "explicit(v=[0, 1, 0], ff=[0, 0, 1])")
    touched = {name for name, module in model.named_modules() if is_tempered(module)}
    assert touched == {"", "layers.1.self_attn", "layers.2.linear1", "layers.2.linear2"}


def test_without_a_penalty_nothing_is_collected_and_the_penalty_is_zero():
    model = encoder()
    tempered = attemper.apply(model, "dropkey(0.1)")
    model(tokens())
    assert tempered.penalties() == []
    assert tempered.penalty().item() == 0.0


def test_no_grad_eval_and_disabled_collect_nothing():
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    with torch.no_grad():
        model(tokens())
    model.eval()
    model(tokens())
    model.train()
    with tempered.disabled():
        model(tokens())
    assert tempered.penalties() == []


def test_a_penalty_leaves_the_output_as_it_is():
    for name in ("timm-vit", "timm-cait", "nn-encoder", "hf-bert"):
        model = build(FAMILY[name]).train()
        before = call(model, FAMILY[name].inputs())
        attemper.apply(model, "explicit(q=1, k=1, v=1, av=1, ff=1, expectation=exact)")
        torch.testing.assert_close(call(model, FAMILY[name].inputs()), before, atol=1e-6, rtol=1e-5)


# ------------------------------------------------------------------------------------------- once, whatever runs it
class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant=False):
        super().__init__()
        self.layers = inner.layers
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("expectation", ["paper", "exact"])
def test_once_under_activation_checkpointing(expectation):
    recipe = RECIPE.replace(")", f", expectation={expectation})")
    plain, model = encoder(), Checkpointed(encoder())
    expected = step(plain, attemper.apply(plain, recipe))
    tempered = attemper.apply(model, recipe)
    penalty, rows, grads = step(model, tempered)
    assert rows == expected[1]
    assert penalty == pytest.approx(expected[0])
    assert_same(grads, expected[2])
    assert tempered.penalty().item() == 0.0, "the recomputed pass counts nothing"


def test_reentrant_checkpointing_is_an_error_and_not_silence():
    model = Checkpointed(encoder(), reentrant=True)
    attemper.apply(model, RECIPE)
    out = model(tokens().requires_grad_())
    with pytest.raises(UnmetError, match=r"'layers.1.* is checkpointed with use_reentrant=True.*use_reentrant=False"):
        out.sum().backward()


def test_once_per_comparison_under_activation_checkpointing():
    model = Checkpointed(encoder())
    tempered = attemper.apply(model, RECIPE + " + dropkey(0.3) + rdrop(0.5)")
    tempered.loss(lambda: model(tokens()), lambda out: out.square().mean()).backward()
    assert len(tempered.penalties()) == 10
    assert tempered.penalty().item() == 0.0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_once_under_compilation(plain_step):
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    penalty, rows, grads = step(model, tempered, torch.compile(model, backend="aot_eager", fullgraph=True))
    assert penalty == pytest.approx(plain_step[0], rel=1e-6)
    assert [row[:2] for row in rows] == [row[:2] for row in plain_step[1]]
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in plain_step[1]], rel=1e-5)
    assert_same(grads, plain_step[2])


def test_once_under_compilation_of_checkpointed_layers(plain_step):
    model = Checkpointed(encoder())
    tempered = attemper.apply(model, RECIPE)
    penalty, rows, grads = step(model, tempered, torch.compile(model, backend="aot_eager"))
    assert penalty == pytest.approx(plain_step[0], rel=1e-6)
    assert [row[2] for row in rows] == pytest.approx([row[2] for row in plain_step[1]], rel=1e-5)
    assert_same(grads, plain_step[2])
    assert tempered.penalty().item() == 0.0


def test_gradient_accumulation_adds_up(plain_step):
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    for half in tokens().chunk(2):  # the mean over samples: two halves of one batch, each at half its weight
        ((model(half).square().mean() + tempered.penalty()) / 2).backward()
    assert_same(gradients(model), plain_step[2])


def test_two_forward_passes_count_twice():
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    values = []
    for seed in (0, 1):
        model(tokens(seed))
        values.append(tempered.penalty().item())
    model(tokens(0))
    model(tokens(1))
    assert tempered.penalty().item() == pytest.approx(sum(values), rel=1e-6)


class Shared(nn.Module):
    """The same layer twice in one pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([encoder(1).layers[0]])

    def forward(self, x):
        return self.layers[0](self.layers[0](x))


def test_a_shared_layer_counts_each_of_its_uses():
    model = Shared().train()
    tempered = attemper.apply(model, RECIPE)
    out = model.layers[0](tokens())
    first = tempered.penalty()
    out = model.layers[0](model.layers[0](tokens()))
    both = tempered.penalty()
    second = both - first
    out = model(tokens())
    assert out.requires_grad, "penalties live as long as the output"
    assert [row.component for row in tempered.penalties()] == 2 * [r.component for r in tempered.penalties()][:5]
    assert tempered.penalty().item() == pytest.approx((first + second).item(), rel=1e-6)
    assert second.item() > 0


# -------------------------------------------------------------------------------------------------------- auto_penalty
def trained_by_hand(model, recipe, batches, accumulate=1, rate=0.1):
    """The weights after one step of a plain loop."""
    tempered = attemper.apply(model, recipe)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in batches:
        (tempered.loss(lambda b=batch: model(**b), lambda out: out.loss) / accumulate).backward()
    optimiser.step()
    tempered.remove()
    return model.state_dict()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", ["explicit(v=0.3, av=0.2, ff=0.4)", "explicit(q=0.3) + dropkey(0.2)"])
def test_a_real_trainer_takes_the_same_step_as_a_plain_loop(tmp_path, accumulate, recipe):
    import transformers

    model = build(FAMILY["hf-vit"])
    model.config.problem_type = "single_label_classification"
    generator = torch.Generator().manual_seed(4)
    data = [
        {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": torch.tensor(i % 2)}
        for i in range(2 * accumulate)
    ]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        max_steps=1,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    model.register_forward_pre_hook(lambda *_: torch.manual_seed(8) and None)  # the same masks in both loops
    before, twin = copy.deepcopy(model.state_dict()), copy.deepcopy(model).train()
    tempered = attemper.apply(model, recipe, auto_penalty=True)
    transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    tempered.remove()
    batches = [
        {name: torch.stack([row[name] for row in data[i : i + 2]]) for name in data[0]} for i in range(0, len(data), 2)
    ]
    expected = trained_by_hand(twin, recipe, batches, accumulate)
    assert_same(model.state_dict(), expected, 1e-5)
    assert not torch.equal(expected["classifier.weight"], before["classifier.weight"])


def test_a_tempered_model_shows_the_signature_that_trainers_ask_for():
    model = build(FAMILY["hf-vit"])
    before = inspect.signature(model.forward)
    attemper.apply(model, RECIPE, auto_penalty=True)
    assert inspect.signature(model.forward) == before


@pytest.mark.parametrize("scale", [0.5, lambda: 0.5], ids=["number", "function"])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_an_output_without_a_loss_carries_the_gradient_of_the_scaled_penalty(kind, scale):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = encoder()

        def forward(self, x):
            out = self.inner(x)
            return {"tensor": out, "tuple": (out, "more"), "dict": {"logits": out, "other": None}}[kind]

    def only(out):
        return out if kind == "tensor" else out[0] if kind == "tuple" else out["logits"]

    model, by_hand = Wrapped().train(), Wrapped().train()
    tempered = attemper.apply(model, RECIPE, auto_penalty=True)
    tempered.loss_scale = scale
    expected = attemper.apply(by_hand, RECIPE)
    for seed in (0, 1):  # gradient accumulation: every loss is halved
        (only(model(tokens(seed))).square().mean() / 2).backward()
        ((only(by_hand(tokens(seed))).square().mean() + expected.penalty()) / 2).backward()
    assert_same(gradients(model), gradients(by_hand))
    assert tempered.penalty().item() == 0.0, "auto_penalty has taken it"


def test_auto_penalty_leaves_outputs_and_evaluation_as_they_are():
    model = encoder()
    plain = copy.deepcopy(model)
    attemper.apply(model, RECIPE, auto_penalty=True)
    torch.testing.assert_close(model(tokens()), plain(tokens()), atol=1e-6, rtol=1e-5)
    assert torch.equal(model.eval()(tokens()), plain.eval()(tokens()))


def test_auto_penalty_changes_nothing_where_the_output_needs_no_gradient():
    model = encoder()
    attemper.apply(model, RECIPE, auto_penalty=True)
    with torch.no_grad():
        assert not model(tokens()).requires_grad


def test_auto_penalty_refuses_a_comparison_of_two_passes():
    model = encoder()
    with pytest.raises(ConflictError, match=r"auto_penalty cannot serve.*tempered\.loss\(forward, criterion\)"):
        attemper.apply(model, RECIPE + " + dropkey(0.1) + consistency(1.0)", auto_penalty=True)
    assert not any(is_tempered(module) for module in model.modules())


def test_penalties_do_not_travel_with_a_copy():
    model = encoder()
    tempered = attemper.apply(model, RECIPE)
    model(tokens())
    twin = copy.deepcopy(model)
    assert attemper.Tempered.of(twin).penalties() == []
    twin(tokens(1))
    assert len(attemper.Tempered.of(twin).penalties()) == len(tempered.penalties()) == 10
    action = next(a for a in state_of(twin.layers[0].self_attn).actions if isinstance(a, AttentionAction))
    assert action.control is attemper.Tempered.of(twin).control is not tempered.control
