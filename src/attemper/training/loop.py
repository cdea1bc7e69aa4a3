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
from attemper.errors import ParameterError
from attemper.probes.recording import IMAGES, Recorder
from attemper.tasks.base import Task
from attemper.tasks.source import Source
from attemper.training.checkpoint import (
    DamagedError,
    StorageError,
    load_checkpoint,
    make_ready,
    save_checkpoint,
    set_aside,
)
from attemper.training.data import RunData
from attemper.training.evaluate import Metrics, detail, evaluate, finite
from attemper.training.graph import Step, fastest
from attemper.training.learner import Learner
from attemper.training.meter import Reading
from attemper.training.parallel import whole
from attemper.training.randomness import borrowed, random_state, seed_everything, set_random_state
from attemper.training.ranks import ALONE, Ranks, current
from attemper.training.schedule import learning_rate
from attemper.training.shards import load_shards, refuse_sharded, remove_shards, save_shards
from attemper.training.spec import FORMAT, RunSpec
from attemper.training.teacher import settled
from attemper.training.weights import save_weights

__all__ = ["Progress", "choose_device", "run"]

Progress = Callable[[dict[str, Any]], None]

REPORT_EVERY = 0.25
"""Seconds between two events inside of an epoch."""

REPORT_BATCHES = 20
"""Batches between two events where several ranks train together."""

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
    """Train one model under one recipe and one seed, and measure it. Inside of `joined`, all ranks do so together.

    The epoch is chosen on validation, the earliest of the best. The test set is opened once, after training has ended,
    for the weights of that epoch. A training that diverges is a result, not an error.

    folder: where checkpoints go, and in the end the chosen weights; a run that finds its own checkpoint there goes on
        from it, and on a CPU ends with the same bits as one that was never interrupted. Whoever stores the result may
        delete the folder.
    progress: called with an event at the end of every epoch, and a few times a second between.
    device: None is a GPU where there is one.
    probe_every: steps between two looks at attention, which go into the result's "probes"; nothing else changes.
    """
    ranks = current()
    with borrowed():
        spec = settled(spec, task)
        return Run(spec, task, folder, progress, choose_device(device, ranks), probe_every, ranks).finish()


