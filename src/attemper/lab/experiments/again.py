"""Put the kept runs of an experiment together again: without its data, and whatever versions they were made under."""

import json
from pathlib import Path
from typing import Any

from attemper.errors import ParameterError
from attemper.files import read_bytes
from attemper.lab.experiments.catalogue import find_experiment
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.experiments.summary import summarise
from attemper.lab.folders import read_object
from attemper.lab.training.spec import Budget

SETTINGS = ("experiment", "task", "models", "budget", "metric", "images")
"""What the runs of one folder have in common; it stands in the file that tells of all of them."""


def put_together(folder: Path) -> dict[str, Any]:
    """The same plain data as `run_experiment` gives, of all runs that lie in a folder of the command's.

    Runs count by arm and seed. Their keys, which hold versions, are not compared: what was measured was measured.
    """
    told = _told(folder)
    experiment = find_experiment(told["experiment"])
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted((folder / f"{told['experiment']}-runs").glob("*-seed*.json")):
        record = json.loads(read_bytes(path))
        if records.setdefault((record["arm"], record["seed"]), record) is not record:
            raise ParameterError(f"{folder} has more than one run of {record['arm']}, seed {record['seed']}.")
    budget = Budget.from_dict(told["budget"])
    plan = [
        ArmRun(told["experiment"], arm, seed, told["task"], budget, told["models"])
        for seed in sorted({seed for _, seed in records})
        for arm in experiment.arms
    ]
    found = {one: records[one.arm.name, one.seed] for one in plan if (one.arm.name, one.seed) in records}
    if not found:
        raise ParameterError(f"{folder} has no finished run of '{told['experiment']}'.")
    missing = [one.label for one in plan if one not in found]
    return summarise(experiment, found) | {name: told[name] for name in SETTINGS} | {"missing": missing}


def _told(folder: Path) -> dict[str, Any]:
    """The file of the folder that tells of all runs."""
    for path in sorted(folder.glob("*.json")):
        told = read_object(read_bytes(path))
        if all(name in told for name in SETTINGS):
            return dict(told)
    raise ParameterError(f"{folder} has no file that tells of an experiment, as `attemper experiment` writes it.")
