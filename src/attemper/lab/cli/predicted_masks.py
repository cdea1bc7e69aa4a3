"""What `attemper predict` does with a model that gives every pixel a class: masks, and how much of an image is what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import ParameterError, UnreadableError
from attemper.lab.cli.printing import console, print_json, say
from attemper.lab.counting import counted

if TYPE_CHECKING:
    from torch import Tensor

    from attemper.lab.evaluation.trained import Trained

SHOWN = 20
"""Images of which something is printed."""


def write_masks(
    trained: Trained, folder: Path, files: Sequence[Path], out: Path | None, top: int, *, json: bool
) -> int:
    """Predict every image, write its mask below `out`, and say which classes take most of it."""
    from rich.progress import track

    screen, classes = console(json=json), trained.inputs.classes
    check_pictures(folder, files, out, "masks")
    found: list[tuple[str, list[float]]] = []
    skipped: list[str] = []
    for file in track(files, "predicting", console=screen, transient=True, disable=not screen.is_terminal):
        name = file.relative_to(folder).as_posix()
        try:
            mask = predict_mask(trained, file)
        except UnreadableError:
            skipped.append(name)
            continue
        if out is not None:
            write_mask(out / file.relative_to(folder).with_suffix(".png"), mask, trained.inputs.numbers)
        counts = mask.flatten().bincount(minlength=len(classes)).double()
        found.append((name, (counts / counts.sum()).tolist()))
    if not found:
        raise UnreadableError(f"Of {counted(len(skipped), 'image')} in '{folder}', none can be decoded.")
    _show(screen, found, classes, max(top, MOST_SHOWN))
    if skipped:
        more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
        say(screen, f"note: skipped, since they cannot be decoded ({len(skipped)}): {', '.join(skipped[:5])}{more}")
    if out is not None:
        say(screen, f"Written: {counted(len(found), 'mask')} below {out}")
    else:
        say(screen, "--out FOLDER writes the masks")
    if json:
        shares = [{"file": name, "shares": dict(zip(classes, row, strict=True))} for name, row in found]
        about = {"run": str(trained.path.parent), "recipe": trained.spec.recipe, "classes": list(classes)}
        print_json({**about, "images": shares, "skipped": skipped})
    return 0


MOST_SHOWN = 3
"""Classes of an image that are printed, unless more are asked for."""


def check_pictures(folder: Path, files: Sequence[Path], out: Path | None, what: str) -> None:
    """Raise where what is written, such as masks, would overwrite each other, or images."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise ParameterError(f"--out is '{out}', a file; {what} go into a folder.")
    if out.resolve() == folder.resolve():
        raise ParameterError(f"--out is the folder of the images; {what} could overwrite them. Name another folder.")
    names = [file.relative_to(folder).with_suffix("").as_posix() for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()):
        raise ParameterError(f"'{folder}' has several images called '{twice[0]}', whose {what} would have one name.")


def predict_mask(trained: Trained, file: Path) -> Tensor:
    """The class of every pixel of an image, int64 (h, w), upright as it is to be seen."""
    import torch

    from attemper.lab.tasks.image_files import as_rgb, upright
    from attemper.lab.tasks.sample_files import open_image
    from attemper.lab.tasks.segmentation.canvas import classes_from_canvas, on_canvas
    from attemper.tempering.outputs import logits_of

    inputs, device = trained.inputs, next(trained.model.parameters()).device
    image = open_image(file, lambda opened: as_rgb(upright(opened)))
    with torch.no_grad():
        x = inputs.normalise(on_canvas(image, (inputs.height, inputs.width))[None].to(device))
        logits = logits_of(trained.model(x))[0].float()
        return classes_from_canvas(logits, (image.height, image.width)).cpu()


def write_mask(path: Path, mask: Tensor, numbers: Sequence[int]) -> None:
    """A PNG of numbers, those of the masks that the model learnt from, with a palette that shows them."""
    import io

    import torch
    from PIL import Image

    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors
    from attemper.lab.tasks.pictures import colour_of

    image = Image.fromarray(torch.tensor(numbers, dtype=torch.uint8)[mask].numpy(), mode="P")
    palette = [(0, 0, 0)] * 256
    for at, number in enumerate(numbers):
        palette[number] = colour_of(at)
    image.putpalette([level for colour in palette for level in colour])
    data = io.BytesIO()
    image.save(data, format="PNG")
    with folder_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, data.getvalue())


def _show(screen: Any, found: Sequence[tuple[str, list[float]]], classes: Sequence[str], most: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "classes by area", box=None, pad_edge=False)
    for name, row in found[:SHOWN]:
        order = sorted((at for at in range(len(row)) if row[at]), key=lambda at: -row[at])[:most]
        table.add_row(escape(name), escape(", ".join(f"{classes[at]} {100 * row[at]:.1f} %" for at in order)))
    screen.print(table)
    if len(found) > SHOWN:
        say(screen, f"… and {len(found) - SHOWN:,} more")
