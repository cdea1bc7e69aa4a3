"""Which weights a study keeps, and the run of which somebody wants them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from attemper.errors import UnreadableError, suggestion
from attemper.files import WEIGHTS
from attemper.lab.errors import StudyError
from attemper.lab.study.selection import validation_of

if TYPE_CHECKING:
    from attemper.lab.study.study import Study


def drop_worse(study: Study) -> None:
    """Remove weights that nobody wants any more: of all runs of a row, the best on validation is kept.

    Several workers may do so at once: a run that is not the best now will not be the best later.
    """
    if study.plan.keep != "best" or not (kept := study.store.kept()):
        return
    wanted = {key for ranked in ranked_runs(study, kept).values() for key in ranked[:1]}
    known = {key for entry in study.plan.recipes for keys in study.keys_of(entry).values() for key in keys}
    for key in kept & known - wanted:
        if study.store.result(key) is not None:  # else it is about to get one
            study.store.drop_weights(key)


def ranked_runs(study: Study, kept: set[str]) -> dict[str, list[str]]:
    """The kept runs of every row by its name, the best on validation first; of equal ones, the first of the plan."""
    found = {}
    for entry in study.plan.recipes:
        scores = {}
        for keys in study.keys_of(entry).values():
            for key in keys:
                result = study.store.result(key) if key in kept else None
                if result is not None:
                    score = validation_of(result)
                    scores[key] = float("-inf") if score is None else score
        found[entry.name] = sorted(scores, key=lambda key: -scores[key])
    return found


def find_run(path: Path, recipe: str | None = None) -> Path:
    """The folder with the weights of a run: the path itself, or that of the best run of a study on validation.

    recipe: the name of the row of the study whose best run is meant; None: that whose best run is best of all.
    """
    from attemper.lab.study.study import Study

    if (path / WEIGHTS).is_file():
        if recipe is not None:
            raise StudyError(f"--of is '{recipe}', and {path} holds a single run; only a study has several.")
        return path
    if not (path / "plan.yaml").is_file():
        raise UnreadableError(
            f"'{path}' is neither the folder of a finished run (which has {WEIGHTS}) nor that of a study (plan.yaml)."
        )
    study = Study(folder=path)
    ranked = ranked_runs(study, study.store.kept())
    if recipe is not None and recipe not in ranked:
        raise StudyError(f"{path} has no recipe '{recipe}'.{suggestion(recipe, ranked)} It has: {', '.join(ranked)}.")
    best = {name: keys[0] for name, keys in ranked.items() if keys and recipe in (None, name)}
    if not best:
        which = "" if recipe is None else f" of '{recipe}'"
        raise StudyError(
            f"{path} has no weights{which}: it was made with keep: none, by an earlier version, or is not finished."
        )

    def score(key: str) -> float:
        result = study.store.result(key)
        value = None if result is None else validation_of(result)
        return float("-inf") if value is None else value

    return study.store.weights(max(best.values(), key=score))
