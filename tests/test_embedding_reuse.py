"""Two passes that are compared embed an image once, and nobody notices but the clock."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attemper
from attemper.methods import TokenGraying
from families import FAMILIES, build

FAMILY = {family.name: family for family in FAMILIES}
RECIPE = "dropkey(0.3) + consistency(0.5)"


def vit() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return build(FAMILY["timm-vit"]).train(), torch.randn(2, 3, 32, 32)


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The image of every convolution that runs."""
    seen: list[Tensor] = []
    run = nn.Conv2d._conv_forward

    def watched(self: nn.Conv2d, image: Tensor, *rest: object) -> Tensor:
        seen.append(image)
        return run(self, image, *rest)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", watched)
    return seen


def square(out: Tensor) -> Tensor:
    return out.square().mean()


def gradients(model: nn.Module, recipe: str, forward: Callable[[nn.Module], Callable[[], Tensor]]) -> list[Tensor]:
    """The loss and the gradient of every parameter."""
    tempered = attemper.apply(model, recipe)
    torch.manual_seed(1)
    loss = tempered.loss(forward(model), square)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_an_image_is_embedded_once_and_loss_and_gradients_are_the_same(convolutions: list[Tensor]) -> None:
    model, image = vit()
    twin = copy.deepcopy(model)
    once = gradients(model, RECIPE, lambda model: lambda: model(image))
    assert len(convolutions) == 1
    twice = gradients(twin, RECIPE, lambda model: lambda: model(image.clone()))
    assert len(convolutions) == 3
    for given, wanted in zip(once, twice, strict=True):
        torch.testing.assert_close(given, wanted)


def test_another_image_is_embedded_anew(convolutions: list[Tensor]) -> None:
    model, image = vit()
    images: Iterator[Tensor] = iter((image, image + 1))
    gradients(model, RECIPE, lambda model: lambda: model(next(images)))
    assert len(convolutions) == 2


def test_an_image_that_is_changed_in_place_is_an_error_in_backward() -> None:
    model, image = vit()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model, RECIPE, lambda model: lambda: model(image.add_(1)))


def test_an_embedding_that_is_not_trained_runs_twice(convolutions: list[Tensor]) -> None:
    model, image = vit()
    model.get_submodule("patch_embed").requires_grad_(False)
    gradients(model, RECIPE, lambda model: lambda: model(image.add_(1)))
    assert len(convolutions) == 2


def test_without_a_comparison_every_pass_embeds_its_image(convolutions: list[Tensor]) -> None:
    model, image = vit()
    tempered = attemper.apply(model, RECIPE)
    tempered.loss(lambda: model(image), square)
    for _ in range(2):
        model(image)
    assert len(convolutions) == 3
    assert tempered.control.ledger.embedded is None


def test_an_error_leaves_nothing_behind() -> None:
    model, image = vit()
    tempered = attemper.apply(model, RECIPE)
    calls = iter((model, None))

    with pytest.raises(TypeError):
        tempered.loss(lambda: next(calls)(image), square)
    assert tempered.control.ledger.embedded is None
    assert not tempered.control.ledger.muted


def test_patches_that_a_method_maps_are_mapped_in_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, image = vit()
    mapped, run = [], TokenGraying.map_patches
    monkeypatch.setattr(TokenGraying, "map_patches", lambda self, patches: mapped.append(1) or run(self, patches))
    gradients(model, f"graying(dct) + {RECIPE}", lambda model: lambda: model(image))
    assert len(mapped) == 2


class Restless(nn.Module):
    """A model that embeds two images, adds to the tokens in place, and looks at them once more without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build(FAMILY["timm-vit"])
        self.model.get_submodule("patch_embed.proj").register_forward_hook(lambda module, args, out: out.add_(1.0))

    def forward(self, image: Tensor, other: Tensor) -> Tensor:
        out = self.model(image) + self.model(other)
        with torch.no_grad():
            again = self.model(image)
        return out + again


def test_whatever_a_model_does_round_its_embedding_nothing_changes(convolutions: list[Tensor]) -> None:
    torch.manual_seed(0)
    model, image = Restless().train(), torch.randn(2, 3, 32, 32)
    twin, other = copy.deepcopy(model), torch.randn(2, 3, 32, 32)
    given = gradients(model, RECIPE, lambda model: lambda: model(image, other))
    assert len(convolutions) == 3  # and in the second pass all three are remembered
    wanted = gradients(twin, RECIPE, lambda model: lambda: model(image.clone(), other.clone()))
    for one, two in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_models_embed_in_every_pass(reentrant: bool) -> None:
    model, image = vit()
    twin = copy.deepcopy(model)
    image.requires_grad_()  # without which a reentrant checkpoint has no gradient

    def forward(model: nn.Module) -> Callable[[], Tensor]:
        return lambda: checkpoint(model, image, use_reentrant=reentrant)

    given = gradients(model, RECIPE, forward)
    wanted = gradients(twin, RECIPE, lambda model: lambda: model(image.clone()))
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_an_image_may_be_given_by_name() -> None:
    model, image = vit()
    embedding = model.get_submodule("patch_embed.proj")
    tempered = attemper.apply(model, RECIPE)
    tempered.loss(lambda: embedding(input=image), square)


def compiled(model: nn.Module, graphs: list[int]) -> Callable[..., Tensor]:
    """The model compiled in one graph; `graphs` takes the number of convolutions of each."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(sum(node.target in (F.conv2d, torch.conv2d) for node in graph.graph.nodes))
        return torch._dynamo.backends.registry.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(model, fullgraph=True, backend=backend)


def test_compiled_models_do_the_same() -> None:
    torch.compiler.reset()  # what it saw change between other models it would not take for constant in this one
    model, image = vit()
    twin, graphs = copy.deepcopy(model), []
    wanted = gradients(twin, RECIPE, lambda model: lambda: model(image))

    def forward(model: nn.Module) -> Callable[[], Tensor]:
        run = compiled(model, graphs)
        return lambda: run(image)

    given = gradients(model, RECIPE, forward)
    assert graphs == [1, 0]
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other)
