"""The state of a run: all of its result so far that is not a weight."""

import dataclasses
from typing import Any


@dataclasses.dataclass
class RunState:
    """How far a run is, and what it has measured so far."""

    epoch: int = 0
    """The last epoch that was finished."""
    batch: int = 0
    """Batches of the epoch after it that are done; more than 0 in a checkpoint from inside of an epoch only."""
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    chosen: int = 0
    """The best epoch so far; 0: the initial weights."""
    diverged: dict[str, Any] | None = None
    seconds: float = 0.0
    """Spent before this process took over."""
    training_seconds: float = 0.0
    probes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    made_under: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """The versions that it was trained under so far, in their order; empty: from before they were recorded."""

    @property
    def over(self) -> bool:
        return self.diverged is not None
