"""Runs all pairs, in one process or in several."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import torch

from architectures import architectures_of
from sweeping.outcomes import Outcome, measure_pair, measure_plain

Model = tuple[str, str]
"""Library and name."""


def measure_model(model: Model, recipes: Sequence[str], seconds: int) -> dict[str, Outcome] | str:
    """Recipe → outcome; or, where the model does not run without Attemper, why not."""
    library, name = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain = measure_plain(architectures_of(library)[name])
        except Exception as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        return {recipe: measure_pair(plain, recipe, seconds) for recipe in recipes}


def prepare() -> None:
    """What a process does first: models are too small for several threads, and nothing is fetched or said."""
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.simplefilter("ignore")


def measured(
    models: Sequence[Model], recipes: Sequence[str], jobs: int, seconds: int
) -> Iterator[tuple[Model, dict[str, Outcome] | str]]:
    """Every model with its outcomes, as they are done."""
    if jobs == 1:
        prepare()
        for model in models:
            yield model, measure_model(model, recipes, seconds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare) as pool:
        started: dict[Future[dict[str, Outcome] | str], Model] = {
            pool.submit(measure_model, model, recipes, seconds): model for model in models
        }
        for done in as_completed(started):
            yield started[done], done.result()


def sweep(
    models: Sequence[Model], recipes: Sequence[str], jobs: int, seconds: int, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, dict[str, Outcome]]], dict[str, str]]:
    """Library → model → recipe → outcome, in the order of `models`, and the models that do not run by themselves."""
    begun, outcomes, left_out = time.perf_counter(), {}, {}
    for number, (model, row) in enumerate(measured(models, recipes, jobs, seconds), 1):
        shown = row if isinstance(row, str) else "".join(outcome.kind[0] for outcome in row.values())
        say(f"{number}/{len(models)} {time.perf_counter() - begun:5.0f} s  {' '.join(model)}: {shown}")
        if isinstance(row, str):
            left_out[" ".join(model)] = row
        else:
            outcomes[model] = row
    found: dict[str, dict[str, dict[str, Outcome]]] = {}
    for model in models:
        if model in outcomes:
            found.setdefault(model[0], {})[model[1]] = outcomes[model]
    return found, dict(sorted(left_out.items()))
