"""One run, from its description to its result."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.classification import Metrics
from attemper.lab.tasks.source import Source
from attemper.lab.training.data import RunData
from attemper.lab.training.devices import usable_device
from attemper.lab.training.graph import Step, fastest
from attemper.lab.training.hashes import with_hashes
from attemper.lab.training.interruptions import Interruptions
from attemper.lab.training.learner import Learner
from attemper.lab.training.leaving import Leave
from attemper.lab.training.meter import Reading
from attemper.lab.training.outcome import result_of
from attemper.lab.training.randomness import preserved_random_state, random_state, seed_everything, set_random_state
from attemper.lab.training.ranks import ALONE, Ranks, current
from attemper.lab.training.rates import moves, rates_now
from attemper.lab.training.run_folder import Owner, take_folder
from attemper.lab.training.run_state import RunState
from attemper.lab.training.schedule import learning_rate
from attemper.lab.training.seed_log import SeedLog
from attemper.lab.training.shards import refuse_sharded
from attemper.lab.training.spec import RunSpec
from attemper.lab.training.validation import evaluate, finite
from attemper.lab.training.versions import versions_here
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

LEAVE = 2
"""The decision to write a checkpoint and end the run; 1: to write one; 0: to go on."""

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
    accept_versions: bool = False,
) -> dict[str, Any]:
    """Train one model under one recipe and one seed, and measure it. Inside of `joined`, all ranks do so together.

    The epoch is chosen on validation, the earliest of the best. The test set is opened once, after training has ended,
    for the weights of that epoch. A training that diverges is a result, not an error.

    folder: where checkpoints go, and in the end the chosen weights; a run that finds its own checkpoint there goes on
        from it, and on a CPU ends with the same bits as one that was never interrupted. Once the result is
        stored, the folder may be deleted. One that holds another run is refused, and left as it is.
    progress: called with an event at the end of every epoch, and a few times a second between. If it raises `Leave`, a
        checkpoint is written first.
    device: None is a GPU where there is one.
    probe_every: steps between two looks at attention, which go into the result's "probes"; nothing else changes.
    examine: evaluates the test set for a run whose spec asks for it.
    accept_versions: go on with a run that was begun under other versions of torch or of Attemper's results.
    """
    ranks = current()
    with preserved_random_state():
        spec = with_hashes(spec, task)
        if folder is not None:
            spec = ranks.from_main(lambda: take_folder(folder, spec, task.fingerprint, accept_versions=accept_versions))
        chosen = choose_device(device, ranks)
        return Run(spec, task, folder, progress, chosen, probe_every, ranks, examine, accept_versions).finish()


def choose_device(device: torch.device | str | None, ranks: Ranks = ALONE) -> torch.device:
    """What was asked for, else a GPU where there is one, else the CPU. Of several ranks, each has a GPU of its own."""
    chosen = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
        accept_versions: bool = False,
    ) -> None:
        self.begun = self.last_saved = self.last_report = self.trained_since = time.perf_counter()
        self.saving = 0.0
        """Seconds that the last checkpoint took."""
        self.leaving: Leave | None = None
        """Whoever watches wants the run to end."""
        self.spec, self.budget, self.task, self.folder, self.device = spec, spec.budget, task, folder, device
        self.ranks = ranks
        self.emit = progress if progress and ranks.main else (lambda event: None)
        self.key = spec.key(task.fingerprint)
        ranks.check_same("version of torch or Attemper", str(versions_here()))
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
        if not ranks.alone:
            here = self.data.part
            self.learner.tempered.samples(first=here.start, count=here.stop - here.start)
        self.recorder = None if probe_every is None or not ranks.main else self.make_recorder(probe_every)
        self.state = RunState(made_under=[versions_here().to_dict()])
        self.best: Mapping[str, Tensor] = self.learner.weights()
        owner = Owner(spec, task.fingerprint)
        self.interruptions = (
            None
            if folder is None
            else Interruptions(folder, owner, self.learner, ranks, self.warn, accept_versions=accept_versions)
        )
        draws = self.learner.tempered.control.draws
        self.seed_log = SeedLog(folder) if folder is not None and draws and ranks.main else None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seed_everything(spec.seed, *([ranks.rank] if ranks.rank else []))

    # ------------------------------------------------------------------------------------------------------- the loop
    def finish(self) -> dict[str, Any]:
        """Everything that is left to do."""
        self.resume()
        self.epoch = self.state.epoch
        self.learner.to_training()
        learn = fastest(self.learner, self.data, self.warn)
        for epoch in range(self.state.epoch + 1, self.budget.epochs + 1):
            if self.state.over:
                break
            reading = self.train(epoch, learn)
            if self.state.over:
                break
            self.learner.sync_statistics()
            validation = self.validate()
            self.record(epoch, reading, validation)
            self.checkpoint(last=epoch == self.budget.epochs or self.state.over)
            self.report(epoch, self.data.batches_per_epoch, reading.loss, validation)
            if self.ranks.agreed(LEAVE if self.leaving else 0):
                self.leave()
        result = result_of(self)
        return self.ranks.from_main(lambda: result)

    def train(self, epoch: int, learn: Step) -> Reading:
        """One epoch of steps."""
        self.epoch = epoch
        self.trained_since = time.perf_counter()
        done = self.state.batch
        if not done:
            self.learner.meter.reset()
        for batch, (inputs, targets) in enumerate(self.data.epoch(epoch, after=done), start=done + 1):
            self.learner.set_lr(self.rate(epoch, batch))
            self.update_rates(epoch, batch)
            learn(inputs, targets)
            if self.seed_log is not None:
                self.seed_log.note(self.steps_before(epoch, batch) + 1, self.learner.seeds)
            if self.recorder is not None and batch % self.data.accumulate == 0:
                self.probe(self.recorder, (epoch - 1) * self.data.steps_per_epoch + batch // self.data.accumulate)
            if self.time_to_report(batch):
                reading = self.read()
                self.report(epoch, batch, reading.loss)
                if reading.bad_batch is not None:
                    break
            self.pause(batch)
        reading = self.read()
        if reading.bad_batch is not None:
            step = (reading.bad_batch - 1) // self.data.accumulate + 1
            self.state.diverged = {"epoch": epoch, "step": step, "loss": finite(reading.bad_loss)}
        self.count_time()
        return reading

    def read(self) -> Reading:
        """What was counted so far; this waits for the device, so seeds are fetched and written at the same time."""
        if self.seed_log is not None:
            self.seed_log.write()
        return self.learner.meter.read()

    def count_time(self) -> None:
        """Add what was spent on training since it was last counted."""
        now = time.perf_counter()
        self.state.training_seconds += now - self.trained_since
        self.trained_since = now

    def time_to_report(self, batch: int) -> bool:
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
        return learning_rate(self.budget, self.steps_before(epoch, batch), self.data.steps_per_epoch)

    def update_rates(self, epoch: int, batch: int) -> None:
        """Let rates follow the course of training."""
        tempered = self.learner.tempered
        tempered.progress(self.steps_before(epoch, batch) / self.steps, self.budget.epochs)
        if epoch > self.budget.epochs - self.budget.last_epochs_without and tempered.methods:
            tempered.rest()

    def steps_before(self, epoch: int, batch: int) -> int:
        """Steps of the optimiser before the one that a batch belongs to."""
        return (epoch - 1) * self.data.steps_per_epoch + (batch - 1) // self.data.accumulate

    @property
    def steps(self) -> int:
        """Of the whole training."""
        return self.budget.epochs * self.data.steps_per_epoch

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
                **({"rates": rates_now(self.learner.tempered)} if moves(self.learner.tempered, self.budget) else {}),
            }
        )
        primary = [entry["validation"][self.task.primary] for entry in state.curve]
        if primary[-1] > max(primary[:-1], default=float("-inf")):
            state.chosen = epoch
            self.best = self.learner.weights()

    def report(self, epoch: int, batch: int, loss: float, validation: Metrics | None = None, **more: Any) -> None:
        self.last_report = time.perf_counter()
        event = {
            "epoch": epoch,
            "epochs": self.budget.epochs,
            "step": batch // self.data.accumulate,
            "steps": self.data.steps_per_epoch,
            "loss": finite(loss),
            "validation": validation,
            **more,
        }
        try:
            self.emit(event)
        except Leave as leave:
            self.leaving = leave

    def warn(self, warning: str) -> None:
        self.report(self.state.epoch, 0, float("nan"), warning=warning)

    # ------------------------------------------------------------------------------------------------- interruptions
    def checkpoint(self, last: bool) -> None:
        """Write a checkpoint at the end of an epoch, if it is time; the main rank's clock counts."""
        if self.ranks.from_main(lambda: last or self.unsaved() > CHECKPOINT_EVERY):
            self.save()

    def pause(self, batch: int) -> None:
        """Write a checkpoint inside of an epoch or leave, if it is time: after whole steps, on all ranks or none."""
        if batch % self.data.accumulate:
            return
        if not self.ranks.alone:  # at numbers of steps that all know: asking costs an exchange
            step = batch // self.data.accumulate
            if step % max(1, REPORT_BATCHES // self.data.accumulate):
                return
        due = self.interruptions is not None and self.unsaved() > max(CHECKPOINT_WITHIN, self.saving / CHECKPOINT_SHARE)
        decision = self.ranks.agreed(LEAVE if self.leaving else int(due))
        if decision:
            self.count_time()
            self.state.batch = batch
            if decision == LEAVE:
                self.leave()
            self.save()
            self.trained_since = time.perf_counter()

    def leave(self) -> NoReturn:
        """Write a checkpoint, and end the run on all ranks."""
        leave = self.leaving or Leave()
        if self.interruptions is not None:
            self.save()
            epoch, batch = self.state.epoch, self.state.batch
            within = f"batch {batch} of {self.data.batches_per_epoch} in epoch {epoch + 1}"
            leave.place = within if batch else f"the end of epoch {epoch}"
        raise leave

    def save(self) -> None:
        if self.interruptions is not None:
            begun = time.perf_counter()
            if self.seed_log is not None:
                self.seed_log.write(durable=True)
            self.interruptions.save(dataclasses.replace(self.state, seconds=self.seconds()), self.best)
            self.last_saved = time.perf_counter()
            self.saving = self.last_saved - begun

    def unsaved(self) -> float:
        return time.perf_counter() - self.last_saved

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        if self.interruptions is None:
            return
        if (found := self.interruptions.resume(self.best)) is not None:
            self.state, self.best = found
        self.ranks.from_main(self.interruptions.mark)
        if self.seed_log is not None:
            self.seed_log.resume(self.steps_before(self.state.epoch + 1, self.state.batch + 1))

    def seconds(self) -> float:
        return self.state.seconds + time.perf_counter() - self.begun

    # ------------------------------------------------------------------------------------------------------ measuring
    def validate(self) -> Metrics:
        """The metrics on the held-out part. A run that is left meanwhile measures them anew when it goes on."""
        drawn = random_state()
        try:
            return self.measure(self.data.validation)
        except Leave:
            set_random_state(drawn)
            self.state.batch = self.data.batches_per_epoch
            self.leave()

    def measure(self, source: Source) -> Metrics:
        """Metrics on samples; a run by itself can be left while they are measured."""
        if not self.ranks.alone:
            return evaluate(self.learner, self.task, source)
        hook = self.learner.model.register_forward_pre_hook(lambda *_: self.report_alive())
        try:
            return evaluate(self.learner, self.task, source)
        finally:
            hook.remove()

    def report_alive(self) -> None:
        """Report, if it is time, that the run is under way between its steps; by itself it can be left there too."""
        if time.perf_counter() - self.last_report > REPORT_EVERY:
            self.report(self.epoch, self.data.batches_per_epoch, float("nan"))
        if self.leaving is not None and self.ranks.alone:
            self.leaving.place = "" if self.folder is None else "the end of its training"
            raise self.leaving
