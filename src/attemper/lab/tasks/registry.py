"""From the text that names a task to the task, and to its files."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attemper.errors import ParameterError, suggestion
from attemper.lab.call_syntax import check_options, is_own, parse_call, render_call
from attemper.lab.counting import counted
from attemper.lab.entry_points import added, find_added
from attemper.lab.errors import DataError
from attemper.lab.tasks import cifar
from attemper.lab.tasks.actions.opening import open_actions
from attemper.lab.tasks.actions.planted import open_planted
from attemper.lab.tasks.audio.listing import SOUNDS
from attemper.lab.tasks.audio.opening import open_audio, open_esc50, open_mel
from attemper.lab.tasks.audio.tones import open_tones
from attemper.lab.tasks.base import ImageTask, Task, Verified
from attemper.lab.tasks.boxes.made_up import open_boxes
from attemper.lab.tasks.boxes.opening import open_coco
from attemper.lab.tasks.csv_listing import open_csv
from attemper.lab.tasks.digits import open_digits
from attemper.lab.tasks.folder import open_folder
from attemper.lab.tasks.idx import open_idx
from attemper.lab.tasks.image_files import IMAGES
from attemper.lab.tasks.listing import describe, list_folder
from attemper.lab.tasks.mae.opening import open_mae
from attemper.lab.tasks.noise import open_noise
from attemper.lab.tasks.normalising import read_normalisation
from attemper.lab.tasks.notifications import collecting
from attemper.lab.tasks.numerals import open_numerals
from attemper.lab.tasks.own.opening import open_own
from attemper.lab.tasks.segmentation.noise import open_noise_masks
from attemper.lab.tasks.segmentation.opening import open_segment
from attemper.lab.tasks.segmentation.shapes import open_shapes
from attemper.lab.tasks.segmentation.task import SegmentationTask
from attemper.lab.tasks.sequences import open_sequences
from attemper.lab.tasks.source import found_under
from attemper.lab.tasks.streaming.hf import open_hf
from attemper.lab.tasks.streaming.task import StreamTask
from attemper.lab.tasks.streaming.wds import open_wds
from attemper.lab.tasks.timm_data import open_timm
from attemper.lab.tasks.translation import open_translation
from attemper.lab.tasks.vqa.opening import open_vqa

ROOT_VARIABLE = "ATTEMPER_DATA"
GROUP = "attemper.tasks"
"""The entry point of other packages' tasks: functions of the task's name, the text behind its colon, and the root."""

OWN = "MODULE:FUNCTION"
MASKED = "mae"
TASKS = {
    "digits": "scikit-learn's handwritten digits: 8 × 8, ten classes, no files needed",
    "cifar10": "CIFAR-10, official binary or Python files under the data root",
    "cifar100": "CIFAR-100, official binary or Python files under the data root",
    "folder:PATH": "any folder of images, with one subfolder per class or with classes in their names",
    "idx:PATH": "a folder with the idx files of MNIST, Fashion-MNIST and their relatives, packed by gzip or not",
    "tones": "made-up tones in noise: six classes of sound, no files needed",
    "audio:PATH": "any folder of audio files, with one subfolder per class, as GTZAN's, or with classes in their names",
    "esc50:PATH": "ESC-50 with its CSV; one of its five folds is the test set",
    "mel:FILE": "ready log-mel spectrograms in an .npz file",
    "sequences:PATH": "windows of measurements with one class each, such as of an accelerometer: .npz or .npy files",
    "actions:PATH": "features of videos with annotated actions: an .npz file, or a folder as of OadTR or ActionFormer",
    "planted": "made-up videos with planted actions, no files needed",
    "segment:PATH": "images with masks, a class for every pixel: a folder as of ADE20K, Pascal VOC or Oxford-IIIT Pet",
    "noise-masks": "random images with masks, by which plans are measured; no files needed",
    "shapes": "made-up pictures of discs, boxes and rings with masks, no files needed",
    OWN: "what a function of your own returns, in an installed module or one of the current directory",
    "csv:FILE": "images whose names and classes a CSV lists",
    "noise": "random images in any number and size, by which plans are measured; no files needed",
    "timm:NAME": "what timm.data.create_dataset opens, such as timm:hfds/cifar10 or timm:torch/svhn",
    "wds:PATH": "WebDataset's tar files of any number: a folder, or a pattern such as imagenet/train-{0000..1023}.tar",
    "hf:NAME": "a Hugging Face data set of images, local or streamed from the hub",
    "numerals": "English numbers below a million, to be said in German; no files needed",
    "boxes": "made-up images with squares, discs and crosses to be found; no files needed",
    "coco:PATH": "images with boxes to be found, a folder annotated in COCO's JSON",
    "translation:PATH": "a folder of parallel text, such as train.en, train.de, val.en, val.de, test.en, test.de",
    "mae:TASK": "masked pre-training without labels on the images of another task, such as mae:digits",
    "vqa:PATH": "questions about images in the layout of VQAv2; vqa:easy, of the package easy-vqa; vqa:shapes, made up",
}

FILES: dict[str, Callable[..., Task]] = {
    "folder": open_folder,
    "csv": open_csv,
    "idx": open_idx,
    "audio": open_audio,
    "esc50": open_esc50,
    "mel": open_mel,
    "sequences": open_sequences,
    "actions": open_actions,
    "vqa": open_vqa,
    "coco": open_coco,
    "segment": open_segment,
}
LISTED = {"folder": IMAGES, "audio": SOUNDS}
"""Tasks whose files have a class by their folder or their name."""
STAND_INS = {
    **dict.fromkeys(("boxes", "coco"), "boxes"),
    **dict.fromkeys(("segment", "shapes"), "noise-masks"),
    "vqa": "vqa:noise",
    "mae": "mae:noise",
}
"""By kind: the task without files on which plans are measured; of the others, noise."""
STREAMS: dict[str, Callable[..., Task]] = {"wds": open_wds, "hf": open_hf}


def data_root(root: Path | str | None = None) -> Path:
    """Where data sets lie: what was given, else the variable ATTEMPER_DATA, else ./data."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or "data").expanduser()


