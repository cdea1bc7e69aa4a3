"""Explicit dropout on the convolutions of whole models: which it acts on, as which component, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import NoSiteError, ParameterError, UnmetError
from attemper.tempering.subclassing import is_tempered
from attemper.tempering.trial import try_out
from convolved import EXPECTATIONS, P, by_matrix
from families import FAMILIES, build


class Residual(nn.Module):
    """A small residual network without attention: a stem, a block with a strided shortcut, a head."""

    def __init__(self, conv=nn.Conv2d):
        super().__init__()
        self.stem = conv(3, 4, 3, padding=1)
        self.conv1, self.conv2 = conv(4, 8, 3, stride=2, padding=1, bias=False), conv(8, 8, 3, padding=1, groups=8)
        self.shortcut = conv(4, 8, 1, stride=2)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.stem(x), inplace=True)
        x = self.shortcut(x) + self.conv2(F.relu(self.norm(self.conv1(x))))
        return self.head(x.mean((2, 3)))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rows(model, recipe, x=IMAGES, **options):
    tempered = attemper.apply(model.train(), recipe, **options)
    try:
        model(x)
        return {(row.site, row.component): row.value for row in tempered.penalties()}
    finally:
        tempered.remove()


@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_every_convolution_of_a_model_has_its_term_and_backward_its_gradient(expectation):
    torch.manual_seed(0)
    model, x = Residual().double().train(), IMAGES.double()
    named = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    inputs: dict[str, torch.Tensor] = {}
    for name, module in named.items():
        module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].clone()}))
    tempered = attemper.apply(model, f"explicit(conv=0.7, p={P}, expectation={expectation})")
    model(x)
    penalty, run = tempered.penalty(), dict(inputs)
    assert [row.site for row in tempered.penalties()] == ["stem", "shortcut", "conv1", "conv2"]
    tempered.remove()
    positions = {"stem": 64, "shortcut": 16, "conv1": 16, "conv2": 16}
    squares = {name: by_matrix(named[name], each, expectation) for name, each in run.items()}
    wanted = sum(0.7 * square / (2 * len(x) * positions[name]) for name, square in squares.items())
    torch.testing.assert_close(penalty, wanted, rtol=1e-10, atol=0.0)
    weights = [module.weight for module in named.values()]
    ours = torch.autograd.grad(penalty, weights, retain_graph=True)
    for one, other in zip(ours, torch.autograd.grad(wanted, weights), strict=True):
        assert (one - other).abs().max() <= 1e-10 * penalty.detach()


def test_a_list_has_one_strength_per_convolution_in_a_model_without_blocks():
    model = Residual()
    one, listed = rows(model, "explicit(conv=1)"), rows(model, "explicit(conv=[0, 1, 2, 3])")
    order = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    assert order == ["stem", "conv1", "conv2", "shortcut"]
    for strength, name in zip((1, 2, 3), order[1:], strict=True):
        assert listed[name, "conv"] == pytest.approx(strength * one[name, "conv"], rel=1e-6)
    assert ("stem", "conv") not in listed
    with pytest.raises(ParameterError, match="one value per convolution: the model has 4 convolutions, the list has 2"):
        attemper.apply(model, "explicit(conv=[1, 2])")


def convolutional_vit(**options):
    from timm.models.pvt_v2 import PyramidVisionTransformerV2

    torch.manual_seed(0)
    return PyramidVisionTransformerV2(
        embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2), sr_ratios=(2, 1), mlp_ratios=(2, 2),
        num_classes=5, **options,
    )  # fmt: skip


def test_in_a_model_with_blocks_a_list_has_one_strength_per_block_and_stems_go_with_the_next_one():
    model, x = convolutional_vit(), torch.randn(2, 3, 32, 32)
    tempered = attemper.apply(model.train(), "explicit(conv=[1, 2, 4])")
    model(x)
    blocks = {row.site: row.block for row in tempered.penalties()}
    tempered.remove()
    assert blocks == {
        "patch_embed.proj": 0,
        "stages.0.blocks.0.attn.sr": 0,
        "stages.0.blocks.0.mlp.dwconv": 0,
        "stages.1.downsample.proj": 1,
        "stages.1.blocks.0.mlp.dwconv": 1,
        "stages.1.blocks.1.mlp.dwconv": 2,
    }
    with pytest.raises(ParameterError, match="conv of explicit must have one value per block: the model has 3"):
        attemper.apply(model, "explicit(conv=[1, 2])")


class ConvolutionalMlp(nn.Module):
    """A feed-forward network of 1 × 1 convolutions with a depthwise one between them."""

    def __init__(self):
        super().__init__()
        self.fc1, self.dw, self.fc2 = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.fc2(F.gelu(self.dw(self.fc1(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = ConvolutionalMlp()

    def forward(self, x):
        return x + self.mlp(x)


def mixer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), Block(), Block())


@pytest.mark.parametrize("expectation", EXPECTATIONS)
def test_a_1_by_1_convolution_of_a_feed_forward_network_is_taken_once_and_the_same_by_either_component(expectation):
    model, setting = mixer(), f"expectation={expectation}"
    alone = rows(model, f"explicit(conv=1, {setting})")
    both = rows(model, f"explicit(conv=1, ff=1, {setting})")
    assert len(alone) == len(both) == 7
    for block in ("1.mlp", "2.mlp"):
        assert both[block, "ff1"] == pytest.approx(alone[f"{block}.fc1", "conv"], rel=1e-5)
        assert both[block, "ff2"] == pytest.approx(alone[f"{block}.fc2", "conv"], rel=1e-5)
        assert both[f"{block}.dw", "conv"] == alone[f"{block}.dw", "conv"]
    first = rows(model, "explicit(conv=1, ff1=1)")
    assert ("1.mlp.fc2", "conv") in first
    assert ("1.mlp.fc1", "conv") not in first
    beside = rows(model, "explicit(conv=1) + arora(ff2=1)")
    assert ("1.mlp.fc2", "conv") not in beside
    assert ("1.mlp.fc1", "conv") in beside


class ConvolvedAttention(nn.Module):
    """Attention over the pixels of images (B, C, H, W), by 1 × 1 convolutions."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.q, self.k, self.v, self.proj = (nn.Conv2d(4, 4, 1) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).flatten(2).unflatten(1, (2, -1)).mT for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj(out.mT.flatten(1, 2).unflatten(-1, x.shape[2:]))


