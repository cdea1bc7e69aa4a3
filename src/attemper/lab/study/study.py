"""A study: a plan, its folder, and the work on its runs."""

import dataclasses
import json
import time
import traceback
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError
from attemper.files import atomic_write
from attemper.lab.errors import FolderError, LostClaimError, PlanError, StudyError
from attemper.lab.folders import disk_error_behind, folder_error, folder_errors, unreadable
from attemper.lab.study.claims import STALE_AFTER, Claim, Claims, Holder
from attemper.lab.study.engine import Engine, Task, Training
from attemper.lab.study.plan import Entry, Plan
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.study.settings import Settings, read_settings, write_settings
from attemper.lab.study.store import Result, Store
from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.tracking.registry import check_trackers
from attemper.lab.training.spec import RunSpec
from attemper.lab.training.tracking import follow

POLL = 0.2
"""Seconds between two looks at a folder on which only others have work to do."""
ATTEMPTS = 3
"""After so many attempts that went wrong, a run is given up."""


class Halt(BaseException):
    """Raised inside a run to leave it, through whatever would catch an `Exception`."""


class Study:
    """The runs of a plan and their results in one folder. Opening a study writes nothing.

    folder: where the results are, or will be.
    plan: what to run; none: the plan that the folder holds.
    root: where this machine keeps its data.
    engine: performs the runs; none: `attemper.lab.training`.
    settings: how runs are watched; none: as the folder remembers it.
    change_plan: take a folder that holds other runs than the plan's. They stay, and those in common are not run again.
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
        stale_after: float = STALE_AFTER,
        attempts: int = ATTEMPTS,
    ) -> None:
        self.folder, self.root, self.attempts = Path(folder), root, attempts
        self.settings = read_settings(self.folder) if settings is None else settings
        self.engine: Engine = engine or Training(self.settings.probe_every)
        self.store = Store(self.folder)
        self.claims = Claims(self.folder / "claims", stale_after=stale_after)
        held = self._held_plan()
        if plan is None and held is None:
            raise StudyError(f"{self.folder} holds no study: it has no plan.yaml.")
        self.plan: Plan = plan or held  # type: ignore[assignment]
        if self.plan.budget.teacher is not None and self.plan.budget.teacher_hash is None:
            self.plan = dataclasses.replace(
                self.plan, budget=self.engine.with_teacher_hash(self.plan.budget, self.task)
            )
        if held is not None and not change_plan:
            self._refuse_other(held)

    def _held_plan(self) -> Plan | None:
        path = self.folder / "plan.yaml"
        return load_plan(path) if path.exists() else None

    def _refuse_other(self, held: Plan) -> None:
        """A longer plan may go on with a folder; one that leaves runs out would hide them."""
        left_out = [run for run in held.runs() if run not in set(self.plan.runs())]
        if left_out:
            raise StudyError(
                f"{self.folder} holds the study of another plan: {len(left_out)} of its {len(held.runs())} runs are "
                f"not in this one, such as {left_out[0].recipe} on {left_out[0].task} with seed {left_out[0].seed}. "
                "Choose another folder, or allow its plan to be changed; results in common are kept either way."
            )

    @cached_property
    def data(self) -> dict[str, str]:
        """The task's name and its data's fingerprint; known from the folder where the data is not at hand."""
        path = self.folder / "data.json"
        try:
            held = json.loads(path.read_text())
            if held["plan"] == self.plan.task:
                return {name: str(held[name]) for name in ("plan", "task", "fingerprint")}
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
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
        return {self.key(spec): spec for spec in self.plan.runs(self.data["task"])}

    def key(self, spec: RunSpec) -> str:
        return spec.key(self.data["fingerprint"])

    def keys_of(self, entry: Entry) -> dict[tuple[str, float], list[str]]:
        """The runs of a row: for each configuration, one per seed."""
        name = self.data["task"]
        return {
            (recipe, lr): [self.key(self.plan.spec(recipe, lr, seed, name)) for seed in self.plan.seeds]
            for recipe, lr in self.plan.configurations(entry)
        }

    # What there is, and what there is to do.

    def results(self) -> dict[str, Result]:
        """The results that are there, by key."""
        found = {key: self.store.result(key) for key in self.runs}
        return {key: result for key, result in found.items() if result is not None}

    def failed(self) -> list[str]:
        """The runs that were given up."""
        given_up = self._given_up()
        return [key for key in self.runs if key in given_up and self.store.result(key) is None]

    def _given_up(self) -> set[str]:
        return {key for key, count in self.store.attempts().items() if count >= self.attempts}

    def missing(self) -> list[str]:
        """The runs that have no result and have not been given up, whether or not a worker has them."""
        given_up = self._given_up()
        return [key for key in self.runs if key not in given_up and self.store.result(key) is None]

    def check(self) -> None:
        """See that every recipe with something to do fits the model; all that do not are named at once."""
        check_trackers(self.settings.track)
        errors: dict[str, str] = {}
        for recipe, spec in {self.runs[key].recipe: self.runs[key] for key in reversed(self.missing())}.items():
            try:
                self.engine.check(spec, self.task)
            except AttemperError as error:
                errors[recipe] = str(error)
        if errors:
            every = [text for text in dict.fromkeys(run.recipe for run in self.runs.values()) if text in errors]
            lines = "\n".join(f"- {recipe}: {errors[recipe]}" for recipe in every)
            raise PlanError(f"{len(errors)} of the plan's recipes cannot be run with {self.plan.model}:\n{lines}")

    def check_data(self) -> dict[str, str]:
        """The task's name and its data's fingerprint; raises unless it is the data that the study began with."""
        found = self._data_of(self.task)
        if self.data != found:
            raise StudyError(
                f"The data of {self.plan.task} is not what this study began with (its fingerprint was "
                f"{self.data['fingerprint']} and is {found['fingerprint']}). Use the same data, or another folder."
            )
        return found

    def prepare(self) -> list[str]:
        """Write the plan into the folder, give every run its attempts back, and sweep. Returns what is worth saying."""
        found = self.check_data()
        with folder_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._held_plan() != self.plan:
                atomic_write(self.folder / "plan.yaml", dump_plan(self.plan))
            if not (self.folder / "data.json").exists() or json.loads((self.folder / "data.json").read_text()) != found:
                atomic_write(self.folder / "data.json", json.dumps(found, indent=1) + "\n")
            write_settings(self.folder, self.settings)
            for name in ("runs", "work", "claims"):
                (self.folder / name).mkdir(exist_ok=True)
        for key in set(self.store.attempts()) & set(self.runs):
            self.store.clear_failures(key)
        self.sweep()
        return [f"{self.store.path(key)} is corrupt; it is set aside and run again" for key in self.corrupt()]

    def sweep(self) -> None:
        """Remove what workers that were killed have left of finished runs."""
        for key in self.store.leftovers() & set(self.runs):
            if self.store.result(key) is not None:
                self.store.forget(key)
                self.claims.clear(key)
        self.store.sweep_parts(older_than=self.claims.stale_after)

    def corrupt(self) -> list[str]:
        """The runs whose file is no result."""
        return [key for key in self.runs if self.store.corrupt(key)]

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

        wait: stay while others have the last runs in hand, in case one of them dies.
        """
        while not stop():
            todo = self.missing()
            if not todo:
                return
            claim = self.claim(todo)
            if claim is None and not wait:
                return
            if claim is None:
                time.sleep(POLL)
            else:
                self.perform(claim, stop=stop, device=device, log=log)

    def perform(self, claim: Claim, *, stop: Callable[[], bool], device: str | None, log: LogCallback) -> None:
        """Do one claimed run, unless it is done or given up by now. Whatever happens, the claim is given back."""
        key = claim.key
        try:
            if self.store.result(key) is not None:
                claim.finish()
            elif key not in self._given_up():
                if self.store.corrupt(key):
                    log(f"corrupt result set aside as {self.store.set_aside(key)}")
                result = self._run(claim, stop, device, log)
                claim.check()
                self.store.save(key, result)
                claim.finish()
        except (Halt, LostClaimError):
            pass
        except FolderError:
            raise
        except Exception as error:
            trouble = disk_error_behind(error)
            if trouble is not None:
                raise folder_error(trouble, Path(trouble.filename or self.folder)) from error
            self.store.add_failure(key, f"{type(error).__name__}: {error}", traceback.format_exc())
            log(f"{self.describe(key)} went wrong: {type(error).__name__}: {error}")
        finally:
            claim.release()

    def _run(self, claim: Claim, stop: Callable[[], bool], device: str | None, log: LogCallback) -> Result:
        def progress(event: dict[str, Any]) -> None:
            if stop() or claim.lost:
                raise Halt
            if "warning" in event:
                log(f"{self.describe(claim.key)}: {event['warning']}")
            self.store.write_progress(claim.key, event)
            follower.progress(event)

        spec = self.runs[claim.key]
        folder = self.store.work(claim.key)
        with folder_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with follow(
            self.settings.track,
            spec,
            key=claim.key,
            project=self.folder.absolute().name,
            name=self.describe(claim.key),
            folder=self.folder,
            log=log,
        ) as follower:
            result = self.engine.run(spec, self.task, folder=folder, progress=progress, device=device)
            follower.result(result)
        return result

    def describe(self, key: str) -> str:
        """A run in words."""
        spec = self.runs[key]
        rate = f", lr {spec.budget.lr:g}" if len(self.plan.lr) > 1 else ""
        return f"{spec.recipe}{rate}, seed {spec.seed}"
