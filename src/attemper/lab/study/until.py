"""Seeds until decided: which recipes go on after a look, and with how many seeds.

What was added stands in the folder's plan, so that a study that was stopped, or that other workers share, goes on from
there. It follows from the plan and the results alone: whoever looks at the same results adds the same seeds.
"""

import dataclasses
from pathlib import Path
from typing import Any

from attemper.lab.study.held_plan import read_held_plan
from attemper.lab.study.looks import schedule
from attemper.lab.study.plan import Plan
from attemper.lab.study.plan_rows import More
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise


def going_on(plan: Plan, folder: Path) -> Plan:
    """The plan with whatever seeds the study in the folder has got already."""
    if plan.until is None:
        return plan
    held = read_held_plan(folder)
    if held is None or dataclasses.replace(held.plan, more=()) != _as_held(plan, held.plan):
        return plan
    most = {more.name: more for more in plan.more}
    for more in held.plan.more:
        if more.name not in most or most[more.name].seeds < more.seeds:
            most[more.name] = more
    ordered = [most[entry.name] for entry in plan.recipes if entry.name in most]
    return dataclasses.replace(plan, more=tuple(ordered))


def _as_held(plan: Plan, held: Plan) -> Plan:
    """Without what is filled in while a study goes on."""
    budget = dataclasses.replace(plan.budget, teacher_hash=held.budget.teacher_hash)
    return dataclasses.replace(plan, more=(), budget=budget)


def longer_plan(study: Study) -> Plan | None:
    """The plan of the next look; None: everything is decided, or has all the seeds that it may have.

    A recipe of which a run was given up gets no more: its seeds would stay incomplete.
    """
    plan = study.plan
    if plan.until is None or plan.max_seeds is None:
        return None
    summary = summarise(study)
    rows = {row["name"]: row for row in summary["recipes"]}
    looks = schedule(len(plan.seeds), plan.max_seeds)
    counts = {entry.name: _count(plan, entry.name) for entry in plan.recipes}
    wanted = {
        name: next(n for n in looks if n > counts[name])
        for name, row in rows.items()
        if _open(row) and name not in summary["same"] and counts[name] < plan.max_seeds
    }
    baseline = plan.baseline.name
    if not wanted or rows[baseline]["missing"]:
        return None
    wanted[baseline] = max(counts[baseline], *wanted.values())
    more = {
        name: More(name, rows[name]["recipe"], rows[name]["lr"], wanted.get(name, counts[name]))
        for name in counts
        if name in wanted or counts[name] > len(plan.seeds)
    }
    return dataclasses.replace(plan, more=tuple(more.values()))


def _open(row: dict[str, Any]) -> bool:
    """Whether a row is undecided and can go on."""
    return bool(row["decision"]) and row["decision"]["answer"] == "undecided" and not row["missing"]


def _count(plan: Plan, name: str) -> int:
    return max([len(plan.seeds), *(more.seeds for more in plan.more if more.name == name)])


def what_is_added(plan: Plan) -> str:
    """The next look, in words."""
    most = max(more.seeds for more in plan.more)
    names = [more.name for more in plan.more if more.seeds == most and more.name != plan.baseline.name]
    return f"undecided: {', '.join(names)}; going on with {most} of at most {plan.max_seeds} seeds"