def choose_device(device: torch.device | str | None, ranks: Ranks = ALONE) -> torch.device:
    """What was asked for, else a GPU where there is one, else the CPU. Of several ranks, each has a GPU of its own."""
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if ranks.alone or chosen.type != "cuda":
        return chosen
    if chosen.index is not None:
        raise ParameterError(
            f"device is '{chosen}', and {ranks.size} processes share a run; 'cuda' gives each its own."
        )
    if ranks.local >= torch.cuda.device_count():
        raise ParameterError(
            f"Process {ranks.local} of this machine has no GPU: there are {torch.cuda.device_count()}. Start as many "
            "processes as there are GPUs, or give --device cpu."
        )
    torch.cuda.set_device(ranks.local)
    return torch.device("cuda", ranks.local)


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
        ranks: Ranks = ALONE,
    ) -> None:
        self.begun = self.last_saved = self.last_report = time.perf_counter()
        self.spec, self.budget, self.task, self.folder, self.device = spec, spec.budget, task, folder, device
        self.ranks = ranks
        self.tell = progress if progress and ranks.main else (lambda event: None)
        self.key = spec.key(task.fingerprint)
        ranks.check_same("run or other data", self.key)
        if ranks.sharded:
            refuse_sharded(spec, probe_every)
        self.data = RunData(spec, task, device, ranks)
        self.learner = Learner(spec, task, device, self.data.accumulate, ranks, self.data.share)
        self.recorder = None if probe_every is None or not ranks.main else self.make_recorder(probe_every)
        self.story = Story()
        self.best = self.learner.weights()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seed_everything(spec.seed, *([ranks.rank] if ranks.rank else []))

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
            self.learner.settle()
            validation = evaluate(self.learner, self.task, self.data.validation)
            self.record(epoch, reading, validation)
            self.checkpoint(last=epoch == self.budget.epochs or self.story.over)
            self.report(epoch, self.data.batches_per_epoch, reading.loss, validation)
        result = self.result()
        return self.ranks.from_main(lambda: result)

    def train(self, epoch: int, learn: Step) -> Reading:
        """One epoch of steps."""
        begun = time.perf_counter()
        self.learner.meter.reset()
        for batch, (inputs, targets) in enumerate(self.data.epoch(epoch), start=1):
            self.learner.set_lr(self.rate(epoch, batch))
            learn(inputs, targets)
            if self.recorder is not None and batch % self.data.accumulate == 0:
                self.probe(self.recorder, (epoch - 1) * self.data.steps_per_epoch + batch // self.data.accumulate)
            if self.time_to_look(batch):
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

    def time_to_look(self, batch: int) -> bool:
        """Whether to read the meter. By clocks of their own, several ranks would leave an epoch at different steps."""
        if self.ranks.alone:
            return time.perf_counter() - self.last_report > REPORT_EVERY
        return batch % REPORT_BATCHES == 0

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
        """Write everything that the rest of the run depends on, if it is time; the main rank's clock counts."""
        due = self.ranks.from_main(lambda: last or time.perf_counter() - self.last_saved > CHECKPOINT_EVERY)
        if self.folder is None or not due:
            return
        story = dataclasses.asdict(self.story) | {"seconds": self.seconds()}
        state: dict[str, Any] = {"key": self.key, "story": story, "random": self.ranks.gather(random_state())}
        if self.ranks.sharded:
            state["shards"] = save_shards(self.folder, self.story.epoch, self.learner, self.best)
        else:
            state |= {"best": self.best, **self.learner.state()}
        if self.ranks.main:
            save_checkpoint(self.folder, state)
            if self.ranks.sharded:
                remove_shards(self.folder, but=state["shards"])
        self.last_saved = time.perf_counter()

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one; one that is damaged or another run's is set aside."""
        if self.folder is None:
            return
        folder = self.folder
        try:
            state = self.ranks.from_main(lambda: self.read_checkpoint(folder))
            if isinstance(state, DamagedError):
                raise state
            if state is None:
                return
            if self.ranks.sharded:
                state["best"] = load_shards(folder, state["shards"], self.learner, self.best)
            else:
                self.learner.load_state(state)
        except DamagedError as error:
            aside = self.ranks.from_main(lambda: set_aside(folder))
            self.warn(f"{error}; it is now '{aside.name}', and the run starts again.")
            return
        self.story, self.best = Story(**state["story"]), state["best"]
        self.resume_random(state["random"])

    def read_checkpoint(self, folder: Path) -> dict[str, Any] | DamagedError | None:
        """The run's own checkpoint, none, or what is wrong with it."""
        make_ready(folder)
        try:
            state = load_checkpoint(folder)
        except DamagedError as error:
            return error
        if state is None:
            return None
        if state.get("key") != self.key or not isinstance(state["random"], list):
            return DamagedError(
                f"The checkpoint in '{folder}' belongs to another run, or to another version of Attemper"
            )
        if ("shards" in state) != self.ranks.sharded:
            kind, other = ("fsdp", "ddp") if "shards" in state else ("ddp", "fsdp")
            raise StorageError(
                f"The checkpoint in '{folder}' was written with --parallel {kind}, and cannot be read with {other}. "
                f"Go on with --parallel {kind}, or in another folder."
            )
        return state

    def resume_random(self, states: list[dict[str, Any]]) -> None:
        """Draw on as each rank would have; as many ranks as before are needed for that."""
        if len(states) == self.ranks.size:
            set_random_state(states[self.ranks.rank])
            return
        seed_everything(self.spec.seed, self.ranks.rank, self.story.epoch)
        self.warn(
            f"The checkpoint was written by {counted(len(states))}, and {counted(self.ranks.size)} go on with it: from "
            "the same weights and with the same batches, but with other random draws, so not with the same bits."
        )

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
            "versions": versions(self.device) | self.together(),
            **({"notes": list(notes)} if (notes := getattr(task, "notes", ())) else {}),
        }
        if self.folder is not None:
            weights = {name: whole(value) for name, value in self.best.items()}
            if self.ranks.main:
                save_weights(self.folder, weights, self.spec, task.fingerprint)
        return result if evaluation is None else {**result, "evaluation": evaluation}

    def examine(self, source: Source, train: Metrics) -> tuple[Metrics, dict[str, Any] | None]:
        """Metrics on the test set and, if the run asks for it, an evaluation from the same reading of it."""
        if not self.spec.evaluate:
            return evaluate(self.learner, self.task, source), None
        from attemper.evaluation.runs import examine

        return self.ranks.from_main(lambda: examine(self.learner, self.task, source, self.spec, train, self.still_here))

    def still_here(self) -> None:
        """Report, if it is time, that the run is under way after its last epoch: whoever listens may stop it."""
        if time.perf_counter() - self.last_report > REPORT_EVERY:
            self.report(self.story.epoch, self.data.batches_per_epoch, float("nan"))

    def together(self) -> dict[str, str]:
        """How many ranks made the result, and how, where there was more than one."""
        kind = "fsdp" if self.ranks.sharded else "ddp"
        return {} if self.ranks.alone else {"ranks": f"{self.ranks.size}, {kind}"}

    def timing(self) -> dict[str, Any]:
        images = self.story.epoch * self.data.images_per_epoch
        trained = self.story.training_seconds
        gpu = self.device.type == "cuda"
        return {
            "seconds": self.seconds(),
            "images_per_second": images / trained if trained else None,
            "peak_memory": torch.cuda.max_memory_allocated(self.device) if gpu else None,
        }


def counted(processes: int) -> str:
    """A number of processes in words."""
    return "one process" if processes == 1 else f"{processes} processes"


def versions(device: torch.device) -> dict[str, str]:
    """What a result was made with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "attemper": attemper.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": name,
    }
