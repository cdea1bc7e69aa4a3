"""The outcomes of a sweep as a small JSON file, and back."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attemper.lab.bench.machine import describe_machine, versions
from sweeping.outcomes import OUTCOMES, RECIPES, Outcome
from sweeping.report import Found, by_recipe, counts, markdown, pairs

PACKAGES = ("timm", "torchvision", "transformers", "vit-pytorch", "x-transformers")
LETTERS = {kind[0]: kind for kind in OUTCOMES}


@dataclass
class Sweep:
    """What was found, and what was not looked at."""

    found: Found
    left_out: dict[str, str] = field(default_factory=dict)
    """Models that do not run by themselves, and why."""
    absent: tuple[str, ...] = ()
    """Libraries that were not installed."""
    about: dict[str, Any] = field(default_factory=dict)
    """Date, machine, versions."""


def about_here() -> dict[str, Any]:
    """Date, machine and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(torch.device("cpu")).device,
        "versions": versions(PACKAGES),
    }


def to_dict(sweep: Sweep) -> dict[str, Any]:
    """As JSON has it: of every pair the first letter of its outcome, and the number of its reason."""
    reasons = sorted({outcome.reason for *_, outcome in pairs(sweep.found) if outcome.reason})
    number = {reason: index for index, reason in enumerate(reasons)}

    def code(outcome: Outcome) -> str:
        return outcome.kind[0] + (str(number[outcome.reason]) if outcome.reason else "")

    recipes = list(by_recipe(sweep.found))
    return {
        "benchmark": "sweep",
        **sweep.about,
        "recipes": {name: RECIPES[name] for name in recipes},
        "counts": counts(sweep.found),
        "by_recipe": by_recipe(sweep.found),
        "reasons": reasons,
        "models": {
            library: {name: " ".join(code(row[recipe]) for recipe in recipes) for name, row in models.items()}
            for library, models in sweep.found.items()
        },
        "left_out": sweep.left_out,
        "absent": list(sweep.absent),
    }


def from_dict(data: dict[str, Any]) -> Sweep:
    """The same back; messages are not kept."""
    reasons = data["reasons"]

    def outcome(code: str) -> Outcome:
        return Outcome(LETTERS[code[0]], reasons[int(code[1:])] if code[1:] else "")

    found = {
        library: {
            name: {recipe: outcome(code) for recipe, code in zip(data["recipes"], codes.split(), strict=True)}
            for name, codes in models.items()
        }
        for library, models in data["models"].items()
    }
    about = {name: data[name] for name in ("date", "machine", "versions")}
    return Sweep(found, data["left_out"], tuple(data["absent"]), about)


def save(sweep: Sweep, path: Path) -> None:
    """Write a sweep as JSON."""
    path.write_text(json.dumps(to_dict(sweep), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Sweep:
    """Read one back."""
    return from_dict(json.loads(path.read_text(encoding="utf-8")))


RESULTS = Path(__file__).resolve().parents[1] / "results"
MARKED = re.compile(r"(<!-- sweep: (\S+) -->\n).*?(<!-- /sweep -->)", re.DOTALL)


def fill(page: str, results: Path = RESULTS) -> str:
    """A page with the table of a result file between its markers: <!-- sweep: sweep-cpu.json --> … <!-- /sweep -->."""

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        return f"{start}\n{caption(load(results / name))}\n\n{markdown(load(results / name).found)}\n\n{end}"

    return MARKED.sub(table, page)


def caption(sweep: Sweep) -> str:
    """What was measured, and with which versions."""
    number = counts(sweep.found)
    models = sum(len(models) for models in sweep.found.values())
    tools = ", ".join(f"{name} {version}" for name, version in sweep.about["versions"].items() if name != "attemper")
    return (
        f"{models} models × {len(by_recipe(sweep.found))} recipes, {sum(number.values()):,} pairs: "
        f"{', '.join(f'{count:,} {kind}' for kind, count in number.items())}. {sweep.about['machine']}, "
        f"{sweep.about['date']}; {tools}."
    )
