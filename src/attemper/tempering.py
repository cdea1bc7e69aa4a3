"""`attemper.apply`: puts methods on the sites of a model, and gives back a handle to what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import (
    AlreadyAppliedError,
    NoSiteError,
    ParameterError,
    UnknownMethodError,
    WrappedModelError,
    suggestion,
)
from attemper.methods.base import Method, Place, Scheduled
from attemper.ops.attention import COMING, IMPLEMENTATIONS
from attemper.ops.perturbation import Perturbation
from attemper.recipe import as_methods, describe
from attemper.seam import (
    RootState,
    SiteState,
    When,
    is_tempered,
    restore_class,
    state_of,
    temper_attention,
    temper_root,
)
from attemper.sites import Sites, find_sites

__all__ = ["Row", "Tempered", "apply"]


def apply(
    model: nn.Module,
    recipe: str | Method | Sequence[Method],
    *,
    targets: Sequence[str] | str | None = None,
    impl: str = "auto",
) -> Tempered:
    """Temper a model in place. In eval mode it computes exactly what it did before; `remove()` undoes everything.

    model: any module with attention in it, before it is wrapped (DDP, FSDP) or compiled.
    recipe: a text such as "dropkey(0.1, schedule=decreasing)", a method, or a sequence of methods.
    targets: globs on module names; only attention in the modules that they match is tempered. A module of your own that
        is not recognised as attention is tempered when a glob names it.
    impl: which implementation computes attention: "auto", or a name that is then obeyed or refused.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> tempered = apply(model, "dropkey(0.2, schedule=decreasing)")
    >>> [row.rate for row in tempered.summary()]
    [0.2, 0.1]
    """
    methods = tuple(as_methods(recipe))
    _refuse_wrapped(model)
    _refuse_tempered(model)
    known = ("auto", *IMPLEMENTATIONS, *COMING)
    if impl not in known:
        raise ParameterError(f"impl must be one of {', '.join(known)}; got {impl!r}.{suggestion(impl, known)}")
    sites = find_sites(model, targets)
    states = _attention_states(model, methods, sites, impl)
    for site, state in states:
        temper_attention(site, state)
    if states and not is_tempered(model):
        temper_root(model, RootState(sites.left_alone))
    return Tempered(model, methods, sites.left_alone)


def _attention_states(
    model: nn.Module, methods: tuple[Method, ...], sites: Sites, impl: str
) -> list[tuple[nn.Module, SiteState]]:
    """What every attention module will carry. Everything that can fail fails here, before the model is touched."""
    if not methods:
        return []
    for method in methods:
        if not isinstance(method, Perturbation):
            raise NoSiteError(f"{method.name} acts on nothing that can be tempered: {method!r}")
    if not sites.attentions:
        raise NoSiteError(_no_attention(model, methods, sites))
    states = []
    for site in sites.attentions:
        grid, prefix = (site.geometry.grid, site.geometry.prefix) if site.geometry else (None, 0)
        place = Place(site.block, len(sites.blocks), grid, prefix, site.name)
        states.append((site.module, SiteState(place, methods, impl)))
    return states


def _no_attention(model: nn.Module, methods: tuple[Method, ...], sites: Sites) -> str:
    kinds = sorted({type(module).__name__ for module in model.modules()})
    seen = ", ".join(kinds[:40]) + (", …" if len(kinds) > 40 else "")
    left = "".join(f" '{name}' was left alone: {reason}." for name, reason in sites.left_alone.items())
    return (
        f"'{describe(methods)}' acts on attention, and {type(model).__name__} has none that is recognised.{left} "
        f"Module types seen: {seen}. Attention in modules of your own can be named: targets=['blocks.*.attn']."
    )


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise WrappedModelError(f"apply needs a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model"
        kind = type(module).__name__
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise WrappedModelError(f"{where} is compiled already; apply to the model first, then torch.compile it")
        if module._compiled_call_impl is not None:
            raise WrappedModelError(f"{where} ({kind}) is compiled already; apply first, then call .compile()")
        if isinstance(module, torch.jit.ScriptModule):
            raise WrappedModelError(f"{where} ({kind}) is scripted; apply to the Python model instead")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or kind.startswith("FSDP"):
            raise WrappedModelError(f"{where} is wrapped in {kind}; apply to the model inside, then wrap it")
        if "forward" in module.__dict__:
            raise WrappedModelError(
                f"the forward of {where} ({kind}) was replaced on the instance (by a hook of another library?), "
                "where it would hide Attemper's; apply before that is done"
            )


def _refuse_tempered(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_tempered(module):
            state = state_of(module)
            what = f"'{describe(state.recipe)}'" if isinstance(state, SiteState) else "a recipe"
            raise AlreadyAppliedError(
                f"'{name}' is tempered already, with {what}. Call remove() on its handle (Tempered.of(model) finds "
                "it), then apply one recipe that holds everything: 'dropkey(0.1) + dropattention(0.1)'."
            )


@dataclass(frozen=True)
class Row:
    """One method at one site."""

    site: str
    """The module's name in the model."""
    module: str
    """Its class."""
    block: int
    """The block that it belongs to, counted through the whole network."""
    method: str
    rate: float | None
    """The probability of dropping here; None for a method without one."""
    recipe: str
    """The method as it acts here."""


