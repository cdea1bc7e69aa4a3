"""Exploring: which settings of which recipes are tried, how many, for how long.

Every recipe, `none` included, gets the same number of trials, its learning rate being a part of each. A trial begins
short; of each recipe's trials the best third goes on at three times the epochs, until one is left at the full budget.
Optuna proposes the settings. Which trials go on is decided here, once all of a stage are there: Optuna's pruners decide
trial by trial as results come in, so that two workers, or a study that was stopped, could come to different ends.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attemper.errors import AttemperError
from attemper.lab.study.grids import expand
from attemper.recipe import as_methods, render

if TYPE_CHECKING:
    from optuna.study import Study as Proposals
    from optuna.trial import Trial

KEPT = 3
"""Of so many trials one goes on, at so many times the epochs."""
LR_FACTOR = 4.0
"""Learning rates are tried up to so far above and below the plan's."""
FIRST_FACTORS = (2.0, 0.5)
"""The learning rates of the first proposals, in units of the plan's, which the trial before them has."""

Configuration = tuple[str, float]
"""A recipe and a learning rate."""
Space = Callable[["Trial"], str]
"""Settings that Optuna proposes → a recipe."""


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _rate(low: float, high: float) -> Callable[[Trial], float]:
    return lambda trial: _rounded(trial.suggest_float("rate", low, high, log=True))


def _explicit(trial: Trial) -> str:
    strength = _rounded(trial.suggest_float("strength", 1e-6, 1e-1, log=True))
    return f"explicit(v={strength}, ff={strength}, p=0.2)"


def _dropkey(trial: Trial) -> str:
    schedule = trial.suggest_categorical("schedule", ["constant", "decreasing"])
    return f"dropkey({_rate(0.02, 0.4)(trial)}, schedule={schedule})"


SPACES: Mapping[str, tuple[str, Space]] = {
    "none": ("none", lambda trial: "none"),
    "dropkey": ("dropkey(0.1)", _dropkey),
    "dropattention": ("dropattention(0.1)", lambda trial: f"dropattention({_rate(0.02, 0.4)(trial)})"),
    "hardmask": ("hardmask(0.1, k=0.1)", lambda trial: f"hardmask({_rate(0.02, 0.5)(trial)}, k=0.1)"),
    "blur": ("blur", lambda trial: f"blur({_rate(0.3, 3.0)(trial)})"),
    "explicit": ("explicit(v=0.001, ff=0.001, p=0.2)", _explicit),
    "cb": ("cb", lambda trial: f"cb({trial.suggest_categorical('variant', ['cb', 'cb_s'])})"),
    "graying": ("graying", lambda trial: f"graying(eps={_rounded(trial.suggest_float('eps', 0.7, 0.99))})"),
    "drophead": ("drophead(0.1)", lambda trial: f"drophead({_rate(0.02, 0.4)(trial)})"),
    "droppath": ("droppath(0.1)", lambda trial: f"droppath({_rate(0.02, 0.4)(trial)})"),
    "ffdropout": ("ffdropout(0.1)", lambda trial: f"ffdropout({_rate(0.02, 0.4)(trial)})"),
}
"""By name: the recipe of the first trial, and what is tried beside it."""
USUAL = ("dropkey", "dropattention", "hardmask", "blur", "explicit", "cb", "graying")
"""What is explored where nothing is said."""


@dataclass(frozen=True)
class Family:
    """Recipes that are explored together, under one name."""

    name: str
    first: str
    space: Space


def families(names: Sequence[str]) -> list[Family]:
    """`none`, and a family for every name: one of `SPACES`, or any recipe or grid, of which the learning rate is tried.

    >>> [family.first for family in families(["dropkey", "cb + droppath({0.1, 0.2})"])]
    ['none', 'dropkey(0.1)', 'cb(cb) + droppath(0.1)']
    """
    found = [Family("none", *SPACES["none"])]
    for name in dict.fromkeys(names or USUAL):
        if name in SPACES:
            first, space = SPACES[name]
            found.append(Family(name, render(as_methods(first)), space))
        else:
            texts = [render(as_methods(text)) for text in expand(name.strip())]
            found.append(Family(name, texts[0], _one_of(texts)))
    return [family for at, family in enumerate(found) if family.name not in [each.name for each in found[:at]]]


