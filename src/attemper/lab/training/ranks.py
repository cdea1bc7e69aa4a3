"""The processes that train one run together: who is who, what they exchange, and how all of them stop when one does.

`torchrun` and `accelerate launch` start the processes; `joined` makes them one team. A process that was started by
itself is `ALONE`, and everything here costs it nothing.
"""

import contextlib
import contextvars
import datetime
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from attemper.errors import ParameterError
from attemper.lab.errors import RankError
from attemper.lab.training.leaving import Leave

Parallel = Literal["ddp", "fsdp"]
"""ddp: every process has the whole model; fsdp: each keeps a part of its weights (FSDP2)."""

T = TypeVar("T")

TIMEOUT = 600.0
"""Seconds that a rank waits for the others in an exchange, unless ATTEMPER_TIMEOUT says otherwise."""
GRACE = 30.0
"""Seconds that a rank has to notice by itself that another one has stopped; then it is ended."""
POLL, SLOWEST_POLL = 0.01, 0.25
"""Seconds between two polls for a message of another rank, at first and in the long run."""
PATIENCE = 2.0
"""Seconds that a rank which stops waits for the reason of another one, or for the others to read its own."""
FAILURE, READ = "failure", "read"


class Ranks:
    """This process among those that train together.

    rank: its number; 0 is the main one, which alone writes files and reports. local: its number on this machine.
    size: how many there are. sharded: whether each keeps a part of the weights.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, *, local: int = 0, sharded: bool = False, timeout: float = TIMEOUT
    ) -> None:
        self.rank, self.size, self.local, self.sharded, self.timeout = rank, size, local, sharded, timeout
        self._generation = 0
        self._broadcasts = 0
        self._left = threading.Event()
        self._base: Store | None = None

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    # ------------------------------------------------------------------------------------------------------- exchanges
    def part(self, samples: int) -> slice:
        """Which of so many samples are this rank's; where they do not divide, the first ranks have one more.

        >>> [Ranks(rank, 4).part(10) for rank in range(4)]
        [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None)]
        """
        each, more = divmod(samples, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def mean(self, values: Sequence[Tensor], share: float) -> Sequence[Tensor]:
        """Scalars, averaged over the ranks. share: this rank's part of what is averaged over."""
        if self.alone:
            return values
        both = share * torch.stack([value.double() for value in values])
        dist.all_reduce(both)
        return both.unbind()

    def sum(self, value: Tensor) -> Tensor:
        """A tensor, added up over the ranks."""
        if not self.alone:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def gather(self, value: T) -> list[T]:
        """What every rank has, in their order."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """What the main rank makes; the others wait, as long as it takes and no rank fails."""
        if self.alone:
            return make()
        self._broadcasts += 1
        ready = f"broadcast {self._broadcasts}"
        box: list[Any] = [None]
        if self.main:
            box = [make()]
            self._store.set(ready, "")
        else:
            pause = POLL
            while not self._store.check([ready]):
                self._raise_failure()
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL)
        dist.broadcast_object_list(box, src=0)
        made: T = box[0]
        return made

    def agreed(self, decision: int) -> int:
        """The main rank's decision, for all. One small exchange on the CPU: cheaper than `from_main`."""
        if self.alone:
            return decision
        shared = torch.tensor(decision)
        self.overwrite([shared])
        return int(shared)

    def overwrite(self, tensors: Sequence[Tensor]) -> None:
        """Put the main rank's values into these tensors of every rank."""
        if not self.alone:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def check_same(self, what: str, value: str) -> None:
        """Raise unless all ranks have the same value."""
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise RankError(
                    f"Rank {rank} has another {what} than rank 0 ({other} and {values[0]}): all processes need the "
                    "same command and the same data."
                )

    # --------------------------------------------------------------------------------------- beginning, failing, ending
    @property
    def _store(self) -> Store:
        assert self._base is not None
        return PrefixStore(f"attemper {self._generation}", self._base)

    def form(self, base: Store | None = None) -> None:
        """Connect to the others; called again after a failure, it connects anew."""
        self._base = base or self._base
        self._generation += 1
        self._broadcasts = 0
        self._left = threading.Event()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=datetime.timedelta(seconds=self.timeout),
        )
        threading.Thread(target=self._watch, args=(self._store.clone(), self._left), daemon=True).start()

    def leave(self) -> None:
        """Close the connections. Ranks that wait for this one notice at once."""
        self._left.set()
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Context manager: code inside it fails on all ranks if it fails on one, and with its message."""
        if self.alone:
            yield
            return
        try:
            yield
        except Leave:  # all ranks leave a run together, and none has failed
            raise
        except BaseException as error:
            first = self._first_failure(error)
            self.leave()
            if first["rank"] is not None:
                self._await_readers()
            if first["rank"] == self.rank or isinstance(error, KeyboardInterrupt):
                raise
            raise RankError(_words(first)) from error

    def _first_failure(self, error: BaseException) -> Mapping[str, Any]:
        """The failure that came first: this rank's, which the others can now read, or that of another one."""
        lost = _is_lost_connection(error)
        own: dict[str, Any] = {"rank": self.rank, "text": f"{type(error).__name__}: {error}"}
        if lost:
            own = {"rank": None, "text": _in_short(error), "silent": []}
        try:
            if lost:  # the rank that broke it says why, unless it was killed
                self._store.set(f"here {self.rank}", "")
                self._wait_until(lambda: self._failure() is not None)
                own["silent"] = [rank for rank in range(self.size) if not self._store.check([f"here {rank}"])]
            first: Mapping[str, Any] = json.loads(self._store.compare_set(FAILURE, "", json.dumps(own)))
            return first
        except RuntimeError:  # the store is gone as well, with the process that held it
            return own

    def _await_readers(self) -> None:
        """Wait until the others have read the failure: the store may go with the main process."""
        with contextlib.suppress(RuntimeError):
            self._store.add(READ, 1)
            if self.main:
                self._wait_until(lambda: self._store.add(READ, 0) == self.size)

    def _failure(self) -> Mapping[str, Any] | None:
        if not self._store.check([FAILURE]):
            return None
        found: Mapping[str, Any] = json.loads(self._store.get(FAILURE))
        return found

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE
        while not happened() and time.monotonic() < until:
            time.sleep(POLL)

    def _raise_failure(self) -> None:
        if (failure := self._failure()) is not None:
            raise RankError(_words(failure))

    def _watch(self, store: Store, left: threading.Event) -> None:
        """End this process if another rank has stopped and the exchange that this one waits in does not notice."""
        while not left.wait(1.0):
            try:
                text = store.get(FAILURE).decode() if store.check([FAILURE]) else None
            except RuntimeError:
                gone = "the process that keeps the ranks together is gone"
                text = json.dumps({"rank": None, "text": gone, "silent": []})
            if text is not None and not left.wait(GRACE):
                sys.stderr.write(f"attemper: {_words(json.loads(text))}\n")
                sys.stderr.flush()
                os._exit(1)


