"""Runs on a Ray cluster: one Ray task per run, everything that lasts in the study's shared folder.

Tasks claim their runs, write their checkpoints and leave their results exactly as processes of one machine do, so a
study can move from one executor to another, and one view shows all of them. When a node dies, Ray says so within
seconds. Its claims would count as alive for another minute; the executor frees them at once and sends the runs out
again, and they go on from their checkpoints. Ray's own retries are off: a task that was started again without a word
would find the claim of its dead predecessor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError
from attemper.lab.errors import StudyError
from attemper.lab.study.live import View
from attemper.lab.study.locks import beacon, check_sees
from attemper.lab.study.performing import perform_run
from attemper.lab.study.resources import Resources
from attemper.lab.study.study import POLL, Study
from attemper.lab.study.workers import DeathCounter, WorkerConfig
from attemper.lab.tasks.notifications import Silent, listening
from attemper.lab.threads import at_most

PATIENCE = 25.0
"""Seconds that runs have to write a checkpoint and end when they are stopped."""
KNOCK = 5.0
"""Seconds that the head of a cluster has to answer."""


@dataclass(frozen=True)
class RayCluster:
    """Does the runs of a study on a Ray cluster that is up already.

    address: HOST:PORT of its head; none: what the variable RAY_ADDRESS says, else the cluster of this machine.
    per_run: what one run takes; none: a core, and a GPU where the cluster has any.
    most: at most so many runs at a time; none: as many as the cluster has room for.
    """

    address: str | None = None
    per_run: Resources | None = None
    most: int | None = None

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise StudyError(f"workers is {self.most}; at least 1 is needed.")

    def pool(self, study: Study, view: View) -> RayPool:
        """Tasks for the missing runs; raises if there is no such cluster, or no room on it."""
        pool = RayPool(study, view, self)
        try:
            pool.connect()
        except BaseException:
            pool.stop()
            raise
        return pool


class RayPool:
    """The tasks of one study on a cluster."""

    def __init__(self, study: Study, view: View, how: RayCluster) -> None:
        self._study, self._view, self._how = study, view, how
        self._deaths = DeathCounter(study)
        self._ray: Any = None
        self._tasks: dict[Any, tuple[str, str]] = {}
        """Ray's reference of every task that is out → the run's key, and the token of its claim."""
        self._open = contextlib.ExitStack()
        self._light = contextlib.ExitStack()
        """Keeps a beacon lit; when it goes out, tasks write a checkpoint and give their runs back."""

    def connect(self) -> None:
        """Find the cluster, and room for a run on it."""
        self._ray = connect(self._how.address, self._open)
        self._per_run = self._how.per_run or default_resources(self._ray.cluster_resources())
        check_room(self._per_run, self._ray.nodes())

    def start(self) -> None:
        per_run = self._per_run
        device = "cuda:0" if per_run.gpus else "cpu"
        config = WorkerConfig.of(self._study, threads=at_most(int(per_run.cpus)), device=device)
        config = replace(config, root=_everywhere(self._study.root))
        marker = self._light.enter_context(beacon(config.folder / "claims"))
        task = self._ray.remote(perform).options(
            num_cpus=per_run.cpus,
            num_gpus=per_run.gpus,
            memory=per_run.bytes,
            max_retries=0,
            name=f"attemper {self._study.folder.name}",
        )
        shared = self._ray.put(config)
        self._send = lambda key, token: task.remote(shared, marker, key, token)
        self._fill()

    def _fill(self) -> None:
        """Send out every run that no worker has."""
        out = {key for key, _ in self._tasks.values()}
        todo = [key for key in self._study.missing() if key not in out]
        held = self._study.claims.holders(todo) if todo else {}
        for key in todo:
            if self._how.most is not None and len(self._tasks) >= self._how.most:
                return
            if key not in held or not held[key].alive:
                token = secrets.token_hex(8)
                self._tasks[self._send(key, token)] = key, token

    def poll(self) -> None:
        if self._tasks:
            ready, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
            deaths = [reason for task in ready if (reason := self._collect(task)) is not None]
            if deaths:  # one count: they died together, with their node
                self._deaths.count(f"said: {deaths[0]}")
        self._fill()

    def _collect(self, task: Any) -> str | None:
        """Show the messages of a task that is over; if its worker died, return how."""
        key, token = self._tasks.pop(task)
        errors = self._ray.exceptions
        try:
            messages = self._ray.get(task)
        except errors.RayTaskError as error:  # ours catches what it can: this is a node that cannot even begin
            raise StudyError(
                f"A node of the cluster cannot work on this study: {_in_short(error)}. Every node needs the same "
                "versions of Python, Ray and attemper as this machine."
            ) from None
        except errors.TaskCancelledError:
            self._study.release_dead(key, token)
        except errors.RayError as error:  # the worker or its whole node is gone
            reason = _in_short(error)
            lost = self._study.release_dead(key, token)
            what = "goes on from its checkpoint elsewhere" if lost else "is sent out again"
            self._view.note(f"{self._study.describe(key)} lost its worker and {what} ({reason})")
            return reason
        else:
            for kind, text in messages:
                if kind == "fatal":
                    raise StudyError(text)
                self._view.note(text)
        return None

    def stop(self) -> None:
        tasks, self._tasks = self._tasks, {}
        self._light.close()
        try:
            if tasks and self._ray is not None:
                self._await_release(dict(tasks.values()))
                for task in tasks:
                    self._ray.cancel(task)
                self._ray.wait(list(tasks), num_returns=len(tasks), timeout=PATIENCE)
        finally:  # a second Ctrl-C leads here as well
            for task, (key, token) in tasks.items():
                with contextlib.suppress(Exception):  # it is gone already, or the cluster is
                    self._ray.cancel(task, force=True)
                self._study.release_dead(key, token)
            self._open.close()

    def _await_release(self, tokens: dict[str, str]) -> None:
        """Give runs the time for a checkpoint. tokens: of our claims, by run."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            held = self._study.claims.holders(tokens).items()
            if not any(holder.alive and holder.token == tokens[key] for key, holder in held):
                return
            time.sleep(POLL)


