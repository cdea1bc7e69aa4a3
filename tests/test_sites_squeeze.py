"""Squeeze-and-excite has two layers like a feed-forward network, and is none."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attemper
from attemper.errors import NoSiteError, UnmetError
from attemper.sites import find_sites

CHANNELS = 16


class Block(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.part = kind()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def model_of(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(Block(kind), Block(kind)).train()


class Convolved(nn.Module):
    """On feature maps, by 1 × 1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(CHANNELS, 4, 1), nn.Conv2d(4, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Listed(nn.Module):
    """Everything in one Sequential, the sigmoid at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(CHANNELS, 4), nn.ReLU(), nn.Linear(4, CHANNELS), nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3)))[:, :, None, None]


class Pooled(nn.Module):
    """Pooling and sigmoid stand outside of the Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(CHANNELS, 4), nn.ReLU(), nn.Linear(4, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc(self.pool(x).flatten(1)))[:, :, None, None]


class Wide(nn.Module):
    """Not even narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.fc2(self.fc1(pooled).relu()))


class Narrow(nn.Module):
    """A real feed-forward network that is narrower than its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(CHANNELS, 4), nn.Linear(4, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.silu(self.fc1(x)))


class Unusual(nn.Module):
    """A gate that nothing tells of but what becomes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(CHANNELS, 4, 1), nn.Conv2d(4, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = x.flatten(2).sum(2)[:, :, None, None] / x[0, 0].numel()
        return x * (self.fc2(self.fc1(squeezed).relu()) + 3).clamp(0, 6).div(6)


@pytest.mark.parametrize("kind", [Convolved, Listed, Pooled, Wide])
def test_a_gate_is_no_feed_forward_network(kind: type[nn.Module]) -> None:
    assert find_sites(model_of(kind)).mlps == ()
    with pytest.raises(NoSiteError, match="acts on feed-forward networks"):
        attemper.apply(model_of(kind), "ffdropout(0.3)")


def test_a_narrow_feed_forward_network_is_one() -> None:
    assert [mlp.name for mlp in find_sites(model_of(Narrow)).mlps] == ["0.part", "1.part"]


@pytest.mark.parametrize("recipe", ["ffdropout(0.3)", "explicit(ff=1)", "cb"])
def test_a_gate_that_was_not_told_shows_when_it_runs(recipe: str) -> None:
    model = model_of(Unusual)
    attemper.apply(model, recipe)
    with pytest.raises(UnmetError, match=r"'0\.part' \(Unusual\).*squeeze-and-excite"):
        model(torch.randn(2, CHANNELS, 4, 4))


@pytest.mark.parametrize(("name", "mlps"), [("seresnet18", 0), ("repvit_m0_9", 26), ("coatnet_nano_rw_224", 9)])
def test_models_with_squeeze_and_excite(name: str, mlps: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found = find_sites(model).mlps
    assert len(found) == mlps
    assert not any(".se" in mlp.name for mlp in found)
