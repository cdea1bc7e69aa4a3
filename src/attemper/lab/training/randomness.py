"""The random state of a process: seeded for a run, kept in its checkpoints, given back afterwards."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attemper.lab.tasks.seed_streams import derive


def seed_everything(seed: int, *place: int) -> None:
    """Start the streams from which stochastic methods, and whatever else a model does by chance, draw.

    place: numbers that make them other streams, such as a rank.
    """
    torch.manual_seed(derive(seed, "methods", *place))
    np.random.seed(derive(seed, "numpy", *place) % 2**32)
    random.seed(derive(seed, "python", *place))


def random_state() -> dict[str, Any]:
    """The state of every generator, in tensors, numbers and plain containers."""
    kind, words, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest],
        "python": random.getstate(),
    }
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(state["torch"])
    gpus: list[Tensor] = state["cuda"]
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)
    kind, words, *rest = state["numpy"]
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Context manager: code inside it may seed everything; afterwards the process draws on as if nothing had been."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