@pytest.mark.parametrize(
    ("component", "left"), [("q", ["0", "1.v", "1.proj"]), ("v", ["0", "1.q", "1.k", "1.proj"]), ("av", None)]
)
def test_a_projection_of_attention_that_is_a_convolution_is_taken_once(component, left):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), ConvolvedAttention())
    found = rows(model, f"explicit(conv=1, {component}=1)")
    assert [site for site, each in found if each == "conv"] == (left or ["0", "1.q", "1.k", "1.proj"])
    assert ("1", component) in found
    assert len(rows(model, "explicit(conv=1)")) == 5


def test_targets_choose_convolutions():
    model = Residual()
    assert set(rows(model, "explicit(conv=1)", targets={"convolutions": ["conv*"]})) == {
        ("conv1", "conv"),
        ("conv2", "conv"),
    }
    with pytest.raises(NoSiteError, match=r"targets\['convolutions'\]: 'norm' matches 1 modules .* no convolution"):
        attemper.apply(model, "explicit(conv=1)", targets={"convolutions": "norm"})


# ------------------------------------------------------------------------------------------ other people's convolutions
class Standardised(nn.Conv2d):
    """A weight that is standardised at every use, with a gain of its own, as in BiT and in NFNets."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1))

    def forward(self, x):
        weight = self.gain * (self.weight - self.weight.mean((1, 2, 3), keepdim=True))
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


def test_the_weight_is_the_one_that_is_multiplied_with():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3)))
    found = rows(model, f"explicit(conv=1, p={P}, expectation=exact, reduction=sum)")
    hidden = model[0](IMAGES)
    for name, layer, x in (("0", model[0], IMAGES), ("1", model[1], hidden)):
        wanted = float(by_matrix(layer.double(), x.detach().double(), "exact").detach()) / 2
        assert found[name, "conv"] == pytest.approx(wanted, rel=1e-5)


class Twice(nn.Conv2d):
    def forward(self, x):
        return super().forward(super().forward(x))


class Transformed(nn.Conv2d):
    def forward(self, x):
        return x * self.weight.sum()


class TwiceInTime(nn.Conv3d):
    def forward(self, x):
        return super().forward(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "first", "count"), [(Twice, nn.Conv2d, 2), (Transformed, nn.Conv2d, 0), (TwiceInTime, nn.Conv3d, 2)]
)
def test_a_module_that_computes_no_single_convolution_is_refused_at_apply(kind, first, count, monkeypatch):
    monkeypatch.setattr("attemper.tempering.applying.try_out", try_out)
    model = nn.Sequential(first(3, 4, 3), kind(4, 4, 1))
    with pytest.raises(UnmetError, match=rf"'1' \({kind.__name__}\) computed {count} convolutions"):
        attemper.apply(model, "explicit(conv=1)")
    assert type(model[1]) is kind


class PastForward(nn.Module):
    """Uses a convolution's weight and never the convolution."""

    def __init__(self):
        super().__init__()
        self.stem, self.hidden = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return F.conv2d(self.stem(x), self.hidden.weight).mean((2, 3))


