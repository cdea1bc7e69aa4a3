"""Summaries of made-up studies, in the form that the report is given: usual ones, odd ones and a malicious one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

EVIL = """</script><script>window.hurt=1</script><img src=x onerror="window.hurt=1">'"&"""
NAMES = [
    "none",
    "dropkey(0.1)",
    "dropkey(0.2, schedule=decreasing)",
    "dropattention(0.1)",
    "explicit v + ff",
    "cb",
    "hardmask",
    "blur + consistency",
    "drophead(0.1)",
    "layerdrop(0.1)",
    "droppath(0.1)",
    "ffdropout(0.1)",
    "dropconnect(0.1)",
    "rdrop",
    "graying",
]


def curve(rng: random.Random, top: float, epochs: int, penalty: bool) -> list[dict[str, Any]]:
    points = []
    for epoch in range(1, epochs + 1):
        grown = 1 - math.exp(-4 * epoch / epochs)
        accuracy = top * grown + rng.gauss(0, 0.006)
        points.append(
            {
                "epoch": epoch,
                "lr": 1e-3,
                "train_loss": 2.3 * (1 - 0.95 * grown),
                "train_accuracy": min(1.0, accuracy + 0.08 * grown),
                "penalty": 0.05 * (2 - grown) if penalty else 0.0,
                "validation": {"accuracy": accuracy, "loss": 2.3 * (1 - 0.8 * grown) + abs(rng.gauss(0, 0.02))},
            }
        )
    return points


def entry(at: int, name: str, *, seeds: int, epochs: int, rng: random.Random) -> dict[str, Any]:
    top = 0.84 + 0.012 * math.sin(at)
    test = [top + 0.006 * rng.gauss(0, 1) for _ in range(seeds)]
    mean = sum(test) / seeds
    deviation = math.sqrt(sum((t - mean) ** 2 for t in test) / (seeds - 1)) if seeds > 1 else None
    shift = mean - 0.84
    difference = {"mean": shift, "low": shift - 0.008, "high": shift + 0.008, "p": 0.02, "adjusted": 0.04 + 0.03 * at}
    difference |= {"alone": [shift - 0.005, shift + 0.005], "level": 0.05 / 7, "spread": 0.004, "seeds": seeds}
    answer = ("better", "worse", "equivalent", "undecided")[at % 4]
    more = 7 if answer == "undecided" else None
    decision = {"answer": answer, "real": at % 3 == 0, "better": 0.97, "within": 0.2, "smallest": 0.011, "more": more}
    recipe = "explicit(v=0.0005, ff=0.0005)" if name.startswith("explicit") else name
    grid = [
        {"recipe": recipe, "lr": lr, "validation": mean - 0.01 * step, "runs": seeds, "chosen": step == 0}
        for step, lr in enumerate((1e-3, 5e-4))
    ]
    stochastic = name.startswith(("drop", "layer", "ff"))
    rate = [0.1 * (7 - block) / 7 if "decreasing" in name else 0.1 for block in range(7)]
    method = name.split("(")[0].split(" ")[0]
    acting = [{"method": method, "block": b, "rate": rate[b] if stochastic else None} for b in range(7)]
    ratio = 1 + 0.04 * at
    return {
        "name": name,
        "recipe": recipe,
        "lr": 0.001,
        "configurations": grid,
        "seeds": list(range(seeds)),
        "test": test,
        "validation": [value + 0.004 for value in test],
        "train": [min(1.0, value + 0.09 - 0.004 * at) for value in test],
        "mean": mean,
        "deviation": deviation,
        "difference": None if name == "none" or seeds < 2 else difference,
        "decision": None if name == "none" or seeds < 2 else decision,
        "sample": {"items": 10_000, "error": 0.004, "difference": None if name == "none" else 0.002},
        "rank": {"mean": at + 1.5, "low": at + 1.0, "high": at + 3.0},
        "diverged": 0,
        "missing": 0,
        "parameters": 2_692_618 + (1344 if name == "cb" else 0),
        "cost": {
            "ratio": ratio,
            "low": ratio - 0.01,
            "high": ratio + 0.02,
            "milliseconds": 12.5 * ratio,
            "peak_memory": int(1.2 * 2**30),
        },
        "curves": [curve(rng, top, epochs, name.startswith("explicit")) for _ in range(seeds)],
        "rates": [] if name == "none" else acting,
        "published": None,
    }


