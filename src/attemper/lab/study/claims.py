"""Claims: who works on which run, agreed on through nothing but the files of one shared folder.

A claim is a file `claims/<key>.<n>`. Creating it with O_EXCL is atomic on local and on network file systems: of all who
try, one succeeds. The owner of a run is the holder of its highest n, and touches the file as long as it lives. A claim
whose owner is dead is taken over by creating n + 1, which again one alone can do. Renaming or deleting the old claim
instead would leave a gap in which two could think that it is theirs. An owner who was only suspended finds a higher n
when it wakes up, and stops. The files of a run go away when its result is there, so a worker that claims a run looks
once more for a result afterwards.

Who is dead is decided without clocks that somebody can set. Of a process on this machine the system knows (`owners`);
one that is seen to live is never taken for dead. One on another machine is dead if its file did not change for a minute
*while we watched*, by a clock of our own that only goes forward. The time of day at which it was touched means nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attemper.files import open_at_once, time_in
from attemper.lab.errors import LostClaimError
from attemper.lab.study.owners import identity, life_of

STALE_AFTER = 60.0
"""Seconds without a heartbeat after which a claim's owner is taken for dead."""
BEATS = 6
"""Heartbeats in that time."""
MOST_BYTES = 2**16
"""Of a claim that are read; it has some hundred."""


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
    """Not known to be dead: nobody may take the run over."""
    certain: bool
    """Known to be alive: its process is there, or its heart has beaten since we first looked."""
    fresh: bool
    """Whether its last heartbeat is recent by the file system's clock: for people, who look once."""
    released: bool
    """Given back without a result: free to be claimed again."""


@dataclass
class Watch:
    """What we have seen of a heart that may have stopped."""

    beat: int
    """The last heartbeat, as the file says it: a number that changes, not a time."""
    since: float
    """When we first saw that one, by our own clock."""
    beaten: bool = False
    """Whether it has changed while we watched."""


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
    """The claims of one study folder, as one process sees them.

    stale_after: seconds without a heartbeat, while we watch, after which a holder on another machine is taken for dead.
    """

    def __init__(self, folder: Path, *, stale_after: float = STALE_AFTER) -> None:
        self.folder, self.stale_after = folder, stale_after
        self.clock: Callable[[], float] = time.monotonic
        self._watched: dict[tuple[str, int], Watch] = {}

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
        return [(key, int(number)) for key, _, number in parts if key and number.isascii() and number.isdigit()]

    def _read(self, key: str, generation: int) -> Holder | None:
        """Who a claim belongs to; None if it went away while we looked."""
        path = self.path(key, generation)
        try:
            # Opening, unlike stat, makes a network file system ask its server for the true time of the last heartbeat.
            with open(path, "rb", opener=open_at_once) as file:
                text, beat = file.read(MOST_BYTES), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            try:  # a folder, or a link that leads nowhere: only its age tells, too
                text, beat = b"", path.lstat().st_mtime_ns
            except OSError:
                return None
        try:
            card = json.loads(text)
            host, pid, token = str(card["host"]), int(card["pid"]), str(card["token"])
            since, released = float(card["since"]), bool(card.get("released", False))
            if not math.isfinite(since):
                raise ValueError(f"since is {since}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            card = {}  # not written yet, or never will be: only its heartbeat tells
            host, pid, token, since, released = "?", 0, "", beat / 1e9, False
        life = life_of(card)
        watch = self._watch(key, generation, beat)
        silent = life == "unknown" and self.clock() - watch.since > self.stale_after
        return Holder(
            key=key,
            generation=generation,
            host=host,
            pid=pid,
            token=token,
            since=since,
            alive=not (released or silent or life == "dead"),
            certain=life == "alive" or watch.beaten,
            fresh=life == "alive" or time_in(self.folder) - beat / 1e9 <= self.stale_after,
            released=released,
        )

    def _watch(self, key: str, generation: int, beat: int) -> Watch:
        """What we know of a heartbeat, now that we have looked at it again."""
        watch = self._watched.get((key, generation))
        if watch is None or watch.beat != beat:
            watch = Watch(beat, self.clock(), beaten=watch is not None)
            self._watched[key, generation] = watch
        return watch
