"""Files and rows that cannot be used: all of them are named at once, and left out where that was asked for."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from attemper.lab.errors import DataError

Broken = Literal["refuse", "skip"]
"""What becomes of a task some of whose files cannot be used: an error, or a task without them."""

NAMED = 10
"""So many are named; of the others, their number."""
LONGEST = 120
"""Characters of a reason."""
POINTER = b"version https://git-lfs"


class Problems:
    """What cannot be used, collected so that all of it can be told at once."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        """Name → why it cannot be used."""
        self.total = 0
        """How many were looked at."""

    @contextlib.contextmanager
    def collect(self, name: str) -> Iterator[None]:
        """Context manager: a `DataError` inside it is kept under this name, and ends the block."""
        self.total += 1
        try:
            yield
        except DataError as error:
            self.found[name] = str(error).rstrip(".")


def settle(
    problems: Mapping[str, str],
    total: int,
    what: str,
    broken: Broken,
    *,
    verb: str = "cannot be read",
    remedy: str = "Repair or remove them",
) -> list[str]:
    """A line about what is left out, if anything is; raise if nothing may be.

    problems: name → why it cannot be used. total: how many there are of them, good and bad.
    what: such as "images in 'photos'". verb: what is wrong with all of them. remedy: what can be done about it.
    """
    if not problems:
        return []
    about = f"{len(problems):,} of {total:,} {what} {verb}"
    named = listed(f"'{shown(name)}'" + (f" ({reason})" if reason else "") for name, reason in problems.items())
    if broken == "refuse":
        raise DataError(f"{about}: {named}. {remedy}, or say broken=skip to leave them out.")
    return [f"{about} and {'is' if len(problems) == 1 else 'are'} skipped: {named}."]


def listed(texts: Iterable[str]) -> str:
    """The first of some texts, and how many more there are.

    >>> listed(str(number) for number in range(12))
    '0; 1; 2; 3; 4; 5; 6; 7; 8; 9; and 2 more'
    """
    each = list(texts)
    more = f"; and {len(each) - NAMED:,} more" if len(each) > NAMED else ""
    return "; ".join(each[:NAMED]) + more


def shown(name: str) -> str:
    """The name of a file on one line, and in letters that every terminal can write.

    >>> shown("two\\nlines"), shown("caf\\udce9.png")
    ('two\\\\nlines', 'caf\\\\udce9.png')
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in name
    )


def reason_of(error: Exception, file: Path | None = None) -> str:
    """Why a file cannot be used, in a few words: an error's own, without what the name says already."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    for name in (repr(str(file)), f"'{file}'", str(file)) if file is not None else ():
        text = text.replace(name, "")
    text = " ".join(shown(text).split()).rstrip(".: ")
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def reason_of_bytes(data: bytes) -> str | None:
    """Why the beginning of a file shows that it is none of the kind that was expected; None: it may be."""
    if not data:
        return "the file is empty"
    if data.startswith(POINTER):
        return "it is a pointer of Git LFS, not the file itself: git lfs pull gets that"
    return None
