"""What each recipe's training step costs, measured once per study."""

import json
import platform
import time
from typing import Any

from attemper.files import atomic_write
from attemper.lab.folders import folder_errors
from attemper.lab.study.study import POLL, Study

KEY = "cost"
FILE = "cost.json"


def read_costs(study: Study) -> dict[str, dict[str, Any]]:
    """The measured cost of each recipe; empty if there is none, or none that can be read."""
    try:
        costs = json.loads((study.folder / FILE).read_text())["costs"]
        return {str(recipe): dict(cost) for recipe, cost in costs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


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