def connect(address: str | None, until: contextlib.ExitStack) -> Any:
    """The module `ray`, connected; `until` disconnects it again. One that is connected already is left as it is."""
    try:
        import ray
        import ray.exceptions
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise StudyError("--executor ray needs the package 'ray': pip install 'attemper[ray]'") from None
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS")
    _knock(address)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:  # Ray has no type of its own for this
        place = f"at {address}" if address else "on this machine, and RAY_ADDRESS names none"
        raise StudyError(
            f"There is no Ray cluster {place}: {_in_short(error)}. Start one with 'ray start --head', or give the "
            "address of its head as --address HOST:6379."
        ) from None
    until.callback(ray.shutdown)
    return ray


def _knock(address: str | None) -> None:
    """See that somebody listens at an address: Ray itself would wait for a minute."""
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise StudyError(
            f"The address is '{address}'; it must be HOST:PORT of the cluster's head, such as 10.0.0.1:6379. "
            "Run the command on a machine of the cluster."
        )
    try:
        with socket.create_connection((host, int(port)), timeout=KNOCK) as line:
            known = _speaks_grpc(line)
    except (OSError, OverflowError) as error:
        raise StudyError(
            f"There is no Ray cluster at {address}: {error}. 'ray status' on its head tells the right address."
        ) from None
    if not known:
        raise StudyError(
            f"There is no Ray cluster at {address}: something else listens there. The port of a cluster's head is 6379 "
            "unless it was started with another one; 8265 is that of its dashboard."
        )


def _speaks_grpc(line: socket.socket) -> bool:
    """Whether the head of a cluster may be at the other end: it greets with a frame of settings, as HTTP/2 wants it."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True  # whom we cannot greet in the open
    line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    with line.makefile("rb") as answer:
        return answer.read(4)[3:] == b"\x04"


def default_resources(cluster: dict[str, float]) -> Resources:
    """A core per run, and a GPU where the cluster has any."""
    return Resources(cpus=1, gpus=1 if cluster.get("GPU") else 0)


def check_room(per_run: Resources, nodes: list[dict[str, Any]]) -> None:
    """Raise unless some node could ever take a run: Ray would let it wait for good."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    wanted = {"CPU": per_run.cpus, "GPU": per_run.gpus, "memory": per_run.bytes or 0}
    if not any(all(node.get(name, 0) >= amount for name, amount in wanted.items()) for node in alive):
        there = "; ".join(f"cpus={node.get('CPU', 0):g},gpus={node.get('GPU', 0):g}" for node in alive)
        raise StudyError(f"No node of the cluster has {per_run} for a run. Its nodes have: {there or 'nothing'}.")


def _everywhere(root: Path | None) -> Path:
    """The data root as every node finds it: tasks run in folders of their own."""
    from attemper.lab.tasks.registry import data_root

    return data_root(root).absolute()


def _in_short(error: BaseException) -> str:
    """The line of an error that says what is wrong: the last of a traceback, the first of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if "Traceback" in str(error) else 0].rstrip(".")


# ------------------------------------------------------------------------------------------------------- on the nodes

_last: list[tuple[WorkerConfig, Study]] = []
"""The study of the last task in this process: the next one finds its data open."""


def perform(config: WorkerConfig, marker: Path, key: str, token: str) -> list[tuple[str, str]]:
    """Do one run on a node, unless another worker has it; returns messages for the view."""
    import torch

    torch.set_num_threads(at_most(config.threads))
    messages: list[tuple[str, str]] = []

    def log(text: str) -> None:
        messages.append(("note", text))

    try:
        check_sees(marker, f"The cluster's node {socket.gethostname()}")
        with listening(Silent()):  # the driver has opened the same data, and has shown its notes
            study = _study(config)
            claim = study.claim([key], token)
            if claim is not None:
                perform_run(study, claim, stop=lambda: _is_gone(marker), device=config.device, log=log)
    except AttemperError as error:
        messages.append(("fatal", str(error)))
    except Exception:
        messages.append(("fatal", f"A node failed outside of any run:\n{traceback.format_exc()}"))
    return messages


def _is_gone(marker: Path) -> bool:
    """Whether the executor has put its beacon out. A file system that does not answer for a moment says nothing."""
    try:
        return not marker.exists()
    except OSError:
        return False


def _study(config: WorkerConfig) -> Study:
    if not _last or _last[0][0] != config:
        _last[:] = [(config, config.open())]
    return _last[0][1]
