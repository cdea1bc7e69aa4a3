"""Small teams of processes for tests: every rank runs the same function, as under torchrun, and its answers come back.

Processes are forked from a server that has imported everything once, which is what takes longest.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["DIED", "free_port", "team"]

DIED = "died"
"""What a rank answers that was killed."""
PATIENCE = 120.0


def team(size: int, check: Callable[..., Any], *args: Any, **environment: str) -> list[Any]:
    """What check(*args) gives on each of so many ranks; an exception is given back as its type's name and its text."""
    context = multiprocessing.get_context("forkserver")
    start_server()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",  # else accelerate gives a rank several, which do not survive being forked
        **environment,
    }
    members = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}
        process = context.Process(target=serve, args=(theirs, own, check, args))
        process.start()
        theirs.close()
        members.append((process, ours))
    until = time.monotonic() + PATIENCE
    try:
        return [_answer(line, until) for _, line in members]
    finally:
        for process, line in members:
            process.join(max(0.0, until - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            line.close()


def start_server() -> None:
    """Start what ranks are forked from, if it does not run yet. It takes its path from the environment alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.set_forkserver_preload(["teams_imports"])
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answer(line: Connection, until: float) -> Any:
    if not line.poll(max(0.0, until - time.monotonic())):
        raise TimeoutError(f"a rank did not answer within {PATIENCE} seconds")
    try:
        return pickle.loads(line.recv_bytes())
    except EOFError:
        return DIED


def serve(line: Connection, environment: dict[str, str], check: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The life of one rank."""
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        line.send_bytes(pickle.dumps(check(*args)))  # plainly: tensors that are shared would go with this process
    except BaseException as error:
        if os.environ.get("ATTEMPER_TEST_TRACES"):
            traceback.print_exc(file=sys.stderr)
        line.send_bytes(pickle.dumps((type(error).__name__, str(error))))
