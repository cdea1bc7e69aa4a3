"""One look at every file of a data set, several at a time, and where what came of it is kept for the next time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from attemper.lab.tasks.notifications import progress

CACHE = ".attemper-cache"
"""Under the data root."""

AT_ONCE = 8
"""Files that are looked at side by side: a disk far away answers late, but it answers several questions at once."""

File = TypeVar("File")
Found = TypeVar("Found")


def look_through(what: str, files: Sequence[File], look: Callable[[File], Found]) -> list[Found]:
    """What is found in every file, in their order; the first error ends it.

    what: a few words for the progress bar.
    """
    found: list[Found] = []
    progress(what, 0, len(files))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for each in pool.map(look, files):
                found.append(each)
                progress(what, len(found), len(files))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found
