"""`attemper predict`: what a trained model takes the images of a folder for."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attemper.errors import ParameterError, UnreadableError
from attemper.lab.cli.options import Json, Of, Run, Text, Writable
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from torch import Tensor

    from attemper.lab.evaluation.trained import Trained

Folder = Annotated[Path, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]
SHOWN = 20
"""Images whose prediction is printed; the file has all."""


@dataclass(frozen=True)
class Predict:
    """Say what a trained model takes images for: labels and probabilities, for every image of a folder.

    Of a segmentation, masks are written: a PNG with the number of a class for every pixel, as large as its image. Of
    objects in images, boxes: a file in COCO's JSON with scores, and pictures. Of questions about images, answers.

    Images are treated as in training: cut to their middle square, resized, normalised. Those that cannot be decoded are
    skipped and named. Of a study, the run that is best on validation predicts.

    Examples
      attemper predict runs/one --images photos
      attemper predict runs/photos-vit --images photos --out predictions.csv
      attemper predict runs/photos-vit --of "dropkey(0.1)" --images photos --top 3
      attemper predict runs/streets --images photos --out masks
      attemper predict runs/cells --images photos --out found
      attemper predict runs/vqa --images photos --question "What color is the ball?"
    """

    run_folder: Run
    images: Folder
    """A folder with images, at any depth."""
    of: Of = None
    question: Text = None
    """Of a run on questions about images: what is asked about every image."""
    questions: Writable = None
    """Of such a run: a JSON file of questions as of VQAv2, about the images whose names end with their numbers."""
    out: Writable = None
    """A CSV file for labels; a folder for masks; a folder or .json file for boxes; a .csv or .json file for answers."""
    top: int = 1
    """So many labels are printed for each image."""
    batch_size: int = 64
    """Images that are looked at at once."""
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        from attemper.files import atomic_write
        from attemper.lab.evaluation.trained import load_predicting
        from attemper.lab.folders import folder_errors
        from attemper.lab.study.winner import find_run
        from attemper.lab.tasks.user_images import image_files
        from attemper.lab.training.box_inputs import BoxInputs
        from attemper.lab.training.loop import choose_device
        from attemper.lab.training.question_inputs import QuestionInputs

        for name, least in (("top", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ParameterError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least {least}."
                )
        screen = console(json=self.json)
        files = image_files(self.images)
        trained = load_predicting(find_run(self.run_folder, self.of), choose_device(self.device))
        say(screen, f"{trained.spec.model} with '{trained.spec.recipe}', seed {trained.spec.seed}: {trained.path}")
        if isinstance(trained.inputs, QuestionInputs):
            from attemper.lab.cli.predicted_answers import asked_of, write_answers

            asked = asked_of(self.images, files, self.question, self.questions)
            return write_answers(trained, asked, self.out, self.batch_size, json=self.json)
        if self.question is not None or self.questions is not None:
            raise ParameterError(f"'{self.run_folder}' was not trained on questions; leave --question(s) out.")
        if isinstance(trained.inputs, BoxInputs):
            from attemper.lab.cli.predicted_boxes import write_boxes

            return write_boxes(trained, self.images, files, self.out, self.batch_size, json=self.json)
        if trained.inputs.numbers:
            from attemper.lab.cli.predicted_masks import write_masks

            return write_masks(trained, self.images, files, self.out, self.top, json=self.json)
        found: list[tuple[str, list[float]]] = []
        skipped: list[str] = []
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
            line = bar.add_task("predicting", total=len(files))
            for names, bad, probabilities in predictions(trained, self.images, files, self.batch_size):
                found += zip(names, probabilities.tolist(), strict=True)
                skipped += bad
                bar.advance(line, len(names) + len(bad))
        if not found:
            raise UnreadableError(f"Of {counted(len(skipped), 'image')} in '{self.images}', none can be decoded.")
        classes = trained.inputs.classes
        if self.out is not None:
            with folder_errors(self.out):
                atomic_write(self.out, to_csv(found, classes))
        self._show(screen, found, classes)
        if skipped:
            more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
            say(screen, f"note: skipped, since they cannot be decoded ({len(skipped)}): {', '.join(skipped[:5])}{more}")
        if self.out is not None:
            say(screen, f"Written: {self.out}")
        if self.json:
            print_json(
                {
                    "run": str(trained.path.parent),
                    "recipe": trained.spec.recipe,
                    "classes": list(classes),
                    "images": [
                        {"file": name, "label": best(row, classes)[0], "probabilities": row} for name, row in found
                    ],
                    "skipped": skipped,
                }
            )
        return 0

    def _show(self, screen: Any, found: Sequence[tuple[str, list[float]]], classes: Sequence[str]) -> None:
        from rich.markup import escape
        from rich.table import Table

        table = Table("image", "label" if self.top == 1 else "labels", box=None, pad_edge=False)
        for name, row in found[:SHOWN]:
            order = sorted(range(len(row)), key=lambda at: -row[at])[: self.top]
            table.add_row(escape(name), escape(", ".join(f"{classes[at]} {100 * row[at]:.1f} %" for at in order)))
        screen.print(table)
        if len(found) > SHOWN:
            rest = f"{len(found) - SHOWN:,} more"
            say(screen, f"… and {rest}" + ("" if self.out or self.json else "; --out FILE.csv writes all of them"))


def best(row: Sequence[float], classes: Sequence[str]) -> tuple[str, float]:
    """The class with the highest probability, and that."""
    at = max(range(len(row)), key=lambda at: row[at])
    return classes[at], row[at]


def predictions(
    trained: Trained, folder: Path, files: Sequence[Path], batch_size: int
) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """Names, names of what cannot be decoded, and probabilities (B, classes), batch by batch."""
    import torch

    from attemper.lab.tasks.source import decode
    from attemper.tempering.outputs import logits_of

    size, device = trained.inputs.height, next(trained.model.parameters()).device
    for start in range(0, len(files), batch_size):
        names: list[str] = []
        bad: list[str] = []
        pixels = []
        for file in files[start : start + batch_size]:
            name = file.relative_to(folder).as_posix()
            try:
                pixels.append(decode(file, size, turn=True))
                names.append(name)
            except UnreadableError:
                bad.append(name)
        if not pixels:
            yield names, bad, torch.empty(0, len(trained.inputs.classes))
            continue
        with torch.no_grad():
            x = trained.inputs.normalise(torch.stack(pixels).to(device))
            yield names, bad, logits_of(trained.model(x)).double().softmax(-1).cpu()


def to_csv(found: Sequence[tuple[str, list[float]]], classes: Sequence[str]) -> str:
    """One line per image. A text that a spreadsheet would take for a formula has an apostrophe before it."""
    from attemper.lab.study.export import harmless

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "label", "probability", *map(harmless, classes)])
    for name, row in found:
        label, probability = best(row, classes)
        shares = [f"{value:.6f}" for value in (probability, *row)]
        writer.writerow([harmless(name), harmless(label), *shares])
    return text.getvalue()
