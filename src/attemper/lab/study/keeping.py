"""Which weights a study keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attemper.lab.study.selection import validation_of

if TYPE_CHECKING:
    from attemper.lab.study.plan_rows import Entry
    from attemper.lab.study.study import Study


def drop_worse(study: Study) -> None:
    """Remove weights that nobody wants any more: of all runs of a row, the best on validation is kept.

    Several workers may do so at once: a run that is not the best now will not be the best later.
    """
    if study.plan.keep != "best" or not (kept := study.store.kept()):
        return
    wanted = {key for ranked in ranked_runs(study, kept).values() for key in ranked[:1]}
    known = {key for entry in study.plan.recipes for keys in _keys(study, entry) for key in keys}
    for key in kept & known - wanted:
        if study.store.result(key) is not None:  # else it is about to get one
            study.store.drop_weights(key)


def _keys(study: Study, entry: Entry) -> list[list[str]]:
    """The runs of a row, those that it got because it was undecided included."""
    return [*study.keys_of(entry).values(), study.more_of(entry)]


def ranked_runs(study: Study, kept: set[str]) -> dict[str, list[str]]:
    """The kept runs of every row by its name, the best on validation first; of equal ones, the first of the plan."""
    found = {}
    for entry in study.plan.recipes:
        scores = {}
        for keys in _keys(study, entry):
            for key in keys:
                result = study.store.result(key) if key in kept else None
                if result is not None:
                    score = validation_of(result)
                    scores[key] = float("-inf") if score is None else score
        found[entry.name] = sorted(scores, key=lambda key: -scores[key])
    return found