def test_a_convolution_that_never_runs_is_an_error_of_the_first_training_pass():
    model = PastForward().train()
    attemper.apply(model, "explicit(conv=1)")
    with pytest.raises(UnmetError, match="explicit would act on what this training pass did not run: 'hidden'"):
        model(IMAGES)


class ByFunction(nn.Module):
    """A convolution of a weight of its own behind one that is a module."""

    def __init__(self, trained=True, transposed=False):
        super().__init__()
        self.stem, self.function = nn.Conv2d(3, 4, 3), F.conv_transpose2d if transposed else F.conv2d
        self.kernel = nn.Parameter(torch.randn(4, 4, 2, 2), requires_grad=trained)

    def forward(self, x):
        return self.function(self.stem(x), weight=self.kernel).mean((2, 3))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_that_is_no_module_is_an_error_of_the_first_training_pass(transposed):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), ByFunction(transposed=transposed)).train()
    tempered = attemper.apply(model, "explicit(conv=1)")
    with pytest.raises(UnmetError, match=r"'1' \(ByFunction\): a convolution by torch's function"):
        model(IMAGES)
    tempered.remove()
    for options in ({"partial": True}, {"targets": {"convolutions": ["0", "1.stem"]}}):
        tempered = attemper.apply(model, "explicit(conv=1)", **options)
        tempered.loss(lambda: model(IMAGES), lambda out: out.sum())
        assert {row.site for row in tempered.penalties()} == {"0", "1.stem"}
        tempered.remove()


def test_a_fixed_filter_is_no_layer():
    model = ByFunction(trained=False).train()
    tempered = attemper.apply(model, "explicit(conv=1)")
    tempered.loss(lambda: model(IMAGES), lambda out: out.sum())
    assert [row.site for row in tempered.penalties()] == ["stem"]


def pointwise():
    """Feed-forward networks of 1 × 1 convolutions, and no other convolution."""
    model = nn.Sequential(Block(), Block())
    model[0].mlp.dw = model[1].mlp.dw = nn.Identity()
    return model


