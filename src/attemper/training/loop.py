"""One run, from its description to its result."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import attemper
from attemper.probes.recording import IMAGES, Recorder
from attemper.tasks.base import Task
from attemper.tasks.source import Source
from attemper.training.checkpoint import DamagedError, load_checkpoint, make_ready, save_checkpoint, set_aside
from attemper.training.data import RunData
from attemper.training.evaluate import Metrics, detail, evaluate, finite
from attemper.training.graph import Step, fastest
from attemper.training.learner import Learner
from attemper.training.meter import Reading
from attemper.training.randomness import borrowed, random_state, seed_everything, set_random_state
from attemper.training.schedule import learning_rate
from attemper.training.spec import FORMAT, RunSpec
from attemper.training.weights import save_weights

__all__ = ["Progress", "choose_device", "run"]

Progress = Callable[[dict[str, Any]], None]

REPORT_EVERY = 0.25
"""Seconds between two events inside of an epoch."""

CHECKPOINT_EVERY = 2.0
"""Seconds between two checkpoints, so that short epochs are not spent on writing. The last epoch always has one."""


def run(
    spec: RunSpec,
    task: Task,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
    device: torch.device | str | None = None,
    probe_every: int | None = None,
) -> dict[str, Any]:
    """Train one model under one recipe and one seed, and measure it.

    The epoch is chosen on validation, the earliest of the best. The test set is opened once, after training has ended,
    for the weights of that epoch. A training that diverges is a result, not an error.

    folder: where checkpoints go, and in the end the chosen weights; a run that finds its own checkpoint there goes on
        from it, and on a CPU ends with the same bits as one that was never interrupted. Whoever stores the result may
        delete the folder.
    progress: called with an event at the end of every epoch, and a few times a second between.
    device: None is a GPU where there is one.
    probe_every: steps between two looks at attention, which go into the result's "probes"; nothing else changes.
    """
    with borrowed():
        return Run(spec, task, folder, progress, choose_device(device), probe_every).finish()


def choose_device(device: torch.device | str | None) -> torch.device:
    """What was asked for, else a GPU where there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


@dataclasses.dataclass
class Story:
    """What has happened in a run so far: all of its result that is not a weight."""

    epoch: int = 0
    """The last epoch that was finished."""
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    chosen: int = 0
    """The best epoch so far; 0: the initial weights."""
    diverged: dict[str, Any] | None = None
    seconds: float = 0.0
    """Spent before this process took over."""
    training_seconds: float = 0.0
    probes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.diverged is not None


