"""What a run starts from: a model with its first weights, part of it frozen, its learning rates by depth.

All of it is a function of the run without its recipe, so every recipe of a study starts from the same weights.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError, UnreadableError
from attemper.files import read_weights
from attemper.lab.call_syntax import is_own
from attemper.lab.models.heads import head_parameters
from attemper.lab.models.naming import is_pretrained
from attemper.lab.models.own import code_hash
from attemper.lab.models.registry import build_model
from attemper.lab.models.starting import StartReport, start_from
from attemper.lab.models.trained import library_weights
from attemper.lab.tasks.base import Shape
from attemper.lab.training.spec import Budget, RunSpec

DIGITS = 20
"""Of a hash."""


@dataclass(frozen=True)
class StartingWeights:
    """Tensors by their names in the model that they were trained in."""

    source: str
    tensors: Mapping[str, Tensor]

    @cached_property
    def hash(self) -> str:
        return hash_of_tensors(self.tensors)


def hash_of_tensors(tensors: Mapping[str, Tensor], *more: str) -> str:
    """The hash of named tensors, wherever their file lies and whatever its format is."""
    digest = hashlib.sha256("".join(more).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:DIGITS]


def starting_weights(budget: Budget, model: str) -> StartingWeights:
    """The weights that a budget or a model's name asks for."""
    if budget.init is None:
        return StartingWeights(f"the trained weights of '{model}'", library_weights(model))
    if is_pretrained(model):
        raise ParameterError(
            f"init is '{budget.init}', and '{model}' has trained weights of its own: leave one of them out, such as by "
            "pretrained=false."
        )
    try:
        weights = read_weights(budget.init)
    except UnreadableError as error:
        raise UnreadableError(f"init: {error}") from error
    return StartingWeights(f"'{budget.init}'", weights.tensors)


def initial_model(spec: RunSpec, shape: Shape) -> tuple[nn.Module, StartReport | None]:
    """The untempered model of a run, in training mode, and what became of the weights that it starts from, if any.

    Weights that are drawn come from torch's generator.
    """
    budget = spec.budget
    if is_own(spec.model) and budget.code_hash not in (None, found := code_hash(spec.model)):
        raise ParameterError(
            f"code_hash is {budget.code_hash}, and the source of '{spec.model}' has {found}: it was changed since this "
            "run was planned. Start the comparison anew, in another folder."
        )
    model = build_model(spec.model, shape, trained=False)
    report = None
    if budget.init is not None or is_pretrained(spec.model):
        weights = starting_weights(budget, spec.model)
        if budget.init_hash not in (None, weights.hash):
            raise ParameterError(
                f"init_hash is {budget.init_hash}, and {weights.source} have {weights.hash}: they are others than this "
                "run was planned with."
            )
        report = start_from(
            model, weights.tensors, source=weights.source, classes=shape.classes, keep_head=budget.keep_head
        )
    elif budget.keep_head:
        raise ParameterError("keep_head is true, and training starts from no weights: give init, or leave it out.")
    freeze(model, budget.freeze, shape.classes)
    return model, report


# ------------------------------------------------------------------------------------------------------------- freezing
def freeze(model: nn.Module, what: str, classes: int) -> None:
    """Take parameters out of training: all before the first block, or all but the head."""
    if what == "none":
        return
    if what == "stem":
        chosen = {name for name, depth in depths(model).items() if depth == 0}
    else:
        head = head_parameters(model, classes)
        chosen = {name for name, _ in model.named_parameters() if name not in head} if head else set()
    if not chosen or len(chosen) == sum(1 for _ in model.parameters()):
        known = "no block" if what == "stem" else f"no last layer with {classes} outputs"
        raise ParameterError(f"freeze is '{what}', and {known} was found in {type(model).__name__}.")
    for name, parameter in model.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Batch norms whose weights are frozen: their running statistics belong to those weights."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if (own := list(norm.parameters())) and not any(p.requires_grad for p in own)]


# --------------------------------------------------------------------------------------------------------------- depths
def depths(model: nn.Module) -> dict[str, int]:
    """How deep every parameter lies: 0 before the first block, then its block's number, one more behind the last.

    In the order in which the model lists them: what stands between two blocks counts to the one before.

    >>> blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    >>> found = depths(nn.Sequential(nn.Linear(2, 2), blocks))
    >>> [found[name] for name in ("0.weight", "1.0.0.weight", "1.2.0.bias")]
    [0, 1, 3]
    """
    blocks = block_names(model)
    last = len(blocks)
    found: dict[str, int] = {}
    depth = 0
    for name, _ in model.named_parameters():
        inside = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
        behind = inside is None and depth == last and last > 0
        depth = inside or depth
        found[name] = last + 1 if behind else depth
    return found


def block_names(model: nn.Module) -> list[str]:
    """The repeated parts of a model in order: the kind of which there are most in lists of one kind."""
    lists: list[tuple[str, list[str], type[nn.Module]]] = []
    for name, module in model.named_modules():
        members = list(module.named_children())
        alike = len({type(member) for _, member in members}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and any(members[0][1].children()):
            lists.append((name, [f"{name}.{key}" if name else key for key, _ in members], type(members[0][1])))
    return _of_one_kind(lists)


def _of_one_kind(lists: Iterable[tuple[str, list[str], Any]]) -> list[str]:
    """The members of the kind of which there are most, over all lists: stages of blocks make one list of blocks."""
    by_kind: dict[Any, list[str]] = {}
    for _, members, kind in lists:
        by_kind.setdefault(kind, []).extend(members)
    most = max(by_kind.values(), key=len, default=[])
    outermost = [name for name in most if not any(name.startswith(f"{other}.") for other in most)]
    return outermost if len(outermost) > 1 else []


def parameter_scales(model: nn.Module, decay: float) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied with; those that are not named learn at the full rate.

    model: as it is before a recipe changes its blocks. decay: per block, counted from the end.
    """
    if decay == 1:
        return {}
    found = depths(model)
    last = max(found.values(), default=0)
    if not last:
        raise ParameterError(
            f"layer_decay is {decay:g}, and {type(model).__name__} has no blocks that could be told apart."
        )
    return {name: decay ** (last - depth) for name, depth in found.items()}
