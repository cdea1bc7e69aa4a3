"""The contract matrix for every method: every family that it can act on × what users lean on.

`test_contracts.py` holds all contracts for the methods of attention; here every other method goes through those that
do not depend on what a method does.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import attemper
from attemper.errors import NoSiteError
from attemper.sites import find_sites
from contracts import assert_same, evaluate, fingerprint, gradients, original, train
from families import FAMILIES, VIT, Family, timm_model
from sweeping.results import load


@dataclass(frozen=True)
class Case:
    recipe: str
    kind: str
    """"stochastic": acts in training only; "penalty": in the loss only; "architecture": in both modes."""
    cannot: tuple[str, ...] = ()
    """Families that it refuses when it is applied."""


NO_MLP = ("nn-mha", "hand-written")
NO_IMAGE = ("hf-detr", "hf-bert", "hf-whisper")
"""What gets none, or makes its tokens of what a whole network has made of it."""
NO_PATCHES = (
    *(*NO_IMAGE, "hf-falcon", "hf-perceiver", "vitp-vit", "vitp-cait", "xt-encoder", "xt-decoder"),
    *("nn-encoder", "nn-decoder", "nn-mha", "hand-written"),
)
UNUSUAL_SKIPS = ("timm-mvitv2", "nn-mha")
"""Blocks whose branches are not simply added to what came in; they are refused when they run."""

SWEEP = load(Path(__file__).parent.parent / "benchmarks" / "results" / "sweep-cpu.json").found
"""What was measured of every method on many architectures, those of some families among them."""


def refuses(family: Family, recipe: str) -> bool:
    """Whether a family's architecture was measured to refuse a recipe, at apply or in its first pass."""
    if family.architecture is None or recipe == "graying":  # which acts on patches, and is measured on tokens
        return False
    name = recipe.rpartition(" + ")[2].partition("(")[0]
    name = "explicit(ff)" if recipe.startswith("explicit(ff") else name
    library, model = family.architecture
    return SWEEP[library][model][name].kind == "refused"


CAUSAL = ("nn-decoder",)
"""What hides later tokens from earlier ones, somewhere at least."""

MIXERS = ("cb", "graying(svd, where=tokens)")
"""What mixes tokens."""

CASES = [
    Case("hardmask(0.5, k=1)", "stochastic"),
    Case("blur(2.0)", "stochastic"),
    Case("drophead(0.5)", "stochastic"),
    Case("layerdrop(0.5)", "stochastic"),
    Case("droppath(0.5)", "stochastic"),
    Case("ffdropout(0.3)", "stochastic", NO_MLP),
    Case("dropconnect(0.3)", "stochastic"),
    Case("dropkey(0.3) + consistency", "stochastic"),
    Case("dropattention(0.3) + rdrop", "stochastic"),
    Case("explicit(q=1, k=1, v=1, av=1)", "penalty"),
    Case("explicit(ff=1, expectation=exact)", "penalty", NO_MLP),
    Case("arora(q=1, k=1, v=1)", "penalty"),
    Case("cb", "architecture", NO_MLP),
    Case("graying", "architecture", NO_PATCHES),
    Case("graying(svd, where=tokens)", "architecture"),
    Case("skipless", "architecture"),
]
MATRIX = [
    pytest.param(case, family, id=f"{case.recipe}-{family.name}")
    for case in CASES
    for family in FAMILIES
    if not (case.recipe.startswith(("droppath", "skipless", "layerdrop")) and family.name in UNUSUAL_SKIPS)
    and not (case.recipe in MIXERS and family.name in CAUSAL)  # refused when it runs
    and not refuses(family, case.recipe)
]


