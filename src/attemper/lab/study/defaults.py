"""What a comparison is run with where nobody says: from the model, the data, and whether weights are fine-tuned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError, ParameterError
from attemper.lab.call_syntax import parse_call, render_call
from attemper.lab.models.naming import is_pretrained
from attemper.lab.study.comparison import DEFAULT_PLAN
from attemper.lab.study.plan import Plan
from attemper.lab.tasks.base import ImageTask, InputShape, SequenceShape, Task
from attemper.lab.tasks.boxes.shape import BoxShape
from attemper.lab.tasks.mae.task import MaskedTask
from attemper.lab.tasks.normalising import NORMALISATIONS, name_of
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.segmentation.task import MaskShape, SegmentationTask
from attemper.lab.tasks.streaming.task import StreamTask
from attemper.lab.training.spec import Budget, RunSpec

WARM_UP = 5
"""The warm-up is at most the epochs divided by it."""
RESIZED = ("folder", "csv", "timm")
"""Kinds of tasks whose images have no size of their own, and a small one unless it is said."""
UPRIGHT = ("digits", "idx")
"""Tasks whose images are characters: a mirrored one would be another."""
RECIPES = ("none", "dropkey(0.1, schedule=decreasing)", "drophead(0.1)", "droppath(0.1)")
"""Compared where nobody says: what acts on attention of every kind, and leaves trained weights what they are."""
TINY = 32
"""Side in pixels up to which images with masks are made-up shapes, or as simple."""
LARGE = 96
"""Side in pixels from which a part of an image still shows what the whole does."""


def with_defaults(given: Mapping[str, Any], root: Path | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A plan with whatever it leaves out, and what was chosen, in sentences.

    given: what somebody has said of a plan, maybe nothing. What they have said stays.
    """
    given = {**given, "budget": dict(given.get("budget") or {})}
    given.setdefault("task", DEFAULT_PLAN["task"])
    tuned = is_pretrained(str(given.get("model", ""))) or given["budget"].get("init") is not None
    if parse_call(str(given["task"]))[0] == "digits" and not tuned:
        return _digits(given), ()
    return _fitted(given, tuned, root)


def completed(given: Mapping[str, Any], root: Path | None = None) -> Plan:
    """The plan that `with_defaults` gives, with what was chosen among its notes."""
    whole, notes = with_defaults(given, root)
    plan = Plan.from_dict(whole)
    return replace(plan, notes=(*notes, *plan.notes))


def missed(plan: Plan | RunSpec, root: Path | None = None) -> tuple[str, ...]:
    """What a plan or run that fine-tunes does otherwise than the model was trained, in sentences; it stays as it is."""
    if not (is_pretrained(plan.model) or plan.budget.init is not None):
        return ()
    text, added = _task_text(plan.task, Wishes.of(plan.model, plan.budget.init), True, root)
    return (
        (f"the model was trained on other images than these: with the task '{text}' they are the same",)
        if added
        else ()
    )


