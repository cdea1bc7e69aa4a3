"""`Tempered.save`: a tempered model's weights, and how it is tempered, in a folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import NoSiteError, UnsavableError, first_line
from attemper.files import WEIGHTS, atomic_write
from attemper.recipe import describe
from attemper.tempering.penalties import Control
from attemper.tempering.records import record_of
from attemper.tempering.root import RootAction
from attemper.tempering.subclassing import is_tempered, state_of

RECORD = "attemper.json"


def save(model: nn.Module, control: Control, folder: Path) -> None:
    """Write a tempered model's weights and how it is tempered."""
    try:
        from safetensors.torch import save as to_bytes
    except ModuleNotFoundError:
        raise UnsavableError("to save a model needs the package safetensors: pip install safetensors") from None
    _check_root(model, control)
    _check_folder(folder)
    record = record_of(model, control)
    tensors, tied = _tensors(model)
    try:
        data = to_bytes(tensors, metadata={"format": "pt"})
    except Exception as error:  # a type of numbers that the format does not know: it raises many kinds
        raise UnsavableError(f"the weights cannot be written as safetensors: {first_line(error)}") from error
    record = dataclasses.replace(record, tied=tied, digest=hashlib.sha256(data).hexdigest())
    atomic_write(folder / WEIGHTS, data)
    atomic_write(folder / RECORD, json.dumps(record.to_dict(), indent=2) + "\n")


def _check_folder(folder: Path) -> None:
    """Refuse a folder whose weights were not written here: those of another library, or of a run."""
    if (folder / WEIGHTS).exists() and not (folder / RECORD).exists():
        raise UnsavableError(
            f"'{folder / WEIGHTS}' is there already, without an {RECORD} beside it: save() did not write it, and it "
            "would be lost. Choose another folder, or remove that file."
        )


def _check_root(model: nn.Module, control: Control) -> None:
    """Refuse a model that is not what apply was called with."""
    root = tempered_root(model)
    if control.methods and root is None:
        raise NoSiteError(f"this {type(model).__name__} is not tempered any more; apply a recipe to it first")
    if root:
        raise UnsavableError(
            f"'{describe(control.methods)}' was applied to '{root}' inside of this {type(model).__name__}; save that: "
            f"Tempered.of(model.{root}).save(folder)"
        )


def tempered_root(model: nn.Module) -> str | None:
    """The name of the module that apply was called with; None: nothing is tempered."""
    tempered = [(name, state_of(module)) for name, module in model.named_modules() if is_tempered(module)]
    roots = (name for name, state in tempered if any(isinstance(action, RootAction) for action in state.actions))
    return next(roots, None)


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict on the CPU, every tensor once, and other name → name of those that have several."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    taken: set[int] = set()
    for name, found in model.state_dict().items():
        _check_plain(name, found)
        value = found.detach()
        view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and first.setdefault(view, name) != name:
            tied[name] = first[view]
            continue
        value = value.cpu().contiguous()
        if value.untyped_storage().data_ptr() in taken:  # another view of the same memory: safetensors wants copies
            value = value.clone()
        taken.add(value.untyped_storage().data_ptr())
        tensors[name] = value
    return tensors, tied


def _check_plain(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        reason = f"is a {type(value).__name__}"
    elif value.is_meta:
        reason = "is on the meta device and has no values"
    elif type(value.detach()) is not Tensor or value.layout != torch.strided or value.is_quantized:
        reason = f"is a {type(value.detach()).__name__} ({value.layout})"
    else:
        return
    raise UnsavableError(
        f"'{name}' in the state dict {reason}; only plain tensors can be saved. Gather what is sharded first."
    )
