"""`attemper diagnose`: what the attention of a model does with a folder of images."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attemper.errors import NoSiteError, ParameterError
from attemper.files import WEIGHTS
from attemper.lab.cli.diagnosis_files import check_out, write_all
from attemper.lab.cli.options import Json, Number, Of, Text, Writable, option
from attemper.lab.cli.printing import command_line, console, print_json, say

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from attemper.lab.tasks.user_images import Images
    from attemper.probes.pictures import Query

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
Folder = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
RECIPE = (
    "Applied to the model before it is looked at; cb, graying and skipless act in eval mode. Otherwise that of a run, "
    "or none."
)
JACOBIAN_LIMIT = (
    "Tokens × channels above which of a Jacobian only the largest singular value is computed; otherwise 4096 on a CPU "
    "and 25000 on a GPU."
)
DEFAULT_SIZE, DEFAULT_CLASSES = 32, 1000

NO_WEIGHTS = "random weights"
RANDOM = "random, since no checkpoint was given"
PRETRAINED = "pretrained weights of the library"


@dataclass(frozen=True)
class Subject:
    """The model that is looked at."""

    model: str
    """As `build_model` takes it."""
    recipe: str
    checkpoint: Path | None
    label: str
    """What its weights are called."""
    size: int
    channels: int
    classes: int | None
    normalise: Callable[[Tensor], Tensor]
    """uint8 (B, 3, size, size) → what the model takes."""


@dataclass(frozen=True)
class Diagnose:
    """Look into a model: entropy, logits and reach of every head, sinks, conditioning of tokens, where attention looks.

    Prints a table and what it comes to, and writes heat maps, curves and pictures as PNG, the table as JSON, and one
    HTML page. Images are cut to their middle square; those that cannot be decoded are skipped and named. The model may
    be the folder of a run or of a study, with its recipe, size and weights; a model by its name has random weights
    without a checkpoint. --beside puts other weights of the same model next to the first ones, in tables and pictures.

    Examples
      attemper diagnose runs/photos-vit --images photos --of "dropkey(0.1)"
      attemper diagnose timm:vit_small_patch16_224 --images photos --checkpoint vit.safetensors
      attemper diagnose vit-cifar --images photos --recipe cb --checkpoint runs/one/checkpoint.pt
      attemper diagnose vit-tiny --images photos --query 3,4 --checkpoint plain.pt --beside dropkey.pt
    """

    model: Model
    """Such as vit-cifar, timm:vit_tiny_patch16_224, hf:vit; or the folder of a run or of a study."""
    images: Folder
    """A folder with images, at any depth."""
    of: Of = None
    recipe: Annotated[str | None, option(RECIPE, "TEXT")] = None
    checkpoint: Writable = None
    """Weights, as .safetensors or as a state dict that torch saved."""
    beside: Writable = None
    """Weights of another run of the same model, as a file or a run's folder: shown beside the first one's."""
    out: Path = Path("diagnosis")
    """Where files are written."""
    probes: tuple[str, ...] = ("entropy", "distance", "logits", "sinks", "twins", "conditioning")
    """Which of entropy, distance, logits, sinks, twins, conditioning, smoothing, jacobian."""
    jacobian_limit: Annotated[int | None, option(JACOBIAN_LIMIT, "N")] = None
    query: str = "class"
    """Whose attention is drawn: 'class', or row and column of a patch such as 3,4."""
    most: int = 16
    """So many images are looked at."""
    pictures: int = 1
    """Of so many images, attention is drawn over them."""
    size: Number = None
    """Side of the images in pixels; otherwise what a timm model was published for, else 32."""
    channels: int = 3
    """Of the model's input: 3, or 1 for grey images."""
    classes: Number = None
    """Of the model's head; otherwise as many as the checkpoint's, else 1000."""
    device: Text = None
    """Such as cpu or cuda:1; otherwise the GPU, if there is one."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        import attemper
        from attemper.lab.tasks.user_images import read_images
        from attemper.lab.training.loop import choose_device
        from attemper.probes.comparison import compare_tables

        query = read_query(self.query)
        check_out(self.out, self._of())
        screen, device = console(json=self.json), choose_device(self.device)
        self._check()
        subject = self._subject()
        images = read_images(self.images, subject.size, self.most)
        models = {subject.label: self._model(subject, subject.checkpoint).to(device)}
        if self.beside is not None:
            models[label_of(self.beside, taken=subject.label)] = self._model(subject, self.beside).to(device)
        inputs = subject.normalise(images.pixels).to(device)
        tables = {}
        for label, each in models.items():
            found = attemper.diagnose(
                each, inputs, self.probes, jacobian_limit=self.jacobian_limit, log=lambda line: say(screen, line)
            )
            random = label == NO_WEIGHTS
            weights, untrained = RANDOM if random else label, random or found.untrained
            tables[label] = dataclasses.replace(found, weights=weights, untrained=untrained)
        table = next(iter(tables.values()))
        beside = compare_tables(tables) if len(tables) > 1 else None
        notes = [images.warning] if images.warning else []
        shown, drawn = self._pictures(models, images, inputs, query)
        notes += shown
        about = self._about(subject, images, words, notes)
        written = write_all(self.out, table, drawn, about, self._of(), beside)
        say(screen, str(table), *(["", str(beside)] if beside else []), *(f"note: {note}" for note in notes))
        say(screen, "", f"Written: {written}")
        if self.json:
            plain = table.to_dict() | {"images": list(images.names), "skipped": list(images.skipped)}
            print_json(plain | ({"beside": beside.to_dict()} if beside else {}))
        return 0

    def _subject(self) -> Subject:
        """What is looked at: the model of a run, or one by its name."""
        folder = Path(self.model)
        if not (folder / WEIGHTS).is_file() and not (folder / "plan.yaml").is_file():
            if self.of is not None:
                raise ParameterError(f"--of chooses a recipe of a study, and '{self.model}' is none.")
            return Subject(
                model=self.model,
                recipe=self.recipe or "none",
                checkpoint=self.checkpoint,
                label=PRETRAINED if self.checkpoint is None and downloads(self.model) else label_of(self.checkpoint),
                size=self.size or published_size(self.model) or DEFAULT_SIZE,
                channels=self.channels,
                classes=self.classes,
                normalise=lambda pixels: to_input(pixels, self.model, self.channels),
            )
        return self._run_subject(folder)

    def _run_subject(self, folder: Path) -> Subject:
        from attemper.lab.evaluation.trained import read_trained
        from attemper.lab.study.winner import find_run

        found = find_run(folder, self.of)
        spec, inputs = read_trained(found)
        if inputs.numbers:
            raise ParameterError(
                f"'{folder}' gives every pixel a class, and its images are not cut to squares, as they would be here: "
                "'attemper train --probe-every' and 'attemper compare --probe-every' look at its attention."
            )
        checkpoint = self.checkpoint or found / WEIGHTS
        return Subject(
            model=spec.model,
            recipe=self.recipe or spec.recipe,
            checkpoint=checkpoint,
            label=label_of(checkpoint),
            size=inputs.height,
            channels=inputs.channels,
            classes=len(inputs.classes),
            normalise=inputs.normalise,
        )

    def _of(self) -> dict[str, str]:
        """What is diagnosed: a folder that holds another diagnosis is left alone."""
        paths = {"of": self.of, "checkpoint": self.checkpoint, "beside": self.beside, "images": self.images}
        files = {name: str(path) for name, path in paths.items() if path is not None}
        return {"model": self.model, "recipe": self.recipe or "none", **files}

    def _check(self) -> None:
        limits = {
            "most": (1, 10_000), "pictures": (0, 10_000), "size": (1, 8_192), "classes": (1, 1_000_000),
            "jacobian_limit": (1, 1_000_000),
        }  # fmt: skip
        for name, (least, largest) in limits.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= largest:
                end = f"at least {least}" if value < least else f"at most {largest:,}"
                raise ParameterError(f"--{name.replace('_', '-')} is {value}; it must be {end}.")
        if self.channels not in (1, 3):
            raise ParameterError(f"--channels is {self.channels}; it must be 1 or 3.")

    def _model(self, subject: Subject, checkpoint: Path | None) -> nn.Module:
        import attemper
        from attemper.files import read_weights
        from attemper.lab.models.registry import build_model
        from attemper.lab.models.weights import classes_in, load_weights
        from attemper.lab.tasks.base import InputShape

        weights = None if checkpoint is None else read_weights(checkpoint)
        classes = subject.classes or (classes_in(weights.tensors) if weights else None) or DEFAULT_CLASSES
        shape = InputShape(subject.channels, subject.size, subject.size, classes)
        model = build_model(subject.model, shape, trained=weights is None)
        attemper.apply(model, subject.recipe)
        if weights is not None:
            load_weights(model, weights, of=subject.model, optional="attemper.")
        return model

    def _pictures(
        self, models: Mapping[str, nn.Module], images: Images, inputs: Tensor, query: Query
    ) -> tuple[list[str], dict[str, Image]]:
        """Notes, and pictures by file name."""
        from attemper.lab.report.png import beside, looks_sheet, overlay
        from attemper.probes.pictures import query_looks, rollout

        drawn: dict[str, Image] = {}
        name = "the class token" if query is None else f"patch {query[0]}, {query[1]}"
        try:
            for at in range(min(self.pictures, len(images.names))):
                pixels, x, title = images.pixels[at], inputs[at : at + 1], f"Where {name} looks: {images.names[at]}"
                sheets = {
                    label: looks_sheet(pixels, query_looks(m, x, query), title=title) for label, m in models.items()
                }
                rolled = {label: overlay(pixels, rollout(m, x, query), 320) for label, m in models.items()}
                for kind, pictures in (("looks", sheets), ("rollout", rolled)):
                    drawn[f"{kind}-{at}"] = beside(pictures) if len(models) > 1 else next(iter(pictures.values()))
        except NoSiteError as error:  # windows, or no class token: the table is there all the same
            return [f"no pictures: {error}"], drawn
        return [], drawn

    def _about(self, subject: Subject, images: Images, words: Sequence[str], notes: Sequence[str]) -> list[str]:
        weights = f"weights: {RANDOM if subject.label == NO_WEIGHTS else subject.label}"
        count = len(images.names)
        lines = [f"Recipe {subject.recipe}; {weights}; {count} {'image' if count == 1 else 'images'}.", *notes]
        return [*lines, command_line(words)] if words else lines


def downloads(model: str) -> bool:
    """Whether a library gives a model its weights."""
    from attemper.lab.call_syntax import parse_call

    return parse_call(model)[1].get("pretrained") is True


def label_of(checkpoint: Path | None, taken: str = "") -> str:
    """What weights are called: their file, and the folder that it lies in; more of the path where that is taken."""
    if checkpoint is None:
        return NO_WEIGHTS
    short = "/".join(checkpoint.parts[-2:])
    return short if short != taken else str(checkpoint) + (" again" if str(checkpoint) == taken else "")


def read_query(text: str) -> Query:
    """None for 'class', else row and column."""
    if text.strip() == "class":
        return None
    parts = text.split(",")
    if len(parts) == 2 and all(re.fullmatch(r"\s*[0-9]{1,6}\s*", part) for part in parts):
        return int(parts[0]), int(parts[1])
    raise ParameterError(f"--query is '{text}'; it must be 'class', or row and column of a patch such as 3,4.")


def published_size(model: str) -> int | None:
    """The image size that a timm model was published for, where nothing in its text says another."""
    from attemper.lab.call_syntax import parse_call

    name, options = parse_call(model)
    if not name.startswith("timm:"):
        return None
    if isinstance(options.get("img_size"), int):
        return int(options["img_size"])
    config = _timm_config(name)
    return None if config is None else int(config.input_size[-1])


def _timm_config(name: str) -> Any:
    import timm

    known = name.removeprefix("timm:")
    return timm.get_pretrained_cfg(known) if timm.is_model(known) else None


def to_input(pixels: Tensor, model: str, channels: int) -> Tensor:
    """uint8 images as a model takes them: normalised as timm does for its own models, else by their own statistics."""
    import torch

    from attemper.lab.call_syntax import parse_call

    x = pixels.float() / 255
    if channels == 1:
        x = x.mean(1, keepdim=True)
    name, _ = parse_call(model)
    config = _timm_config(name) if name.startswith("timm:") else None
    if config is not None and channels == 3:
        mean, deviation = torch.tensor(config.mean), torch.tensor(config.std)
    else:
        mean, deviation = x.mean((0, 2, 3)), x.std((0, 2, 3)).clamp_min(1e-3)
    return (x - mean[:, None, None]) / deviation[:, None, None]