@pytest.mark.parametrize(("case", "family"), MATRIX)
def test_every_method_keeps_its_promises_on_every_family(case: Case, family: Family) -> None:
    model, plain = original(family), original(family)
    before = fingerprint(model)
    keys = list(model.state_dict())
    if family.name in case.cannot:
        with pytest.raises(NoSiteError):
            attemper.apply(model, case.recipe, targets=family.targets)
        assert fingerprint(model) == before
        return
    wanted = evaluate(plain, family)
    handle = attemper.apply(model, case.recipe, targets=family.targets)
    assert list(model.state_dict()) == keys
    assert (case.kind == "architecture") != torch.equal(evaluate(model, family), wanted)

    got = train(model, family)
    untempered = train(plain, family)
    few_coins = case.recipe.startswith("layerdrop") and family.own_randomness  # beside those of the model
    if not (few_coins or (case.recipe.startswith("drophead") and family.name == "timm-mvitv2")):  # which has few heads
        assert (case.kind == "penalty") == torch.equal(got, untempered)
    assert (float(handle.penalty().detach()) > 0) == (case.kind == "penalty")
    if case.kind == "stochastic" and not case.recipe.startswith("layerdrop"):  # few coins, which may fall alike
        assert not torch.equal(got, train(model, family, seed=2))
    assert_same(train(model, family), got)
    copies = [copy.deepcopy(model), *([pickle.loads(pickle.dumps(model))] if family.pickles else [])]
    for copied in copies:
        assert_same(train(copied, family), got)

    with handle.disabled():
        assert_same(train(model, family), train(plain, family))
    handle.remove()
    model.train()
    assert list(model.state_dict()) == keys
    assert all(type(a) is type(b) for a, b in zip(model.modules(), plain.modules(), strict=True))
    assert all(a.__dict__.keys() == b.__dict__.keys() for a, b in zip(model.modules(), plain.modules(), strict=True))


DROPS_BRANCHES = ("layerdrop", "skipless", "drophead", "droppath")
"""Made to keep gradients from what they drop."""


@pytest.mark.parametrize(
    ("case", "family"),
    [
        pytest.param(case, family, id=f"{case.recipe}-{family.name}")
        for case in CASES
        for family in FAMILIES
        if family.name not in case.cannot and not case.recipe.startswith(DROPS_BRANCHES)
        if not (case.recipe in MIXERS and family.name in CAUSAL)
        if not refuses(family, case.recipe)
    ],
)
def test_gradients_reach_what_they_reached_before(case: Case, family: Family) -> None:
    plain = original(family)
    reached = {name for name, grad in gradients(plain, train(plain, family)).items() if grad.any()}
    model = original(family)
    attemper.apply(model, case.recipe, targets=family.targets)
    found = gradients(model, train(model, family))
    assert reached <= {name for name, grad in found.items() if grad.any()}
    assert all(grad.isfinite().all() for grad in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_a_compiled_training_pass_gives_what_eager_gives(case: Case) -> None:
    family = next(family for family in FAMILIES if family.name == "timm-vit")
    torch.manual_seed(0)
    model = timm_model("vit_tiny_patch16_224", **{**VIT, "depth": 2})()
    handle = attemper.apply(model, case.recipe)
    output = train(model, family)
    penalty = handle.penalty()
    wanted = gradients(model, output) if case.kind != "penalty" else {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager_default_partitioner", fullgraph=True)
    again = train(compiled, family)
    assert_same(again, output, rtol=1e-4, atol=1e-5)
    assert_same(handle.penalty(), penalty, rtol=1e-4, atol=1e-6)
    if wanted:
        assert_same(gradients(model, again), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_summary_names_every_place_where_a_method_acts(case: Case) -> None:
    family = FAMILIES[0]
    model = original(family)
    handle = attemper.apply(model, case.recipe)
    first = case.recipe.split("(")[0].split(" ")[0]
    rows = [row for row in handle.summary() if row.method == first]
    blocks = {row.block for row in rows}
    assert blocks == ({0} if first == "graying" else set(range(len(find_sites(model).blocks))))
    assert all(row.site in str(handle) for row in rows)
