"""Interruptions: what a run writes down so that it can go on, and how it finds its place again.

A checkpoint is written at the end of an epoch, or inside of one between two steps of the optimiser, when there are no
gradients to keep. The order of batches is a function of seed and epoch: a position in an epoch is a number of batches.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from attemper.files import set_aside
from attemper.lab.errors import DamagedError, OtherRunError, StorageError
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, make_ready, save_checkpoint
from attemper.lab.training.learner import Learner
from attemper.lab.training.randomness import random_state, seed_everything, set_random_state
from attemper.lab.training.ranks import Ranks
from attemper.lab.training.run_folder import Owner, check_versions, mark_folder
from attemper.lab.training.run_state import RunState
from attemper.lab.training.shards import load_shards, remove_shards, save_shards
from attemper.lab.training.versions import BEFORE, Versions, versions_here

Weights = Mapping[str, Tensor]


class Interruptions:
    """The checkpoints of one run.

    owner: the run; another run's checkpoint is refused.
    warn: called with what a user should know.
    accept_versions: go on from a checkpoint that was written under other versions.
    """

    def __init__(
        self,
        folder: Path,
        owner: Owner,
        learner: Learner,
        ranks: Ranks,
        warn: Callable[[str], None],
        *,
        accept_versions: bool = False,
    ) -> None:
        self.folder, self.owner, self.accept_versions = folder, owner, accept_versions
        self.learner, self.ranks, self.warn = learner, ranks, warn

    # ------------------------------------------------------------------------------------------------------- writing
    def save(self, state: RunState, best: Weights) -> None:
        """Write everything that the rest of the run depends on, by all ranks together."""
        saved: dict[str, Any] = {
            **self.owner.to_dict(),
            "story": dataclasses.asdict(state),
            "random": self.ranks.gather(random_state()),
        }
        if state.batch:
            self.learner.sync_statistics()  # those of the main rank are those that count when the epoch ends
            saved["meter"] = self.learner.meter.state()
        if self.ranks.sharded:
            saved["shards"] = save_shards(self.folder, place(state), self.learner, best)
        else:
            saved |= {"best": best, **self.learner.state()}
        if self.ranks.main:
            save_checkpoint(self.folder, saved)
            if self.ranks.sharded:
                remove_shards(self.folder, but=saved["shards"])

    def mark(self) -> None:
        """Write down whose folder it is."""
        mark_folder(self.folder, self.owner)

    # ------------------------------------------------------------------------------------------------------- reading
    def resume(self, best: Weights) -> tuple[RunState, Weights] | None:
        """Put everything back as the checkpoint has it: state and best weights, or None where a run begins.

        One that is damaged is set aside; another run's is refused. best: such as would be read.
        """
        try:
            saved = self.ranks.from_main(self._read)
            if isinstance(saved, DamagedError):
                raise saved
            if saved is None:
                return None
            if self.ranks.sharded:
                best = load_shards(self.folder, saved["shards"], self.learner, best)
            else:
                best = saved["best"]
                self.learner.load_state(saved)
        except DamagedError as error:
            aside = self.ranks.from_main(lambda: set_aside(self.folder / CHECKPOINT, "damaged"))
            self.warn(f"{error}; it is now '{aside.name}', and the run starts again.")
            return None
        state = RunState(**saved["story"])
        state.made_under = _with_versions_here(state.made_under)
        if state.batch:
            self.learner.meter.load_state(saved["meter"])
        self._resume_random(saved["random"], state)
        return state, best

    def _read(self) -> dict[str, Any] | DamagedError | None:
        """The run's own checkpoint, none, or what is wrong with it."""
        try:
            saved = load_checkpoint(self.folder)
            if saved is not None:
                self._check_owner(saved)
        except DamagedError as error:
            make_ready(self.folder)
            return error
        make_ready(self.folder)
        if saved is None:
            return None
        if ("shards" in saved) != self.ranks.sharded:
            kind, other = ("fsdp", "ddp") if "shards" in saved else ("ddp", "fsdp")
            raise StorageError(
                f"The checkpoint in '{self.folder}' was written with --parallel {kind}, and cannot be read with "
                f"{other}. Go on with --parallel {kind}, or in another folder."
            )
        return saved

    def _check_owner(self, saved: dict[str, Any]) -> None:
        """Raise unless a checkpoint is this run's, of a form that can be read, and of versions that may be mixed."""
        path = self.folder / CHECKPOINT
        if "spec" in saved:
            try:
                self.owner.check_same(Owner.of(saved), self.folder)
            except ValueError as error:
                raise DamagedError(f"The checkpoint '{path}' cannot be read: {error}") from None
        elif saved.get("key") != dataclasses.replace(self.owner.spec, versions=BEFORE).key(self.owner.fingerprint):
            raise OtherRunError(
                f"'{path}' is of another run, of which it says nothing more, and was left as it is. Choose another "
                "folder, or remove this one."
            )
        if not isinstance(saved.get("random"), list):
            raise DamagedError(f"The checkpoint '{path}' is of a form that is no longer read")
        made_under = [Versions.from_dict(each) for each in saved["story"].get("made_under", ())] or [BEFORE]
        check_versions(made_under, path, self.accept_versions)

    def _resume_random(self, states: list[dict[str, Any]], state: RunState) -> None:
        """Draw on as each rank would have; as many ranks as before are needed for that."""
        if len(states) == self.ranks.size:
            set_random_state(states[self.ranks.rank])
            return
        seed_everything(self.owner.spec.seed, self.ranks.rank, state.epoch, *([state.batch] if state.batch else []))
        before, now = counted(len(states)), counted(self.ranks.size)
        self.warn(
            f"The checkpoint was written by {before}, and the run goes on with {now}: from the same weights and with "
            "the same batches, but with other random draws, so not with the same bits."
        )


def _with_versions_here(made_under: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The versions of a run that goes on under ours."""
    before, here = made_under or [BEFORE.to_dict()], versions_here().to_dict()
    return before if here in before else [*before, here]


def place(state: RunState) -> str:
    """Where a run is, as a part of a name."""
    return f"{state.epoch}-{state.batch}" if state.batch else str(state.epoch)


def counted(processes: int) -> str:
    """A number of processes in words."""
    return "one process" if processes == 1 else f"{processes} processes"
