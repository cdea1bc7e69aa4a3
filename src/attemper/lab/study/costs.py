"""What each recipe's training step costs, measured once per study."""

import json
import math
import platform
import time
from typing import Any

from attemper.errors import MissingFileError, UnreadableError, first_line
from attemper.files import atomic_write, read_json_object
from attemper.lab.folders import folder_errors
from attemper.lab.study.study import POLL, Study

KEY = "cost"
FILE = "cost.json"


def read_costs(study: Study) -> dict[str, dict[str, Any]]:
    """The measured cost of each recipe; those that cannot be read are left out (see `cost_problem`)."""
    return _read(study)[0]


def cost_problem(study: Study) -> str | None:
    """What is wrong with the file of costs, in a line that names it; None where nothing is."""
    return _read(study)[1]


def _read(study: Study) -> tuple[dict[str, dict[str, Any]], str | None]:
    path = study.folder / FILE
    try:
        costs = read_json_object(path)["costs"]
        whole = {recipe: cost for recipe, cost in costs.items() if _whole(cost)}
    except MissingFileError:
        return {}, None
    except (UnreadableError, KeyError, AttributeError) as error:
        return {}, f"{path} is damaged, so step times are missing until they are measured again: {first_line(error)}"
    lost = len(costs) - len(whole)
    return whole, f"{path} is damaged: {lost} of its {len(costs)} step times cannot be read" if lost else None


def _whole(cost: Any) -> bool:
    """Whether a cost is one that can be shown: a damaged one is measured again."""
    return isinstance(cost, dict) and all(
        isinstance(cost.get(name), int | float) and math.isfinite(cost[name]) for name in ("ratio", "milliseconds")
    )


def measure_costs(study: Study, recipes: list[str]) -> None:
    """Measure whatever of these recipes is not measured yet, interleaved with `none` in one process.

    Of several processes on one folder one measures, and the others wait for it.
    """
    while not set(recipes) <= set(read_costs(study)):
        with folder_errors(study.claims.folder):
            claim = study.claims.take(KEY)
        if claim is None:
            time.sleep(POLL)
            continue
        try:
            _measure(study, recipes)
            claim.finish()
            return
        finally:
            claim.release()


def _measure(study: Study, recipes: list[str]) -> None:
    known = read_costs(study)
    missing = [recipe for recipe in recipes if recipe not in known]
    if not missing:
        return  # another process was faster
    wanted = list(dict.fromkeys(["none", *missing]))
    found = study.engine.costs(wanted, study.task, study.plan.model, study.plan.budget)
    whole = {
        "machine": f"{platform.node()}, {platform.processor() or platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "costs": {**found, **known},
    }
    with folder_errors(study.folder / FILE):
        atomic_write(study.folder / FILE, json.dumps(whole, indent=1, allow_nan=False) + "\n")
