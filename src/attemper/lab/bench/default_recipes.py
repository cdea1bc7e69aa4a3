"""Which recipes are measured: representative settings of every method, or those that were asked for."""

from collections.abc import Sequence

import torch

import attemper
from attemper.lab.bench.targets import LOOP_RECIPES
from attemper.lab.bench.targets import STEP as TARGETS
from attemper.recipe import as_methods, render
from attemper.tempering.composition import check_composition

OPS: dict[str, tuple[str, ...]] = {
    "none": ("none",),
    "dropkey": ("dropkey(0.1)", "dropkey(0.3, share=heads)"),
    "hardmask": ("hardmask(0.1, k=5)",),
    "blur": ("blur",),
}
"""What `ops` measures, by name."""

LOOP_UNTARGETED = ("droppath(0.1)", "ffdropout(0.1)")
"""What `loop` measures beside recipes that have targets: masks that are not drawn in attention."""

STEP: dict[str, tuple[str, ...]] = {
    "dropkey": ("dropkey(0.1)", "dropkey(0.3, share=heads)"),
    "consistency": ("dropkey(0.1) + consistency",),
    "rdrop": ("ffdropout(0.1) + rdrop",),
    "explicit": tuple(f"explicit({part}=1e-3, ff=1e-3)" for part in ("v", "q", "k", "av")),
    "arora": ("arora(v=1e-3, ff=1e-3)",),
    "graying": ("graying(dct)", "graying(svd)"),
    "skipless": ("skipless(mlp)",),
}
"""What `step` measures of the methods that do nothing by their defaults, or are worth more than one recipe."""


def ops_recipes(chosen: Sequence[str] = ()) -> list[str]:
    """The recipes for the operator, as `attemper.render` writes them.

    chosen: names of methods, or recipes; none: the standard ones.

    >>> ops_recipes(["blur"])
    ['blur(1.0)']
    """
    recipes = [recipe for name in chosen or OPS for recipe in OPS.get(name, (name,))]
    found = list(dict.fromkeys(render(as_methods(recipe)) for recipe in recipes))
    one = torch.zeros(1, 1, 8, 8)
    for recipe in found:  # a method that does not act inside of attention is refused here, before anything is measured
        methods = as_methods(recipe)
        check_composition(methods)
        attemper.implementations(one, one, one, methods=methods)  # type: ignore[arg-type]
    return found


def step_recipes(chosen: Sequence[str] = ()) -> list[str]:
    """The recipes for a training step, without `none`, which is always measured.

    chosen: names of methods, or recipes; none: every method that there is, those with a target first, in case that the
        time runs out.

    >>> step_recipes(["graying"])
    ['graying(dct)', 'graying(svd)']
    """
    names = [method.name for method in attemper.list_methods()]
    recipes = [recipe for name in chosen or names for recipe in STEP.get(name, (name,))]
    found = list(dict.fromkeys(render(as_methods(recipe)) for recipe in recipes))
    for recipe in found:
        check_composition(as_methods(recipe))
    if not chosen:
        found.sort(key=lambda recipe: recipe not in TARGETS)
    return [recipe for recipe in found if recipe != "none"]


def loop_recipes(chosen: Sequence[str] = ()) -> list[str]:
    """The recipes for training loops, without `none`, which is always measured.

    If none is chosen: those with targets, and those of `LOOP_UNTARGETED`.

    >>> loop_recipes(["explicit(v=5e-4)"])
    ['explicit(v=0.0005)']
    """
    found = list(dict.fromkeys(render(as_methods(recipe)) for recipe in chosen or (*LOOP_RECIPES, *LOOP_UNTARGETED)))
    for recipe in found:
        check_composition(as_methods(recipe))
    return [recipe for recipe in found if recipe != "none"]