def summary(recipes: int = 8, *, seeds: int = 5, epochs: int = 30, **changes: Any) -> dict[str, Any]:
    """A finished study of some recipes."""
    rng = random.Random(0)
    names = NAMES[:recipes]
    return {
        "title": "cifar10 · vit-cifar",
        "metric": "accuracy",
        "verdict": "dropkey(0.1) is better than the baseline: by 1.0 points, 95 % interval 0.2 to 1.8. No other is.",
        "plan": {
            "task": "cifar10",
            "model": "vit-cifar",
            "seeds": seeds,
            "budget": {"epochs": epochs, "batch_size": 128},
            "lr": [1e-3, 5e-4],
            "recipes": names,
        },
        "versions": {"attemper": "0.1.0", "torch": "2.15.0", "python": "3.12.4", "device": "cpu"},
        "command": "attemper compare plan.yaml --folder studies/cifar10",
        "complete": True,
        "confidence": 0.95,
        "margin": {"value": 0.005, "given": False},
        "recipes": [entry(at, name, seeds=seeds, epochs=epochs, rng=rng) for at, name in enumerate(names)],
        **changes,
    }


def published_beside(given: dict[str, Any]) -> dict[str, Any]:
    for at, recipe in enumerate(given["recipes"][:4]):
        recipe["published"] = {
            "value": 85.24 + at,
            "deviation": 0.75 if at else None,
            "source": "Explicit dropout, table 1",
        }
    return given


def reproduced(given: dict[str, Any], *, another: bool = False) -> dict[str, Any]:
    """A study of a published table: two columns, settings of all three standings, a note."""
    for at, recipe in enumerate(published_beside(given)["recipes"]):
        shared = {"condition": "", "deviation": 0.75, "unit": "%", "source": "Explicit dropout, table 1"}
        ours = 100 * recipe["mean"]
        first = {"column": "", "metric": "", "published": 85.24 + at, "ours": ours, "ours_deviation": 0.4}
        second = {"column": "FGSM, %", "metric": "FGSM 1/255", "published": 11.8, "ours": None, "ours_deviation": None}
        told = {"condition": "one step of 1/255", "deviation": None, "source": "table S2"}
        difference = None if another else ours - 85.24 - at
        cells = [{**shared, **first, "difference": difference}, {**shared, **second, **told, "difference": None}]
        recipe["beside"] = cells if at < 4 else []
    given["reference"] = {
        "table": "cb-robustness",
        "source": "Explicit dropout, table 1",
        "notes": ["The text says something else."],
        "apart": "The figures were published for ImageNet-1K, and this ran on digits: no difference is taken."
        * another,
        "standing": "Settings: 1 as printed; 1 other than printed (epochs); 1 ours (seeds).",
        "settings": [
            {"name": "lr", "here": "0.001", "printed": "1e-3", "agrees": True, "standing": "as printed"},
            {"name": "epochs", "here": "40", "printed": "200", "agrees": False, "standing": "other"},
            {"name": "seeds", "here": "3", "printed": "", "agrees": False, "standing": "ours"},
        ],
    }
    return given


def unfinished() -> dict[str, Any]:
    given = summary(4, complete=False)
    given["recipes"][1].update(missing=3, test=[0.8, 0.82, None, None, None], difference=None, rank=None)
    given["recipes"][2].update(
        missing=5, mean=None, deviation=None, difference=None, rank=None, cost=None, curves=[], rates=[], lr=None
    )
    for part in ("test", "train", "validation"):
        given["recipes"][2][part] = [None] * 5
    return given


