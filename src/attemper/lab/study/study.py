"""A study: a plan, its folder, and the work on its runs."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_write, read_json_object
from attemper.lab.errors import DamagedPlanError, StudyError, VersionsError
from attemper.lab.folders import folder_errors, unreadable
from attemper.lab.study.claims import STALE_AFTER, Claim, Claims, Holder
from attemper.lab.study.engine import Engine, Task, Training
from attemper.lab.study.fitting import refuse_misfits
from attemper.lab.study.held_plan import (
    DATA,
    FORMAT,
    HeldPlan,
    read_held_plan,
    refuse_foreign,
    refuse_other_plan,
    versions_in,
    write_held_plan,
)
from attemper.lab.study.keeping import drop_worse
from attemper.lab.study.performing import perform_run
from attemper.lab.study.plan import Plan
from attemper.lab.study.plan_rows import Entry
from attemper.lab.study.settings import Settings, read_settings, write_settings
from attemper.lab.study.store import Result, Store
from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.tracking.registry import check_trackers
from attemper.lab.training.spec import RunSpec, lacks_hashes
from attemper.lab.training.versions import BEFORE, listed, versions_here

POLL = 0.2
"""Seconds between two looks at a folder on which only others have work to do."""
ATTEMPTS = 3
"""After so many attempts that went wrong, a run is given up."""


class Study:
    """The runs of a plan and their results in one folder. Opening a study writes nothing.

    folder: where the results are, or will be.
    plan: what to run; none: the plan that the folder holds.
    root: where this machine keeps its data.
    engine: performs the runs; none: `attemper.lab.training`.
    settings: how runs are watched; none: as the folder remembers it.
    change_plan: take a folder that holds other runs than the plan's. They stay, and those in common are not run again.
    accept_versions: do runs under other versions of torch or of Attemper's results than those that are there.
    stale_after: seconds of silence after which another worker is taken for dead.
    attempts: after so many attempts that went wrong, a run is given up and the others go on.
    """

    def __init__(
        self,
        folder: str | Path,
        plan: Plan | None = None,
        root: Path | None = None,
        *,
        engine: Engine | None = None,
        settings: Settings | None = None,
        change_plan: bool = False,
        accept_versions: bool = False,
        stale_after: float = STALE_AFTER,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.folder, self.root, self.attempts, self.accept_versions = Path(folder), root, attempts, accept_versions
        held = self._held_plan(replaced=plan is not None and change_plan)
        if plan is None and held is None:
            raise StudyError(f"{self.folder} holds no study: it has no plan.yaml.")
        if held is None and not change_plan:
            refuse_foreign(self.folder)
        self.versions = (held.versions if held else versions_in(self.folder)) or (versions_here(),)
        """Under which the runs were done so far; the first are those of their keys."""
        self.settings = read_settings(self.folder) if settings is None else settings
        self.engine: Engine = engine or Training(self.settings.probe_every)
        self.claims = Claims(self.folder / "claims", stale_after=stale_after)
        self.store = Store(self.folder, digests=self.versions[0] != BEFORE)
        self.plan: Plan = plan or held.plan  # type: ignore[union-attr]
        if lacks_hashes(self.plan.budget, self.plan.model):
            budget = self.engine.with_hashes(self.plan.budget, self.task, self.plan.model)
            self.plan = dataclasses.replace(self.plan, budget=budget)
        if held is not None and not change_plan:
            refuse_other_plan(self.folder, self.plan, held)

    def _held_plan(self, *, replaced: bool = False) -> HeldPlan | None:
        """What the folder holds. replaced: another plan takes its place, so that it may be damaged."""
        try:
            return read_held_plan(self.folder)
        except DamagedPlanError:
            if not replaced:
                raise
            return None

    @cached_property
    def data(self) -> dict[str, str]:
        """The task's name and its data's fingerprint; known from the folder where the data is not at hand."""
        path = self.folder / DATA
        try:
            held = read_json_object(path)
            if held["plan"] == self.plan.task:
                return {name: _text(held, name) for name in ("plan", "task", "fingerprint")}
        except MissingFileError:
            pass
        except (UnreadableError, ValueError, KeyError) as error:
            raise unreadable(path, error) from None
        return self._data_of(self.task)

    def _data_of(self, task: Task) -> dict[str, str]:
        return {"plan": self.plan.task, "task": task.name, "fingerprint": task.fingerprint}

    @cached_property
    def task(self) -> Task:
        """The opened task."""
        return self.engine.open_task(self.plan.task, self.root)

    @cached_property
    def runs(self) -> dict[str, RunSpec]:
        """Every run by its key, in the order in which they are done."""
        specs = [dataclasses.replace(spec, versions=self.versions[0]) for spec in self.plan.runs(self.data["task"])]
        return {self.key(spec): spec for spec in specs}

    def key(self, spec: RunSpec) -> str:
        return dataclasses.replace(spec, versions=self.versions[0]).key(self.data["fingerprint"])

    def keys_of(self, entry: Entry) -> dict[tuple[str, float], list[str]]:
        """The runs of a row: for each configuration, one per seed."""
        name = self.data["task"]
        return {
            (recipe, lr): [self.key(self.plan.spec(recipe, lr, seed, name)) for seed in self.plan.seeds]
            for recipe, lr in self.plan.configurations(entry)
        }

    def more_of(self, entry: Entry) -> list[str]:
        """The runs that a row got beyond the plan's own seeds."""
        more, seeds = self.plan.more_of(entry), self.plan.every_seed
        if more is None:
            return []
        name = self.data["task"]
        added = seeds[len(self.plan.seeds) : more.seeds]
        return [self.key(self.plan.spec(more.recipe, more.lr, seed, name)) for seed in added]

    # What there is, and what there is to do.

    def results(self) -> dict[str, Result]:
        """The results that are there, by key."""
        found = {key: self.store.result(key) for key in self.runs}
        return {key: result for key, result in found.items() if result is not None}

    def failed(self) -> list[str]:
        """Runs that were given up and have no result."""
        given_up = self.given_up()
        return [key for key in self.runs if key in given_up and self.store.result(key) is None]

    def given_up(self) -> set[str]:
        """Runs that went wrong too often to be tried again, also those that another worker has done since."""
        return {key for key, count in self.store.attempts().items() if count >= self.attempts}

    def missing(self) -> list[str]:
        """The runs that have no result and have not been given up, whether or not a worker has them."""
        given_up = self.given_up()
        return [key for key in self.runs if key not in given_up and self.store.result(key) is None]

    def check(self) -> None:
        """See that every recipe with something to do fits the model; all that do not are named at once."""
        check_trackers(self.settings.track)
        first = {self.runs[key].recipe: self.runs[key] for key in reversed(self.missing())}
        runs = {run.recipe: first[run.recipe] for run in self.runs.values() if run.recipe in first}
        refuse_misfits(runs, lambda spec: self.engine.check(spec, self.task), self.plan.model)

    def check_data(self) -> dict[str, str]:
        """The task's name and its data's fingerprint; raises unless it is the data that the study began with."""
        found = self._data_of(self.task)
        if self.data != found:
            raise StudyError(
                f"The data of {self.plan.task} is not what this study began with (its fingerprint was "
                f"{self.data['fingerprint']} and is {found['fingerprint']}). Use the same data, or another folder."
            )
        return found

    def check_versions(self) -> None:
        """Raise if runs are to be done under other versions than those that are there, unless that is accepted.

        Where nothing was run yet, the versions are those of whoever begins.
        """
        here = versions_here()
        if here in self.versions:
            return
        if not self.store.has_begun():
            self.versions = (here,)
            self.__dict__.pop("runs", None)  # keys depend on it
        elif self.accept_versions:
            self.versions = (*self.versions, here)
        else:
            self._refuse_versions()

    def join(self) -> None:
        """Take part, as a worker, in a study that somebody has made ready; raises as `check_versions` does."""
        here = versions_here()
        if here in self.versions:
            return
        if not self.accept_versions:
            self._refuse_versions()
            return
        self.versions = (*self.versions, here)
        held = read_held_plan(self.folder)
        if held is not None:
            with folder_errors(self.folder):
                write_held_plan(self.folder, held.plan, tuple(dict.fromkeys((*held.versions, here))), held)

    def _refuse_versions(self) -> None:
        """Raise if there is anything to do."""
        done, total = len(self.results()), len(self.runs)
        if done < total:
            raise VersionsError(
                f"{self.folder} has {done} results made under {listed(self.versions)}, and here are {versions_here()}: "
                f"the missing runs ({total - done}) would not be comparable. Use those versions, another folder, or "
                "--accept-versions to mix them; summary and page then say so."
            )

    def prepare(self) -> list[str]:
        """Write the plan into the folder, give every run its attempts back, and sweep. Returns what is worth saying."""
        found = self.check_data()
        self.check_versions()
        with folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_held_plan(self.folder, self.plan, self.versions, self._held_plan(replaced=True))
            data, path = {"format": FORMAT, **found}, self.folder / DATA
            if not path.exists() or read_json_object(path) != data:
                atomic_write(path, json.dumps(data, indent=1) + "\n")
            write_settings(self.folder, self.settings)
            for name in ("runs", "work", "claims"):
                (self.folder / name).mkdir(exist_ok=True)
        for key in set(self.store.attempts()) & set(self.runs):
            self.store.clear_failures(key)
        self.sweep()
        notes = [
            f"{self.store.path(key)} is corrupt ({problem}); it is set aside and run again"
            for key, problem in self.corrupt().items()
        ]
        if set(self.versions) != {versions_here()}:
            what = "mixes results made" if len(self.versions) > 1 else "was begun"
            notes.append(f"this study {what} under {listed(self.versions)}")
        return notes

    def sweep(self) -> None:
        """Remove what workers that were killed have left of finished runs."""
        for key in self.store.leftovers() & set(self.runs):
            if self.store.result(key) is not None:
                self.store.forget(key)
                self.claims.clear(key)
        self.store.sweep_parts()
        drop_worse(self)

    def corrupt(self) -> dict[str, str]:
        """The runs whose file is no result, and what is wrong with it."""
        found = {key: self.store.corrupt(key) for key in self.runs}
        return {key: problem for key, problem in found.items() if problem is not None}

    # Working.

    def claim(self, keys: Iterable[str] | None = None, token: str | None = None) -> Claim | None:
        """Claim the first missing run that no worker has; None if there is none at the moment.

        token: names the claim, so that the executor that sent this worker can tell it from others.
        """
        wanted = self.missing() if keys is None else list(keys)
        taken = {key for key, holder in self.claims.holders(wanted).items() if holder.alive}
        for key in wanted:
            if key not in taken:
                with folder_errors(self.claims.folder):
                    claim = self.claims.take(key, on_takeover=self._note_death, token=token)
                if claim is not None:
                    return claim
        return None

    def release_dead(self, key: str, token: str) -> bool:
        """Free a run whose worker is known to be dead, though its last sign of life is fresh; whether it held it.

        token: of the dead worker's claim. A worker that is not dead after all finds out that the run is not its own.
        """
        holder = self.claims.holder(key)
        if holder is None or holder.token != token or holder.released:
            return False
        with folder_errors(self.claims.folder):
            claim = self.claims.take(key, on_takeover=self._note_death, dead=token)
        if claim is not None:
            claim.release()
        return claim is not None

    def _note_death(self, holder: Holder) -> None:
        if self.store.result(holder.key) is None:
            self.store.add_failure(
                holder.key, f"its worker, process {holder.pid} on {holder.host}, died during the run"
            )

    def work(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        device: str | None = None,
        log: LogCallback = print,
        wait: bool = True,
    ) -> None:
        """Do missing runs in this process, one after another, until there is none or `stop` says so.

        stop: asked a few times a second; a run that it stops writes a checkpoint first.
        wait: stay while others have the last runs in hand, in case one of them dies. Otherwise this leaves as soon as
            all of them are known to be alive, which takes up to a minute where they are on other machines.
        """
        while not stop():
            todo = self.missing()
            if not todo:
                return
            claim = self.claim(todo)
            if claim is not None:
                perform_run(self, claim, stop=stop, device=device, log=log)
            elif not wait and self._all_in_hand(todo):
                return
            else:
                time.sleep(POLL)

    def _all_in_hand(self, keys: Iterable[str]) -> bool:
        """Whether runs have holders that are known to be alive. One on another machine has to be watched for that."""
        holders = self.claims.holders(keys).values()
        return bool(holders) and all(holder.certain for holder in holders)

    def describe(self, key: str) -> str:
        """A run in words."""
        spec = self.runs[key]
        rate = f", lr {spec.budget.lr:g}" if len(self.plan.lr) > 1 else ""
        return f"{spec.recipe}{rate}, seed {spec.seed}"


def _text(held: dict[str, Any], name: str) -> str:
    if not isinstance(held[name], str):
        raise ValueError(f"{name} is {held[name]!r}")
    return str(held[name])
