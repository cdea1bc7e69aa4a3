"""What a training script sets for all of torch: none of it changes what a recipe does, or stays behind in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import attemper
from attemper.methods.drophead import drophead
from plain_blocks import HEADS, WIDTH, Block, model_of, tokens

RECIPES = (
    "dropkey(0.5)", "dropkey(0.4, share=heads)", "dropkey(learn)", "hardmask(0.5, k=2)", "blur(learn)", "drophead(0.5)",
    "dropattention(0.5)", "dropattention(0.5, unit=column, rescale=normalize)", "dropconnect(0.3)", "cb(cb_s)",
    "droppath(0.5) + ffdropout(0.3)", "explicit(q=1, v=1, ff=1)", "graying(where=tokens)",
    "consistency(0.5) + dropkey(0.3)",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def applied(recipe: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, attemper.Tempered]:
    model = model_of(Block).to(dtype)
    return model, attemper.apply(model, recipe)


def step(model: nn.Module, tempered: attemper.Tempered, x: Tensor) -> list[Tensor]:
    """The loss and all gradients of a training step with one seed."""
    with torch.device("cpu"):  # a generator of meta tensors draws nothing
        torch.manual_seed(3)
    model.zero_grad()
    loss = tempered.loss(lambda: model(x), lambda out: out.float().square().mean())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    assert len(some) == len(others)
    assert all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("default", [(torch.float64, "cpu"), (torch.float32, "meta")], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_defaults_for_new_tensors_change_nothing(recipe, default):
    dtype = DTYPES[RECIPES.index(recipe) % len(DTYPES)]
    expected = step(*applied(recipe, dtype), tokens().to(dtype))
    model, x = model_of(Block).to(dtype), tokens().to(dtype)
    with defaults(*default):
        assert_same(step(model, attemper.apply(model, recipe), x), expected)


def in_inference_mode(model: nn.Module, tempered: attemper.Tempered, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


def averaged_in_inference_mode(model: nn.Module, tempered: attemper.Tempered, x: Tensor) -> None:
    model.eval()
    with torch.inference_mode():
        tempered.average(lambda: model(x), passes=2)
    model.train()


def as_shapes(model: nn.Module, tempered: attemper.Tempered, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(x)


MODES = (in_inference_mode, averaged_in_inference_mode, as_shapes)
CASES = [
    pytest.param(recipe, mode, marks=() if at % 3 == number else pytest.mark.slow)
    for at, recipe in enumerate(RECIPES)
    for number, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("recipe", "before"), CASES)
def test_what_ran_before_in_another_mode_leaves_nothing_behind(recipe, before):
    expected = step(*applied(recipe), tokens())
    model, tempered = applied(recipe)

    def work() -> list[Tensor]:
        before(model, tempered, tokens())
        return step(model, tempered, tokens())

    with ThreadPoolExecutor(1) as thread:  # it has no memory of what other tests ran
        assert_same(thread.submit(work).result(), expected)


@pytest.mark.parametrize("recipe", ["explicit(v=1, ff=1)", "explicit(q=1, k=1) + arora(v=0.5)"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_every_sample_by_vmap_are_those_of_its_own_step(recipe):
    model, tempered = applied(recipe, torch.float64)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    samples = tokens().double()

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        run = lambda: torch.func.functional_call(model, weights, (x[None],))  # noqa: E731
        return tempered.loss(run, lambda out: out.square().sum())

    mapped = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, samples)
    for number, x in enumerate(samples):
        alone, handle = applied(recipe, torch.float64)
        handle.loss(lambda alone=alone, x=x: alone(x[None]), lambda out: out.square().sum()).backward()
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(mapped[name][number], weight.grad)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_values_in_another_order_are_refused_under_vmap_too():
    class Interleaved(Block):
        def __init__(self) -> None:
            super().__init__()
            self.attn = OtherOrder()

    model = model_of(Interleaved)
    tempered = attemper.apply(model, "explicit(v=1)")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        run = lambda: torch.func.functional_call(model, weights, (x[None],))  # noqa: E731
        return tempered.loss(run, lambda out: out.square().sum())

    with pytest.raises(attemper.errors.UnmetError, match="another order"):
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, tokens())


class OtherOrder(type(Block().attn)):
    """Q, K and V of one head lie side by side in the weight, as in GPT-NeoX."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_drophead_scales_exactly_in_float64():
    out = drophead(torch.ones(1, 7, 1, 1, dtype=torch.float64), torch.tensor([[True] * 3 + [False] * 4]))
    assert out.amax().item() == pytest.approx(7 / 3, rel=1e-15)


def test_learnt_rates_are_as_exact_as_the_weights():
    for dtype, kept in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        model, _ = applied("dropkey(learn)", dtype)
        added = [weight for name, weight in model.named_parameters() if name.startswith("attemper.")]
        assert {weight.dtype for weight in added} == {kept}


NESTED = (
    "dropkey(0.5)", "dropkey(0.3, share=queries)", "blur(2.0)", "drophead(0.5)", "cb(cb_s)", "graying(where=tokens)",
    "layerdrop(0.5)", "droppath(0.5)", "ffdropout(0.3)", "explicit(v=1)", "explicit(ff=1)", "arora(k=1)",
)  # fmt: skip


@pytest.mark.parametrize("recipe", NESTED)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_training_and_mean_what_they_did_in_eval_mode(recipe):
    parts = [torch.randn(many, WIDTH, dtype=torch.float64) for many in (3, 5)]
    samples = torch.nested.nested_tensor(parts, layout=torch.jagged)
    model = model_of(Jagged).double().eval()
    plain = model(samples).values()
    tempered = attemper.apply(model, recipe)
    if not recipe.startswith(("cb", "graying")):
        assert torch.equal(model(samples).values(), plain)
    model.train()
    with pytest.raises(attemper.errors.UnsupportedError, match="a nested one"):
        tempered.loss(lambda: model(samples), lambda out: out.values().sum())


class Jagged(Block):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, [HEADS, -1]).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def __init__(self) -> None:
        super().__init__()
        self.attn = self.Attention()
