"""What whoever reads a study's figures should know about them: files that do not count, versions that are mixed."""

from collections import Counter
from collections.abc import Iterable

from attemper.lab.study.store import Result
from attemper.lab.study.study import Study
from attemper.lab.training.versions import age, listed, versions_of


def notices(study: Study, results: Iterable[Result]) -> list[str]:
    """One line each."""
    return [*_damaged(study), *_mixed(results)]


def row_versions(results: Iterable[Result]) -> str:
    """The versions behind one row of a table, the oldest first."""
    return listed(sorted((each for result in results for each in versions_of(result)), key=age))


def _damaged(study: Study) -> list[str]:
    return [
        f"{study.store.path(key)} is damaged and counts as missing: {problem}. 'attemper study resume {study.folder}' "
        "sets it aside and does the run again."
        for key, problem in study.corrupt().items()
    ]


def _mixed(results: Iterable[Result]) -> list[str]:
    found = Counter(listed(versions_of(result)) for result in results)
    if len(found) < 2 and not any(" and " in words for words in found):
        return []
    parts = "; ".join(f"{count} {'run' if count == 1 else 'runs'} under {words}" for words, count in found.items())
    return [f"The results were made under different versions and may differ for that alone: {parts}."]
