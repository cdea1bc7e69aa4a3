"""Blocks whose own code adds their branches in a straight line are not followed, and do what followed ones do."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import ViTConfig, ViTModel

import attemper
from attemper.errors import UnmetError
from attemper.tempering import skips
from attemper.tempering.repeated_sums import RepeatedSums
from attemper.tempering.residual import Residuals
from attemper.tempering.straight import OwnSums, straight
from attemper.tempering.subclassing import state_of
from test_repeated_sums import Attention, Mlp

SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
RECIPES = (
    "droppath(0.5)", "layerdrop(0.4)", "skipless(mlp)", "droppath(0.3) + ffdropout(0.2) + dropkey(0.2) + cb",
    "droppath(0.5, saving=auto)",
)  # fmt: skip


class Line(nn.Module):
    """A block as most are written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = nn.LayerNorm(8), Mixed(), nn.LayerNorm(8), Mlp()

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Text
        with an indent.
        """
        shift = scale + 0.5
        x = x + (shift - 0.5) * self.attn(self.norm1(x))
        return self.mlp(self.norm2(x)) + x


class Mixed(Attention):
    pass


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Line) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SIZES)


def swin() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 4, "window_size": 4, "depths": (1, 2), "embed_dim": 8, "num_heads": (2, 2)}
    return timm.models.swin_transformer.SwinTransformer(num_classes=3, drop_path_rate=0.0, **sizes)


def hf() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTModel(ViTConfig(image_size=32, patch_size=16, **sizes), add_pooling_layer=False)


def tempered(make: object, recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = make().train()  # type: ignore[operator]
    attemper.apply(model, recipe)
    return model


def passed(model: nn.Module, x: Tensor, seed: int, **options: bool) -> list[Tensor]:
    """The output of a pass and all gradients."""
    torch.manual_seed(seed)
    out = checkpoint(model, x, **options) if options else model(x)
    out = out if isinstance(out, Tensor) else out[0]
    params = tuple(model.parameters())
    grads = torch.autograd.grad(out.square().sum(), params, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_same(ours: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What follows modules, each time that it does."""
    found: list[str] = []
    for kind in (Residuals, RepeatedSums):

        def enter(self: TorchFunctionMode) -> TorchFunctionMode:
            found.append(type(self).__name__)
            return TorchFunctionMode.__enter__(self)

        monkeypatch.setattr(kind, "__enter__", enter)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [vit, swin, hf])
