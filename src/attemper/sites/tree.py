"""A model's modules by name, and how they lie in each other."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Tree:
    """A model's modules by name."""

    modules: dict[str, nn.Module]

    def ancestors(self, name: str) -> Iterator[str]:
        """The names above `name`, nearest first, the root ('') last."""
        while name:
            name = name.rpartition(".")[0]
            yield name

    def listed(self, name: str) -> bool:
        """Whether a module is an element of a ModuleList or Sequential."""
        return bool(name) and isinstance(self.modules[name.rpartition(".")[0]], nn.ModuleList | nn.Sequential)

    def holder(self, name: str) -> nn.Module | None:
        """The nearest module above `name` that has a forward of its own and is no Sequential; None: there is none."""
        for above in self.ancestors(name):
            module = self.modules[above]
            if not isinstance(module, nn.Sequential) and type(module).forward is not nn.Module.forward:
                return module
        return None

    def nearest(self, name: str) -> str | None:
        """The nearest list element above a module."""
        return next((above for above in self.ancestors(name) if self.listed(above)), None)

    def in_stages(self, parts: Iterable[str]) -> frozenset[str]:
        """Those of `parts` whose nearest list element is a stage: it lists several elements with parts in them.

        A stage with a single block is known by the others: names that differ in their numbers alone are alike.
        """
        parts = list(parts)
        elements = {each for part in parts for each in (part, *self.ancestors(part)) if self.listed(each)}
        inside = Counter(above for each in elements for above in self.ancestors(each) if above in elements)
        kinds = {_kind(part) for part in parts if inside[self.nearest(part) or ""] > 1}
        return frozenset(part for part in parts if _kind(part) in kinds)

    def inside(self, name: str, others: Sequence[str]) -> bool:
        """Whether one of `others` lies below `name`."""
        return any(below(other, name) for other in others)


def below(name: str, above: str) -> bool:
    """Whether a module lies inside of another one."""
    return name != above and (not above or name.startswith(above + "."))


def _kind(name: str) -> str:
    """What is the same in names that differ in their numbers."""
    return re.sub(r"\d+", "#", name)