def _one_of(texts: list[str]) -> Space:
    return lambda trial: str(trial.suggest_categorical("recipe", texts))


class Proposer:
    """Proposes the trials of one family. The same results, told in the same order, lead to the same proposals."""

    def __init__(self, family: Family, lr: float, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.family, self.lr = family, lr
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4, constant_liar=True)
        self._study: Proposals = optuna.create_study(direction="maximize", sampler=sampler)
        for factor in FIRST_FACTORS:  # the same for every recipe
            self._study.enqueue_trial({"lr": factor * lr})
        self._asked: list[tuple[Configuration, Trial]] = []
        self.trials: list[Configuration] = [(family.first, lr)]

    def propose(self, count: int) -> None:
        """So many trials more; settings that were proposed before are proposed anew a few times, then taken."""
        for _ in range(count):
            for _ in range(10):
                trial = self._study.ask()
                lr = _rounded(trial.suggest_float("lr", self.lr / LR_FACTOR, self.lr * LR_FACTOR, log=True))
                found = (render(as_methods(self.family.space(trial))), lr)
                if found not in self.trials:
                    self._asked.append((found, trial))
                    self.trials.append(found)
                    break
                self._study.tell(trial, state=_failed())

    def tell(self, values: Mapping[Configuration, float | None]) -> None:
        """The results of whatever was proposed and has one; a trial that diverged counts as failed."""
        for found, trial in self._asked:
            if found in values:
                value = values[found]
                if value is None:
                    self._study.tell(trial, state=_failed())
                else:
                    self._study.tell(trial, value)
        self._asked = [each for each in self._asked if each[0] not in values]


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL


def rungs(epochs: int) -> list[int]:
    """Epochs of the stages, the last being the full budget.

    >>> rungs(15), rungs(40), rungs(2)
    ([5, 15], [4, 13, 40], [2])
    """
    found = [epochs]
    while found[0] >= 3 * KEPT and len(found) < 3:
        found.insert(0, math.ceil(found[0] / KEPT) if found[0] % KEPT == 0 else max(2, round(found[0] / KEPT)))
    return found if len(found) < 3 or found[0] >= 3 else found[1:]


def kept(count: int, stages: int) -> list[int]:
    """How many of a recipe's trials there are at each stage: a third goes on, and one is left at the last.

    >>> kept(9, 3), kept(4, 2), kept(5, 1)
    ([9, 3, 1], [4, 2], [5])
    """
    found = [count]
    for _ in range(stages - 1):
        found.append(max(1, math.ceil(found[-1] / KEPT)))
    return found


def best_of(values: Mapping[Configuration, float | None], count: int) -> list[Configuration]:
    """The configurations that go on; of equal ones those that were tried first, and diverged ones last of all."""
    known = sorted(values, key=lambda found: -math.inf if values[found] is None else values[found], reverse=True)  # type: ignore[arg-type,return-value]
    return known[:count]


def expected_best(values: Sequence[float]) -> list[float]:
    """The best validation that one, two … trials would have had on average (Dodge et al., 2019).

    >>> [round(value, 3) for value in expected_best([0.5, 0.7])]
    [0.6, 0.65]
    """
    ordered, n = sorted(values), len(values)
    return [
        sum(value * ((i / n) ** k - ((i - 1) / n) ** k) for i, value in enumerate(ordered, 1)) for k in range(1, n + 1)
    ]


def fitting(found: Sequence[Family], check: Callable[[str], None]) -> tuple[list[Family], dict[str, str]]:
    """The families whose first recipe fits the model, and why the others do not."""
    fits, misfits = [], {}
    for family in found:
        try:
            check(family.first)
            fits.append(family)
        except AttemperError as error:
            if family.name == "none":
                raise
            misfits[family.name] = str(error)
    return fits, misfits
