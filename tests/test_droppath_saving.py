"""droppath(saving=auto) leaves dropped samples out of the branches, and changes nothing else."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import SwinConfig, SwinModel, ViTConfig, ViTForImageClassification

import attemper
from attemper.tempering.kept_samples import KeptSamples

TINY = {"img_size": 32, "num_classes": 5, "drop_path_rate": 0.0}
HF = {"image_size": 32, "patch_size": 4, "hidden_act": "gelu"}
MODELS = {
    "timm ViT": lambda: timm.create_model(
        "vit_tiny_patch16_224", patch_size=8, embed_dim=24, depth=2, num_heads=3, **TINY
    ),
    "timm Swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", window_size=4, embed_dim=12, depths=(2, 1), num_heads=(2, 2), **TINY
    ),
    "Transformers ViT": lambda: ViTForImageClassification(
        ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, **HF)
    ),
    "Transformers Swin": lambda: SwinModel(
        SwinConfig(embed_dim=12, depths=[2, 1], num_heads=[2, 2], window_size=4, drop_path_rate=0.0, **HF)
    ),
}
RECIPES = ["droppath(0.5, saving={})", "droppath(0.4, saving={}) + dropkey(0.3) + cb"]


class Block(nn.Module):
    """A hand-written block; order: which branch comes first, or both at once."""

    def __init__(self, width: int = 8, order: str = "attention") -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = timm.models.vision_transformer.Attention(width, 2)
        self.mlp = timm.layers.Mlp(width, 2 * width)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "both":
            return x + self.attn(self.norm1(x)) + self.mlp(self.norm2(x))
        if self.order == "attention":
            x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x if self.order == "attention" else x + self.attn(self.norm1(x))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
        return x


@pytest.fixture
def rows(monkeypatch):
    """How many rows the modules that may leave some out got, in all."""
    seen: list[int] = []
    around = KeptSamples.around

    def counted(self, module, forward, args, kwargs):
        def inner(*args, **kwargs):
            seen.append(next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).shape[0])
            return forward(*args, **kwargs)

        return around(self, module, inner, args, kwargs)

    monkeypatch.setattr(KeptSamples, "around", counted)
    return seen


def train(model, recipe, batches, seeds=None):
    """The loss and the gradients of a few steps on these batches, in float64."""
    model = copy.deepcopy(model).double().train()
    attemper.apply(model, recipe)
    steps = []
    for number, x in enumerate(batches):
        torch.manual_seed(number if seeds is None else seeds[number])
        model.zero_grad()
        out = model(x.double())
        out = out if isinstance(out, Tensor) else out[0]
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        loss.backward()
        steps.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    return steps


def assert_same(model, recipe, batches, **options):
    with_all = train(model, recipe.format("none"), batches, **options)
    for (loss, grads), (wanted, all_grads) in zip(
        train(model, recipe.format("auto"), batches, **options), with_all, strict=True
    ):
        torch.testing.assert_close(loss, wanted, atol=1e-10, rtol=1e-10)
        for name, grad in all_grads.items():
            torch.testing.assert_close(
                grads[name], grad, atol=1e-10, rtol=1e-8, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_models_learn_the_same_from_fewer_rows(name, recipe, rows):
    torch.manual_seed(0)
    images = [torch.randn(batch, 3, 32, 32) for batch in (6, 6, 6, 6, 4, 1)]
    assert_same(MODELS[name](), recipe, images)
    assert rows
    assert any(some % 2 or some < 4 for some in rows)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(2, 7),
    p=st.floats(0.05, 0.99),
    order=st.sampled_from(["attention", "mlp", "both"]),
    inside=st.sampled_from(["", " + dropkey(0.4)", " + ffdropout(0.3)", " + hardmask(0.5, k=2) + drophead(0.3)"]),
    seed=st.integers(0, 99),
)
def test_hand_written_blocks(batch, p, order, inside, seed):
    torch.manual_seed(seed)
    model = Stack(Block(order=order), Block(order="attention"))
    batches = [torch.randn(batch, 5, 8) for _ in range(3)]
    assert_same(model, f"droppath({p}, saving={{}}){inside}", batches, seeds=[seed, seed + 1, seed + 2])


def test_every_row_that_is_dropped_is_left_out(rows):
    """From the third pass on, what was kept runs and nothing else."""
    model = Stack(Block()).train()
    tempered = attemper.apply(model, "droppath(0.5, saving=auto)")
    x = torch.randn(8, 5, 8)
    for _ in range(4):
        rows.clear()
        model(x)
    kept = [int(mask.sum()) for mask in tempered.masks(tempered.pass_seed).values()]
    assert rows == [many for many in kept if many < 8]


def test_where_no_sample_is_kept_weights_have_zero_gradients():
    """Not None: processes that train together wait for them."""
    steps = train(Stack(Block()), "droppath(0.999, saving=auto)", [torch.randn(3, 5, 8)] * 4)
    for name, grad in steps[-1][1].items():
        assert grad is not None, name
        assert torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints(recipe, reentrant, rows):
    model = Stack(Block(), Block(), checkpoints=reentrant)
    assert_same(model, recipe, [torch.randn(6, 5, 8).requires_grad_() for _ in range(4)])
    assert rows


class Mixing(nn.Module):
    """Samples see each other: by a batch norm, or by a mean over the batch that nothing names."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.by = nn.Linear(8, 16), nn.Linear(16, 8), by
        self.norm = nn.BatchNorm1d(5) if by == "norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.fc1(x))
        return self.fc2(x - x.mean(0) if self.by == "mean" else x)


