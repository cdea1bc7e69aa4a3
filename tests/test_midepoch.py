"""A run that is stopped inside of an epoch goes on at the same step, and ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.lab.tasks.base import Task
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import loop
from attemper.lab.training import ranks as ranks_module
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from attemper.lab.training.data import RunData
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import joined
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_same_end, timeless
from stops import StopError, die_at, stop_at
from teams import DIED, team

TASK = "digits(train=200, test=50)"
MODEL = "vit-digits(depth=2, width=16, heads=2, mlp=16)"
STEPS = 7
"""Of an epoch of batches of 20."""
"""Else accelerate gives a rank several, which a process cannot have that was forked from one with several."""
EVERYTHING = {"ema": 0.9, "clip": 1.0, "accumulate": 2, "batch_size": 10, "augment": "crop-flip(1)+mixup"}


@pytest.fixture(autouse=True)
def at_every_step_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checkpoints after every step, and sums in one order."""
    monkeypatch.setattr(loop, "CHECKPOINT_WITHIN", -1.0)
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec(recipe: str = "dropkey(0.2) + droppath(0.1)", **budget: Any) -> RunSpec:
    given = {"epochs": 3, "batch_size": 20, "lr": 3e-3, "warmup_epochs": 1, "augment": "crop-flip(1)+mixup"}
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=3, budget=Budget(**{**given, **budget}))


