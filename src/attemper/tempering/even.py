"""Whether the processes that share a batch have equally many samples of it, which their numbers rest on.

The number of a process's first sample is rank · local batch. That is right only while all have equally many, as with
torch's DistributedSampler. So a process whose number of samples changes tells the others, and waits for them to tell
theirs. While nothing changes nobody asks.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from itertools import count
from typing import Any

import torch

from attemper.errors import MeshError

PATIENCE = 300.0
"""Seconds that a process waits for the others, which may read their data more slowly."""
_MODELS: dict[str, count[int]] = {}


class Evenness:
    """Of one tempered model: how many rows its passes had, and whether the other processes had as many."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.rows: int | None = None
        """In the pass before."""
        self.changes = 0
        self.name: str | None = None

    def check(self, rows: int, ranks: tuple[int, ...]) -> None:
        """Raise where another process has another number of rows. ranks: all that must agree."""
        if rows == self.rows:
            return
        if self.name is None:  # models come in the same order everywhere, those of one recipe at least
            self.name = f"{self.recipe}/{next(_MODELS.setdefault(self.recipe, count()))}"
        found = self._exchange(rows, ranks)
        if any(other != rows for other in found.values()):
            raise MeshError(
                f"processes share a batch unevenly: {_listed(found)}. Which number a sample has in the whole batch "
                "cannot be told then. Use batches of equal size (DistributedSampler, drop_last=True), or say before "
                "every pass which samples this process has: tempered.samples(first=…, count=…). Processes that train "
                "models of their own say tempered.samples(first=0, count=…); a pass of one process alone, which trains "
                "nothing, belongs into tempered.disabled()."
            )
        self.rows, self.changes = rows, self.changes + 1

    def _exchange(self, rows: int, ranks: tuple[int, ...]) -> dict[int, int | None]:
        """Process → its rows after as many changes as there were here; None: it has seen no such change."""
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        keys = {rank: f"attemper/rows/{self.name}/{self.changes}/{rank}" for rank in ranks}
        store.set(keys[torch.distributed.get_rank()], str(rows))
        with contextlib.suppress(RuntimeError):  # a time-out, whose type depends on the store
            store.wait(list(keys.values()), timedelta(seconds=PATIENCE))
        return {rank: int(store.get(key)) if store.check([key]) else None for rank, key in keys.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe}

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy is a model of its own
        self.__init__(state["recipe"])  # type: ignore[misc]


def _listed(found: dict[int, int | None]) -> str:
    silent = f"told of no change for {PATIENCE:.0f} seconds"
    said = [f"process {rank} {silent if rows is None else f'has {rows}'}" for rank, rows in found.items()]
    return ", ".join(said[:8]) + (", …" if len(said) > 8 else "")
