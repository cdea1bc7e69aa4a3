"""Everything that is wrong with the files of a task, kind by kind, to be told at once."""

from collections.abc import Sequence

from attemper.lab.errors import DataError
from attemper.lab.tasks.broken import Broken, listed, shown


class Faults:
    """What is wrong with some files, collected before anything is raised.

    >>> faults = Faults()
    >>> faults.add("images cannot be read", "a.jpg", "it is empty")
    >>> faults.settle("'photos'", "skip")
    ["'photos': 1 images cannot be read: 'a.jpg' (it is empty)"]
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}
        """What is wrong, in the plural → where → why, maybe empty."""

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, kind: str, where: str, why: str = "") -> None:
        """One more of a kind. kind: such as "boxes have no size"; it is told behind a number."""
        self.found.setdefault(kind, {}).setdefault(where, why)

    def merge(self, other: "Faults", of: str = "") -> None:
        """Those of another file as well. of: what is put before the places, such as the file's name."""
        for kind, places in other.found.items():
            for where, why in places.items():
                self.add(kind, f"{of}: {where}" if of else where, why)

    def lines(self) -> list[str]:
        """A line for every kind: how many there are, the first of them, and how many more."""
        return [f"{len(places):,} {kind}: {listed(map(_place, places.items()))}" for kind, places in self.found.items()]

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


def _place(place: tuple[str, str]) -> str:
    where, why = place
    return f"'{shown(where)}'" + (f" ({shown(why)})" if why else "")


def _paragraph(first: str, lines: Sequence[str]) -> str:
    return "\n".join([first, *(f"  {line}" for line in lines)])