def _digits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The embedded comparison, which is made for digits, changed by what was said."""
    whole = {**DEFAULT_PLAN, **given, "budget": {**DEFAULT_PLAN["budget"], **given["budget"]}}
    if given.keys() - {"task", "budget"} or given["budget"] or given["task"] != DEFAULT_PLAN["task"]:
        whole["title"] = given.get("title", "")
    if "lr" in given["budget"]:
        whole.pop("lr", None) if "lr" not in given else None
    if "warmup_epochs" not in given["budget"]:
        budget = whole["budget"]
        budget["warmup_epochs"] = _warm_up(DEFAULT_PLAN["budget"]["warmup_epochs"], budget["epochs"])
    return whole


def _warm_up(wanted: float, epochs: Any) -> float:
    """Never more than a fifth of the epochs; what is no number of epochs is refused elsewhere."""
    return min(wanted, epochs / WARM_UP) if isinstance(epochs, int | float) else wanted


def _fitted(given: dict[str, Any], tuned: bool, root: Path | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    wanted = given["budget"]
    wishes = Wishes.of(str(given.get("model", "")), wanted.get("init")) if "model" in given else Wishes()
    given["task"], of_images = _task_text(str(given["task"]), wishes, tuned, root)
    task = open_task(given["task"], root)
    samples = sum(map(len, task.split(0, 0.5)))
    model = given.get("model") or _model_for(task)
    budget = _budget_for(task, samples, tuned)
    if "epochs" in wanted:
        budget["epochs"] = wanted["epochs"]
    budget["warmup_epochs"] = _warm_up(float(budget["warmup_epochs"]), budget["epochs"])
    if tuned and wanted.get("layer_decay") is None and not _has_blocks(model, task):
        budget.pop("layer_decay", None)
    lr = budget.pop("lr")
    chosen = {name: value for name, value in budget.items() if name not in wanted}
    whole = {**given, "model": model, "budget": {**chosen, **wanted}}
    if "lr" not in given and "lr" not in wanted:
        whole["lr"], chosen["lr"] = [lr], lr
    whole.setdefault("recipes", list(RECIPES))
    whole.setdefault("seeds", DEFAULT_PLAN["seeds"])
    return whole, _notes(given, whole, chosen, of_images, task, samples, tuned)


def _notes(
    given: Mapping[str, Any],
    whole: Mapping[str, Any],
    chosen: Mapping[str, Any],
    of_images: Mapping[str, Any],
    task: Task,
    samples: int,
    tuned: bool,
) -> tuple[str, ...]:
    what = "fine-tuning" if tuned else "training from nothing"
    kind = getattr(task, "samples", "images")
    parts = [f"{name} {value}" for name, value in of_images.items()]
    parts += [] if "model" in given else [f"model {whole['model']}"]
    parts += [] if "recipes" in given else [f"recipes {', '.join(whole['recipes'][1:])}"]
    parts += [f"{name} {_shown(value)}" for name, value in chosen.items()]
    return (f"chosen for {what} on {samples:,} {kind}: {', '.join(parts)}",) if parts else ()


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ----------------------------------------------------------------------------------------------------- from the model
@dataclass(frozen=True)
class Wishes:
    """What a model was made or trained for."""

    size: int | None = None
    normalise: Any = None

    @classmethod
    def of(cls, model: str, init: str | None) -> Wishes:
        """Of a trained run, what that had; else what the library says of its model."""
        if init is not None and (found := _of_run(init)) is not None:
            return found
        try:
            name, options = parse_call(model)
        except ParameterError:
            return cls()  # a mistake that is told where the model is built
        library, _, rest = name.partition(":")
        found = _of_timm(rest) if library == "timm" else _of_transformers(rest) if library == "hf" else cls()
        asked = options.get("img_size", options.get("image_size"))
        return cls(asked, found.normalise) if isinstance(asked, int) else found


def _of_run(init: str) -> Wishes | None:
    """The images of a run whose weights are given."""
    from attemper.errors import UnreadableError
    from attemper.files import parse_json, read_notes, weights_in

    path = Path(init)
    try:
        notes = read_notes(weights_in(path) if path.is_dir() else path)
        _, options = parse_call(parse_json(notes["spec"], "its spec")["task"])
        return Wishes(options.get("size"), options.get("normalise", "data"))
    except (KeyError, TypeError, ParameterError, UnreadableError):  # somebody else's file, or no file at all
        return None


def _of_timm(name: str) -> Wishes:
    import timm

    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError:
        found = None
    if found is None or found.input_size is None:
        return Wishes()
    return Wishes(int(found.input_size[-1]), name_of(tuple(found.mean), tuple(found.std)))


def _of_transformers(name: str) -> Wishes:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as KNOWN

    from attemper.lab.models.trained import transformers_config

    if "/" not in name:
        size = getattr(AutoConfig.for_model(name), "image_size", None) if name in KNOWN else None
        return Wishes(size if isinstance(size, int) else None)
    size = getattr(transformers_config(name), "image_size", None)
    return Wishes(size if isinstance(size, int) else None, _processor_of(name))


def _processor_of(name: str) -> Any:
    """What the processor of a model takes out of images; ImageNet's numbers where it has none."""
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    try:
        found = get_image_processor_config(name)
        return name_of(tuple(found["image_mean"]), tuple(found["image_std"]))
    except Exception:  # no such file, no network: the model's own configuration was read before this
        return "imagenet"


