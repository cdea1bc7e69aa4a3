"""A trained model in the formats of other programs, each checked against the model."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError, UnsavableError, first_line
from attemper.files import atomic_write
from attemper.lab.evaluation.trained import Trained
from attemper.tempering.outputs import logits_of
from attemper.tempering.records import added_parameters

TOLERANCE = 1e-3
"""How far the logits of an exported graph may lie from those of the model, over the largest of them."""


class Logits(nn.Module):
    """A model that gives its logits, whatever else it has to say."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.model(images))


def about(trained: Trained) -> dict[str, str]:
    """What a program needs to know of an exported model, as texts."""
    inputs = trained.inputs
    return {
        "classes": json.dumps(inputs.classes),
        "mean": json.dumps(inputs.mean),
        "deviation": json.dumps(inputs.deviation),
        "size": json.dumps([inputs.channels, inputs.height, inputs.width]),
        "model": trained.spec.model,
        "recipe": trained.spec.recipe,
        **({"numbers": json.dumps(inputs.numbers)} if inputs.numbers else {}),
    }


def example(trained: Trained, samples: int = 2) -> Tensor:
    """Images of noise."""
    inputs, generator = trained.inputs, torch.Generator().manual_seed(0)
    return torch.randn(samples, inputs.channels, inputs.height, inputs.width, generator=generator)


def program_of(trained: Trained) -> Any:
    """The model as torch.export sees it, for any number of images."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    try:
        with quiet():
            return torch.export.export(
                Logits(trained.model).eval(), (example(trained),), dynamic_shapes={"images": {0: batch}}
            )
    except Exception as error:  # whatever torch.export does not understand about a model
        raise UnsavableError(
            f"{trained.spec.model} with '{trained.spec.recipe}' cannot be exported: {first_line(error)}"
        ) from error


def export_program(trained: Trained, path: Path) -> str:
    """A program of torch.export."""
    buffer = io.BytesIO()
    program = program_of(trained)
    torch.export.save(program, buffer, extra_files=about(trained))
    data = buffer.getvalue()
    again = torch.export.load(io.BytesIO(data)).module()
    check(trained, again, "the program")
    atomic_write(path, data)
    return "checked against the model"


def export_onnx(trained: Trained, path: Path) -> str:
    """An ONNX file."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError:
        raise ParameterError("--onnx needs the packages onnx and onnxscript: pip install 'attemper[onnx]'") from None

    try:
        with quiet():
            made: Any = torch.onnx.export(program_of(trained), dynamo=True, verbose=False)
    except UnsavableError:
        raise
    except Exception as error:  # an operator that ONNX does not have, say
        raise UnsavableError(
            f"{trained.spec.model} with '{trained.spec.recipe}' cannot be written as ONNX: {first_line(error)}"
        ) from error
    proto = made.model_proto
    onnx.helper.set_model_props(proto, about(trained))
    data = proto.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        atomic_write(path, data)
        return "not checked: onnxruntime is not installed"
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    check(trained, lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), "the ONNX graph")
    atomic_write(path, data)
    return "checked against the model by onnxruntime"


def export_weights(trained: Trained, path: Path) -> str:
    """The weights as safetensors; those that methods added keep their prefix."""
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in trained.model.state_dict().items()}
    atomic_write(path, save(_untied(tensors), metadata={"format": "pt", **about(trained)}))
    added = [each.name for each in added_parameters(trained.model)]
    built_in = [method.name for method in trained.tempered.methods if method.name in ARCHITECTURE]
    if built_in or added:
        return f"they are right only with '{trained.spec.recipe}' applied, which changes the architecture"
    return "they fit the plain model"


ARCHITECTURE = ("cb", "graying", "skipless")
"""Methods that act in eval mode."""


def _untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory, each with its own."""
    seen: set[int] = set()
    found = {}
    for name, value in tensors.items():
        found[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return found


def check(trained: Trained, run: Any, what: str) -> None:
    """Raise unless an exported graph gives what the model gives, for other numbers of images, too."""
    for samples in (1, 3):
        x = example(trained, samples)
        with torch.no_grad():
            wanted, given = logits_of(trained.model(x)), run(x)
        worst = float((given - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
        if not worst <= TOLERANCE:
            raise UnsavableError(
                f"{what} does not give what the model gives: its logits are off by {worst:.2g} of the largest. Nothing "
                "was written."
            )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager: inside it, exporters keep their progress to themselves."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
