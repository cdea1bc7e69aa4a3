"""Experiments from the papers, ready to run: train a few arms, look inside them, and put both side by side.

Each arm is a model and a recipe. All arms of an experiment get the same data, budget and seeds. What is looked at are
the weights of the epoch that was best on validation, on images of the test set.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import attemper
from attemper.errors import ParameterError, suggestion
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task
from attemper.lab.tasks.notifications import LogCallback
from attemper.lab.training.check import check_run
from attemper.lab.training.checkpoint import load_checkpoint
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.probes.diagnosis import find_attention, head_rows
from attemper.probes.tokens import conditioning_after
from attemper.probes.watching import in_eval
from attemper.sites import find_sites

IMAGES = 64
"""Of the test set that are looked at."""
MOST_SEEDS = 1_000


@dataclasses.dataclass(frozen=True)
class Arm:
    """One model under one recipe. VIT and MIXER in the model stand for those of the task."""

    name: str
    recipe: str = "none"
    model: str = "VIT"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is trained, what is looked at in it, and what the paper found."""

    title: str
    measure: str
    """entropy: normalised attention entropy of every block; condition: κ of the tokens before and behind the blocks."""
    expected: str
    arms: tuple[Arm, ...]


EXPERIMENTS = {
    "entropy-cb": Experiment(
        "Attention entropy with and without context broadcasting",
        "entropy",
        "Attention asks for dense interactions; given the mean by cb, it can be sparser: lower entropy in deep blocks.",
        (Arm("none"), Arm("cb", "cb"), Arm("cb_s", "cb(variant=cb_s)")),
    ),
    "entropy-dropkey": Experiment(
        "Attention entropy with DropKey against dropout on attention weights",
        "entropy",
        "DropKey penalises what attends to single keys: it spreads attention, and raises its entropy.",
        (Arm("none"), Arm("dropkey", "dropkey(0.2)"), Arm("dropout", "dropattention(0.2, rescale=inverted)")),
    ),
    "skips": Experiment(
        "Condition number and accuracy without the skip round attention or the MLP",
        "condition",
        "Both skips ≥ no MLP skip ≫ no attention skip for a ViT; a convolutional mixer hardly notices.",
        (
            Arm("ViT, both skips"),
            Arm("ViT, no MLP skip", "skipless(mlp)"),
            Arm("ViT, no attention skip", "skipless(attention)"),
            Arm("mixer, both skips", model="MIXER"),
            Arm("mixer, no channel skip", model="MIXER(channel_skip=False)"),
            Arm("mixer, no spatial skip", model="MIXER(spatial_skip=False)"),
        ),
    ),
    "graying": Experiment(
        "Condition number and accuracy over ε of token graying",
        "condition",
        "A smaller ε makes the tokens that go in better conditioned; accuracy gains while the image survives it.",
        (
            Arm("none"),
            *(Arm(f"svd, ε = {eps}", f"graying(kind=svd, where=tokens, eps={eps})") for eps in (0.9, 0.7, 0.5)),
            *(Arm(f"dct, ε = {eps}", f"graying(kind=dct, where=tokens, eps={eps})") for eps in (0.95, 0.9, 0.8)),
        ),
    ),
}


def find_experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in EXPERIMENTS:
        raise ParameterError(
            f"There is no experiment '{name}'.{suggestion(name, EXPERIMENTS)} There are: {', '.join(EXPERIMENTS)}."
        )
    return EXPERIMENTS[name]


