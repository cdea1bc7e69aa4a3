"""Whether a folder can be shared: of all who create the same file at once, one alone may succeed.

Claims rest on that. Local file systems and NFS since version 3 keep it; some that are put together from objects in a
cloud, and some old network mounts, do not, and two workers would then do the same run over each other.
"""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attemper.lab.errors import FolderError
from attemper.lab.folders import folder_errors

ROUNDS = 20

RIVAL = """
import os, sys
folder, name, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
for round_ in range(rounds):
    try:
        os.close(os.open(os.path.join(folder, name + str(round_)), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        print(round_)
    except FileExistsError:
        pass
"""
"""Another process that wants the same files. It imports nothing of ours: it is there in a moment."""


def check_locks(folder: Path) -> None:
    """Let two processes race for the same files, and raise `FolderError` if both ever got one."""
    name = f".race-{secrets.token_hex(4)}-"
    with folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            theirs = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", RIVAL, str(folder), name, str(ROUNDS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            with theirs:
                assert theirs.stdout is not None
                assert theirs.stderr is not None
                theirs.stdout.readline()  # it is there: the race begins
                ours = {round_ for round_ in range(ROUNDS) if create(folder / f"{name}{round_}")}
                created, complaint = theirs.stdout.read(), theirs.stderr.read()
        finally:
            for left in folder.glob(f"{name}*"):
                with contextlib.suppress(OSError):
                    left.unlink()
    if theirs.returncode:
        raise FolderError(f"The locks of {folder} could not be tried out: {complaint.strip()}")
    judge(folder, ours, {int(round_) for round_ in created.split()})


def create(path: Path) -> bool:
    """Create a file that must not be there; whether it was us who did."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def judge(folder: Path, ours: set[int], theirs: set[int]) -> None:
    """Raise unless every file has one owner."""
    both, neither = ours & theirs, set(range(ROUNDS)) - ours - theirs
    if both or neither:
        what = "created by both" if both else "created by neither"
        raise FolderError(
            f"The file system of {folder} has no working locks: of {ROUNDS} files that two processes raced for, some "
            f"were {what}. Two workers would do the same run over each other. Choose a folder on a local disk, NFS or "
            "Lustre."
        )


@contextlib.contextmanager
def beacon(folder: Path) -> Iterator[Path]:
    """A file that is there as long as the block runs. Gives its path: every machine that shares the folder sees it."""
    path = folder / f".beacon-{secrets.token_hex(4)}"
    with folder_errors(path):
        path.touch(exist_ok=False)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def check_sees(path: Path, who: str) -> None:
    """Raise unless this machine sees a beacon of another one, and cannot create it a second time."""
    if not path.parent.is_dir():
        raise FolderError(
            f"{who} has no folder {path.parent}. A study on several machines needs a folder that all of them share, "
            "under the same path."
        )
    with folder_errors(path):
        ours = create(path)
    if ours:
        with contextlib.suppress(OSError):
            path.unlink()
        raise FolderError(
            f"{who} does not see the files that this machine has in {path.parent}: the folder is not shared, or its "
            "file system has no working locks. Choose a folder on a file system that all machines share, such as NFS."
        )