def _is_lost_connection(error: BaseException) -> bool:
    """Whether an exchange failed because of another rank. Gloo has no type of its own for that."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _in_short(error: BaseException) -> str:
    """What torch says of a broken connection, without where in its sources, and without advice."""
    first = str(error).partition("\n")[0].partition(". This is typically")[0]
    return re.sub(r"^\[[^]]*\] *", "", first).rstrip(".")


def _words(failure: Mapping[str, Any]) -> str:
    if failure["rank"] is not None:
        return f"Rank {failure['rank']} stopped: {failure['text']}"
    match failure["silent"]:
        case []:
            who = "Another rank is"
        case [rank]:
            who = f"Rank {rank} is"
        case ranks:
            who = f"Ranks {', '.join(map(str, ranks))} are"
    return f"{who} gone without a word, or did not answer in time: {failure['text']}"


ALONE = Ranks()
"""A process that trains by itself."""

_joined = contextvars.ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """The ranks that this process belongs to: those it has joined, or `ALONE`."""
    ranks = _joined.get()
    if ranks.alone and dist.is_initialized() and dist.get_world_size() > 1:
        raise RankError(
            "torch.distributed is initialised, but not by Attemper: every process would train a run of its own. "
            "Put the call into 'with attemper.lab.training.ranks.joined():', and leave torch.distributed to it."
        )
    return ranks


@contextlib.contextmanager
def joined(parallel: Parallel | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """All processes that `torchrun` or `accelerate launch` has started, as one team for the length of the block.

    A process that was started by itself gets `ALONE`. If one rank fails, the others stop with its message.

    parallel: "ddp" or "fsdp"; none: ddp, unless `accelerate launch --use_fsdp` asks for the other.
    """
    size = _number(environment, "WORLD_SIZE", 1)
    if size == 1:
        yield ALONE
        return
    if dist.is_initialized():
        raise RankError("torch.distributed is initialised already; Attemper does that itself, inside of 'joined()'.")
    asked_fsdp = environment.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if asked_fsdp and parallel == "ddp":
        raise ParameterError("parallel is ddp, and accelerate launch was given --use_fsdp; leave one of them out.")
    ranks = Ranks(
        _number(environment, "RANK"),
        size,
        local=_number(environment, "LOCAL_RANK"),
        sharded=asked_fsdp or parallel == "fsdp",
        timeout=float(_number(environment, "ATTEMPER_TIMEOUT", int(TIMEOUT))),
    )
    _meet(ranks, environment)
    before = _joined.set(ranks)
    try:
        with ranks.failing_together():
            yield ranks
            ranks.sum(torch.zeros(()))  # no rank leaves, maybe with the store, while another still reads it
    finally:
        _joined.reset(before)
        ranks.leave()


def _meet(ranks: Ranks, environment: Mapping[str, str]) -> None:
    """Connect to the other processes, as soon as all of them are there."""
    address = ":".join(_variable(environment, name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=ranks.timeout)))
        ranks.form(store)
    except dist.DistError as error:
        raise RankError(
            f"Rank {ranks.rank} of {ranks.size} cannot reach the others at {address} (MASTER_ADDR and MASTER_PORT): "
            f"{_in_short(error)}. All {ranks.size} processes must be started within {ranks.timeout:g} s, with "
            "the same address, and nothing else may listen on its port."
        ) from error


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that a launcher sets, and that is a whole number."""
    if default is not None and name not in environment:
        return default
    text = _variable(environment, name)
    if not text.isdigit():
        raise ParameterError(f"The variable {name} is '{text}'; it must be a whole number.")
    return int(text)


def _variable(environment: Mapping[str, str], name: str) -> str:
    """A variable that a launcher sets."""
    if name not in environment:
        raise ParameterError(
            f"The variable {name} is missing, and WORLD_SIZE says that there are ranks. torchrun and accelerate "
            "launch set both."
        )
    return environment[name]
