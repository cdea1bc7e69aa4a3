"""Weights from a file into a model; nothing in the file is executed, and another model's weights are refused."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError

__all__ = ["classes_in", "load_weights", "read_weights"]

INSIDE = ("best", "state_dict", "model_state_dict", "model")
"""Names under which training scripts, ours among them, keep the weights in a checkpoint."""
WRAPPERS = ("module.", "_orig_mod.")
HEADS = ("head.weight", "head.fc.weight", "classifier.weight", "heads.head.weight", "fc.weight")
DIGEST = 32  # bytes of a SHA-256, which stand behind a checkpoint of our own


def read_weights(file: Path) -> dict[str, Tensor]:
    """The weights in a .safetensors file or in a checkpoint of tensors and plain containers, on the CPU."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(file)
        else:
            data = file.read_bytes()
            if hashlib.sha256(data[:-DIGEST]).digest() == data[-DIGEST:]:
                data = data[:-DIGEST]
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ParameterError(f"There is no checkpoint '{file}'.") from None
    except ModuleNotFoundError:
        raise ParameterError(f"'{file}' needs the package safetensors: pip install safetensors") from None
    except Exception as error:  # damaged files, and files that would run code: torch raises many kinds
        told = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ParameterError(
            f"'{file}' cannot be read as weights alone ({told}). Save model.state_dict() with torch.save or as "
            ".safetensors."
        ) from None
    for name in INSIDE:
        if isinstance(found, dict) and isinstance(found.get(name), dict):
            found = found[name]
            break
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ParameterError(
            f"'{file}' holds no weights: a state dict, or one under {', '.join(INSIDE)}, was expected."
        )
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): value for name, value in found.items()}
    return dict(found)


def classes_in(weights: dict[str, Tensor]) -> int | None:
    """How many classes the weights' head tells apart, if it has a usual name."""
    return next((int(weights[name].shape[0]) for name in HEADS if name in weights), None)


def load_weights(model: nn.Module, weights: dict[str, Tensor], file: Path) -> None:
    """Put weights into a model, all or none. file: what they are called in messages."""
    own = model.state_dict()
    missing = [name for name in own if name not in weights and not name.startswith("attemper.")]
    unknown = [name for name in weights if name not in own]
    reshaped = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if missing or unknown or reshaped:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(own)} weights are missing, such as '{missing[0]}'")
        if unknown:
            parts.append(f"{len(unknown)} are not the model's, such as '{unknown[0]}'")
        if reshaped:
            first = reshaped[0]
            shapes = f"{tuple(weights[first].shape)} in the file, {tuple(own[first].shape)} in the model"
            parts.append(f"{len(reshaped)} have another shape, such as '{first}' ({shapes})")
        raise ParameterError(
            f"'{file}' is a checkpoint of another model than this {type(model).__name__}: {'; '.join(parts)}."
        )
    model.load_state_dict(weights)
