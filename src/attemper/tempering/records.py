"""What a file says of how a model was tempered: recipe, options, versions, and the parameters that methods added."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

import attemper
from attemper.errors import AttemperError, ParameterError, UnreadableError, UnsavableError, first_line
from attemper.methods.base import Method
from attemper.methods.rates import Scheduled
from attemper.recipe import as_methods, describe, render
from attemper.sites.targets import Globs, read_targets
from attemper.tempering.attention import AttentionAction
from attemper.tempering.layers import Parameters, TokenAction
from attemper.tempering.penalties import Control
from attemper.tempering.placement import Placement
from attemper.tempering.subclassing import Action, is_tempered, state_of

FORMAT = 1
"""Counts up when a file of a new version would be misread by this one."""


@dataclass(frozen=True)
class Added:
    """A parameter that a method added to a model."""

    name: str
    """In the state dict of the model."""
    method: str
    place: str
    """The name of the module where it acts."""
    side: str
    shape: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """What says which one it is, whatever its name."""
        return self.method, self.place, self.side


@dataclass(frozen=True)
class Record:
    """How a model was tempered when it was saved."""

    recipe: str
    options: dict[str, Any]
    """The keywords of apply."""
    blocks: int
    """L, how many blocks the network has; 0: no method asked."""
    base: str
    """Of Transformers' models with a head: the name of the module that is the model without it; otherwise empty."""
    part: str
    """The name of what was saved in the model that was tempered; empty: it was saved whole."""
    parameters: tuple[Added, ...]
    versions: dict[str, str]
    tied: dict[str, str] = field(default_factory=dict)
    """Names in the state dict that are other names of the same tensor, which is in the file once."""
    digest: str = ""
    """SHA-256 of the weights; empty in the config of a model of Transformers."""

    @property
    def methods(self) -> list[Method]:
        return as_methods(self.recipe)

    @property
    def wording(self) -> str:
        """The recipe, and where it acts, for people to read."""
        return worded(self.recipe, self.options.get("targets"))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"format": FORMAT, **asdict(self), "parameters": [_plain(added) for added in self.parameters]}

    def moved(self, base: str) -> Record:
        """The same for a model whose modules lie under `base` instead: AutoModel instead of AutoModelForX, or back."""
        if base == self.base:
            return self
        parameters = tuple(
            dataclasses.replace(added, place=moved_name(added.place, self.base, base)) for added in self.parameters
        )
        return dataclasses.replace(
            self, base=base, parameters=parameters, options=moved_options(self.options, self.base, base)
        )


def _plain(added: Added) -> dict[str, Any]:
    return {**asdict(added), "shape": list(added.shape)}


def worded(recipe: str, targets: Globs | None) -> str:
    """A recipe in quotes, with its targets where there are any.

    >>> worded("cb", None), worded("cb", ["blocks.0"]), worded("cb", {"mlp": ["blocks.0", "blocks.1"]})
    ("'cb'", "'cb' on blocks.0", "'cb' on mlp: blocks.0, blocks.1")
    """
    if targets is None:
        return f"'{recipe}'"
    if isinstance(targets, dict):
        return f"'{recipe}' on {'; '.join(f'{kind}: ' + ', '.join(each) for kind, each in targets.items())}"
    return f"'{recipe}' on {', '.join(targets)}"


def moved_name(name: str, old: str, new: str) -> str:
    """A module's name, or a glob on names, in a model whose modules lie under `new` and no longer under `old`.

    >>> moved_name("vit.layers.0", "vit", ""), moved_name("layers.*", "", "vit"), moved_name("*.mlp", "", "vit")
    ('layers.0', 'vit.layers.*', '*.mlp')
    """
    if old and name.startswith(old + "."):
        name = name.removeprefix(old + ".")
    elif old:
        return name  # a head, or a glob that may match it
    return name if not new or name.startswith("*") else f"{new}.{name}"