class Run:
    """A run that is under way."""

    def __init__(
        self,
        spec: RunSpec,
        task: Task,
        folder: Path | None,
        progress: Progress | None,
        device: torch.device,
        probe_every: int | None = None,
    ) -> None:
        self.begun = self.last_saved = self.last_report = time.perf_counter()
        self.spec, self.budget, self.task, self.folder, self.device = spec, spec.budget, task, folder, device
        self.tell = progress or (lambda event: None)
        self.key = spec.key(task.fingerprint)
        self.data = RunData(spec, task, device)
        self.learner = Learner(spec, task, device, self.data.accumulate)
        self.recorder = None if probe_every is None else self.make_recorder(probe_every)
        self.story = Story()
        self.best = self.learner.weights()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seed_everything(spec.seed)

    # ------------------------------------------------------------------------------------------------------- the loop
    def finish(self) -> dict[str, Any]:
        """Everything that is left to do."""
        self.resume()
        self.learner.model.train()
        learn = fastest(self.learner, self.data, self.warn)
        for epoch in range(self.story.epoch + 1, self.budget.epochs + 1):
            if self.story.over:
                break
            reading = self.train(epoch, learn)
            if self.story.over:
                break
            validation = evaluate(self.learner, self.task, self.data.validation)
            self.record(epoch, reading, validation)
            self.checkpoint(last=epoch == self.budget.epochs or self.story.over)
            self.report(epoch, self.data.batches_per_epoch, reading.loss, validation)
        return self.result()

    def train(self, epoch: int, learn: Step) -> Reading:
        """One epoch of steps."""
        begun = time.perf_counter()
        self.learner.meter.reset()
        for batch, (inputs, targets) in enumerate(self.data.epoch(epoch), start=1):
            self.learner.set_lr(self.rate(epoch, batch))
            learn(inputs, targets)
            if self.recorder is not None and batch % self.data.accumulate == 0:
                self.probe(self.recorder, (epoch - 1) * self.data.steps_per_epoch + batch // self.data.accumulate)
            if time.perf_counter() - self.last_report > REPORT_EVERY:
                reading = self.learner.meter.read()
                self.report(epoch, batch, reading.loss)
                if reading.bad_batch is not None:
                    break
        reading = self.learner.meter.read()
        if reading.bad_batch is not None:
            step = (reading.bad_batch - 1) // self.data.accumulate + 1
            self.story.diverged = {"epoch": epoch, "step": step, "loss": finite(reading.bad_loss)}
        self.story.training_seconds += time.perf_counter() - begun
        return reading

    def make_recorder(self, every: int) -> Recorder:
        held = len(self.data.validation)
        spread = torch.arange(min(IMAGES, held)) * held // min(IMAGES, held)  # neighbours may be steps of one video
        stored, _ = next(self.data.validation.batches(spread, IMAGES))
        return Recorder(self.learner.model, self.task.to_input(stored), every)

    def probe(self, recorder: Recorder, step: int) -> None:
        with self.learner.autocast():
            self.story.probes += recorder.after(step)

    def rate(self, epoch: int, batch: int) -> float:
        step = (epoch - 1) * self.data.steps_per_epoch + (batch - 1) // self.data.accumulate
        return learning_rate(self.budget, step, self.data.steps_per_epoch)

    def record(self, epoch: int, reading: Reading, validation: Metrics) -> None:
        """Write an epoch down, and keep its weights if they are the best so far."""
        story = self.story
        story.epoch = epoch
        if validation["loss"] is None:  # the last step of all can break the weights after the last training loss
            story.diverged = {"epoch": epoch, "step": self.data.steps_per_epoch, "loss": None}
            return
        story.curve.append(
            {
                "epoch": epoch,
                "lr": self.rate(epoch, self.data.batches_per_epoch),
                "train_loss": reading.loss,
                "train_accuracy": reading.accuracy,
                "penalty": reading.penalty,
                "validation": validation,
            }
        )
        primary = [entry["validation"][self.task.primary] for entry in story.curve]
        if primary[-1] > max(primary[:-1], default=float("-inf")):
            story.chosen = epoch
            self.best = self.learner.weights()

    def report(self, epoch: int, batch: int, loss: float, validation: Metrics | None = None, **more: Any) -> None:
        self.last_report = time.perf_counter()
        self.tell(
            {
                "epoch": epoch,
                "epochs": self.budget.epochs,
                "step": batch // self.data.accumulate,
                "steps": self.data.steps_per_epoch,
                "loss": finite(loss),
                "validation": validation,
                **more,
            }
        )

    def warn(self, warning: str) -> None:
        self.report(self.story.epoch, 0, float("nan"), warning=warning)

    # ------------------------------------------------------------------------------------------------- interruptions
    def checkpoint(self, last: bool) -> None:
        """Write everything that the rest of the run depends on, if it is time."""
        if self.folder is None or not (last or time.perf_counter() - self.last_saved > CHECKPOINT_EVERY):
            return
        story = dataclasses.asdict(self.story) | {"seconds": self.seconds()}
        state = {"key": self.key, "story": story, "best": self.best, "random": random_state(), **self.learner.state()}
        save_checkpoint(self.folder, state)
        self.last_saved = time.perf_counter()

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; one that is damaged or another run's is set aside."""
        if self.folder is None:
            return
        make_ready(self.folder)
        try:
            state = load_checkpoint(self.folder)
            if state is None:
                return
            if state.get("key") != self.key:
                raise DamagedError(f"The checkpoint in '{self.folder}' belongs to another run")
            self.learner.load_state(state)
        except DamagedError as error:
            aside = set_aside(self.folder)
            self.warn(f"{error}; it is now '{aside.name}', and the run starts again.")
            return
        self.story, self.best = Story(**state["story"]), state["best"]
        set_random_state(state["random"])

    def seconds(self) -> float:
        return self.story.seconds + time.perf_counter() - self.begun

    # ---------------------------------------------------------------------------------------------------- the result
    def result(self) -> dict[str, Any]:
        """Measure the chosen epoch, on test for the first and only time."""
        story, learner, task, data = self.story, self.learner, self.task, self.data
        learner.average = None
        learner.model.load_state_dict(self.best)
        chosen = next((entry for entry in story.curve if entry["epoch"] == story.chosen), None)
        validation = chosen["validation"] if chosen else evaluate(learner, task, data.validation)
        train = evaluate(learner, task, data.measured_train())
        held_out = task.test().to(self.device)
        test, evaluation = self.examine(held_out, train)
        details = detail(learner, task, held_out)
        result = {
            "format": FORMAT,
            "key": self.key,
            "spec": self.spec.to_dict(),
            "fingerprint": task.fingerprint,
            "status": "diverged" if story.over else "finished",
            "diverged_at": story.diverged,
            "metric": task.primary,
            "chosen_epoch": story.chosen,
            "train": train,
            "validation": validation,
            "test": test,
            **({} if details is None else {"test_details": details}),
            "curve": story.curve,
            "probes": story.probes,
            "rates": [{"method": r.method, "block": r.block, "rate": r.rate} for r in learner.tempered.summary()],
            "parameters": sum(p.numel() for p in learner.model.parameters()),
            "timing": self.timing(),
            "versions": versions(self.device),
            **({"notes": list(notes)} if (notes := getattr(task, "notes", ())) else {}),
        }
        if self.folder is not None:
            save_weights(self.folder, self.best, self.spec, task.fingerprint)
        return result if evaluation is None else {**result, "evaluation": evaluation}

    def examine(self, source: Source, train: Metrics) -> tuple[Metrics, dict[str, Any] | None]:
        """Metrics on the test set and, if the run asks for it, an evaluation from the same reading of it."""
        if not self.spec.evaluate:
            return evaluate(self.learner, self.task, source), None
        from attemper.evaluation.runs import examine

        return examine(self.learner, self.task, source, self.spec, train, self.still_here)

    def still_here(self) -> None:
        """Report, if it is time, that the run is under way after its last epoch: whoever listens may stop it."""
        if time.perf_counter() - self.last_report > REPORT_EVERY:
            self.report(self.story.epoch, self.data.batches_per_epoch, float("nan"))

    def timing(self) -> dict[str, Any]:
        images = self.story.epoch * self.data.images_per_epoch
        trained = self.story.training_seconds
        gpu = self.device.type == "cuda"
        return {
            "seconds": self.seconds(),
            "images_per_second": images / trained if trained else None,
            "peak_memory": torch.cuda.max_memory_allocated(self.device) if gpu else None,
        }


def versions(device: torch.device) -> dict[str, str]:
    """What a result was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "attemper": attemper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
    }
