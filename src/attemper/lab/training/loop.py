"""One run, from its description to its result."""

import dataclasses
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attemper
from attemper.errors import ParameterError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.source import Source
from attemper.lab.training.data import RunData
from attemper.lab.training.graph import Step, fastest
from attemper.lab.training.interruptions import Interruptions
from attemper.lab.training.learner import Learner
from attemper.lab.training.meter import Reading
from attemper.lab.training.parallel import whole
from attemper.lab.training.randomness import preserved_random_state, seed_everything
from attemper.lab.training.ranks import ALONE, Ranks, current
from attemper.lab.training.run_state import RunState
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.shards import refuse_sharded
from attemper.lab.training.spec import FORMAT, RunSpec
from attemper.lab.training.teacher import with_teacher_hash
from attemper.lab.training.validation import detail, evaluate, finite
from attemper.lab.training.weights import save_weights
from attemper.probes.recording import IMAGES, Recorder

Progress = Callable[[dict[str, Any]], None]

Examine = Callable[[Learner, Task, Source, RunSpec, Metrics, Callable[[], None]], tuple[Metrics, dict[str, Any]]]
"""Evaluates the test set of a run that asks for it, such as `attemper.lab.evaluation.runs.examine`: gives the metrics
that every run has, and everything else that it measured."""

REPORT_EVERY = 0.25
"""Seconds between two events inside of an epoch."""

REPORT_BATCHES = 20
"""Batches between two events, and between two looks at the main rank's clock, where several ranks train together."""

CHECKPOINT_EVERY = 2.0
"""Seconds between two checkpoints at the ends of epochs, so that short ones are not spent on writing. The last epoch
always has one."""

CHECKPOINT_WITHIN = 300.0
"""Seconds after which a checkpoint is written inside of an epoch: so much can be lost."""

CHECKPOINT_SHARE = 0.01
"""Of the time, at most so much goes into checkpoints inside of epochs; those of a large model are less frequent."""


