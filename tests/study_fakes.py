"""Runs that cost nothing: a study's bookkeeping can be tested, killed and repeated without training anything."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attemper.errors import ParameterError
from attemper.lab.study.plan import Plan
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.versions import versions_here

EPOCHS = 4


@dataclass(frozen=True)
class FakeTask:
    name: str = "fake"
    fingerprint: str = "f00d"


def chance(*parts: object) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def make_result(spec: RunSpec, fingerprint: str = "f00d", **changes: Any) -> dict[str, Any]:
    """A result as training writes it."""
    accuracy = {part: round(0.5 + 0.4 * chance(spec, part), 4) for part in ("train", "validation", "test")}
    return {
        "format": 1,
        "key": spec.key(fingerprint),
        "spec": spec.to_dict(),
        "fingerprint": fingerprint,
        "status": "finished",
        "diverged_at": None,
        "metric": "accuracy",
        "chosen_epoch": 1,
        **{part: {"accuracy": value, "loss": 1 - value} for part, value in accuracy.items()},
        "curve": [{"epoch": 1, "validation": {"accuracy": accuracy["validation"]}}],
        "rates": [],
        "parameters": 1000,
        "timing": {"seconds": 0.1},
        "versions": {"torch": "0", "device": "cpu"},
        "made_under": [versions_here().to_dict()],
        **changes,
    }


@dataclass
class FakeEngine:
    """Performs runs that write a checkpoint per epoch and return numbers that depend on the whole history.

    log: a file that gets one line per run begun from nothing and per result returned.
    pause: seconds per epoch.
    troubles: recipe → what happens to its runs at the second epoch.
    """

    log: Path | None = None
    pause: float = 0.0
    troubles: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    misfits: tuple[str, ...] = ()
    fingerprint: str = "f00d"

    def open_task(self, text: str, root: Path | None) -> FakeTask:
        return FakeTask(text, self.fingerprint)

    def with_hashes(self, budget: Budget, task: Any, model: str) -> Budget:
        return budget

    def check(self, spec: RunSpec, task: Any) -> None:
        if spec.recipe in self.misfits:
            raise ParameterError(f"{spec.recipe} does not fit")

    def run(
        self, spec: RunSpec, task: FakeTask, *, folder: Path, progress: Callable[..., None], device: str | None
    ) -> dict[str, Any]:
        checkpoint, state, first = folder / "state", "begin", 1
        if checkpoint.exists():
            state, first = checkpoint.read_text().split()[0], int(checkpoint.read_text().split()[1]) + 1
        else:
            self.note(f"begin {spec.key(task.fingerprint)}")
        for epoch in range(first, EPOCHS + 1):
            progress({"epoch": epoch, "epochs": EPOCHS, "step": 1, "steps": 1, "loss": 1.0, "validation": None})
            time.sleep(self.pause)
            if epoch == 2 and spec.recipe in self.troubles:
                self.troubles[spec.recipe](folder)
            state = hashlib.sha256(f"{spec} {state} {epoch}".encode()).hexdigest()
            (folder / "part").write_text(f"{state} {epoch}")
            (folder / "part").replace(checkpoint)
        self.note(f"end {spec.key(task.fingerprint)}")
        return make_result(spec, task.fingerprint, weights=state, timing={"seconds": 0.1, "at": time.time()})

    def note(self, line: str) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(line + "\n")

    def costs(self, recipes: Sequence[str], task: Any, model: str, budget: Budget) -> dict[str, dict[str, Any]]:
        self.note(f"costs {' '.join(recipes)}")
        cost = {"ratio": 1.5, "low": 1.4, "high": 1.6, "milliseconds": 3.0, "peak_memory": None}
        return {recipe: {**cost, "ratio": 1.0} if recipe == "none" else dict(cost) for recipe in recipes}


class AcceleratorError(RuntimeError):
    """Stands for torch's error of this name, after which a process can no longer use its GPU."""


gone: set[int] = set()
"""The processes that have lost their GPU."""


def lose_device_once(folder: Path) -> None:
    """An illegal access in one process of all; whatever that process does afterwards fails, too."""
    marker = folder.parents[1] / "lost"
    if os.getpid() in gone or not marker.exists():
        marker.touch()
        gone.add(os.getpid())
        raise AcceleratorError("CUDA error: an illegal memory access was encountered")


def die_once(folder: Path) -> None:
    """Kill the whole process, the first time that any run comes here."""
    died = folder.parents[1] / "died"
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), 9)


def die(folder: Path) -> None:
    os.kill(os.getpid(), 9)


def break_down(folder: Path) -> None:
    raise RuntimeError("the disk brake is on")


def fill_the_disk(folder: Path) -> None:
    raise OSError(28, "No space left on device", str(folder / "checkpoint"))


GATE_PATIENCE = 300.0


def wait_half_way(folder: Path) -> None:
    """Hold a run, once half of twelve are done, until the gate is open; says on which node of a cluster it waits."""
    import ray

    study, until = folder.parents[1], time.monotonic() + GATE_PATIENCE
    while len(list((study / "runs").glob("*.json"))) >= 6 and not _gate(study).exists():
        (folder / "part").write_text(ray.get_runtime_context().get_node_id())
        (folder / "part").replace(folder / "waits")
        if time.monotonic() > until:
            raise TimeoutError("nobody has opened the gate")
        time.sleep(0.05)


def open_gate(study: Path) -> None:
    """Let the runs of a study go on that wait half-way, and all that come after them."""
    _gate(study).touch()


def _gate(study: Path) -> Path:
    return study.with_name(f"{study.name} goes on")


def make_plan(recipes: Sequence[Any] = ("none", "dropkey(0.1)", "cb"), seeds: Any = 3, **more: Any) -> Plan:
    return Plan.from_dict({"task": "fake", "model": "vit-digits", "recipes": list(recipes), "seeds": seeds, **more})
