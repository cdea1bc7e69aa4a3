"""A run writes down the seed of every training pass, once, whatever interrupts it; its masks come back from there."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attemper
from attemper.lab.errors import StorageError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import loop, seed_log
from attemper.lab.training.loop import run
from attemper.lab.training.seed_log import SEEDS, SeedLog
from attemper.lab.training.spec import Budget, RunSpec
from attemper.methods import DropPath
from attemper.tempering import draws

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "digits(train=200, test=50)"
MODEL = "vit-digits(depth=2, width=16, heads=2, mlp=16)"
EPOCHS, STEPS = 3, 7


def spec(recipe: str, **budget: Any) -> RunSpec:
    given = {"epochs": EPOCHS, "batch_size": 20, "warmup_epochs": 1, "augment": "crop-flip(1)+mixup"}
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=3, budget=Budget(**{**given, **budget}))


def rows(folder: Path) -> list[tuple[int, int]]:
    """(step, seed) of every pass that was written down."""
    with (folder / SEEDS).open(newline="") as file:
        return [(int(row["step"]), int(row["pass_seed"])) for row in csv.DictReader(file)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of all training passes."""
    seeds: list[int] = []
    draw = draws.draw_seed

    def watched(where: Any) -> Tensor:
        seed = draw(where)
        if not seed.is_meta:
            seeds.append(int(seed))
        return seed

    monkeypatch.setattr(draws, "draw_seed", watched)
    return seeds


@pytest.mark.parametrize(
    ("recipe", "budget", "passes"),
    [
        ("dropkey(0.2) + droppath(0.1)", {}, 1),
        ("dropkey(0.2) + rdrop", {"epochs": 1}, 2),
        ("ffdropout(0.2)", {"accumulate": 2, "batch_size": 10, "epochs": 1}, 2),
        ("dropkey(0.2)", {"last_epochs_without": 2}, 1),
    ],
)
def test_every_pass_of_every_step_has_a_line_with_its_seed(
    recipe: str, budget: dict[str, Any], passes: int, tmp_path: Path, drawn: list[int]
) -> None:
    run(spec(recipe, **budget), open_task(TASK), folder=tmp_path)
    found = rows(tmp_path)
    epochs = budget.get("epochs", EPOCHS) - budget.get("last_epochs_without", 0)  # at rate zero nothing is drawn
    assert epochs > 0
    assert [step for step, _ in found] == [step for step in range(1, epochs * STEPS + 1) for _ in range(passes)]
    assert [seed for _, seed in found] == drawn[: len(found)]
    assert len(set(drawn)) == len(drawn)


def test_a_recipe_that_draws_nothing_has_no_file(tmp_path: Path) -> None:
    run(spec("explicit(v=1e-4)", epochs=1), open_task(TASK), folder=tmp_path)
    assert not (tmp_path / SEEDS).exists()


class StopError(Exception):
    pass


@pytest.mark.parametrize("within", [False, True])
def test_a_run_that_is_interrupted_has_every_line_once(
    within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = spec("dropkey(0.2) + droppath(0.1)")
    run(chosen, open_task(TASK), folder=tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    if within:  # checkpoints after every step
        monkeypatch.setattr(loop, "CHECKPOINT_WITHIN", -1.0)
        monkeypatch.setattr(loop, "CHECKPOINT_SHARE", float("inf"))
    note = SeedLog.note
    for last in (3, STEPS + 2, 2):
        made: list[int] = []

        def noted(self: SeedLog, step: int, seeds: Any, made: list[int] = made, last: int = last) -> None:
            note(self, step, seeds)
            made.append(step)
            self.write()  # so that there are lines of steps behind the checkpoint
            if len(made) == last:
                raise StopError

        with monkeypatch.context() as patch:
            patch.setattr(SeedLog, "note", noted)
            with pytest.raises(StopError):
                run(chosen, open_task(TASK), folder=tmp_path / "cut")
        with (tmp_path / "cut" / SEEDS).open("a") as file:
            file.write("99")  # a process that was killed may leave half a line
    run(chosen, open_task(TASK), folder=tmp_path / "cut")
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_a_log_that_is_damaged_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / SEEDS).write_bytes(b"\xff\xfe\x00")
    log = SeedLog(tmp_path)
    log.resume(5)
    log.note(6, [torch.tensor(-(2**63)), torch.tensor(2**63 - 1)])
    log.write(durable=True)
    log.write()
    assert rows(tmp_path) == [(6, -(2**63)), (6, 2**63 - 1)]


def test_a_captured_step_may_write_over_its_seed(tmp_path: Path) -> None:
    log, seed = SeedLog(tmp_path), torch.zeros((), dtype=torch.int64)
    log.resume(0)
    for step in (1, 2):
        log.note(step, [seed.fill_(10 * step)])
    log.write()
    assert rows(tmp_path) == [(1, 10), (2, 20)]


def test_a_disk_that_takes_no_seeds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seed_log, "atomic_write", full)
    with pytest.raises(StorageError, match=r"seeds\.csv' could not be written: No space left"):
        SeedLog(tmp_path).resume(0)
    with pytest.raises(StorageError, match="could not be written"):
        SeedLog(tmp_path / "gone").write()


def test_a_logged_pass_can_be_looked_at_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    map_branch = DropPath.map_branch

    def watched(self: Any, branch: Tensor, stream: Any) -> Tensor:
        out = map_branch(self, branch, stream)
        if not branch.is_meta:
            kept.append((out != 0).flatten(1).any(1))
        return out

    chosen, task = spec("droppath(0.4)", epochs=1), open_task(TASK)
    with monkeypatch.context() as patch:
        patch.setattr(DropPath, "map_branch", watched)
        run(chosen, task, folder=tmp_path)
    model = build_model(chosen.model, task.shape).train()
    tempered = attemper.apply(model, chosen.recipe)
    model(task.shape.example(20)[0])
    masks = list(tempered.masks(rows(tmp_path)[-1][1]).values())
    assert [mask.flatten().tolist() for mask in masks] == [mask.tolist() for mask in kept[-len(masks) :]]
