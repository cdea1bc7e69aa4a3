"""What a family is, how its model is built and called, and the inputs that several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from architectures.base import quiet

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    blocks: int
    """How many blocks the network has: L of the schedules."""
    attentions: int
    """How many attention sites."""
    grids: tuple[tuple[int, int] | None, ...]
    """The key grids of the attention sites, without repeats, in order."""
    prefix: int = 0
    """How many keys stand before the patches."""
    prefixes: tuple[int, ...] | None = None
    """The same per site, where sites differ."""
    targets: tuple[str, ...] | None = None
    fullgraph: bool = True
    """False where the untempered model itself cannot be compiled into one graph."""
    architecture: tuple[str, str] | None = None
    """Library and name in `benchmarks/architectures`, whose sweep says which recipes it refuses."""
    depths: tuple[int, ...] | None = None
    """The block of every attention; None: 0, 1, 2 …"""
    pickles: bool = True
    """False where the untempered model cannot be pickled once it has run."""
    own_randomness: bool = False
    """Whether the untempered model draws random numbers, beside which ours change what it draws."""


def build(family: Family) -> nn.Module:
    """The family's model with nothing left at zero: some start with a zero head or norm, which hides attention."""
    torch.manual_seed(0)
    model = family.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def call(model: nn.Module, inputs: Inputs) -> Tensor:
    """The model's main output as one tensor, whatever it returns."""
    out = model(*inputs.get("args", ()), **{k: v for k, v in inputs.items() if k != "args"})
    if isinstance(out, Tensor):
        return out
    if isinstance(out, tuple):
        return next(part for part in out if isinstance(part, Tensor))
    last = getattr(out, "transformer_decoder_last_hidden_state", None)  # of Mask2Former, behind all of its attention
    return last if last is not None else next(value for value in out.values() if isinstance(value, Tensor))


def image(size: int = 32, batch: int = 2) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"args": (torch.randn(batch, 3, size, size, generator=generator),)}

    return make


def pixels(size: int = 32, **more: Any) -> Callable[[], Inputs]:
    def make() -> Inputs:
        return {"pixel_values": image(size)()["args"][0], **more}

    return make


def noise(*shapes: tuple[int, ...]) -> Callable[[], Inputs]:
    def make() -> Inputs:
        generator = torch.Generator().manual_seed(1)
        return {"args": tuple(torch.randn(*shape, generator=generator) for shape in shapes)}

    return make


def of_architecture(family: str, library: str, name: str, blocks: int, attentions: int, **more: Any) -> Family:
    """A model of `benchmarks/architectures` as a family, without dropout of its own and without a cache of keys."""

    def make() -> nn.Module:
        from architectures import architectures_of

        model = quiet(architectures_of(library)[name].make())
        config = getattr(model, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        return model

    def inputs() -> Inputs:
        from architectures import architectures_of

        return architectures_of(library)[name].inputs()

    return Family(family, make, inputs, blocks, attentions, (None,), architecture=(library, name), **more)