def test_later_passes_are_followed_no_more_and_give_the_same(
    make: object, recipe: str, followed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tempered(make, recipe)
    inputs = [torch.randn(4, 3, 32, 32) for _ in range(4)]
    ours = [passed(model, x, seed) for seed, x in enumerate(inputs)]
    followed.clear()
    ours.append(passed(model, inputs[0], 9))
    assert followed == []
    monkeypatch.setattr(skips, "straight", lambda forward: None)
    other = tempered(make, recipe)
    for seed, wanted in zip([0, 1, 2, 3, 9], ours, strict=True):
        assert_same(passed(other, inputs[seed % 9], seed), wanted)


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_checkpoints_compute_the_same_again(recipe: str) -> None:
    model, x = tempered(vit, recipe), torch.randn(4, 3, 32, 32)
    wanted = [passed(model, x, 7) for _ in range(3)][-1]
    for a, b in zip(passed(model, x, 7, use_reentrant=False), wanted, strict=True):
        torch.testing.assert_close(a, b)
    wrapped = model.blocks[0].attn.forward
    model.blocks[0].attn.forward = lambda *args, **kwargs: checkpoint(wrapped, *args, **kwargs, use_reentrant=False)
    for a, b in zip(passed(model, x, 7), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_hand_written_code_is_read_as_it_runs(followed: list[str]) -> None:
    model = tempered(Net, "droppath(0.4)")
    for seed in range(3):
        passed(model, torch.randn(3, 4, 8), seed)
    assert followed == ["Residuals"] * 2
    block = model.blocks[0]
    torch.manual_seed(3)
    one = block(torch.ones(4, 3, 8), scale=2.0)
    torch.manual_seed(3)
    assert torch.equal(one, block(torch.ones(4, 3, 8), scale=2.0))
    assert not torch.equal(one, block(torch.ones(4, 3, 8)))


class Ifs(Line):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 2:
            x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Loops(Line):
    def forward(self, x: Tensor) -> Tensor:
        for norm, part in ((self.norm1, self.attn), (self.norm2, self.mlp)):
            x = x + part(norm(x))
        return x


class InPlace(Line):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x += self.mlp(self.norm2(x))
        return x


class Chosen(Line):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + (self.mlp(self.norm2(x)) if self.training else self.mlp(x))


class Superior(Line):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Elsewhere(Line):
    """A part of it adds itself to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return self.inner(x)


class Inner(Line):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


@pytest.mark.parametrize("kind", [Ifs, Loops, InPlace, Chosen, Superior])
def test_code_that_may_take_another_way_is_left_alone(kind: type[nn.Module]) -> None:
    assert straight(kind().forward) is None


def test_code_that_was_made_otherwise_is_left_alone(tmp_path: object) -> None:
    scope: dict[str, object] = {}
    exec("def forward(self, x):\n    return x + self.attn(x)\n", scope)
    assert straight(types.MethodType(scope["forward"], Line())) is None  # type: ignore[arg-type]
    changed = types.FunctionType(Inner.forward.__code__.replace(co_consts=(None, 3)), globals())
    assert straight(types.MethodType(changed, Inner())) is None
    assert straight(lambda x: x + x) is None
    assert straight(Inner().forward) is not None


def test_tracebacks_point_into_the_file_of_the_block() -> None:
    code = straight(Inner().forward)
    assert code is not None
    assert code.rewritten.__code__.co_filename == __file__
    assert code.rewritten.__code__.co_firstlineno == Inner.forward.__code__.co_firstlineno
    lines = [{line for *_, line in each.__code__.co_lines() if line} for each in (code.original, code.rewritten)]
    assert lines[0] == lines[1]


class Doubling(Mixed):
    """Attention that has another way in every other pass, and so is nothing to rely on."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if x.shape[1] % 2 else out


def test_blocks_with_parts_that_may_take_another_way_are_followed(followed: list[str]) -> None:
    model = Net()
    for block in model.blocks:
        block.attn = Doubling()
    attemper.apply(model.train(), "droppath(0.4)")
    for seed in range(3):
        passed(model, torch.randn(2, 4, 8), seed)
    assert len(followed) == 6


def adds_its_input(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return out + args[0]


CHANGES = {
    "a part": lambda block: setattr(block, "norm2", nn.Identity()),
    "a part of a part": lambda block: setattr(block.mlp, "fc1", nn.Linear(8, 12, bias=False)),
    "a hook": lambda block: block.attn.register_forward_hook(adds_its_input),
    "a hook in front": lambda block: block.mlp.fc1.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "a forward": lambda block: setattr(block.mlp, "forward", nn.Sequential(block.mlp.fc1, block.mlp.fc2).forward),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_followed_again(change: str, followed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr(skips, "straight", lambda forward: None)
        model = tempered(Net, "droppath(0.4)")
        for seed in range(3):
            passed(model, torch.linspace(-1, 1, 64).view(2, 4, 8), seed)
        followed.clear()
        torch.manual_seed(1)
        for block in model.blocks:
            CHANGES[change](block)
        results += [passed(model, torch.linspace(-1, 1, 64).view(2, 4, 8), seed) for seed in range(4)]
        assert followed
    for ours, wanted in zip(results[:4], results[4:], strict=True):
        assert_same(ours, wanted)


def test_a_hook_on_all_modules_is_seen(followed: list[str]) -> None:
    model = tempered(Net, "droppath(0.4)")
    for seed in range(3):
        passed(model, torch.randn(2, 4, 8), seed)
    followed.clear()
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        passed(model, torch.randn(2, 4, 8), 3)
    finally:
        handle.remove()
    assert followed


def test_a_branch_of_another_shape_is_told() -> None:
    model = tempered(Net, "droppath(0.4)")
    for seed in range(3):
        passed(model, torch.randn(2, 4, 8), seed)
    block = model.blocks[0]
    block.mlp.fc2.weight = nn.Parameter(block.mlp.fc2.weight[:1].detach())
    block.mlp.fc2.bias = nn.Parameter(block.mlp.fc2.bias[:1].detach())
    with pytest.raises(UnmetError, match="adds something else than before"):
        passed(model, torch.randn(2, 4, 8), 6)


def test_copies_and_pickles_read_for_themselves() -> None:
    model, x = tempered(vit, "droppath(0.4)"), torch.randn(4, 3, 32, 32)
    wanted = [passed(model, x, 9) for _ in range(3)][-1]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(3):
            assert_same(passed(made, x, 9), wanted)
        (action,) = state_of(made.blocks[0]).actions
        assert isinstance(action.own, OwnSums)
        assert action.own.parts[0][0] is made.blocks[0]._modules


def test_another_forward_of_the_class_is_seen(monkeypatch: pytest.MonkeyPatch, followed: list[str]) -> None:
    model = tempered(Net, "droppath(0.4)")
    for seed in range(3):
        passed(model, torch.randn(2, 4, 8), seed)
    followed.clear()
    monkeypatch.setattr(Line, "forward", Loops.forward)
    passed(model, torch.randn(2, 4, 8), 5)
    assert followed


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.sampled_from(["mlp", "attn", "twice"]), min_size=1, max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=3, max_size=5),
)
def test_whatever_the_line_is(parts: list[str], swapped: bool, lengths: list[int]) -> None:
    """Blocks of generated code, which has a file of its own."""
    import linecache

    code = ["def forward(self, x):\n"]
    for number, part in enumerate(parts):
        branch = {"mlp": "self.mlp(self.norm2(x))", "attn": "self.attn(self.norm1(x))"}.get(part, "0.5 * self.mlp(x)")
        code.append(f"    y{number} = {branch}\n")
        code.append(f"    x = {f'y{number} + x' if swapped else f'x + y{number}'}\n")
    code.append("    return x\n")
    name = f"<generated {hash(tuple(code))}>"
    linecache.cache[name] = (len("".join(code)), None, code, name)
    scope: dict[str, object] = {"__name__": __name__}
    exec(compile("".join(code), name, "exec"), scope)
    kind = type("Generated", (Line,), {"forward": scope["forward"]})
    results = []
    for reads in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not reads:
                patch.setattr(skips, "straight", lambda forward: None)
            torch.manual_seed(0)
            model = Net(kind).train()
            try:
                attemper.apply(model, "droppath(0.4)")
                results.append(
                    [passed(model, torch.linspace(-1, 1, 16 * n).view(2, n, 8), n) for n in [*lengths, *lengths]]
                )
            except attemper.errors.AttemperError as error:
                results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        for ours, wanted in zip(*results, strict=True):
            assert_same(ours, wanted)
