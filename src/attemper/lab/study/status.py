"""How far a study is: counts for every recipe, and who is at work."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from attemper.lab.study.notices import notices
from attemper.lab.study.plan_rows import Entry
from attemper.lab.study.selection import validation_of
from attemper.lab.study.store import Result
from attemper.lab.study.study import Study

LEAST_SHARE = 0.02
"""Of a run, before its pace says anything: its first steps set things up."""


@dataclass(frozen=True)
class Running:
    """A run that a living worker has in hand."""

    name: str
    """Of the run, in words."""
    host: str
    pid: int
    seconds: float
    """Since it was claimed; a run that was taken over counts anew."""
    share: float
    """How much of it is done, 0 to 1."""
    loss: float | None

    @property
    def total(self) -> float | None:
        """Seconds that the whole run will take, at its pace so far; None: too early to say."""
        return self.seconds / self.share if self.share >= LEAST_SHARE else None

    @property
    def seconds_left(self) -> float | None:
        """Until it is done, at its pace so far."""
        return None if self.total is None else self.total - self.seconds


@dataclass(frozen=True)
class RecipeStatus:
    """How far one recipe is."""

    name: str
    total: int
    done: int
    running: tuple[Running, ...]
    failed: int
    diverged: int
    validation: float | None
    """Mean over the runs that are done. Test is not looked at before the end."""

    @property
    def missing(self) -> int:
        """Runs that nobody has begun, or that wait for another attempt."""
        return self.total - self.done - len(self.running) - self.failed

    @property
    def share(self) -> float:
        """How much of all its runs is done, 0 to 1."""
        return (self.done + sum(run.share for run in self.running)) / self.total


@dataclass(frozen=True)
class Status:
    """How far a study is. Runs that two recipes have in common count for both, and once in all."""

    recipes: tuple[RecipeStatus, ...]
    total: int
    done: int
    running: tuple[Running, ...]
    failed: int
    seconds_left: float | None
    """At the pace of the runs that are done and the workers that are busy now; none: nothing to go by."""
    notes: tuple[str, ...] = ()
    """What whoever reads it should know: files that do not count, versions that are mixed."""

    @property
    def missing(self) -> int:
        return self.total - self.done - len(self.running) - self.failed


def status_of(study: Study) -> Status:
    """Count a study's runs. Looks at the folder only: works while others work, and where it may only be read."""
    results, failed = study.results(), set(study.failed())
    holders = study.claims.holders(key for key in study.runs if key not in results)
    running = {}
    for key, holder in holders.items():
        if holder.alive and holder.fresh and key not in failed:
            event = study.store.read_progress(key)
            seconds = max(0.0, time.time() - holder.since)
            running[key] = Running(
                study.describe(key), holder.host, holder.pid, seconds, _share(event), _number(event.get("loss"))
            )
    recipes = tuple(_recipe_status(study, entry, results, running, failed) for entry in study.plan.recipes)
    return Status(
        recipes=recipes,
        total=len(study.runs),
        done=len(results),
        running=tuple(running.values()),
        failed=len(failed),
        seconds_left=_seconds_left(study, results, running, failed),
        notes=tuple(notices(study, results.values())),
    )


def _recipe_status(
    study: Study, entry: Entry, results: dict[str, Result], running: dict[str, Running], failed: set[str]
) -> RecipeStatus:
    keys = list(dict.fromkeys(key for keys in study.keys_of(entry).values() for key in keys))
    keys += [key for key in study.more_of(entry) if key not in keys]
    done = [results[key] for key in keys if key in results]
    reached = [value for value in map(validation_of, done) if value is not None]
    return RecipeStatus(
        name=entry.name,
        total=len(keys),
        done=len(done),
        running=tuple(running[key] for key in keys if key in running),
        failed=sum(key in failed for key in keys),
        diverged=sum(result["status"] == "diverged" for result in done),
        validation=sum(reached) / len(reached) if reached else None,
    )


def _share(event: dict[str, object]) -> float:
    """How much of a run is done, from what it last told."""
    try:
        epoch, epochs, step, steps = (float(str(event[name])) for name in ("epoch", "epochs", "step", "steps"))
        return min(1.0, max(0.0, (epoch - 1 + step / steps) / epochs))
    except (KeyError, ValueError, ZeroDivisionError):
        return 0.0


def _number(value: object) -> float | None:
    """A loss that can be shown; None where there is none, or where its file is damaged."""
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def _seconds_left(
    study: Study, results: dict[str, Result], running: dict[str, Running], failed: set[str]
) -> float | None:
    """Each run to do takes what the finished runs of its recipe took on average, or all finished runs.

    Before the first has finished, what those in hand will take at their pace.
    """
    took: dict[str, list[float]] = {}
    for key, result in results.items():
        seconds = result.get("timing", {}).get("seconds")
        if isinstance(seconds, int | float):
            took.setdefault(study.runs[key].recipe, []).append(float(seconds))
    every = [seconds for values in took.values() for seconds in values]
    todo = [key for key in study.runs if key not in results and key not in failed]
    if not todo:
        return 0.0
    if not every:
        for key, run in running.items():
            if run.total is not None:
                took.setdefault(study.runs[key].recipe, []).append(run.total)
        every = [seconds for values in took.values() for seconds in values]
    if not every or not running:
        return None

    def expected(key: str) -> float:
        values: Sequence[float] = took.get(study.runs[key].recipe, every)
        share = running[key].share if key in running else 0.0
        return sum(values) / len(values) * (1 - share)

    left = [expected(key) for key in todo]
    return max(*left, sum(left) / len(running))


def duration(seconds: float) -> str:
    """A length of time in words.

    >>> duration(5.2), duration(140), duration(7260)
    ('5 s', '2 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
