"""vit-pytorch, x-transformers and some models of Transformers: what acted on them when it was last measured still acts.

The expectation is the newest sweep in `benchmarks/results`. After a change that makes more recipes act, measure again:
`python benchmarks/sweep.py --json benchmarks/results/sweep-cpu.json`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from architectures import architectures_of
from sweeping.outcomes import ACTS, Outcome, measure_pair, measure_plain
from sweeping.results import load

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results" / "sweep-cpu.json"
MEASURED = load(RESULTS).found
NAMED = ("falcon", "blip", "blip, answering", "blip, describing", "vilt", "mask2former", "segformer", "perceiver")
"""Of Transformers' models, those that met attention in a way of their own."""

MODELS = [
    *(("vit-pytorch", name) for name in MEASURED["vit-pytorch"]),
    *(("x-transformers", name) for name in MEASURED["x-transformers"]),
    *(("transformers", name) for name in NAMED),
]
SAMPLE = 7
"""One in so many models is tried by `make test`, with one recipe each; `make slow` tries all with all."""


def acting(row: dict[str, Outcome]) -> list[str]:
    return [recipe for recipe, outcome in row.items() if outcome.kind == ACTS and not outcome.reason]


def cases() -> list[tuple[str, str, tuple[str, ...], bool]]:
    """(library, model, recipes, slow)."""
    made = []
    for number, (library, name) in enumerate(MODELS):
        recipes = acting(dict(MEASURED[library][name]))
        if number % SAMPLE == 0 and recipes:
            made.append((library, name, (recipes[number // SAMPLE % len(recipes)],), False))
        made.append((library, name, tuple(recipes), True))
    return made


@pytest.mark.parametrize(
    ("library", "name", "recipes"),
    [
        pytest.param(*case, id=f"{library} {name} {'all' if slow else case[2][0]}", marks=[pytest.mark.slow] * slow)
        for *case, slow in cases()
        for library, name, _ in [case]
    ],
)
def test_what_acted_when_it_was_measured_still_acts(library: str, name: str, recipes: tuple[str, ...]) -> None:
    plain = measure_plain(architectures_of(library)[name])
    found = {recipe: measure_pair(plain, recipe) for recipe in recipes}
    assert {recipe: outcome for recipe, outcome in found.items() if outcome != Outcome(ACTS)} == {}
