"""`attemper.apply`: puts methods on the sites of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from attemper.errors import (
    AlreadyAppliedError,
    AttemperError,
    ConflictError,
    NoSiteError,
    ParameterError,
    UnmetError,
    WrappedModelError,
    suggestion,
)
from attemper.methods.base import Method
from attemper.methods.kinds import LossTerm
from attemper.ops.dispatch import IMPLEMENTATIONS
from attemper.recipe import as_methods, describe
from attemper.sites import find_sites
from attemper.sites.targets import Targets, read_targets
from attemper.tempering.handle import PREFIX, Tempered
from attemper.tempering.looking import look_at
from attemper.tempering.mesh import Locator, read_mesh
from attemper.tempering.penalties import Control
from attemper.tempering.placement import Plan, make_plan
from attemper.tempering.pretrained import notes, warn_of_other_recipe
from attemper.tempering.subclassing import add_action, is_tempered, override, state_of
from attemper.tempering.trial import read_masks, try_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def apply(
    model: nn.Module,
    recipe: str | Method | Sequence[Method],
    *,
    targets: Targets | None = None,
    impl: str = "auto",
    auto_penalty: bool = False,
    partial: bool = False,
    mesh: DeviceMesh | Mapping[str, DeviceMesh] | None = None,
) -> Tempered:
    """Temper a model in place. `remove()` undoes everything.

    In eval mode the model computes exactly what it did before, unless the recipe changes its architecture (cb, graying,
    skipless).

    model: any module with attention in it, before it is wrapped (DDP, FSDP) or compiled, and before the optimiser is
        built if a method adds parameters (cb_s).
    recipe: a text such as "dropkey(0.1, schedule=decreasing)", a method, or a sequence of methods.
    targets: globs on module names; only what lies in the modules that they match is tempered. A module of your own that
        is not recognised as attention is tempered when a glob names it. {"attention": …, "mlp": …, "blocks": …} has
        globs for each kind of site; what it does not name is tempered everywhere.
    impl: which implementation computes attention: "auto", or a name that is then obeyed or refused.
    auto_penalty: add the gradient of every penalty inside backward, for training loops that cannot be changed.
    partial: accept that a method does not reach everything, as long as it acts somewhere: attention that no site
        covers, blocks that cannot be skipped, modules that a training pass does not run. Otherwise an error names them.
    mesh: how processes share the batch and the model: a DeviceMesh whose dimensions have names such as "dp", "tp" and
        "cp", or one mesh for each role, {"data": …, "tensor": …, "context": …}. Not needed for DDP, FSDP and
        `parallelize_module`, whose parameters tell.

    >>> layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> tempered = apply(model, "dropkey(0.2, schedule=decreasing)")
    >>> [row.rate for row in tempered.summary()]
    [0.2, 0.1]
    """
    methods = tuple(as_methods(recipe))
    _refuse_wrapped(model)
    _refuse_tempered(model)
    _refuse_lazy(model)
    known = ("auto", *IMPLEMENTATIONS)
    if impl not in known:
        raise ParameterError(f"impl must be one of {', '.join(known)}; got {impl!r}.{suggestion(impl, known)}")
    if auto_penalty and any(isinstance(method, LossTerm) for method in methods):
        raise ConflictError(
            f"auto_penalty cannot serve '{describe(methods)}': a comparison of passes needs "
            "tempered.loss(forward, criterion)"
        )
    sites = find_sites(model, targets, look_at(model) if methods else None)
    options = {"targets": read_targets(targets), "impl": impl, "auto_penalty": auto_penalty, "partial": partial}
    locator = Locator(None if mesh is None else read_mesh(mesh), model)
    control = Control(methods, sites.left_alone, auto_penalty, partial=partial, locator=locator, options=options)
    plan = make_plan(model, methods, sites, control, impl)
    warn_of_other_recipe(model, control, len(sites.blocks))
    try:
        return _carry_out(model, plan, control, impl)
    except UnmetError as error:
        if not error.outside:
            raise
        try:  # branches that blocks do not add may be added by what runs the blocks
            control = Control(
                methods, sites.left_alone, auto_penalty, partial=partial, locator=locator, options=options
            )
            plan = make_plan(model, methods, sites, control, impl, outside=True)
            return _carry_out(model, plan, control, impl)
        except AttemperError:
            raise error from None


def _carry_out(model: nn.Module, plan: Plan, control: Control, impl: str) -> Tempered:
    """Temper the model, and try it out; where that fails, the model is as it was."""
    for module, _ in plan.actions:
        _refuse_hidden(model, module)
    for module, action in plan.actions:
        add_action(module, action)
    for module, name, value in plan.overrides:
        override(module, name, value)
    if any(True for _ in plan.parameters.parameters()):
        model.add_module(PREFIX, plan.parameters)
    for module, note in notes(model, control):
        add_action(module, note)
    tempered = Tempered(model, control)
    if control.methods:
        try:
            try_out(model, impl)
            read_masks(model)
        except AttemperError:
            tempered.remove()
            raise
        tempered.begin()
    return tempered


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise WrappedModelError(f"apply needs a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        where = _called(name)
        kind = type(module).__name__
        if isinstance(module, torch._dynamo.OptimizedModule):
            raise WrappedModelError(f"{where} is compiled already; apply to the model first, then torch.compile it")
        if module._compiled_call_impl is not None:
            raise WrappedModelError(f"{where} ({kind}) is compiled already; apply first, then call .compile()")
        if isinstance(module, torch.jit.ScriptModule):
            raise WrappedModelError(f"{where} ({kind}) is scripted; apply to the Python model instead")
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or kind.startswith("FSDP"):
            raise WrappedModelError(f"{where} is wrapped in {kind}; apply to the model inside, then wrap it")


def _refuse_lazy(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise NoSiteError(
                f"weights of {_called(name)} ({type(module).__name__}) have no shape yet, and what they are cannot be "
                "told; run the model once, then apply"
            )


def _refuse_hidden(model: nn.Module, module: nn.Module) -> None:
    """Refuse a module whose forward stands on the instance, where it would hide what is put on its class."""
    if "forward" in module.__dict__:
        name = next(name for name, each in model.named_modules() if each is module)
        raise WrappedModelError(
            f"the forward of {_called(name)} ({type(module).__name__}) was replaced on the instance (by a hook of "
            "another library?), where it would hide Attemper's; apply before that is done, or leave it out with "
            "targets="
        )


def _called(name: str) -> str:
    return f"'{name}'" if name else "the model"


def _refuse_tempered(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_tempered(module):
            recipe = describe(state_of(module).actions[0].control.methods)
            raise AlreadyAppliedError(
                f"{_called(name)} is tempered already, with '{recipe}'. Call remove() on its handle "
                "(Tempered.of(model) finds it), then apply one recipe that holds everything: "
                "'dropkey(0.1) + dropattention(0.1)'."
            )
