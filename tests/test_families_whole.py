"""Every method on T2T-ViT, CeiT, LocalViT and PiT: it acts, eval mode is as it was, and remove undoes everything."""

from __future__ import annotations

import pytest
import torch

import attemper
from contracts import evaluate, fingerprint, original, train
from families import Family, family

RECIPES = {
    **{"dropkey": "dropkey(0.3, structure=block, w=1)", "dropattention": "dropattention(0.3)"},
    **{"hardmask": "hardmask(0.5, k=2)", "blur": "blur(2.0, grid=2d)", "consistency": "dropkey(0.3) + consistency"},
    **{"rdrop": "dropattention(0.3) + rdrop", "explicit": "explicit(q=1, k=1, v=1, av=1, ff=1)"},
    **{"arora": "arora(q=1, k=1, v=1)", "cb": "cb(cb_s, branch=both)", "graying": "graying", "skipless": "skipless"},
    **{"drophead": "drophead(0.5)", "layerdrop": "layerdrop(0.7)", "droppath": "droppath(0.5)"},
    **{"ffdropout": "ffdropout(0.3)", "dropconnect": "dropconnect(0.3)"},
}
ARCHITECTURE, PENALTIES = ("cb", "graying", "skipless"), ("explicit", "arora")


def gives(model: Family, name: str, recipe: str) -> None:
    tempered, plain = original(model), original(model)
    before, wanted, untouched = fingerprint(tempered), evaluate(plain, model), train(plain, model)
    handle = attemper.apply(tempered, recipe)
    assert (name in ARCHITECTURE) != torch.equal(evaluate(tempered, model), wanted)
    passes = [train(tempered, model, seed) for seed in (1, 2, 3)]
    assert (name in PENALTIES) == all(torch.equal(each, untouched) for each in passes)
    assert (name in PENALTIES) == (float(handle.penalty().detach()) > 0)
    handle.remove()
    tempered.train()
    assert fingerprint(tempered) == before
    torch.testing.assert_close(train(tempered, model), untouched, rtol=0, atol=0)


BUILT = ("lab-t2t", "lab-ceit", "lab-localvit", "timm-pit")


@pytest.mark.parametrize("built", BUILT)
def test_some_methods_keep_their_promises(built: str) -> None:
    """Each of the four has another quarter of them: every method is tried on one."""
    for name in list(RECIPES)[BUILT.index(built) :: len(BUILT)]:
        gives(family(built), name, RECIPES[name])


@pytest.mark.slow
@pytest.mark.parametrize("built", BUILT)
def test_every_method_keeps_its_promises(built: str) -> None:
    for name, recipe in RECIPES.items():
        gives(family(built), name, recipe)


def test_no_method_is_forgotten() -> None:
    """Those of other packages apart."""
    own = {method.name for method in attemper.list_methods() if method.__module__.startswith("attemper.methods")}
    assert own == set(RECIPES)