@pytest.mark.parametrize(
    ("make", "recipe", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "explicit(conv=1)", "acts on convolutions; Sequential has none"),
        (
            lambda: nn.Sequential(nn.LazyConv2d(4, 3)),
            "explicit(conv=1)",
            r"weights of '0' \(LazyConv2d\) have no shape yet",
        ),
        (lambda: build(FAMILIES[0]), "explicit(conv=[0, 1, 1])", "would act on none of the 1 convolutions of Vision"),
        (pointwise, "explicit(conv=1, ff=1)", "would act on none of the 4 convolutions of Sequential"),
    ],
    ids=["none", "lazy", "strength 0", "all taken"],
)
def test_a_model_without_a_convolution_to_act_on_is_refused(make, recipe, message):
    model = make()
    with pytest.raises(NoSiteError, match=message):
        attemper.apply(model, recipe)
    assert not any(is_tempered(module) for module in model.modules())


def test_eval_mode_is_left_alone_and_remove_restores_the_classes():
    torch.manual_seed(0)
    model = Residual().eval()
    classes, before = [type(module) for module in model.modules()], model(IMAGES)
    tempered = attemper.apply(model, "explicit(conv=1)")
    assert torch.equal(model(IMAGES), before)
    assert tempered.penalties() == []
    tempered.remove()
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_squares_are_summed_in_float32_under_autocast(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    expected = rows(model, "explicit(conv=1, expectation=exact, reduction=sum)", 300 * IMAGES)
    with torch.autocast("cpu", dtype):
        ours = rows(model, "explicit(conv=1, expectation=exact, reduction=sum)", 300 * IMAGES)
    assert ours["0", "conv"] == pytest.approx(expected["0", "conv"], rel=2e-2)


def test_a_checkpointed_convolution_counts_once_and_has_the_same_gradient():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).train()
    tempered = attemper.apply(model, "explicit(conv=1, expectation=exact)")
    grads = []
    for run in (model, lambda x: model[1](checkpoint(model[0], x, use_reentrant=False))):
        model.zero_grad()
        loss = tempered.loss(lambda run=run: run(IMAGES), lambda out: out.square().mean())
        assert len(tempered.penalties()) == 2
        loss.backward()
        grads.append([weight.grad.clone() for weight in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_auto_penalty_brings_the_same_gradient():
    grads = []
    for automatic in (False, True):
        torch.manual_seed(0)
        model = Residual().train()
        tempered = attemper.apply(model, "explicit(conv=0.5)", auto_penalty=automatic)
        tempered.loss_scale = 1.0
        loss = model(IMAGES).square().mean()
        (loss if automatic else loss + tempered.penalty()).backward()
        grads.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_the_weight_of_a_convolution_has_what_lora_adds_to_it():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, bias=False), nn.Conv2d(4, 4, 3, groups=2))
    config = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(plain, config).train()
    recipe, name = f"explicit(conv=1, p={P}, expectation=exact, reduction=sum)", "base_model.model.0"
    found = rows(model, recipe, targets={"convolutions": [name]})
    assert list(found) == [(name, "conv")]
    merged = model.merge_and_unload()[0].double()
    wanted = by_matrix(merged, IMAGES.double(), "exact").detach() / 2
    assert found[name, "conv"] == pytest.approx(float(wanted), rel=1e-5)
    grouped = peft.LoraConfig(r=2, target_modules=["1"])
    with pytest.raises(NoSiteError, match=r"'base_model.model.1' .* with groups is not known"):
        attemper.apply(peft.get_peft_model(nn.Sequential(*plain), grouped), "explicit(conv=1)")


class InPlace(nn.Module):
    """What writes over the outputs of a convolution and of a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3), nn.ModuleList([LinearBlock()])

    def forward(self, x):
        return self.blocks[0](F.relu(self.stem(x), inplace=True).mean((2, 3))[:, None])


class LinearBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))

    def forward(self, x):
        return x + self.mlp(x)


def test_compiled_gradients_are_those_of_eager_code_where_outputs_are_written_over():
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = InPlace().train()
        tempered = attemper.apply(model, "explicit(conv=0.5, ff=0.5, p=0.9, expectation=exact)")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        tempered.loss(lambda run=run: run(IMAGES), lambda out: out.square().mean()).backward()
        grads.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
