"""The seeds of a run's training passes, in a file beside its checkpoint: any mask can be had again from them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attemper.errors import MissingFileError, UnreadableError
from attemper.files import atomic_write, read_bytes
from attemper.lab.errors import StorageError

SEEDS = "seeds.csv"
"""Its name in the folder of a run."""
HEAD = "step,pass_seed\n"
MOST_BYTES = 2**36


class SeedLog:
    """One line for every training pass: the step of the optimiser, counted from 1, and the seed of the pass.

    Seeds stay on their device until `write`, which waits for it. A line is written once, whatever interrupts the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / SEEDS
        self.waiting: list[tuple[int, Tensor]] = []

    def resume(self, steps: int) -> None:
        """Keep the lines of the steps that a run has made when it begins or goes on; others will come again."""
        try:
            found = re.findall(r"^(\d+),(-?\d+)$", read_bytes(self.path, most=MOST_BYTES).decode(), re.MULTILINE)
        except (MissingFileError, UnreadableError, UnicodeDecodeError):
            found = []
        try:
            atomic_write(self.path, HEAD + "".join(f"{step},{seed}\n" for step, seed in found if int(step) <= steps))
        except OSError as error:
            raise self._unwritten(error) from error

    def note(self, step: int, seeds: Sequence[Tensor]) -> None:
        """Remember the seeds of the passes of a batch; a captured step writes over its own, so these are copied."""
        if seeds:
            self.waiting.append((step, torch.stack(list(seeds))))

    def write(self, *, durable: bool = False) -> None:
        """Add the lines of what was noted since. durable: wait until the disk has all lines, as before a checkpoint."""
        lines = self._lines()
        try:
            with self.path.open("a") as file:
                file.writelines(lines)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritten(error) from error

    def _lines(self) -> list[str]:
        """What waits, in one transfer from its device; nothing waits then any more."""
        if not self.waiting:
            return []
        steps = [step for step, seeds in self.waiting for _ in range(len(seeds))]
        drawn = torch.cat([seeds for _, seeds in self.waiting]).tolist()
        self.waiting = []
        return [f"{step},{seed}\n" for step, seed in zip(steps, drawn, strict=True)]

    def _unwritten(self, error: OSError) -> StorageError:
        return StorageError(f"The seeds '{self.path}' could not be written: {error.strerror or error}.")