def list_tasks() -> dict[str, str]:
    """Every task's name, with a line about it."""
    return TASKS | added(GROUP)


def open_task(text: str, root: Path | None = None) -> Task:
    """The task that a text such as 'digits', 'cifar10(train=5000)' or 'folder:flowers(size=64)' names.

    text: a name of `list_tasks()`, with options in call form. Every task takes train= and test=: how many images to
        keep, the same ones for everybody, with every class in its proportion.
    root: the folder under which data sets lie; None: the variable ATTEMPER_DATA, else ./data.

    >>> task = open_task("digits")
    >>> task.shape
    InputShape(channels=1, height=8, width=8, classes=10)
    >>> [len(part) for part in task.split(seed=0, validation=0.3)]
    [1006, 431]
    """
    name, options = parse_call(text)
    kind, _, inner = name.partition(":")
    if kind == MASKED:
        return open_mae(render_call(name, options), inner, options, functools.partial(open_task, root=root))
    label, normalise = render_call(name, options), options.pop("normalise", None)
    if _is_own(name):
        task = open_own(label, name, options, functools.partial(open_task, root=root))
    else:
        opener = _opener(name, label, data_root(root))
        check_options(text, opener, options)
        task = opener(**options)
    return task if normalise is None else normalised(task, label, normalise)


def _is_own(name: str) -> bool:
    """Whether a name is 'module:function', and not a kind of task with something behind its colon."""
    kind = name.partition(":")[0]
    taken = [*(known.partition(":")[0] for known in TASKS if known != OWN), *(added(GROUP))]
    return is_own(name) and kind not in taken


def normalised(task: Task, label: str, given: Any) -> Task:
    """The task with other numbers taken out of its channels than it would."""
    if not isinstance(task, ImageTask | StreamTask | SegmentationTask):
        raise ParameterError(f"'{label}' has no images in bytes that could be normalised; leave normalise out.")
    found = read_normalisation(given, task.shape.channels)
    if isinstance(task, ImageTask):
        return dataclasses.replace(task, normalise=found)
    if found is None:
        raise ParameterError(f"'{label}' is not looked through before training: normalise cannot be 'data' there.")
    return dataclasses.replace(task, normalise=found)


