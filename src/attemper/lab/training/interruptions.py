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
from attemper.lab.errors import DamagedError, StorageError
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, make_ready, save_checkpoint
from attemper.lab.training.learner import Learner
from attemper.lab.training.randomness import random_state, seed_everything, set_random_state
from attemper.lab.training.ranks import Ranks
from attemper.lab.training.run_state import RunState
from attemper.lab.training.shards import load_shards, remove_shards, save_shards

Weights = Mapping[str, Tensor]


class Interruptions:
    """The checkpoints of one run.

    key: of the run; another run's checkpoint is not taken for its own.
    warn: called with what a user should know.
    """

    def __init__(
        self, folder: Path, key: str, seed: int, learner: Learner, ranks: Ranks, warn: Callable[[str], None]
    ) -> None:
        self.folder, self.key, self.seed = folder, key, seed
        self.learner, self.ranks, self.warn = learner, ranks, warn

    # ------------------------------------------------------------------------------------------------------- writing
    def save(self, state: RunState, best: Weights) -> None:
        """Write everything that the rest of the run depends on, by all ranks together."""
        saved: dict[str, Any] = {
            "key": self.key,
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

    # ------------------------------------------------------------------------------------------------------- reading
    def resume(self, best: Weights) -> tuple[RunState, Weights] | None:
        """Put everything back as the checkpoint has it: state and best weights, or None where a run begins.

        One that is damaged or another run's is set aside. best: such as would be read.
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
        if state.batch:
            self.learner.meter.load_state(saved["meter"])
        self._resume_random(saved["random"], state)
        return state, best

    def _read(self) -> dict[str, Any] | DamagedError | None:
        """The run's own checkpoint, none, or what is wrong with it."""
        make_ready(self.folder)
        try:
            saved = load_checkpoint(self.folder)
        except DamagedError as error:
            return error
        if saved is None:
            return None
        if saved.get("key") != self.key or not isinstance(saved["random"], list):
            return DamagedError(
                f"The checkpoint in '{self.folder}' belongs to another run, or to another version of Attemper"
            )
        if ("shards" in saved) != self.ranks.sharded:
            kind, other = ("fsdp", "ddp") if "shards" in saved else ("ddp", "fsdp")
            raise StorageError(
                f"The checkpoint in '{self.folder}' was written with --parallel {kind}, and cannot be read with "
                f"{other}. Go on with --parallel {kind}, or in another folder."
            )
        return saved

    def _resume_random(self, states: list[dict[str, Any]], state: RunState) -> None:
        """Draw on as each rank would have; as many ranks as before are needed for that."""
        if len(states) == self.ranks.size:
            set_random_state(states[self.ranks.rank])
            return
        seed_everything(self.seed, self.ranks.rank, state.epoch, *([state.batch] if state.batch else []))
        before, now = counted(len(states)), counted(self.ranks.size)
        self.warn(
            f"The checkpoint was written by {before}, and the run goes on with {now}: from the same weights and with "
            "the same batches, but with other random draws, so not with the same bits."
        )


def place(state: RunState) -> str:
    """Where a run is, as a part of a name."""
    return f"{state.epoch}-{state.batch}" if state.batch else str(state.epoch)


def counted(processes: int) -> str:
    """A number of processes in words."""
    return "one process" if processes == 1 else f"{processes} processes"
