"""Which process a claim belongs to, and whether that process is still there. No clock is asked.

The time at which a process began, as it is usually told, moves when the clock of the machine is set. Its start in ticks
since the machine was booted does not, and a process number with its start ticks belongs to one process per boot.
"""

import contextlib
import functools
import os
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

PROC = Path("/proc")
START_FIELD = 22
"""Of /proc/<pid>/stat: ticks between the boot of the machine and the start of the process."""
STATE_FIELD = 3
ENDED = ("Z", "X", "x")
"""States of a process that has ended, though its parent has not noticed yet."""

Life = Literal["alive", "dead", "unknown"]


class HiddenError(Exception):
    """There is a process of this number, and we may not look at it."""


def identity() -> dict[str, Any]:
    """This process, so that another one can find out whether it is still there."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "scope": scope(), "start": _own_start(pid)}


def life_of(card: Mapping[str, Any]) -> Life:
    """Whether the process that an `identity` names is there. Of other machines, containers and boots nothing is known.

    >>> life_of(identity()), life_of({**identity(), "scope": "another machine"})
    ('alive', 'unknown')
    """
    pid, start = card.get("pid"), card.get("start")
    if card.get("scope") != scope() or not isinstance(pid, int) or pid <= 0 or not isinstance(start, str):
        return "unknown"
    try:
        found = start_of(pid)
    except (HiddenError, OSError, OverflowError, psutil.Error):
        return "unknown"
    return "alive" if found == start else "dead"  # none, or a number that was given out again


def start_of(pid: int) -> str | None:
    """When a process began, in words that never change while it lives; None if there is none, or if it has ended."""
    if not (PROC / "self" / "stat").exists():
        return _start_without_proc(pid)
    try:
        fields = _fields((PROC / str(pid) / "stat").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        if _exists(pid):  # /proc may hide the processes of other users
            raise HiddenError from None
        return None
    return None if fields[0] in ENDED else f"{fields[START_FIELD - STATE_FIELD]} ticks after boot"


def _fields(stat: bytes) -> list[str]:
    """The fields of a stat file from the third on; the second, the name, may hold blanks and brackets of its own."""
    return stat.rpartition(b")")[2].decode().split()


def _start_without_proc(pid: int) -> str | None:
    """Where there is no /proc, the system keeps the time of the start, and gives the same one each time."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"at {process.create_time()!r}"
    except psutil.NoSuchProcess:
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@functools.cache
def _own_start(pid: int) -> str | None:
    return start_of(pid)


@functools.cache
def scope() -> str:
    """What a process number is unique in: this boot of this machine and, in a container, its own numbering.

    The start of process 1 tells containers apart whose numberings had the same name one after the other, or have none.
    """
    parts = [socket.gethostname()]
    try:
        parts.append((PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip())
    except OSError:
        parts.append(f"{uuid.getnode():x}")
    with contextlib.suppress(OSError):
        parts.append(os.readlink(PROC / "self" / "ns" / "pid"))
    with contextlib.suppress(OSError, HiddenError, psutil.Error):
        parts.append(f"process 1 began {start_of(1)}")
    return ", ".join(parts)