def _opener(name: str, label: str, root: Path) -> Callable[..., Task]:
    kind, _, rest = name.partition(":")
    if opener := find_added(GROUP, kind, own=TASKS, takes=("name", "text", "root"), gives=Task):  # type: ignore[type-abstract]
        return functools.partial(opener, label, rest, root)
    if name == "digits":
        return functools.partial(open_digits, label)
    if name == "noise":
        return functools.partial(open_noise, label)
    if name in cifar.CIFAR:
        return functools.partial(cifar.open_cifar, label, cifar.CIFAR[name], root)
    if name == "tones":
        return functools.partial(open_tones, label)
    if kind in FILES and rest:
        return functools.partial(FILES[kind], label, rest, root)
    if name == "boxes":
        return functools.partial(open_boxes, label)
    if name == "noise-masks":
        return functools.partial(open_noise_masks, label)
    if name == "shapes":
        return functools.partial(open_shapes, label)
    if name == "planted":
        return functools.partial(open_planted, label)
    if kind == "timm" and rest:
        return functools.partial(open_timm, label, rest, root)
    if kind in STREAMS and rest:
        return functools.partial(STREAMS[kind], label, rest, root)
    if name == "numerals":
        return functools.partial(open_numerals, label)
    if kind == "translation" and rest:
        return functools.partial(open_translation, label, rest, root)
    known = list_tasks()
    raise ParameterError(f"There is no task '{name}'.{suggestion(name, known)} There are: {', '.join(known)}.")


def verify(text: str, root: Path | None = None) -> list[str]:
    """Check the files of a task, and say in a few lines what was found; what is wrong with them is raised.

    >>> verify("digits")
    ['digits: 1,437 training samples and 360 test samples of 1 × 8 × 8 and of 10 classes']
    """
    with collecting() as told:
        task = open_task(text, root)
        more = task.verify() if isinstance(task, Verified) else []
    train, validation = task.split(seed=0, validation=0.5)
    return [
        f"{task.name}: {counted(len(train) + len(validation), 'training sample')} and "
        f"{counted(len(task.test()), 'test sample')} "
        f"of {task.shape}",
        *dict.fromkeys((*told, *getattr(task, "notes", ()), *more)),
    ]


def preview(text: str, root: Path | None = None) -> list[str]:
    """What the names of a task's files say: classes, how many files each has, groups. No file is opened."""
    name, options = parse_call(text)
    options.pop("normalise", None)
    kind, _, path = name.partition(":")
    if kind not in LISTED or not path:
        raise ParameterError(f"'{text}' cannot be previewed; {' and '.join(f'{each}:PATH' for each in LISTED)} can.")
    where = data_root(root)
    check_options(text, _opener(name, text, where), options)
    listing = list_folder(found_under(where, path), LISTED[kind], options.get("label"), options.get("broken", "refuse"))
    lines = describe(listing, LISTED[kind])
    return [f"{text}: {lines[0]}", *lines[1:]]


def prepare(text: str, root: Path | None = None) -> list[str]:
    """Download the files of a task that are not there yet, then `verify` them."""
    name, _ = parse_call(text)
    where = data_root(root)
    if name in cifar.CIFAR and not cifar.is_there(cifar.CIFAR[name], where):
        _download(name, cifar.CIFAR[name].torchvision, where)
    return verify(text, root)


def _download(name: str, kind: str, root: Path) -> None:
    import torchvision

    try:
        root.mkdir(parents=True, exist_ok=True)
        getattr(torchvision.datasets, kind)(root, download=True)
    except OSError as error:  # urllib's errors are among them
        raise DataError(
            f"{name} could not be downloaded into '{root}': {error}. On a machine without network, copy the official "
            f"folder there ({' or '.join(layout.folder for layout in cifar.CIFAR[name].layouts)})."
        ) from None
    except RuntimeError as error:
        raise DataError(f"The download of {name} into '{root}' is damaged: {error}. Delete it and try again.") from None
