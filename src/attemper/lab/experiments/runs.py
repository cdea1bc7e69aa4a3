"""One arm of an experiment under one seed: train it, look into it, and say what was found as plain data."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attemper
from attemper.errors import AttemperError
from attemper.files import atomic_write, read_json_object
from attemper.lab.experiments.branches import IMAGES as BRANCH_IMAGES
from attemper.lab.experiments.branches import branch_conditions
from attemper.lab.experiments.catalogue import Arm, Experiment, find_experiment, model_of
from attemper.lab.experiments.gradients import BATCHES, POINTS, Noise, gradient_noise
from attemper.lab.experiments.looks import entropies, patch_condition, token_conditions
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.training.checkpoint import load_checkpoint
from attemper.lab.training.leaving import Leave
from attemper.lab.training.loop import Progress, run
from attemper.lab.training.spec import Budget, RunSpec, canonical
from attemper.lab.training.validation import finite

FORMAT = 1
"""Of what is kept of a finished run; another number makes all of them be run again."""
IMAGES = 64
"""Of the test set that are looked at."""
SPOKEN_EVERY = 20.0
"""Seconds between two lines about a run that is under way."""
NOISE = "noise.json"
"""What was measured of gradients so far, in the folder of a run that is under way."""


@dataclasses.dataclass(frozen=True)
class ArmRun:
    """One arm under one seed."""

    experiment: str
    arm: Arm
    seed: int
    task: str
    budget: Budget
    models: Mapping[str, str] = dataclasses.field(hash=False)

    @property
    def label(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def of(self) -> Experiment:
        return find_experiment(self.experiment)

    def spec(self, arm: Arm | None = None) -> RunSpec:
        """What is trained; with another arm, what that one would be under the same seed."""
        arm = self.arm if arm is None else arm
        model = model_of(arm, self.models)
        return RunSpec(task=self.task, model=model, recipe=arm.recipe, seed=self.seed, budget=self.budget)

    def key(self, fingerprint: str) -> str:
        """A hash of everything that the findings depend on: the run, and how it is looked at."""
        looks = {"format": FORMAT, "measures": self.of.measures, "sizes": [IMAGES, BRANCH_IMAGES, BATCHES]}
        arms = [self.spec(arm).key(fingerprint) for arm in self.measured_arms()]
        return hashlib.sha256(canonical({**looks, "arms": arms}).encode()).hexdigest()[:16]

    def measured_arms(self) -> tuple[Arm, ...]:
        """Whose gradients are measured at this run's weights: at those of the first arm every arm's, so that recipes
        can be compared at the same weights; otherwise its own."""
        first = "gradients" in self.of.measures and self.arm == self.of.arms[0]
        return self.of.arms if first else (self.arm,)


def run_arm(one: ArmRun, task: Task, folder: Path, device: torch.device, log: LogCallback) -> dict[str, Any]:
    """Train and measure; plain data. folder: of its checkpoints, from which a run that was stopped goes on."""
    begun = time.perf_counter()
    noise: dict[str, Any] | None = None
    if "gradients" in one.of.measures:
        result, noise = _train_and_measure(one, task, folder, device, log)
    else:
        result = run(one.spec(), task, folder=folder, device=device, progress=_spoken(one, log))
    looked = _looked(one, task, folder, device)
    metric = result["metric"]
    return {
        "test": result["test"][metric],
        "train": result["train"][metric],
        "status": result["status"],
        "parameters": result["parameters"],
        "flops": result["flops"],
        "seconds": round(time.perf_counter() - begun, 1),
        "versions": result["versions"],
        **looked,
        **({} if noise is None else {"gradients": noise}),
    }


def _spoken(one: ArmRun, log: LogCallback) -> Progress:
    """Says from time to time how far a run is."""
    spoken = time.perf_counter()

    def progress(event: dict[str, Any]) -> None:
        nonlocal spoken
        if event["validation"] is None or time.perf_counter() - spoken < SPOKEN_EVERY:
            return
        spoken = time.perf_counter()
        log(f"{one.label}: epoch {event['epoch']} of {event['epochs']}")

    return progress


def _looked(one: ArmRun, task: Task, folder: Path, device: torch.device) -> dict[str, Any]:
    """What the weights of the chosen epoch show on images of the test set."""
    wanted = set(one.of.measures) - {"gradients"}
    if not wanted:
        return {}
    checkpoint = load_checkpoint(folder)
    model = build_model(one.spec().model, task.shape)
    tempered = attemper.apply(model, one.arm.recipe)
    if checkpoint is not None:  # a run that diverged in its first epoch has none; its initial weights are looked at
        model.load_state_dict(checkpoint["best"])
    model.to(device)
    held_out = task.test()
    stored, _ = next(held_out.batches(torch.arange(min(IMAGES, len(held_out))), IMAGES))
    inputs = task.to_input(stored).to(device)
    looks: dict[str, Callable[[], Any]] = {
        "entropy": lambda: entropies(model, inputs),
        "tokens": lambda: token_conditions(model, inputs),
        "patches": lambda: patch_condition(model, inputs, tempered.methods),
        "branches": lambda: branch_conditions(model, inputs, tempered.methods),
    }
    return {name: _plain(looks[name]()) for name in one.of.measures if name in wanted}


def _plain(value: Any) -> Any:
    """Plain data in which every number is finite: None stands for a κ that float64 cannot tell from infinity."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if value < 1 / torch.finfo(torch.float64).eps else None
    return value


