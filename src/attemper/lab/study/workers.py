"""What workers of a study have in common, wherever they run: what they are told, and when too many of them died."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attemper.lab.errors import StudyError
from attemper.lab.study.engine import Engine
from attemper.lab.study.plan import Plan
from attemper.lab.study.settings import Settings
from attemper.lab.study.study import Study

MOST_DEATHS = 10
"""So many workers may die in a row without anything having come of it."""


@dataclass(frozen=True)
class WorkerConfig:
    """Everything that a worker needs to open the study, in whatever process or machine it is."""

    folder: Path
    plan: Plan
    root: Path | None
    engine: Engine
    settings: Settings
    stale_after: float
    attempts: int
    accept_versions: bool
    threads: int
    device: str | None

    @classmethod
    def of(cls, study: Study, *, threads: int, device: str | None) -> WorkerConfig:
        """The configuration of a worker on this study."""
        return cls(
            folder=study.folder.absolute(),
            plan=study.plan,
            root=study.root,
            engine=study.engine,
            settings=study.settings,
            stale_after=study.claims.stale_after,
            attempts=study.attempts,
            accept_versions=study.accept_versions,
            threads=threads,
            device=device,
        )

    def open(self) -> Study:
        """The study, opened in the worker; raises if the versions there are others."""
        study = Study(
            self.folder,
            self.plan,
            self.root,
            engine=self.engine,
            settings=self.settings,
            change_plan=True,
            stale_after=self.stale_after,
            attempts=self.attempts,
            accept_versions=self.accept_versions,
        )
        study.join()
        return study


class DeathCounter:
    """Counts workers that die one after another while the study gets nowhere."""

    def __init__(self, study: Study) -> None:
        self._study, self._count, self._state = study, 0, (0, 0)

    def count(self, reason: str) -> None:
        """One more; raises when there is no point in going on. reason: such as 'was killed by signal 9'."""
        state = (len(self._study.results()), sum(self._study.store.attempts().values()))
        self._count = self._count + 1 if state == self._state else 1
        self._state = state
        if self._count > MOST_DEATHS:
            raise StudyError(f"{self._count} workers died one after another without a run done; the last {reason}.")
