"""`attemper export`: a trained model for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attemper.errors import ParameterError
from attemper.lab.cli.options import Of, Run, option
from attemper.lab.cli.printing import console, say

if TYPE_CHECKING:
    from attemper.lab.evaluation.trained import Trained

File = Annotated[Path | None, option(metavar="FILE")]


@dataclass(frozen=True)
class ExportModel:
    """Write a trained model as ONNX, as a torch.export program, or its weights as safetensors.

    The model is exported in eval mode, where only cb, graying and skipless act; they are part of the graph. It takes
    normalised images and gives logits; classes, mean and deviation stand in the file's metadata. Every graph is run
    once, and must give what the model gives. Of a study, the run that is best on validation is exported.

    Examples
      attemper export runs/one --onnx model.onnx
      attemper export runs/photos-vit --of "dropkey(0.1)" --torch-export model.pt2 --safetensors model.safetensors
    """

    run_folder: Run
    onnx: File = None
    """An ONNX file; needs the packages onnx and onnxscript, and onnxruntime to be checked."""
    torch_export: File = None
    """A program of torch.export, such as model.pt2."""
    safetensors: File = None
    """The weights alone, under the names that they have in the plain model."""
    of: Of = None

    def run(self, words: Sequence[str] = ()) -> int:
        from attemper.lab.evaluation.exporting import export_onnx, export_program, export_weights
        from attemper.lab.evaluation.trained import load_trained
        from attemper.lab.folders import folder_errors
        from attemper.lab.study.winner import find_run

        wanted = [
            (self.onnx, export_onnx), (self.torch_export, export_program), (self.safetensors, export_weights),
        ]  # fmt: skip
        if not any(path for path, _ in wanted):
            raise ParameterError("Say what to write: --onnx FILE, --torch-export FILE, --safetensors FILE.")
        screen = console()
        trained = load_trained(find_run(self.run_folder, self.of))
        say(screen, f"{trained.spec.model} with '{trained.spec.recipe}', seed {trained.spec.seed}: {trained.path}")
        for path, export in wanted:
            if path is not None:
                with folder_errors(path):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    about = export(trained, path)
                say(screen, f"Written: {path} ({about})")
        self._print_inputs(trained)
        return 0

    def _print_inputs(self, trained: Trained) -> None:
        inputs = trained.inputs
        mean, deviation = (", ".join(f"{value:.4f}" for value in each) for each in (inputs.mean, inputs.deviation))
        size = f"{inputs.channels} × {inputs.height} × {inputs.width}"
        say(
            console(),
            f"It takes images of {size}: pixels from 0 to 1, less the mean ({mean}), over the deviation ({deviation}). "
            f"It gives logits of {len(inputs.classes)} classes{', for every pixel' if inputs.numbers else ''}.",
        )
