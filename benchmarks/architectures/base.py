"""What an architecture is, how its model is built and called, and the inputs that several of them share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs = dict[str, Any]
"""Keyword arguments of a model; "args" holds the positional ones."""


@dataclass(frozen=True)
class Architecture:
    """One small model with random weights, and an input that it takes."""

    library: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def build(self) -> nn.Module:
        """The model without randomness of its own, and with weights that let everything be felt.

        So whatever differs between two training passes is Attemper's doing. No zero head or small scale hides it, and
        logits are far enough from each other for what changes the largest of them.
        """
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = quiet(self.make())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    inputs = max(1, math.prod(parameter.shape[1:]))
                    parameter.add_(min(0.1, inputs**-0.5) * torch.randn_like(parameter))
        return model


def quiet(model: nn.Module) -> nn.Module:
    """Set every rate of dropping to zero, wherever modules and configurations keep it."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, float) and 0 < value < 1 and (is_rate(name) or isinstance(module, DROPOUTS)):
                    setattr(holder, name, 0.0)
    return model


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def is_rate(name: str) -> bool:
    """Whether an attribute of this name says how often something is dropped."""
    return ("drop" in name and "keep" not in name) or "jitter" in name or name in MASKED


MASKED = ("mask_time_prob", "mask_feature_prob")


def call(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Everything that the model returns in floating point, in order."""
    keywords = {key: value for key, value in inputs.items() if key != "args"}
    out = model(*inputs.get("args", ()), **keywords)
    return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def noise(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    """Positional tensors of these shapes."""

    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"args": tuple(torch.randn(*shape, generator=generator) for shape in shapes)}

    return make


def image(size: int, batch: int = 2, channels: int = 3) -> Callable[[], Inputs]:
    """A batch of square images as the one positional argument."""
    return noise((batch, channels, size, size))


def ids(batch: int = 2, length: int = 9, most: int = 90, seed: int = 1) -> Tensor:
    """Token ids that mean nothing special to anybody."""
    return torch.randint(5, most, (batch, length), generator=torch.Generator().manual_seed(seed))