def run_experiment(
    name: str,
    task: Task,
    *,
    budget: Budget,
    seeds: int = 3,
    vit: str = "vit-digits",
    mixer: str = "convmixer(width=32, depth=4, kernel=3)",
    device: torch.device | str | None = None,
    log: LogCallback = lambda line: None,
) -> dict[str, Any]:
    """Train every arm under every seed, look into it, and give plain data: one entry per arm.

    vit, mixer: the models that the arms' placeholders stand for.
    log: called with a line per finished run.
    """
    experiment = find_experiment(name)
    if not 1 <= seeds <= MOST_SEEDS:
        raise ParameterError(f"seeds is {seeds}; it must be from 1 to {MOST_SEEDS:,}.")
    for arm in experiment.arms:  # all of them before any is trained
        model = _fill(arm.model, vit, mixer)
        check_run(RunSpec(task=task.name, model=model, recipe=arm.recipe, seed=0, budget=budget), task)
    arms = []
    for arm in experiment.arms:
        runs = []
        for seed in range(seeds):
            model = _fill(arm.model, vit, mixer)
            spec = RunSpec(task=task.name, model=model, recipe=arm.recipe, seed=seed, budget=budget)
            runs.append(_one(spec, task, experiment.measure, device))
            log(f"{arm.name}, seed {seed}: {100 * runs[-1]['test']:.2f} %")
        arms.append(_summary(arm, runs))
    return {
        "experiment": name,
        "title": experiment.title,
        "measure": experiment.measure,
        "expected": experiment.expected,
        "task": task.name,
        "metric": task.primary,
        "models": {"ViT": vit, "mixer": mixer},
        "budget": budget.to_dict(),
        "seeds": seeds,
        "images": IMAGES,
        "versions": {"attemper": attemper.__version__, "torch": torch.__version__},
        "arms": arms,
    }


def _fill(model: str, vit: str, mixer: str) -> str:
    """The placeholder of an arm, with its options joined to those of the model that it stands for."""
    for word, text in (("VIT", vit), ("MIXER", mixer)):
        if model.startswith(word):
            options = model.removeprefix(word).strip("()")
            if not options:
                return text
            return f"{text.removesuffix(')')}, {options})" if text.endswith(")") else f"{text}({options})"
    return model


def _one(spec: RunSpec, task: Task, measure: str, device: torch.device | str | None) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        result = run(spec, task, folder=Path(folder), device=device)
        checkpoint = load_checkpoint(Path(folder))
    model = build_model(spec.model, task.shape)
    attemper.apply(model, spec.recipe)
    if checkpoint is not None:  # a run that diverged in its first epoch has none; its initial weights are looked at
        model.load_state_dict(checkpoint["best"])
    held_out = task.test()
    stored, _ = next(held_out.batches(torch.arange(min(IMAGES, len(held_out))), IMAGES))
    inputs = task.to_input(stored)
    look = _entropies if measure == "entropy" else _conditions
    metric = result["metric"]
    return {
        "test": result["test"][metric],
        "train": result["train"][metric],
        "status": result["status"],
        "blocks": look(model, inputs),
    }


def _entropies(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """Normalised entropy of every block, the mean over its heads."""
    with in_eval(model), torch.no_grad():
        rows, _ = head_rows(model, inputs, find_attention(model), frozenset({"entropy"}))
    blocks = sorted({row.block for row in rows})
    return [statistics.fmean(row.normalised or 0.0 for row in rows if row.block == block) for block in blocks]


def _conditions(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """κ of the tokens that the first block computes with, then behind every block; medians over images."""
    sites = find_sites(model)
    names = [site.name for site in sites.blocks]
    if not sites.attentions:
        mixing = [name for name, _ in model.named_modules() if name.startswith("blocks.") and name.count(".") == 1]
        names = ["patches", *mixing]
    found = conditioning_after(model, inputs, names)
    behind = [each.condition for each in found.values()]
    if "patches" in found:
        return behind
    # Graying acts at the entry of the first block, which is seen from inside of it.
    tokens = attemper.diagnose(model, inputs, ["conditioning"]).tokens
    return [next(row.condition for row in tokens if row.place == "input"), *behind]


def _summary(arm: Arm, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    blocks = [[run["blocks"][at] for run in runs] for at in range(len(runs[0]["blocks"]))]
    test = [run["test"] for run in runs]
    return {
        "name": arm.name,
        "model": arm.model,
        "recipe": arm.recipe,
        "test": test,
        "train": [run["train"] for run in runs],
        "mean": statistics.fmean(test),
        "deviation": statistics.stdev(test) if len(test) > 1 else None,
        "diverged": sum(run["status"] == "diverged" for run in runs),
        "blocks": [[_known(value) for value in values] for values in blocks],
        "median": [_known(statistics.median(values)) for values in blocks],
    }


def _known(value: float) -> float | None:
    """The value; None where it is no number, or a κ that float64 cannot tell from infinity."""
    return value if value < 1 / torch.finfo(torch.float64).eps else None
