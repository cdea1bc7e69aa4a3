"""Whether the recipes of a plan fit its model: found out before anything is trained, and told for all at once."""

from collections.abc import Callable, Mapping

from attemper.errors import AttemperError
from attemper.lab.errors import PlanError
from attemper.lab.tasks.notifications import progress
from attemper.lab.training.spec import RunSpec


def refuse_misfits(runs: Mapping[str, RunSpec], check: Callable[[RunSpec], None], model: str) -> None:
    """Raise a `PlanError` that names every recipe with which the model cannot be run, and why.

    runs: for every recipe, one run. check: raises if that one cannot be done.
    """
    errors: dict[str, str] = {}
    for done, (recipe, spec) in enumerate(runs.items()):
        progress("trying recipes on the model", done, len(runs))
        try:
            check(spec)
        except AttemperError as error:
            errors[recipe] = str(error)
    progress("trying recipes on the model", len(runs), len(runs))
    if len(errors) == len(runs) > 1 and len(set(errors.values())) == 1:
        raise PlanError(f"The plan cannot be run with {model}: {next(iter(errors.values()))}")
    if errors:
        lines = "\n".join(f"- {recipe}: {error}" for recipe, error in errors.items())
        raise PlanError(f"{len(errors)} of the plan's recipes cannot be run with {model}:\n{lines}")