def _task_text(text: str, wishes: Wishes, tuned: bool, root: Path | None) -> tuple[str, dict[str, Any]]:
    """The task with the size and the colours that the model wants, where the task does not say, and what was added."""
    name, options = parse_call(text)
    added: dict[str, Any] = {}
    if wishes.size is not None and "size" not in options and name.partition(":")[0] in RESIZED:
        added["size"] = wishes.size
    if tuned and wishes.normalise not in (None, "data") and "normalise" not in options:
        task = open_task(render_call(name, {**options, **added}), root)
        usual = task.normalise if isinstance(task, StreamTask | SegmentationTask) else None
        known = usual is not None and usual == NORMALISATIONS.get(str(wishes.normalise))
        if isinstance(task, ImageTask | StreamTask | SegmentationTask) and not known:
            added["normalise"] = wishes.normalise
    return (render_call(name, {**options, **added}) if added else text), added


def _model_for(task: Task) -> str:
    """A model that takes the task's inputs."""
    shape = task.shape
    if isinstance(shape, InputShape):
        return "vit-digits" if max(shape.height, shape.width) <= 16 else "vit-cifar"
    if isinstance(shape, SequenceShape):
        return "encoder"
    if isinstance(shape, MaskShape):
        return "segvit-shapes" if max(shape.height, shape.width) <= TINY else "segvit"
    from attemper.lab.models.registry import OWN

    fitting = [name for name, (_, kind, _) in OWN.items() if isinstance(shape, kind)]
    if not fitting:
        raise ParameterError(f"No model here takes inputs of {shape}; name one of your own, as module:function.")
    return fitting[0]


def _has_blocks(model: str, task: Task) -> bool:
    """Whether learning rates can differ from block to block."""
    from attemper.lab.models.registry import build_model
    from attemper.lab.training.initial import block_names
    from attemper.lab.training.randomness import preserved_random_state

    try:
        with preserved_random_state():
            return bool(block_names(build_model(model, task.shape, trained=False)))
    except AttemperError:
        return False  # a mistake that is told where the plan is checked


# ------------------------------------------------------------------------------------------------------ from the data
def _budget_for(task: Task, samples: int, tuned: bool) -> dict[str, Any]:
    """Optimiser, length and augmentation for so many samples."""
    small, medium = samples < 2_000, samples < 20_000
    chosen: dict[str, Any] = {
        "epochs": (10 if small else 8 if medium else 4) if tuned else (60 if small else 40 if medium else 30),
        "batch_size": 32 if small else 64 if medium else 128,
        "optimizer": "adamw",
        "lr": 3e-4 if tuned else 1e-3,
        "min_lr": 1e-6 if tuned else 1e-5,
        "weight_decay": 0.05,
        "decay": "matrices",
        "clip": 1.0,
        "warmup_epochs": 1.0 if tuned else 5.0,
        "validation": 0.2 if medium else 0.1,
    }
    if tuned:
        chosen["layer_decay"] = 0.75
    images = task.inner if isinstance(task, MaskedTask) else task
    if isinstance(images.shape, InputShape) and _takes(images, "crop-flip"):
        upright = images.name.partition(":")[0].partition("(")[0] in UPRIGHT
        large = min(images.shape.height, images.shape.width) >= LARGE
        scale = 0.5 if tuned else 0.25
        chosen["augment"] = f"resized-crop(scale={scale})" if large else "crop-flip(flip=0)" if upright else "crop-flip"
    if isinstance(task.shape, BoxShape):
        chosen |= {"augment": "flip+crop+photometric", "batch_size": 16 if small else 32}
        chosen["epochs"] *= 1 if tuned else 2  # where objects are takes longer to learn than what they are
    if isinstance(task.shape, MaskShape):
        chosen["augment"] = "scale-crop+photometric"
    Budget.from_dict(chosen)
    return chosen


def _takes(task: Task, augmentation: str) -> bool:
    """Whether a task's images are augmented in this way; spectrograms are not."""
    try:
        task.augmentation(augmentation)
    except ParameterError:
        return False
    return isinstance(task, ImageTask | StreamTask)