def moved_options(options: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """The options with targets moved as names are."""
    targets = options.get("targets")
    return options if targets is None else {**options, "targets": moved_globs(targets, old, new)}


def moved_globs(targets: Globs, old: str, new: str) -> Globs:
    """Targets moved as names are."""
    if isinstance(targets, dict):
        return {kind: [moved_name(glob, old, new) for glob in each] for kind, each in targets.items()}
    return [moved_name(glob, old, new) for glob in targets]


# ----------------------------------------------------------------------------------------------------- from a model
def record_of(model: nn.Module, control: Control, part: str = "", *, strict: bool = True) -> Record:
    """How a model is tempered now.

    part: the name of the module in it that is to be saved.
    strict: refuse a recipe that could not be read back; otherwise it is written as people read it.
    """
    blocks = _blocks(model)
    options = {**control.options, "targets": read_targets(control.options.get("targets"))}
    parameters = added_parameters(model)
    if part:
        options = moved_options(options, part, "")
        parameters = [dataclasses.replace(added, place=moved_name(added.place, part, "")) for added in parameters]
    return Record(
        recipe=_readable(control.methods, blocks) if strict else written(control.methods, blocks),
        options=options,
        blocks=blocks,
        base=base_of(model.get_submodule(part)),
        part=part,
        parameters=tuple(parameters),
        versions=_versions(model),
    )


def written(methods: Iterable[Method], blocks: int) -> str:
    """The recipe text of methods on a model with this many blocks: schedules that are functions become their rates."""
    return describe(
        dataclasses.replace(method, schedule=tuple(method.rates(blocks)))
        if isinstance(method, Scheduled) and callable(method.schedule) and blocks
        else method
        for method in methods
    )


def _readable(methods: Sequence[Method], blocks: int) -> str:
    text = written(methods, blocks)
    try:
        if render(as_methods(text)) == text:
            return text
        reason = f"it reads back as '{render(as_methods(text))}'"
    except (AttemperError, ValueError) as error:
        reason = first_line(error)
    raise UnsavableError(
        f"'{text}' cannot be written as a recipe ({reason}). Give a schedule as a list of rates, and make a method of "
        "your own known by its name, under the entry point attemper.methods."
    )


def added_parameters(model: nn.Module) -> list[Added]:
    """The parameters that methods added to a model."""
    homes = {id(module): name for name, module in model.named_modules() if isinstance(module, Parameters)}
    found: dict[str, Added] = {}
    for action in actions_of(model):
        if not isinstance(action, TokenAction | AttentionAction) or action.parameters is None:
            continue
        home = homes.get(id(action.parameters))
        if home is None:  # of a model that this one is a part of
            continue
        if isinstance(action, AttentionAction):
            own = [(parameter, method, "rate") for method, parameter in action.learnt.items()]
        else:
            own = [(action.parameter, action.method.name, action.side)]
        for parameter, method, side in own:
            shape, name = tuple(getattr(action.parameters, parameter).shape), f"{home}.{parameter}"
            found[name] = Added(name, method, action.place.name, side, shape)
    return list(found.values())


def actions_of(model: nn.Module) -> list[Action]:
    """Everything that tempering does in a model."""
    return [action for module in model.modules() if is_tempered(module) for action in state_of(module).actions]


def _blocks(model: nn.Module) -> int:
    return next((action.place.blocks for action in actions_of(model) if hasattr(action, "place")), 0)


def base_of(model: nn.Module) -> str:
    """Of a model of Transformers with a head, the name of the module that is the model without it."""
    prefix = getattr(model, "base_model_prefix", "")
    return prefix if isinstance(prefix, str) and prefix in model._modules else ""


def architecture(methods: Iterable[Method]) -> dict[str, Method]:
    """The methods that act in eval mode too, by name."""
    return {method.name: method for method in methods if Placement.acts_in_eval(method)}


def _versions(model: nn.Module) -> dict[str, str]:
    """Those of Attemper, of torch and of the libraries that the model's modules come from."""
    roots = sorted({type(module).__module__.partition(".")[0] for module in model.modules()} - {"attemper", "torch"})
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", *roots)}
    return {
        "attemper": attemper.__version__,
        **{name: str(version) for name, version in found.items() if isinstance(version, str)},
    }


# ------------------------------------------------------------------------------------------------------- from a file
FIELDS: dict[str, type] = {
    "format": int, "recipe": str, "options": dict, "blocks": int, "base": str, "part": str, "parameters": list,
    "versions": dict, "tied": dict, "digest": str,
}  # fmt: skip


def read_record(data: Any, where: str, defaults: dict[str, Any]) -> Record:
    """A record from JSON; whatever is wrong with it is an `UnreadableError` of one line.

    where: what is read, for messages.
    defaults: the keywords of apply with their defaults.
    """
    if not isinstance(data, dict) or not isinstance(data.get("recipe"), str):
        raise UnreadableError(f"{where} names no recipe: it was not written by Attemper, or is damaged.")
    version = data["versions"].get("attemper") if isinstance(data.get("versions"), dict) else None
    given = data["options"] if isinstance(data.get("options"), dict) else {}
    unknown = [*(data.keys() - FIELDS.keys()), *(given.keys() - defaults.keys())]
    if unknown or data.get("format") != FORMAT:
        what = ", ".join(sorted(map(str, unknown))) or f"format {data.get('format')}"
        raise UnreadableError(
            f"{where} was written by Attemper {version}, and this is {attemper.__version__}, which does not know "
            f"what it holds: {what}."
        )
    wrong = [name for name, kind in FIELDS.items() if not isinstance(data.get(name), kind)]
    if wrong:
        raise UnreadableError(f"{where} is damaged: '{wrong[0]}' is missing or wrong.")
    wrong = [name for name, value in given.items() if not _fits(value, defaults[name])]
    if wrong or not all(isinstance(text, str) for text in (*data["tied"].values(), *data["versions"].values())):
        raise UnreadableError(f"{where} is damaged: '{wrong[0] if wrong else 'tied or versions'}' is wrong.")
    fields = {name: data[name] for name in FIELDS if name not in ("format", "parameters")}
    record = Record(**fields, parameters=tuple(_read_added(each, where) for each in data["parameters"]))
    try:
        as_methods(record.recipe)
    except (AttemperError, ValueError, TypeError, RecursionError) as error:
        raise UnreadableError(f"{where} has a recipe that cannot be read: {first_line(error)}") from error
    return record


def _fits(value: Any, default: Any) -> bool:
    """Whether a keyword of apply can have a value; those without a default are globs, or None."""
    if default is None:
        try:
            return value is None or (isinstance(value, list | dict) and read_targets(value) == value)
        except ParameterError:
            return False
    return type(value) is type(default)


def _read_added(data: Any, where: str) -> Added:
    names = [each.name for each in dataclasses.fields(Added)]
    if isinstance(data, dict) and sorted(data) == sorted(names) and isinstance(data["shape"], list):
        texts = all(isinstance(data[name], str) for name in names if name != "shape")
        if texts and all(isinstance(size, int) for size in data["shape"]):
            return Added(**{**data, "shape": tuple(data["shape"])})
    raise UnreadableError(f"{where} is damaged: a parameter has no name, place or shape.")


def same_recipe(one: str, other: str) -> bool:
    """Whether two recipe texts name the same methods, in whatever order; texts that cannot be read are compared."""
    try:
        first, second = as_methods(one), as_methods(other)
    except (AttemperError, ParameterError, ValueError, TypeError, RecursionError):
        return one == other
    return {method.name: method for method in first} == {method.name: method for method in second}
