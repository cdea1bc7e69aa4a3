"""The versions that decide what a run comes to: of Attemper's results, and of torch.

Two runs of one description under different versions are not the same measurement. So their versions are a part of a
run's key, of its checkpoints and of its result, and nothing is continued under others unless somebody says so.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

RESULTS = 4
"""Counts up whenever a run of the same description comes to another result than before, by a change of ours: of the
random stream, a method, a task, the training loop or a metric."""


@dataclass(frozen=True)
class Versions:
    """What two results must have in common to be compared.

    >>> print(Versions(results=3, torch="2.11"))
    results 3, torch 2.11
    """

    results: int
    """`RESULTS` of the Attemper that made it; 0: one that did not record it."""
    torch: str
    """Major and minor version; empty: not recorded."""

    def __str__(self) -> str:
        results = f"results {self.results}" if self.results else "results 0 (from before versions were recorded)"
        return f"{results}, torch {self.torch}" if self.torch else results

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        return cls(results=int(given["results"]), torch=str(given["torch"]))


BEFORE = Versions(results=0, torch="")
"""Of runs that do not say: they were made before versions were recorded."""


@functools.cache
def versions_here() -> Versions:
    """Those of this process."""
    import torch

    return Versions(RESULTS, major_minor(torch.__version__))


def major_minor(version: str) -> str:
    """The part of a version that decides results.

    >>> major_minor("2.11.1+cu130")
    '2.11'
    """
    return ".".join(version.split(".")[:2])


def versions_of(result: Mapping[str, Any]) -> tuple[Versions, ...]:
    """What a result was made under: more than one version where its run was continued under another."""
    if "made_under" in result:
        return tuple(map(Versions.from_dict, result["made_under"]))
    return (Versions(0, major_minor(str(result.get("versions", {}).get("torch", "")))),)


def age(versions: Versions) -> tuple[int, list[int]]:
    """By which versions are sorted, the oldest first: 2.9 goes before 2.11."""
    return versions.results, [int(part) for part in versions.torch.split(".") if part.isdigit()]


def listed(versions: Iterable[Versions]) -> str:
    """Versions in words."""
    return " and ".join(map(str, dict.fromkeys(versions)))
