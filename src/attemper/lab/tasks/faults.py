"""Everything that is wrong with the files of a task, kind by kind, to be told at once."""

import dataclasses
from collections.abc import Mapping, Sequence

from attemper.lab.counting import counted
from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import Broken, listed, shown


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of what can be wrong, as it is said of one thing and of several."""

    one: str
    many: str


UNREADABLE = Fault("image cannot be read", "images cannot be read")


class Faults:
    """What is wrong with some files, collected before anything is raised.

    >>> faults = Faults()
    >>> faults.add(UNREADABLE, "a.jpg", "it is empty")
    >>> faults.settle("'photos'", "skip")
    ["'photos': 1 image cannot be read: 'a.jpg' (it is empty)"]
    """

    def __init__(self) -> None:
        self.found: dict[Fault, dict[str, str]] = {}
        """What is wrong → where → why, maybe empty."""

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, kind: Fault, where: str, why: str = "") -> None:
        """One more of a kind."""
        self.found.setdefault(kind, {}).setdefault(where, why)

    def merge(self, other: "Faults", of: str = "") -> None:
        """Those of another file as well. of: what is put before the places, such as the file's name."""
        for kind, places in other.found.items():
            for where, why in places.items():
                self.add(kind, f"{of}: {where}" if of else where, why)

    def lines(self) -> list[str]:
        """A line for every kind: how many there are, the first of them, and how many more."""
        return [_line(kind, places) for kind, places in self.found.items()]

    def settle(self, what: str, broken: Broken, remedy: str = "Repair or remove them") -> list[str]:
        """What is left out, in sentences; raise if nothing may be. what: the files, such as "'photos'"."""
        if not self.found:
            return []
        if broken == "refuse":
            ask = f"{remedy}, or say broken=skip to leave them out."
            raise DataError(_paragraph(f"{what} cannot be used as it is:", [*self.lines(), ask]))
        return [f"{what}: {line}" for line in self.lines()]

    def refuse(self, what: str) -> None:
        """Raise if there is anything, whatever broken= says."""
        if self.found:
            raise DataError(_paragraph(f"{what} cannot be used:", self.lines()))


def _line(kind: Fault, places: Mapping[str, str]) -> str:
    """A reason that is the same for all of them is said once.

    >>> _line(UNREADABLE, {"a.jpg": "it is empty", "b.jpg": "it is empty"})
    "2 images cannot be read (it is empty): 'a.jpg'; 'b.jpg'"
    """
    what, reasons = counted(len(places), kind.one, kind.many), set(places.values())
    if len(places) > 1 and len(reasons) == 1:
        named = listed(f"'{shown(where)}'" for where in places)
        return f"{what}{_because(*reasons)}: {named}"
    named = listed(f"'{shown(where)}'{_because(why)}" for where, why in places.items())
    return f"{what}: {named}"


def _because(why: str) -> str:
    return f" ({shown(why)})" if why else ""


def _paragraph(first: str, lines: Sequence[str]) -> str:
    return "\n".join([first, *(f"  {line}" for line in lines)])
