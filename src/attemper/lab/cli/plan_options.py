"""A plan from the command line: a file, options alone, or a file and options, which go before what the file says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from attemper.lab.cli.options import Data, Number, Text, Texts

if TYPE_CHECKING:
    from attemper.lab.study.plan import Plan

OF_THE_PLAN = ("task", "model", "recipes", "seeds", "lr", "evaluate", "keep", "margin", "until", "max_seeds")
"""Options that are keys of a plan, under the same names. A command has some of them."""
OF_THE_BUDGET = (
    "epochs", "batch_size", "augment", "init", "keep_head", "freeze", "layer_decay", "optimizer", "warmup_epochs",
    "validation",
)  # fmt: skip
"""Options that are settings of a plan's budget, under the same names."""
File = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[PLAN]", help_behavior_hint="")]


@dataclass(frozen=True)
class PlanOptions:
    """What every command that takes a plan has; a command adds options of its own."""

    plan: File = None
    """A plan file; otherwise the embedded comparison on digits, changed by the options."""
    task: Text = None
    """Such as digits, cifar10, folder:PATH, csv:FILE, audio:PATH, wds:PATH, hf:NAME, timm:NAME, MODULE:FUNCTION."""
    model: Text = None
    """Such as vit-cifar, "timm:vit_tiny_patch16_224(pretrained=true)", hf:OWNER/NAME, MODULE:FUNCTION."""
    recipes: Texts = ()
    """Recipes to compare, each in quotes; 'none' is always among them."""
    seeds: Number = None
    """How many seeds."""
    epochs: Number = None
    """Epochs of every run."""
    batch_size: Number = None
    """Samples per step."""
    augment: Text = None
    """Augmentations joined by '+', such as crop-flip+mixup(0.8)."""
    data: Data = None

    def planned(self) -> Plan:
        """The plan of the file, changed by what the command line says; or one that suits what it says."""
        from attemper.lab.study.defaults import completed, missed
        from attemper.lab.study.planfile import load_plan

        if self.plan is None:
            return completed(self._merged({}), self.data)
        plan = self.changed(load_plan(self.plan, pipes=True).to_dict())
        return dataclasses.replace(plan, notes=(*plan.notes, *missed(plan, self.data)))

    def changed(self, given: Mapping[str, Any]) -> Plan:
        """A plan with what the command line says in the place of what it said."""
        from attemper.lab.study.plan import Plan

        return Plan.from_dict(self._merged(given))

    def _merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        of_the_plan, of_the_budget = self._given(OF_THE_PLAN), self._given(OF_THE_BUDGET)
        merged = {**given, **of_the_plan, "budget": {**given.get("budget", {}), **of_the_budget}}
        if self.plan is None and (of_the_plan or of_the_budget):
            merged.pop("title", None)
        if "lr" in of_the_plan:
            merged["budget"].pop("lr", None)
        if "recipes" in of_the_plan:  # published figures belong to rows of the plan's own
            merged.pop("published", None)
        return merged

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        """The options of these names that this command has, and that were given."""
        from attemper.lab.evaluation.suites import split_suites

        found = {name: getattr(self, name, None) for name in names}
        found |= {name: list(value) for name, value in found.items() if isinstance(value, tuple)}
        if "evaluate" in found:
            found["evaluate"] = split_suites(found["evaluate"] or "")
        return {name: value for name, value in found.items() if value not in (None, []) and value is not False}
