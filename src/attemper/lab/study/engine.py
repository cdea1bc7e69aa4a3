"""What a study needs of training and evaluation: five functions that a test can replace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from attemper.lab.training.spec import Budget, RunSpec

Progress = Callable[[dict[str, Any]], None]


class Task(Protocol):
    """What a study needs to know of a task."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...


class Engine(Protocol):
    """Opens tasks, checks and performs runs, measures costs. Goes to other processes, so it can be pickled."""

    def open_task(self, text: str, root: Path | None) -> Task:
        """The task of a plan; root: where this machine keeps its data."""
        ...

    def with_hashes(self, budget: Budget, task: Task, model: str) -> Budget:
        """The budget with the hashes of the weights and of the source that keys depend on."""
        ...

    def check(self, spec: RunSpec, task: Task) -> None:
        """Raise an `AttemperError` if the run cannot work, before anything is trained."""
        ...

    def run(self, spec: RunSpec, task: Task, *, folder: Path, progress: Progress, device: str | None) -> dict[str, Any]:
        """Perform a run, or go on with it from what is in its folder, and return its result."""
        ...

    def costs(self, recipes: Sequence[str], task: Task, model: str, budget: Budget) -> dict[str, dict[str, Any]]:
        """What a training step costs with each recipe, against 'none'."""
        ...


@dataclass(frozen=True)
class Training:
    """`attemper.lab.training` and `attemper.lab.evaluation`, imported when they are needed."""

    probe_every: int | None = None
    """Steps between two looks at attention during every run; they do not change its result."""

    def open_task(self, text: str, root: Path | None) -> Task:
        from attemper.lab.tasks.registry import open_task

        return open_task(text, root)

    def with_hashes(self, budget: Budget, task: Any, model: str) -> Budget:
        from attemper.lab.training.hashes import budget_with_hashes

        return budget_with_hashes(budget, model, task.shape)

    def check(self, spec: RunSpec, task: Any) -> None:
        from attemper.lab.evaluation.runs import check_suites
        from attemper.lab.training.check import check_run

        check_suites(spec, task)
        check_run(spec, task)
        if self.probe_every is not None:
            self._check_attention(spec, task)

    def _check_attention(self, spec: RunSpec, task: Any) -> None:
        """Refuse to probe a network that has none, before anything is trained."""
        import torch

        from attemper.lab.models.registry import build_model
        from attemper.probes.diagnosis import find_attention

        with torch.random.fork_rng():
            find_attention(build_model(spec.model, task.shape, trained=False))

    def run(self, spec: RunSpec, task: Any, *, folder: Path, progress: Progress, device: str | None) -> dict[str, Any]:
        from attemper.lab.evaluation.runs import examine
        from attemper.lab.training.loop import run

        return run(
            spec,
            task,
            folder=folder,
            progress=progress,
            device=device,
            probe_every=self.probe_every,
            examine=examine,
            accept_versions=True,  # the study has seen to it who may work on it
        )

    def costs(self, recipes: Sequence[str], task: Any, model: str, budget: Budget) -> dict[str, dict[str, Any]]:
        from attemper.lab.training.cost import step_costs

        return {recipe: dict(cost) for recipe, cost in step_costs(recipes, task, model, budget).items()}
