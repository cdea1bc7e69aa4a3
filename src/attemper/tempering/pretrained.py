"""Models of Transformers: the recipe in their config, and parameters of methods in the files of `save_pretrained`."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attemper.errors import MissingFileError, ParameterError, RecipeWarning, UnreadableError
from attemper.files import read_json_object, read_weights
from attemper.sites.targets import Globs, read_targets
from attemper.tempering.penalties import Control
from attemper.tempering.records import Added, Record, base_of, moved_globs, record_of, same_recipe, worded, written
from attemper.tempering.subclassing import Action

ENTRY = "attemper"
"""The attribute of a config that says how the model was tempered."""
CONFIG = "config.json"
FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where Transformers looks for weights, in its order."""
VARIANTS = ("model.*.safetensors", "model.safetensors.index.*.json", "pytorch_model.*.bin")


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is saved with a config, as Transformers' models are."""
    has_config = callable(getattr(getattr(module, "config", None), "to_dict", None))
    return has_config and callable(getattr(module, "save_pretrained", None))


# --------------------------------------------------------------------------------------------- the recipe in a config
@dataclass
class NoteAction(Action):
    """Writes the recipe into the config that `save_pretrained` saves.

    It stands in the config for as long as that takes: other models may share the object, and are not tempered.
    """

    control: Control
    record: Record

    def acts(self, training: bool) -> bool:
        return False

    @contextlib.contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        config: Any = module.config
        before = getattr(config, ENTRY, None)
        recipe = written(self.control.methods, self.record.blocks)  # rates may have changed
        setattr(config, ENTRY, dataclasses.replace(self.record, recipe=recipe).to_dict())
        try:
            yield
        finally:
            if before is None:
                delattr(config, ENTRY)
            else:
                setattr(config, ENTRY, before)


def notes(model: nn.Module, control: Control) -> list[tuple[nn.Module, Action]]:
    """For every module of a tempered model that is saved with a config, what writes the recipe there."""
    if not control.methods:
        return []
    parts = [(name, module) for name, module in model.named_modules() if is_pretrained(module)]
    return [(module, NoteAction(control, record_of(model, control, name, strict=False))) for name, module in parts]


def entry_of(model: nn.Module) -> Any:
    """What the config of a model says of how it was tempered when it was saved; None: nothing."""
    return getattr(model.config, ENTRY, None) if is_pretrained(model) else None


def warn_of_other_recipe(model: nn.Module, control: Control, blocks: int) -> None:
    """Warn where a config says that the weights were trained with something else than what is applied now."""
    now, targets = written(control.methods, blocks), read_targets(control.options["targets"])
    configs: list[Any] = []
    for name, module in model.named_modules():
        entry = entry_of(module)
        if not isinstance(entry, dict) or any(module.config is config for config in configs):
            continue
        configs.append(module.config)
        recipe, there = str(entry.get("recipe")), _targets(entry, name, module)
        if same_recipe(recipe, now) and there == targets and not entry.get("parameters"):
            continue
        which = f"model.{name}" if name else "model"
        afresh = ", its parameters as they start" if entry.get("parameters") else ""
        warnings.warn(
            f"{which} ({type(module).__name__}) was trained with {worded(recipe, there)}, says its config; "
            f"{worded(now, targets)} is applied now{afresh}. attemper.load({which}) restores what it was trained with.",
            RecipeWarning,
            stacklevel=3,
        )


def _targets(entry: dict[str, Any], name: str, module: nn.Module) -> Globs | None:
    """The targets that a config names, as they would be in the model that holds the module under a name."""
    options, base = entry.get("options"), entry.get("base")
    if not isinstance(options, dict) or not isinstance(base, str):
        return None
    try:
        targets = read_targets(options.get("targets"))
    except ParameterError:
        return None
    if targets is None:
        return None
    moved = moved_globs(targets, base, base_of(module)) if base != base_of(module) else targets
    return moved_globs(moved, "", name)


