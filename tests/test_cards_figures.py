"""What the cards of methods quote of our own experiments stands in the records that are kept of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECORDS = {
    "digits skips": "skips.json",
    "digits graying": "graying.json",
    "skips": "cifar10-skips/skips.json",
    "graying": "cifar10-graying/graying.json",
    "variance": "cifar10-gradient-variance/gradient-variance.json",
}


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "results" / RECORDS[name]).read_text(encoding="utf-8"))
    return found


def arms(name: str) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in record(name)["arms"]}


def accuracy(arm: dict[str, Any]) -> str:
    return f"{100 * arm['mean']:.2f} ± {100 * arm['deviation']:.2f}"


def of_skips(name: str) -> Iterator[str]:
    found = arms(name)
    for arm in ("ViT, both skips", "ViT, no MLP skip", "ViT, no attention skip"):
        yield accuracy(found[arm])
    for bare, whole in (("mixer, no skip", "mixer, both skips"), ("ResNet, no skip", "ResNet, with skips")):
        lost = 100 * (found[whole]["mean"] - found[bare]["mean"])
        if lost > 0:
            yield f"{lost:.1f}"
    if name == "digits skips":
        for arm in ("ViT, both skips", "ViT, no MLP skip"):
            yield f"{found[arm]['median'][-1]:.1f}"
        yield f"{found['ViT, no attention skip']['median'][-1]:.1e}".replace("e+0", "e")


def of_graying_digits() -> Iterator[str]:
    found = arms("digits graying")
    yield f"{found['none']['median'][0]:.3g}"
    for eps in ("0.9", "0.7", "0.5"):
        yield f"{found[f'svd on tokens, ε = {eps}']['median'][0]:.3g}"
    tokens = [found[f"dct on tokens, ε = {eps}"]["median"][0] for eps in ("0.95", "0.9", "0.8")]
    yield f"{min(tokens):.3g} to {max(tokens):.3g}"
    for arm in ("none", "svd on patches, ε = 0.5", "dct on patches, ε = 0.8"):
        yield f"{found[arm]['patches_median']:.3g}"
    patches = [arm["median"][0] for name, arm in found.items() if "on patches" in name]
    yield f"{min(patches):.1f} and {max(patches):.1f}"
    means = [100 * arm["mean"] for name, arm in found.items() if name != "none"]
    yield f"{min(means):.1f} to {max(means):.1f}"


def of_variance(*arms_named: str) -> Iterator[str]:
    """How much lower the variance is along an arm's own training in the end, and its interval."""
    for row in record("variance")["gradients"]:
        if (row["point"], row["at"]) == ("end", "own training") and row["arm"] in arms_named:
            mean, low, high = (100 * row["variance"][key] for key in ("mean", "low", "high"))
            yield f"{-mean:.1f} %"
            yield f"({-high:.1f} to {-low:.1f})" if high < 0 else f"(−{-low:.1f} to +{high:.1f})"


QUOTED = {
    "skipless, digits": ("skipless", lambda: of_skips("digits skips")),
    "skipless": ("skipless", lambda: of_skips("skips")),
    "graying, digits": ("graying", of_graying_digits),
    "blur": ("blur", lambda: of_variance("blur", "blur + consistency")),
    "hardmask": ("hardmask", lambda: of_variance("hardmask", "hardmask + consistency")),
    "consistency": ("consistency", lambda: of_variance("blur + consistency", "hardmask + consistency")),
}


@pytest.mark.parametrize("case", QUOTED)
def test_cards_quote_what_the_records_have(case: str) -> None:
    card, figures = QUOTED[case]
    text = " ".join((DOCS / "methods" / f"{card}.md").read_text(encoding="utf-8").split())
    ours = " ".join(re.findall(r"(?:\[On|\[on) (?:digits|CIFAR-10)\]\(\.\./results/.*?(?= ##|$)", text))
    wanted = list(figures())
    # A card says "is 12.2 % lower (3.3 to 21.2)" too.
    missing = [each for each in wanted if each not in ours and each.strip("()") not in ours]
    assert wanted
    assert not missing