# ----------------------------------------------------------------------------------------------------------- gradients
def _train_and_measure(
    one: ArmRun, task: Task, folder: Path, device: torch.device, log: LogCallback
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Result, and for each point of training the noise of gradients by arm: None where training did not get there."""
    middle = max(1, one.budget.epochs // 2)
    noise: dict[str, Any] = read_json_object(folder / NOISE) if (folder / NOISE).is_file() else {}

    def note(point: str, weights: Mapping[str, Tensor] | None) -> None:
        arms = {arm.name: gradient_noise(one.spec(arm), task, weights, device) for arm in one.measured_arms()}
        noise[point] = {name: _finite_noise(found) for name, found in arms.items()}
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / NOISE, json.dumps(noise, allow_nan=False))

    def stop(event: dict[str, Any]) -> None:
        speak(event)
        if event["validation"] is not None and event["epoch"] == middle:
            raise Leave

    speak = _spoken(one, log)
    if "start" not in noise:
        note("start", None)
    if "middle" not in noise and _stopped_after(folder, middle):  # it was stopped while this was measured
        note("middle", _weights(folder))
    try:
        progress = speak if "middle" in noise else stop
        result = run(one.spec(), task, folder=folder, device=device, progress=progress)
    except Leave:
        note("middle", _weights(folder))
        result = run(one.spec(), task, folder=folder, device=device, progress=speak)
    if result["status"] == "finished":
        note("end", _weights(folder))
    return result, {point: noise.get(point) for point in POINTS}


def _stopped_after(folder: Path, epoch: int) -> bool:
    """Whether the checkpoint of a run stands at the end of this epoch; one that cannot be read stands nowhere."""
    try:
        checkpoint = load_checkpoint(folder)
    except AttemperError:
        return False
    return checkpoint is not None and (checkpoint["story"]["epoch"], checkpoint["story"]["batch"]) == (epoch, 0)


def _weights(folder: Path) -> Mapping[str, Tensor]:
    """The weights that the last epoch left."""
    checkpoint = load_checkpoint(folder)
    assert checkpoint is not None
    weights: Mapping[str, Tensor] = checkpoint["model"]
    return weights


def _finite_noise(found: Noise) -> dict[str, float | None]:
    return {"variance": finite(found["variance"]), "squared_mean": finite(found["squared_mean"])}
