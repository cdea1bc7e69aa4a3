"""From the text behind 'mae:' to masked pre-training on the images of another task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attemper.errors import ParameterError
from attemper.lab.call_syntax import render_call
from attemper.lab.tasks.augment import check
from attemper.lab.tasks.base import ImageTask, InputShape, Task
from attemper.lab.tasks.mae.shape import MaskedShape
from attemper.lab.tasks.mae.task import MaskedTask
from attemper.lab.tasks.patch_size import fitting_patch

SHARE = 0.75
"""Of the patches that are hidden, as in the paper."""
OPTIONS = ("mask", "patch", "per_patch")


def open_mae(name: str, inner: str, options: Mapping[str, Any], open_inner: Callable[[str], Task]) -> MaskedTask:
    """Masked pre-training (He et al., Masked Autoencoders Are Scalable Vision Learners, 2022) on another task's images.

    inner: its name; options: its options, and among them ours:
    mask: share of the patches that are hidden, 0.75 unless given.
    patch: side of a patch in pixels; otherwise whatever gives about 8 × 8 patches.
    per_patch: predict pixels of mean 0 and variance 1 in each patch, unless false: those of the whole image then.
    open_inner: from the text of a task to the task.
    """
    ours = {key: value for key, value in options.items() if key in OPTIONS}
    theirs = {key: value for key, value in options.items() if key not in OPTIONS}
    if not inner:
        raise ParameterError(f"'{name}' does not say which images: mae:TASK, such as mae:digits or mae:folder:photos.")
    task = open_inner(render_call(inner, theirs))
    if not isinstance(task, ImageTask) or not isinstance(task.shape, InputShape):
        raise ParameterError(
            f"'{name}': masked pre-training is on images with one class each that are no stream, such as those of "
            f"digits, cifar100, folder:PATH or csv:FILE. '{inner}' has {task.shape}."
        )
    return MaskedTask(name, task, shape_of(name, task.shape, ours), per_patch=_per_patch(name, task, ours))


def shape_of(name: str, images: InputShape, options: Mapping[str, Any]) -> MaskedShape:
    """The shape that some options give for images."""
    if images.height != images.width:
        raise ParameterError(f"'{name}': ViT-MAE takes square images, and these are {images.height} × {images.width}.")
    given = options.get("patch")
    if given is not None:
        check("patch", given, 1, whole=True)
    patch = fitting_patch(images, given)
    if given is None and patch == 1:
        raise ParameterError(
            f"'{name}': images of {images.height} × {images.width} can be cut into no patches but single pixels; make "
            "them of another size, or say patch=1."
        )
    patches = (images.height // patch) ** 2
    share = options.get("mask", SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ParameterError(f"'{name}': mask is {share!r}; it must be a number above 0 and below 1.")
    if patches < 2:
        raise ParameterError(f"'{name}': an image is one patch of {patch} × {patch}; give a smaller patch.")
    visible = min(max(1, round(patches * (1 - share))), patches - 1)
    return MaskedShape(images.channels, images.height, patch, visible)


def _per_patch(name: str, task: ImageTask, options: Mapping[str, Any]) -> bool:
    found = options.get("per_patch", True)
    if not isinstance(found, bool):
        raise ParameterError(f"'{name}': per_patch is {found!r}; it must be true or false.")
    return found