@pytest.mark.parametrize("by", ["norm", "mean"])
def test_where_samples_see_each_other_all_are_computed(by, rows):
    block = Block()
    block.mlp = Mixing(by)
    batches = [torch.randn(6, 5, 8) for _ in range(4)]
    assert_same(Stack(block), "droppath(0.5, saving={})", batches)
    tempered = attemper.apply(model := Stack(block).train(), "droppath(0.5, saving=auto)")
    for x in batches[:2]:
        model(x)
    rows.clear()
    model(batches[2])
    assert rows == []
    tempered.remove()


class Turning(Block):
    """Its branches take turns."""

    def forward(self, x: Tensor) -> Tensor:
        self.order = "mlp" if self.order == "attention" else "attention"
        return super().forward(x)


def test_branches_that_change_their_order_are_noticed():
    assert_same(Stack(Turning()), "droppath(0.5, saving={})", [torch.randn(6, 5, 8) for _ in range(6)])


def test_penalties_are_over_all_samples(rows):
    model = Stack(Block()).train()
    tempered = attemper.apply(model, "droppath(0.5, saving=auto) + explicit(v=1e-2)")
    for x in torch.randn(3, 6, 5, 8):
        tempered.loss(lambda x=x: model(x), lambda out: out.square().sum()).backward()
    assert rows == []


def test_compiled_code_computes_all(rows):
    outs = []
    for saving in ("auto", "none"):
        torch.manual_seed(3)
        model = Stack(Block()).train()
        attemper.apply(model, f"droppath(0.5, saving={saving})")
        compiled = torch.compile(model, backend="eager")
        outs.append([compiled(x) for x in torch.linspace(-1, 1, 4 * 6 * 5 * 8).view(4, 6, 5, 8)])
    assert rows == []
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b)


def test_saving_is_checked_and_written_down():
    assert attemper.render(attemper.parse("droppath(0.2)")) == "droppath(0.2)"
    assert attemper.render(attemper.parse("droppath(0.2, saving=auto)")) == "droppath(0.2, saving=auto)"
    with pytest.raises(attemper.errors.RecipeError, match="saving must be one of auto, none"):
        attemper.parse("droppath(0.2, saving=some)")


def test_copies_of_a_model_save_by_themselves():
    model = Stack(Block()).train()
    attemper.apply(model, "droppath(0.5, saving=auto)")
    x = torch.randn(6, 5, 8)
    for _ in range(3):
        model(x)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.manual_seed(4)
        each.out = each(x)
    assert torch.equal(model.out, twin.out)
    attemper.Tempered.of(twin).remove()
    assert not any("_attemper" in module.__dict__ for module in twin.modules())
