"""The run of which somebody wants the weights: the best of a study, or of one of its recipes."""

from pathlib import Path

from attemper.errors import UnreadableError, suggestion
from attemper.files import WEIGHTS
from attemper.lab.errors import StudyError
from attemper.lab.study.keeping import ranked_runs
from attemper.lab.study.selection import validation_of
from attemper.lab.study.study import Study


def find_run(path: Path, recipe: str | None = None) -> Path:
    """The folder with the weights of a run: the path itself, or that of the best run of a study on validation.

    recipe: the name of the row of the study whose best run is meant; None: that whose best run is best of all.
    """
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