def stopped(batch: int, chosen: RunSpec, folder: Path, task: Task | None = None, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(batch, patch)
        with pytest.raises(StopError):
            run(chosen, task or open_task(TASK), folder=folder, **options)


# --------------------------------------------------------------------------------------------------------- one process
@pytest.mark.parametrize(
    ("recipe", "budget"),
    [
        ("dropkey(0.2) + droppath(0.1)", {}),
        ("dropattention(0.1) + rdrop(0.5) + explicit(v=5e-4)", EVERYTHING | {"optimizer": "adamw"}),
    ],
)
def test_a_run_stopped_at_any_batch_ends_with_the_same_bits(
    recipe: str, budget: dict[str, Any], tmp_path: Path
) -> None:
    chosen = spec(recipe, **budget)
    whole = run(chosen, open_task(TASK), folder=tmp_path / "whole", probe_every=2)
    for batch in (3, 4, 6, 9):  # from where it was each time
        torch.manual_seed(batch)  # another process would start from other random numbers
        stopped(batch, chosen, tmp_path / "cut", probe_every=2)
    resumed = run(chosen, open_task(TASK), folder=tmp_path / "cut", probe_every=2)
    assert timeless(resumed) == timeless(whole)
    assert whole["probes"], "and attention was looked at"
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_a_checkpoint_is_written_between_steps_of_the_optimiser_only(tmp_path: Path) -> None:
    places = []
    for batch in range(1, 7):
        stopped(batch, spec("none", **EVERYTHING), tmp_path / str(batch))
        state = load_checkpoint(tmp_path / str(batch))
        places.append(0 if state is None else state["story"]["batch"])
    assert places == [0, 0, 2, 2, 4, 4]


def test_what_came_before_is_neither_read_nor_augmented_again(tmp_path: Path) -> None:
    class Counting(type(open_task(TASK).split(0, 0.3)[0])):  # type: ignore[misc]
        def batches(self, order: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
            read.append(len(order))
            return super().batches(order, batch_size)  # type: ignore[no-any-return]

    read: list[int] = []
    data = RunData(spec(), open_task(TASK), torch.device("cpu"))
    data.train = Counting(data.train.images, data.train.targets)  # type: ignore[attr-defined]
    everything = list(data.epoch(2))
    rest = list(data.epoch(2, after=4))
    assert read == [STEPS * 20, (STEPS - 4) * 20]
    for (inputs, targets), (same, also) in zip(everything[4:], rest, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, also)


def test_a_run_killed_between_its_last_step_and_the_end_of_the_epoch_does_not_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(spec(epochs=1), open_task(TASK))

    def failing(*_: Any) -> None:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", failing)
        with pytest.raises(StopError):
            run(spec(epochs=1), open_task(TASK), folder=tmp_path)
    stop_at(1, monkeypatch)
    assert timeless(run(spec(epochs=1), open_task(TASK), folder=tmp_path)) == timeless(whole)


def test_a_run_that_diverged_before_its_checkpoint_diverges_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "REPORT_EVERY", 1e9)  # nobody looks before the end of the epoch
    wild = spec("none", lr=1e6, warmup_epochs=0, loss_bound=30.0)
    whole = run(wild, open_task(TASK))
    assert whole["status"] == "diverged"
    for batch in (1, 2, 3):
        stopped(batch, wild, tmp_path)
    assert timeless(run(wild, open_task(TASK), folder=tmp_path)) == timeless(whole)


def test_checkpoints_inside_of_an_epoch_wait_for_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_WITHIN", 300.0)
    stopped(STEPS, spec("none"), tmp_path)
    assert not (tmp_path / CHECKPOINT).exists()


def test_checkpoints_that_take_long_are_written_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", 1e-9)  # the first one is as late as it would be, the second is not
    stopped(STEPS, spec("none"), tmp_path)
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert state["story"]["batch"] == 1


def test_a_checkpoint_from_before_there_were_any_inside_of_epochs_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    whole = run(spec(), open_task(TASK))
    stopped(STEPS + 1, spec(), tmp_path)
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert state["story"].pop("batch") == 0
    assert "meter" not in state
    save_checkpoint(tmp_path, state)
    assert timeless(run(spec(), open_task(TASK), folder=tmp_path)) == timeless(whole)


# ------------------------------------------------------------------------------------------------------- several ranks
def train(folder: Path, chosen: RunSpec, parallel: Any = None, killed: tuple[int, int] | None = None) -> Any:
    """A run, checkpointed after every step, with the warnings that it gave; killed: which rank dies, at which batch."""
    loop.CHECKPOINT_WITHIN, loop.CHECKPOINT_SHARE, loop.REPORT_BATCHES = -1.0, float("inf"), 1
    ranks_module.PATIENCE = 0.2  # nobody can say why a rank was killed
    warnings: list[str] = []
    with joined(parallel) as ranks:
        if killed is not None and killed[0] == ranks.rank:
            die_at(killed[1])
        told = lambda event: warnings.extend([event["warning"]] if "warning" in event else [])  # noqa: E731
        result = run(chosen, open_task(TASK), folder=folder, progress=told, device="cpu")
    return timeless(result), warnings


@pytest.mark.parametrize(
    ("parallel", "epochs", "kills"),
    [("ddp", 2, ((1, 4), (0, 13))), pytest.param("fsdp", 1, ((1, 6),), marks=pytest.mark.slow)],
)
def test_ranks_that_are_killed_inside_of_an_epoch_end_with_the_same_bits(
    parallel: str, epochs: int, kills: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    chosen = spec("dropkey(0.2) + explicit(v=5e-4)", **EVERYTHING, epochs=epochs)
    whole = team(2, train, tmp_path / "whole", chosen, parallel)
    for killed in kills:
        answers = team(2, train, tmp_path / "cut", chosen, parallel, killed)
        assert answers[killed[0]] == DIED
        state = load_checkpoint(tmp_path / "cut")
        assert state is not None
        assert state["story"]["batch"] > 0
    resumed = team(2, train, tmp_path / "cut", chosen, parallel)
    assert [result for result, _ in resumed] == [result for result, _ in whole]
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    shards = list((tmp_path / "cut").glob("checkpoint-shards-*"))
    assert len(shards) == (1 if parallel == "fsdp" else 0), "the last good ones, and no others"


def test_another_number_of_ranks_goes_on_at_the_same_batch_and_says_so(tmp_path: Path) -> None:
    chosen = spec("none", epochs=2)
    whole = run(chosen, open_task(TASK))
    assert DIED in team(2, train, tmp_path, chosen, "ddp", (0, 5))
    state = load_checkpoint(tmp_path)
    assert state is not None
    assert state["story"]["batch"] in (3, 4)
    events: list[dict[str, Any]] = []
    result = run(chosen, open_task(TASK), folder=tmp_path, progress=events.append)
    assert "was written by 2 processes, and the run goes on with one process" in events[0]["warning"]
    for mine, expected in zip(result["curve"], whole["curve"], strict=True):
        assert mine["train_loss"] == pytest.approx(expected["train_loss"], abs=2e-3)
