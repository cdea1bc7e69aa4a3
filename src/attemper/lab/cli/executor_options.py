"""Who does the runs of a study: options that several commands have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from attemper.errors import ParameterError
from attemper.lab.cli.options import Number, Text, Workers, option

if TYPE_CHECKING:
    from attemper.lab.study.executor import Executor

PER_RUN = (
    'With --executor ray: what a run takes, such as "cpus=2,gpus=0.25,memory=8" (GiB); otherwise a core, and a GPU '
    "where there are any."
)


@dataclass(frozen=True)
class ExecutorOptions:
    """Where the runs are done."""

    executor: Literal["processes", "ray"] = "processes"
    """processes: of this machine; ray: on a Ray cluster that is up already."""
    workers: Workers = None
    per_gpu: Number = None
    """Runs side by side on one GPU; otherwise as many as fit, once the first has shown what it takes."""
    per_run: Annotated[str | None, option(PER_RUN, "TEXT")] = None
    address: Text = None
    """With --executor ray: HOST:PORT of the cluster's head; otherwise RAY_ADDRESS, else the cluster of this machine."""
    attempts: Number = None
    """After so many attempts that went wrong, or whose machine died, a run is given up; otherwise 3."""

    def make(self) -> Executor | None:
        """The executor that was asked for; None where nothing was."""
        if self.attempts is not None and self.attempts < 1:
            raise ParameterError(f"--attempts is {self.attempts}; it must be at least 1.")
        if self.executor == "ray":
            self._refuse("per_gpu", "say --per-run gpus=0.5 to put two runs on a GPU")
            from attemper.lab.study.ray_executor import RayCluster
            from attemper.lab.study.resources import Resources

            per_run = Resources.parse(self.per_run) if self.per_run is not None else None
            return RayCluster(self.address, per_run, self.workers)
        self._refuse("per_run", "it belongs to --executor ray; say --per-gpu N or --workers N")
        self._refuse("address", "it belongs to --executor ray")
        if self.workers is None and self.per_gpu is None:
            return None
        from attemper.lab.study.processes import Processes

        return Processes(self.workers, self.per_gpu)

    def _refuse(self, name: str, instead: str) -> None:
        if getattr(self, name) is not None:
            raise ParameterError(f"--{name.replace('_', '-')} says nothing to --executor {self.executor}: {instead}.")