def diverged() -> dict[str, Any]:
    given = summary(3)
    broken = given["recipes"][1]
    broken["diverged"] = 2
    for curve in broken["curves"][:2]:
        del curve[6:]
        curve[-1].update(train_loss=None, train_accuracy=None, penalty=None, validation=None)
        curve[-2]["validation"]["loss"] = 9_000.0
    return given


def equal() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"]:
        recipe.update(test=[0.5] * 5, train=[0.5] * 5, mean=0.5, deviation=0.0)
        if recipe["difference"]:
            recipe["difference"] = {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0, "adjusted": 1.0}
            recipe["decision"] = {"answer": "equivalent", "real": False, "better": None, "smallest": None, "more": None}
        recipe["cost"].update(ratio=1.0, low=1.0, high=1.0)
        for curve in recipe["curves"]:
            for at in curve:
                at.update(train_loss=1.0, train_accuracy=0.5, validation={"accuracy": 0.5, "loss": 1.0})
    return given


def without_cost() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"]:
        recipe["cost"] = None
    return given


def long_names() -> dict[str, Any]:
    given = summary(3)
    for recipe in given["recipes"][1:]:
        recipe["name"] = recipe["recipe"] = "explicit(" + ", ".join(f"v{i}=0.0005" for i in range(30)) + recipe["name"]
    return given


def with_classes(classes: int = 10) -> dict[str, Any]:
    """Every recipe with a confusion matrix, most of it on the diagonal."""
    rng = random.Random(1)
    given = summary(4)
    for recipe in given["recipes"]:
        confusion = [[rng.choice((0, 0, 1, 3)) for _ in range(classes)] for _ in range(classes)]
        for at in range(classes):
            confusion[at][at] = 60 + at
        names = ["blues", "a class with a long name", *(f"genre {at}" for at in range(2, classes))]
        recipe["details"] = {"classes": names[:classes], "confusion": confusion, "runs": 5}
    return given


def poisoned() -> dict[str, Any]:
    given = published_beside(summary(4))
    given.update(
        title=EVIL, verdict=EVIL, command=EVIL, cautions=[EVIL], reading=EVIL, versions={EVIL: EVIL}, metric="accuracy"
    )
    given["plan"].update(task=EVIL, model=EVIL, budget={EVIL: EVIL})
    for recipe in given["recipes"][1:]:
        recipe.update(name=recipe["name"] + EVIL, recipe=EVIL)
        recipe["published"] = {"value": 80.0, "deviation": None, "source": EVIL}
        recipe["rates"] = [{"method": EVIL, "block": 0, "rate": 0.1}, {"method": EVIL + "2", "block": 0, "rate": None}]
        recipe["configurations"][0]["recipe"] = EVIL
        recipe["beside"] = [
            {"column": EVIL, "published": 80.0, "ours": 1.0, "difference": 1.0, "condition": EVIL, "source": EVIL}
        ]
    given["reference"] = {
        **dict.fromkeys(("table", "source", "apart", "standing"), EVIL),
        "notes": [EVIL],
        "settings": [{"name": EVIL, "here": EVIL, "printed": EVIL, "standing": EVIL}],
    }
    for recipe in given["recipes"]:
        recipe["details"] = {"classes": [EVIL, EVIL + "2"], "confusion": [[3, 1], [0, 4]], "runs": 5}
    return given


STUDIES: dict[str, Callable[[], dict[str, Any]]] = {
    "usual": lambda: published_beside(summary()),
    "reproduced": lambda: reproduced(summary()),
    "reproduced on another task": lambda: reproduced(summary(), another=True),
    "unfinished": unfinished,
    "diverged": diverged,
    "one seed": lambda: summary(3, seeds=1),
    "one epoch": lambda: summary(3, epochs=1),
    "no cost": without_cost,
    "fifteen recipes": lambda: summary(15, epochs=200),
    "long names": long_names,
    "classes": with_classes,
    "many classes": lambda: with_classes(20),
    "all equal": equal,
    "only none": lambda: summary(1),
    "empty": lambda: summary(0, verdict="", complete=False),
}
