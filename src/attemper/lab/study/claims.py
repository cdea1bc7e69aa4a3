"""Claims: who works on which run, agreed on through nothing but the files of one shared folder.

A claim is a file `claims/<key>.<n>`. Creating it with O_EXCL is atomic on local and on network file systems: of all who
try, one succeeds. The owner of a run is the holder of its highest n, and touches the file as long as it lives. A claim
that was not touched for a while, or whose process is known to be dead, is taken over by creating n + 1, which again one
alone can do. Renaming or deleting the old claim instead would leave a gap in which two could think that it is theirs.
An owner who was only suspended finds a higher n when it wakes up, and stops. The files of a run go away when its result
is there, so a worker that claims a run looks once more for a result afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from attemper.lab.errors import LostClaimError

STALE_AFTER = 60.0
"""Seconds without a heartbeat after which a claim's owner is taken for dead."""
BEATS = 6
"""Heartbeats in that time."""


@dataclass(frozen=True)
class Holder:
    """Whose claim on a run is the valid one."""

    key: str
    generation: int
    host: str
    pid: int
    token: str
    since: float
    """When it was claimed, by the holder's clock."""
    alive: bool
    released: bool
    """Given back without a result: free to be claimed again."""


class Claim:
    """A run that is ours. It stays so as long as `check` does not raise."""

    def __init__(self, claims: Claims, key: str, generation: int, token: str) -> None:
        self.key, self.generation = key, generation
        self._claims, self._token = claims, token
        self._path = claims.path(key, generation)
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"heartbeat-{key}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._claims.stale_after / BEATS):
            if not self._touch():
                return

    def _touch(self) -> bool:
        try:
            os.utime(self._path)
            self._lost = self._lost or self._claims.highest(self.key) != self.generation
        except FileNotFoundError:
            self._lost = True
        except OSError:
            pass  # the file system does not answer for a moment; the next beat tries again
        return not self._lost

    def check(self) -> None:
        """Raise `LostClaimError` if another worker has taken the run over."""
        if not self._over.is_set():
            self._touch()
        if self._lost:
            raise LostClaimError(f"Run {self.key} was taken over by another worker.")

    @property
    def lost(self) -> bool:
        """What the heartbeat knows, without looking."""
        return self._lost

    def finish(self) -> None:
        """The result is on disk: the claim is no longer needed."""
        self._stop()
        if not self._lost:
            self._claims.clear(self.key)

    def release(self) -> None:
        """Give the run back without a result, unless it is finished. The file stays, marked: n never goes back."""
        if self._over.is_set():
            return
        self._stop()
        if not self._lost:
            with contextlib.suppress(OSError):
                self._path.write_text(json.dumps({**self._claims.card(self._token), "released": True}))

    def _stop(self) -> None:
        self._over.set()
        self._thread.join()


class Claims:
    """The claims of one study folder, as one process sees them."""

    def __init__(self, folder: Path, *, stale_after: float = STALE_AFTER) -> None:
        self.folder, self.stale_after = folder, stale_after

    def path(self, key: str, generation: int) -> Path:
        return self.folder / f"{key}.{generation}"

    def card(self, token: str) -> dict[str, Any]:
        """What a claim says of its owner."""
        return {**identity(), "token": token, "since": time.time()}

    def take(
        self,
        key: str,
        on_takeover: Callable[[Holder], None] | None = None,
        *,
        token: str | None = None,
        dead: str | None = None,
    ) -> Claim | None:
        """Claim a run, or None if another worker has it.

        on_takeover: called with the dead holder whose run is now ours.
        token: what the claim is called; none: something that nothing else is called.
        dead: the token of a holder that is known to be dead, however fresh its last sign of life is.
        """
        holder = self.holder(key)
        if holder is not None and holder.alive and holder.token != dead:
            return None
        generation = 0 if holder is None else holder.generation + 1
        token = token or secrets.token_hex(8)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(self.path(key, generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return None
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(self.card(token), file)
        except OSError:
            self.path(key, generation).unlink(missing_ok=True)
            raise
        claim = Claim(self, key, generation, token)
        if on_takeover is not None and holder is not None and not holder.released:
            on_takeover(holder)
        return claim

    def highest(self, key: str) -> int | None:
        """The generation whose holder owns the run."""
        return max((n for name, n in self._files() if name == key), default=None)

    def holder(self, key: str) -> Holder | None:
        generation = self.highest(key)
        return None if generation is None else self._read(key, generation)

    def holders(self, keys: Iterable[str]) -> dict[str, Holder]:
        """Of these runs, the ones that a worker holds, alive or not."""
        wanted, highest = set(keys), dict[str, int]()
        for key, generation in self._files():
            if key in wanted:
                highest[key] = max(generation, highest.get(key, 0))
        found = (self._read(key, generation) for key, generation in highest.items())
        return {holder.key: holder for holder in found if holder is not None and not holder.released}

    def clear(self, key: str) -> None:
        """Remove the claims of a run, the valid one last: until then no worker can begin at 0."""
        for generation in sorted(n for name, n in self._files() if name == key):
            with contextlib.suppress(OSError):
                self.path(key, generation).unlink(missing_ok=True)

    def _files(self) -> list[tuple[str, int]]:
        try:
            names = os.listdir(self.folder)
        except OSError:
            return []
        parts = (name.rpartition(".") for name in names)
        return [(key, int(number)) for key, _, number in parts if key and number.isdigit()]

    def _read(self, key: str, generation: int) -> Holder | None:
        """Who a claim belongs to; None if it went away while we looked."""
        try:
            # Opening, unlike stat, makes a network file system ask its server for the true time of the last heartbeat.
            with self.path(key, generation).open() as file:
                text, beat = file.read(), os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        try:
            card = json.loads(text)
            host, pid, token = str(card["host"]), int(card["pid"]), str(card["token"])
            since, released = float(card["since"]), bool(card.get("released", False))
        except (ValueError, KeyError, TypeError):
            card = {}  # not written yet, or never will be: only its age tells
            host, pid, token, since, released = "?", 0, "", beat, False
        silent = self._now() - beat > self.stale_after
        alive = not released and not silent and not is_dead(card)
        return Holder(key, generation, host, pid, token, since, alive, released)

    def _now(self) -> float:
        """The time by the clock that stamps the heartbeats, which on a network file system is the server's."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as probe:
                return os.fstat(probe.fileno()).st_mtime
        except OSError:  # a folder that we may only read
            return time.time()


@functools.cache
def _scope() -> str:
    """What a process number is unique in: this boot of this machine and, in a container, its own numbering."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    if len(parts) == 1:
        parts.append(f"{uuid.getnode():x}")
    return " ".join(parts)


@functools.cache
def _born(pid: int) -> float:
    return float(psutil.Process(pid).create_time())


def identity() -> dict[str, Any]:
    """This process, so that another one can find out whether it is still there."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "scope": _scope(), "born": _born(pid)}


def is_dead(card: dict[str, Any]) -> bool:
    """Whether the process of a claim is known to be gone; of other machines nothing is known."""
    if card.get("scope") != _scope():
        return False
    try:
        process = psutil.Process(int(card["pid"]))
        another = abs(process.create_time() - float(card["born"])) > 5  # a number that was given out again
        return another or bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