class Tempered:
    """The handle to a tempered model."""

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], left_alone: dict[str, str]) -> None:
        self.model = model
        self.methods = methods
        self.left_alone = left_alone

    @classmethod
    def of(cls, model: nn.Module) -> Tempered:
        """The handle to a model that is tempered already: a copy, or one that was loaded from a file."""
        states = [state_of(module) for module in model.modules() if is_tempered(module)]
        sites = [state for state in states if isinstance(state, SiteState)]
        if not sites:
            raise NoSiteError(f"this {type(model).__name__} is not tempered; attemper.apply(model, recipe) does that")
        roots = [state.left_alone for state in states if isinstance(state, RootState)]
        return cls(model, sites[0].recipe, roots[0] if roots else {})

    def _sites(self) -> list[tuple[str, nn.Module, SiteState]]:
        found = []
        for name, module in self.model.named_modules():
            state = state_of(module) if is_tempered(module) else None
            if isinstance(state, SiteState):
                found.append((name, module, state))
        return found

    def loss(self, forward: Callable[[], Any], criterion: Callable[[Any], Tensor]) -> Tensor:
        """The training loss: the task's own, and whatever the methods add to it.

        forward: runs the model and returns its output.
        criterion: turns that output into a scalar.
        """
        return criterion(forward()) + self.penalty()

    def penalty(self) -> Tensor:
        """What the methods add to the loss: a scalar, zero for methods that act in the forward pass alone."""
        tensor = next(iter(self.model.parameters()), None)
        return torch.zeros((), device=None if tensor is None else tensor.device)

    def set_rate(self, rate: float, method: str | None = None) -> None:
        """Set p of every stochastic method on the live model; schedules keep their shape.

        rate: the new p. Zero switches dropping off and costs nothing, as for the last epochs of a training.
        method: the name of the one method to set; None sets all.
        """
        names = [m.name for m in self.methods if isinstance(m, Scheduled)]
        if method is not None and method not in names:
            raise UnknownMethodError(
                f"no method '{method}' with a rate in '{describe(self.methods)}'.{suggestion(method, names)}"
            )
        recipe = tuple(
            m.with_rate(rate) if isinstance(m, Scheduled) and method in (None, m.name) else m for m in self.methods
        )
        sites = self._sites()
        for _, _, state in sites:  # resolve everywhere once, so that a refusal leaves every site as it was
            for m in recipe:
                m.at(state.place)
        for _, _, state in sites:
            state.set_recipe(recipe)
        self.methods = recipe

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """A stretch of code in which the model computes what it did before, in training mode too."""
        with self._when("never"):
            yield

    @contextlib.contextmanager
    def stochastic(self) -> Iterator[None]:
        """A stretch of code in which the methods act in eval mode too; nothing else leaves eval mode."""
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it would pass by the tempered modules
        try:
            with self._when("always"):
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)

    @contextlib.contextmanager
    def _when(self, when: When) -> Iterator[None]:
        states = [(state, state.when) for _, _, state in self._sites()]
        for state, _ in states:
            state.when = when
        try:
            yield
        finally:
            for state, before in states:
                state.when = before

    def average(self, forward: Callable[[], Tensor], passes: int) -> Tensor:
        """The mean of `passes` stochastic passes, which closes the gap between training and test.

        forward: runs the model and returns predictions, such as `lambda: model(x).softmax(-1)`. Put the model in eval
            mode before: the methods act all the same, and nothing else does.
        """
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ParameterError(f"passes must be a number of passes, at least 1; got {passes!r}")
        with self.stochastic():
            total = forward()
            for _ in range(passes - 1):
                total = total + forward()
        return total / passes

    def remove(self) -> None:
        """Make the model what it was before: same classes, same attributes, same outputs in training and eval."""
        for module in list(self.model.modules()):
            if is_tempered(module):
                restore_class(module)

    def summary(self) -> list[Row]:
        """Which method acts where, at which rate: one row per site and method."""
        return [
            Row(name, type(module).__name__, state.place.block, method.name, getattr(method, "p", None), str(method))
            for name, module, state in self._sites()
            for method in state.methods
        ]

    def __str__(self) -> str:
        rows = self.summary()
        if not rows:
            return f"{type(self.model).__name__}: not tempered"
        by_site: dict[str, list[Row]] = {}
        for row in rows:
            by_site.setdefault(row.site, []).append(row)
        names = [method.name for method in self.methods]
        table = [["block", "site", "module", *names]]
        for site, here in by_site.items():
            rates = ["" if row.rate is None else f"{row.rate:.4g}" for row in here]
            table.append([str(here[0].block), site or "(root)", here[0].module, *rates])
        lines = [f"{type(self.model).__name__} tempered with {describe(self.methods)}", "", *_aligned(table)]
        lines += [f"left alone: {name}, since {reason}" for name, reason in self.left_alone.items()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Tempered {type(self.model).__name__}: {describe(self.methods)}>"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