def run(
    spec: RunSpec,
    task: Task,
    *,
    folder: Path | None = None,
    progress: Progress | None = None,
    device: torch.device | str | None = None,
    probe_every: int | None = None,
    examine: Examine | None = None,
) -> dict[str, Any]:
    """Train one model under one recipe and one seed, and measure it. Inside of `joined`, all ranks do so together.

    The epoch is chosen on validation, the earliest of the best. The test set is opened once, after training has ended,
    for the weights of that epoch. A training that diverges is a result, not an error.

    folder: where checkpoints go, and in the end the chosen weights; a run that finds its own checkpoint there goes on
        from it, and on a CPU ends with the same bits as one that was never interrupted. Once the result is
        stored, the folder may be deleted.
    progress: called with an event at the end of every epoch, and a few times a second between.
    device: None is a GPU where there is one.
    probe_every: steps between two looks at attention, which go into the result's "probes"; nothing else changes.
    examine: evaluates the test set for a run whose spec asks for it.
    """
    ranks = current()
    with preserved_random_state():
        spec = with_teacher_hash(spec, task)
        return Run(spec, task, folder, progress, choose_device(device, ranks), probe_every, ranks, examine).finish()


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
        examine: Examine | None = None,
    ) -> None:
        self.begun = self.last_saved = self.last_report = self.trained_since = time.perf_counter()
        self.saving = 0.0
        """Seconds that the last checkpoint took."""
        self.spec, self.budget, self.task, self.folder, self.device = spec, spec.budget, task, folder, device
        self.ranks = ranks
        self.emit = progress if progress and ranks.main else (lambda event: None)
        self.key = spec.key(task.fingerprint)
        ranks.check_same("run or other data", self.key)
        if ranks.sharded:
            refuse_sharded(spec, probe_every)
        if spec.evaluate and examine is None:
            raise ParameterError(
                f"evaluate is {','.join(spec.evaluate)!r}, and nothing evaluates it: give run() "
                "examine=attemper.lab.evaluation.runs.examine."
            )
        self.examine = examine if spec.evaluate else None
        self.data = RunData(spec, task, device, ranks)
        self.learner = Learner(spec, task, device, self.data.accumulate, ranks, self.data.share)
        self.recorder = None if probe_every is None or not ranks.main else self.make_recorder(probe_every)
        self.state = RunState()
        self.best: Mapping[str, Tensor] = self.learner.weights()
        self.interruptions = (
            None if folder is None else Interruptions(folder, self.key, spec.seed, self.learner, ranks, self.warn)
        )
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seed_everything(spec.seed, *([ranks.rank] if ranks.rank else []))

    # ------------------------------------------------------------------------------------------------------- the loop
    def finish(self) -> dict[str, Any]:
        """Everything that is left to do."""
        self.resume()
        self.learner.model.train()
        learn = fastest(self.learner, self.data, self.warn)
        for epoch in range(self.state.epoch + 1, self.budget.epochs + 1):
            if self.state.over:
                break
            reading = self.train(epoch, learn)
            if self.state.over:
                break
            self.learner.sync_statistics()
            validation = evaluate(self.learner, self.task, self.data.validation)
            self.record(epoch, reading, validation)
            self.checkpoint(last=epoch == self.budget.epochs or self.state.over)
            self.report(epoch, self.data.batches_per_epoch, reading.loss, validation)
        result = self.result()
        return self.ranks.from_main(lambda: result)

    def train(self, epoch: int, learn: Step) -> Reading:
        """One epoch of steps."""
        self.trained_since = time.perf_counter()
        done = self.state.batch
        if not done:
            self.learner.meter.reset()
        for batch, (inputs, targets) in enumerate(self.data.epoch(epoch, after=done), start=done + 1):
            self.learner.set_lr(self.rate(epoch, batch))
            learn(inputs, targets)
            if self.recorder is not None and batch % self.data.accumulate == 0:
                self.probe(self.recorder, (epoch - 1) * self.data.steps_per_epoch + batch // self.data.accumulate)
            if self.time_to_look(batch):
                reading = self.learner.meter.read()
                self.report(epoch, batch, reading.loss)
                if reading.bad_batch is not None:
                    break
            self.checkpoint_within(batch)
        reading = self.learner.meter.read()
        if reading.bad_batch is not None:
            step = (reading.bad_batch - 1) // self.data.accumulate + 1
            self.state.diverged = {"epoch": epoch, "step": step, "loss": finite(reading.bad_loss)}
        self.count_time()
        return reading

    def count_time(self) -> None:
        """Add what was spent on training since it was last counted."""
        now = time.perf_counter()
        self.state.training_seconds += now - self.trained_since
        self.trained_since = now

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
            self.state.probes += recorder.after(step)

    def rate(self, epoch: int, batch: int) -> float:
        step = (epoch - 1) * self.data.steps_per_epoch + (batch - 1) // self.data.accumulate
        return learning_rate(self.budget, step, self.data.steps_per_epoch)

    def record(self, epoch: int, reading: Reading, validation: Metrics) -> None:
        """Write an epoch down, and keep its weights if they are the best so far."""
        state = self.state
        state.epoch, state.batch = epoch, 0
        if validation["loss"] is None:  # the last step of all can break the weights after the last training loss
            state.diverged = {"epoch": epoch, "step": self.data.steps_per_epoch, "loss": None}
            return
        state.curve.append(
            {
                "epoch": epoch,
                "lr": self.rate(epoch, self.data.batches_per_epoch),
                "train_loss": reading.loss,
                "train_accuracy": reading.accuracy,
                "penalty": reading.penalty,
                "validation": validation,
            }
        )
        primary = [entry["validation"][self.task.primary] for entry in state.curve]
        if primary[-1] > max(primary[:-1], default=float("-inf")):
            state.chosen = epoch
            self.best = self.learner.weights()

    def report(self, epoch: int, batch: int, loss: float, validation: Metrics | None = None, **more: Any) -> None:
        self.last_report = time.perf_counter()
        self.emit(
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
        self.report(self.state.epoch, 0, float("nan"), warning=warning)

    # ------------------------------------------------------------------------------------------------- interruptions
    def checkpoint(self, last: bool) -> None:
        """Write a checkpoint at the end of an epoch, if it is time; the main rank's clock counts."""
        if self.ranks.from_main(lambda: last or self.unsaved() > CHECKPOINT_EVERY):
            self.save()

    def checkpoint_within(self, batch: int) -> None:
        """Write a checkpoint inside of an epoch, if it is time: after whole steps only, and on all ranks or on none."""
        if self.interruptions is None or batch % self.data.accumulate:
            return
        if not self.ranks.alone:  # at numbers of steps that all know: asking costs an exchange
            step = batch // self.data.accumulate
            if step % max(1, REPORT_BATCHES // self.data.accumulate):
                return
        if self.ranks.agreed(self.unsaved() > max(CHECKPOINT_WITHIN, self.saving / CHECKPOINT_SHARE)):
            self.count_time()
            self.state.batch = batch
            self.save()
            self.trained_since = time.perf_counter()

    def save(self) -> None:
        if self.interruptions is not None:
            begun = time.perf_counter()
            self.interruptions.save(dataclasses.replace(self.state, seconds=self.seconds()), self.best)
            self.last_saved = time.perf_counter()
            self.saving = self.last_saved - begun

    def unsaved(self) -> float:
        return time.perf_counter() - self.last_saved

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.interruptions is not None and (found := self.interruptions.resume(self.best)) is not None:
            self.state, self.best = found

    def seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.begun

    # ---------------------------------------------------------------------------------------------------- the result
    def result(self) -> dict[str, Any]:
        """Measure the chosen epoch, on test for the first and only time."""
        state, learner, task, data = self.state, self.learner, self.task, self.data
        learner.average = None
        learner.model.load_state_dict(self.best)
        chosen = next((entry for entry in state.curve if entry["epoch"] == state.chosen), None)
        validation = chosen["validation"] if chosen else evaluate(learner, task, data.validation)
        train = evaluate(learner, task, data.measured_train())
        held_out = task.test().to(self.device)
        test, evaluation = self.measure_test(held_out, train)
        details = detail(learner, task, held_out)
        result = {
            "format": FORMAT,
            "key": self.key,
            "spec": self.spec.to_dict(),
            "fingerprint": task.fingerprint,
            "status": "diverged" if state.over else "finished",
            "diverged_at": state.diverged,
            "metric": task.primary,
            "chosen_epoch": state.chosen,
            "train": train,
            "validation": validation,
            "test": test,
            **({} if details is None else {"test_details": details}),
            "curve": state.curve,
            "probes": state.probes,
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

    def measure_test(self, source: Source, train: Metrics) -> tuple[Metrics, dict[str, Any] | None]:
        """Metrics on the test set and, if the run asks for it, an evaluation from the same reading of it."""
        examine = self.examine
        if examine is None:
            return evaluate(self.learner, self.task, source), None
        learner, task, spec = self.learner, self.task, self.spec
        return self.ranks.from_main(lambda: examine(learner, task, source, spec, train, self.report_alive))

    def report_alive(self) -> None:
        """Report, if it is time, that the run is under way after its last epoch: it can be stopped there too."""
        if time.perf_counter() - self.last_report > REPORT_EVERY:
            self.report(self.state.epoch, self.data.batches_per_epoch, float("nan"))

    def together(self) -> dict[str, str]:
        """How many ranks made the result, and how, where there was more than one."""
        kind = "fsdp" if self.ranks.sharded else "ddp"
        return {} if self.ranks.alone else {"ranks": f"{self.ranks.size}, {kind}"}

    def timing(self) -> dict[str, Any]:
        images = self.state.epoch * self.data.images_per_epoch
        trained = self.state.training_seconds
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