# ------------------------------------------------------------------------------------------------------------- files
def source_name(model: nn.Module) -> str:
    """The folder, or the name on the hub, from which Transformers loaded a model; empty where it was not loaded."""
    return str(getattr(model, "name_or_path", "") or getattr(model.config, "_name_or_path", "") or "")


def source_of(model: nn.Module) -> Path:
    """The folder from which Transformers loaded a model."""
    name = source_name(model)
    if name and Path(name).is_dir():
        return Path(name)
    with contextlib.suppress(Exception):  # not installed, not a name of the hub, not in its cache
        from huggingface_hub import snapshot_download

        revision = getattr(model.config, "_commit_hash", None)
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    raise UnreadableError(
        f"this {type(model).__name__} says that it came from '{name}', which is no folder here; give the folder: "
        "attemper.load(model, folder)"
    )


def config_entry(folder: Path) -> Any:
    """What `config.json` in a folder says of how the model was tempered."""
    path = folder / CONFIG
    try:
        entry = read_json_object(path).get(ENTRY)
    except MissingFileError:
        raise UnreadableError(
            f"'{folder}' has neither attemper.json nor {CONFIG}: it is not the folder of a tempered model."
        ) from None
    if entry is None:
        raise UnreadableError(f"'{path}' says nothing of a recipe: the model was not tempered when it was saved.")
    return entry


def read_parameters(folder: Path, record: Record) -> dict[str, Tensor]:
    """The parameters that methods added, by the names of the record, whatever stands before them in the files."""
    tensors = _tensors_under(folder, [added.name for added in record.parameters])
    found: dict[str, Tensor] = {}
    for added in record.parameters:
        names = [name for name in tensors if _is_called(name, added.name)]
        if len(names) != 1:
            raise UnreadableError(_not_found(folder, record, added, names))
        found[added.name] = tensors[names[0]]
        if tuple(found[added.name].shape) != added.shape:
            raise UnreadableError(
                f"{names[0]} in '{folder}' has the shape {list(found[added.name].shape)}; {CONFIG} says "
                f"{list(added.shape)}."
            )
    return found


def _is_called(key: str, name: str) -> bool:
    """Whether a key of a file is a name of the model; Transformers may put the name of a part before it."""
    return key == name or key.endswith("." + name)


def _not_found(folder: Path, record: Record, added: Added, names: list[str]) -> str:
    part = f" Only the part '{record.part}' of the tempered model was saved, without them." if record.part else ""
    seen = f"has it {len(names)} times: {', '.join(names)}" if names else "does not have it"
    return (
        f"'{record.recipe}' was trained with {len(record.parameters)} parameters of its own, such as {added.name}, and "
        f"'{folder}' {seen}.{part}"
    )


def _tensors_under(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """Of the weights in a folder, those that are called by one of the names."""

    def wanted(key: str) -> bool:
        return any(_is_called(key, name) for name in names)

    path = _weights_file(folder)
    if path.suffix != ".json":
        return read_weights(path, wanted).tensors
    mapping = read_json_object(path).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(n, str) and n == Path(n).name for n in mapping.values()):
        raise UnreadableError(f"'{path}' is damaged: its weight_map does not name files beside it.")
    found: dict[str, Tensor] = {}
    for file in sorted({file for key, file in mapping.items() if wanted(key)}):
        found |= read_weights(folder / file, wanted).tensors
    return found


def _weights_file(folder: Path) -> Path:
    """The file of weights that Transformers would read, or the index of several."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    others = sorted(each for pattern in VARIANTS for each in folder.glob(pattern))
    others = [each for each in others if each.suffix == ".json"] or others
    if len(others) == 1:
        return others[0]
    there = f"several: {', '.join(each.name for each in others)}" if others else f"none of {', '.join(FILES)}"
    raise UnreadableError(f"'{folder}' should have one file of weights, and has {there}.")
