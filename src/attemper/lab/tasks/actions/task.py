"""The task: which action happens now, and from when to when each one lasts."""

import dataclasses
from functools import cached_property
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks import source as memory
from attemper.lab.tasks.actions.detection import Segments, find_segments, per_frame_map, segment_map
from attemper.lab.tasks.actions.videos import Array, Video, Videos
from attemper.lab.tasks.actions.windows import (
    Bank,
    LabelSets,
    MemoryWindows,
    StreamedWindows,
    Timeline,
    WindowReader,
    Windows,
)
from attemper.lab.tasks.augment import Augment, parse_augmentation
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.classification import BATCH, Metrics
from attemper.lab.tasks.fingerprint import of_parts
from attemper.lab.tasks.source import Source
from attemper.lab.tasks.split import FIXED, divide
from attemper.tempering.outputs import logits_of

READ_AT_ONCE = 2**26
"""Bytes of windows in a batch that is measured on: each may take a megabyte."""


@dataclasses.dataclass
class ActionTask:
    """Windows of a video's steps up to the current one → the class of the current step.

    protocol: "online" is measured by per-frame mAP over the actions, "segments" by the mAP of segments that are found
        in the scores of all steps.
    window: steps per sample; what lies before a video is filled with its first step.
    stride: every stride-th step of a training video is a sample. What is measured is measured on every step.
    train, test_videos: keep only so many videos, always the same ones.
    """

    name: str
    videos: Videos
    protocol: Literal["online", "segments"] = "online"
    window: int = 64
    stride: int = 1
    train: int | None = None
    test_videos: int | None = None
    primary: str = dataclasses.field(default="mAP", init=False)

    def __post_init__(self) -> None:
        if self.protocol not in ("online", "segments"):
            raise ParameterError(f"'{self.name}': protocol is {self.protocol!r}; it must be 'online' or 'segments'.")
        for part in ("train", "test"):
            if not any(video.labels[:, 1:].any() for video in self.videos.part(part)):
                raise DataError(f"'{self.name}' has no action in its {part} videos.")

    # ----------------------------------------------------------------------------------------------------------- data
    @property
    def shape(self) -> SequenceShape:
        return SequenceShape(tokens=self.window, features=self.videos.width, classes=len(self.videos.classes))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of a result should know of the data."""
        return self.videos.notes

    @property
    def in_memory(self) -> bool:
        return self.videos.bytes <= memory.MEMORY_LIMIT

    @cached_property
    def fingerprint(self) -> str:
        """Of annotations and features; of the names and sizes of files where features are not held in memory."""
        parts: list[str | bytes] = [self.videos.annotations_fingerprint, f"{self.videos.width} {self.videos.dtype}"]
        for video in self.videos.all:
            parts.append(
                np.ascontiguousarray(video.features.read()).tobytes() if self.in_memory else str(video.features)
            )
        return of_parts(*parts)

    @cached_property
    def sets(self) -> LabelSets:
        return LabelSets(self.videos.all, self.shape.classes)

    @cached_property
    def _pool(self) -> Windows:
        """Every step of the training videos, validation included."""
        return self._every_step(self._limited("train", self.train))

    @cached_property
    def _held_out(self) -> Windows:
        return self._every_step(self._limited("test", self.test_videos))

    def _every_step(self, videos: tuple[Video, ...]) -> Windows:
        timeline = Timeline(videos, self.sets)
        if self.in_memory:
            steps = torch.arange(len(timeline.targets))
            return MemoryWindows(Bank(timeline), self.window, steps, timeline.targets)
        return StreamedWindows(WindowReader(timeline, self.window, self.videos.dtype), timeline.targets)

    def _limited(self, part: str, limit: int | None) -> tuple[Video, ...]:
        videos = self.videos.part(part)
        if limit is None or limit == len(videos):
            return videos
        if limit > len(videos):
            raise DataError(f"'{self.name}' asks for {limit} {part} videos, and there are {len(videos)}.")
        return tuple(videos[i] for i in divide(_main_classes(videos), limit, FIXED)[1].tolist())

    def split(self, seed: int, validation: float) -> tuple[Source, Source]:
        """Training and validation videos: no video has windows in both. Ambiguous steps are not trained on."""
        timeline = self._pool.timeline
        held = round(len(timeline.videos) * validation)
        if not 0 < held < len(timeline.videos):
            raise DataError(
                f"'{self.name}' has {len(timeline.videos)} training videos; a share of {validation:g} of them cannot "
                "be held out for validation, with at least one on either side."
            )
        train, out = divide(_main_classes(timeline.videos), held, seed)
        trained, measured = timeline.steps_of(train, self.stride), timeline.steps_of(out)
        trained = trained[timeline.targets[trained] != self.sets.ambiguous]
        for part, steps in (("training", trained), ("validation", measured)):
            if not self.sets.table[timeline.targets[steps], 1:].any():
                raise DataError(
                    f"'{self.name}' with seed {seed} has no action in its {part} part; it needs more videos."
                )
        return self._pool.at(trained), self._pool.at(measured)

    def test(self) -> Source:
        return self._held_out

    # ---------------------------------------------------------------------------------------------- inputs and targets
    def to_input(self, stored: Tensor) -> Tensor:
        """(B, window, features) as stored → float32, each feature with mean 0 over the training videos' steps."""
        factor, shift = self._normalisation_on(stored.device)
        return stored.float() * factor - shift

    @cached_property
    def _by_device(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _normalisation_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._by_device:
            mean, deviation = self._pool.statistics()
            scale = torch.ones_like(mean) if self.videos.scale is None else torch.from_numpy(self.videos.scale)
            # One divisor for all features: a faint component of a PCA stays faint.
            size = (deviation * scale).square().mean().sqrt().clamp(min=1e-12)
            self._by_device[device] = (scale / size).to(device), (mean * scale / size).to(device)
        return self._by_device[device]

    def augmentation(self, text: str) -> Augment:
        """There is none for features."""
        return parse_augmentation(text, {})

    def loss(self, logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy. Where actions overlap, each of them has an equal share of the step."""
        return F.cross_entropy(logits, self._shares(targets), label_smoothing=smoothing)

    def right(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The share of steps whose most likely class is one of theirs."""
        labels = self._sets_on(targets.device)[targets]
        return labels.gather(1, logits.argmax(-1, keepdim=True)).double().mean()

    def _shares(self, targets: Tensor) -> Tensor:
        labels = self._sets_on(targets.device)[targets].float()
        return labels / labels.sum(-1, keepdim=True).clamp(min=1.0)

    def _sets_on(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = self.sets.table.to(device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    # -------------------------------------------------------------------------------------------------------- measuring
    def measure(self, model: nn.Module, source: Source) -> Metrics:
        """Per-frame mAP, accuracy and loss over the steps of a source; for segments also, and first of all, their mAP.

        Ambiguous steps count in none of the first three. Segments are looked for in whole videos: in all that the
        source has a step of.
        """
        assert isinstance(source, MemoryWindows | StreamedWindows)
        if self.protocol == "segments":
            touched = source.timeline.video_of[source.current].unique()
            source = source.at(source.timeline.steps_of(touched))
        scores, losses = self._scores(model, source)
        targets = source.targets.cpu()
        counted = (targets != self.sets.ambiguous).numpy()
        labels = self.sets.table[targets].numpy()
        right = labels[np.arange(len(labels)), scores.argmax(1)]
        frames = per_frame_map(scores[:, 1:], labels[:, 1:], ~counted).mean
        both: Metrics = {"accuracy": float(right[counted].mean()), "loss": float(losses[counted].mean())}
        if self.protocol == "online":
            return {"mAP": frames, **both}
        return {**self._segments(source, scores), "per-frame mAP": frames, **both}

    def _scores(self, model: nn.Module, source: Windows) -> tuple[Array, Tensor]:
        """Probabilities (steps, classes) and the loss of every step."""
        scores, losses = [], []
        wide = 4 * self.window * self.videos.width
        for stored, targets in source.batches(torch.arange(len(source)), max(1, min(BATCH, READ_AT_ONCE // wide))):
            logits = logits_of(model(self.to_input(stored))).float()
            scores.append(logits.softmax(-1).cpu())
            losses.append(F.cross_entropy(logits, self._shares(targets), reduction="none").cpu())
        return torch.cat(scores).numpy(), torch.cat(losses).double()

    def _segments(self, source: Windows, scores: Array) -> Metrics:
        timeline = source.timeline
        of = timeline.video_of[source.current].numpy()
        predictions, truth = [], []
        for video in np.unique(of).tolist():
            predictions += [(video, *row) for row in find_segments(scores[of == video, 1:])]
            truth += [(video, *row) for row in timeline.videos[video].segments.tolist()]
        found = segment_map(Segments.of(predictions), Segments.of(truth), self.shape.classes - 1)
        means = {f"mAP@{overlap:g}": precision.mean for overlap, precision in found.items()}
        known = [value for value in means.values() if value is not None]
        return {"mAP": sum(known) / len(known) if known else None, **means}


def _main_classes(videos: tuple[Video, ...]) -> Tensor:
    return torch.tensor([video.main_class for video in videos])
