"""How many CPU threads a process of the laboratory computes with."""

import contextlib
import os
from collections.abc import Iterator

VARIABLE = "OMP_NUM_THREADS"


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def at_most(threads: int) -> int:
    """So many threads, or as many as OMP_NUM_THREADS allows where it allows fewer; one at least."""
    first = os.environ.get(VARIABLE, "").split(",")[0].strip()  # the others are for threads that begin threads
    allowed = int(first) if first.isdecimal() else 0
    return max(1, min(threads, allowed or threads))


def share_of_cores(processes: int) -> int:
    """How many threads each of some processes of this machine computes with.

    At most as many as torch has here: whoever gives it fewer than there are cores, by OMP_NUM_THREADS or by
    `torch.set_num_threads`, wants to leave the others to somebody else.
    """
    import torch

    return at_most(min(cores() // processes, torch.get_num_threads()))


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Context manager: inside it, torch uses so many CPU threads; None: as many as before."""
    import torch

    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
