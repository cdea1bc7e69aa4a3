"""A run that is interrupted goes on as if it had not been; a checkpoint is whole, or set aside, or absent."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attemper.lab.errors import StorageError
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import loop
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from attemper.lab.training.loop import run
from attemper.lab.training.randomness import random_state, seed_everything, set_random_state
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_same_end, timeless

TASK = "digits(train=200, test=50)"
EPOCHS = 5


@pytest.fixture(autouse=True)
def every_epoch_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checkpoints after every epoch, and sums in one order."""
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec(recipe: str = "dropkey(0.2) + droppath(0.1)", **budget: Any) -> RunSpec:
    given = {
        "epochs": EPOCHS,
        "batch_size": 32,
        "lr": 3e-3,
        "warmup_epochs": 1,
        "augment": "crop-flip(1)+mixup",
        **budget,
    }
    model = "vit-digits(depth=2, width=16, heads=2, mlp=16)"
    return RunSpec(task=TASK, model=model, recipe=recipe, seed=3, budget=Budget(**given))


class StopError(Exception):
    pass


def stop_after(epoch: int) -> Any:
    def progress(event: dict[str, Any]) -> None:
        if event["validation"] is not None and event["epoch"] == epoch:
            raise StopError

    return progress


@pytest.mark.parametrize(
    ("recipe", "budget"),
    [
        ("dropkey(0.2) + droppath(0.1)", {}),
        ("cb(cb_s) + explicit(v=5e-4, ff=5e-4)", {"ema": 0.9, "optimizer": "adamw", "accumulate": 2, "clip": 1.0}),
        ("dropkey(learn) + droppath(0.2, start=1, until=0.7, ramp=1)", {"last_epochs_without": 1}),
    ],
)
def test_a_run_interrupted_after_any_epoch_ends_with_the_same_bits(
    recipe: str, budget: dict[str, Any], tmp_path: Path
) -> None:
    whole = run(spec(recipe, **budget), open_task(TASK), folder=tmp_path / "whole")
    for epoch in (1, 2, 4, EPOCHS):
        torch.manual_seed(epoch)  # another process would start from other random numbers
        with pytest.raises(StopError):
            run(spec(recipe, **budget), open_task(TASK), folder=tmp_path / "cut", progress=stop_after(epoch))
    resumed = run(spec(recipe, **budget), open_task(TASK), folder=tmp_path / "cut")
    assert timeless(resumed) == timeless(whole)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_a_run_without_a_checkpoint_yet_starts_again_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", 1e9)
    with pytest.raises(StopError):
        run(spec(), open_task(TASK), folder=tmp_path, progress=stop_after(2))
    assert not (tmp_path / CHECKPOINT).exists()
    assert timeless(run(spec(), open_task(TASK), folder=tmp_path)) == timeless(run(spec(), open_task(TASK)))
    assert (tmp_path / CHECKPOINT).exists(), "the last epoch always has a checkpoint"


def test_a_finished_run_is_measured_again_without_training(tmp_path: Path) -> None:
    first = run(spec(), open_task(TASK), folder=tmp_path)
    epochs: list[Any] = []
    again = run(spec(), open_task(TASK), folder=tmp_path, progress=epochs.append)
    assert epochs == []
    assert timeless(again) == timeless(first)


def test_a_run_that_diverged_diverges_again_when_resumed(tmp_path: Path) -> None:
    wild = spec("none", lr=1e6, warmup_epochs=0, loss_bound=30.0)
    results = [timeless(run(wild, open_task(TASK), folder=tmp_path)) for _ in range(2)]
    assert results[0] == results[1]
    assert results[0]["status"] == "diverged"


SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.spec import RunSpec
from attemper.lab.training import loop
from attemper.lab.training.loop import run
import json
loop.CHECKPOINT_EVERY = 0.0
spec = RunSpec.from_dict(json.loads(sys.argv[2]))
run(spec, open_task(spec.task), folder=Path(sys.argv[1]), progress=lambda event: print(event["epoch"], flush=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_run_that_is_killed_outright_ends_with_the_same_bits(tmp_path: Path) -> None:
    lasting = spec(epochs=12)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cut"), json.dumps(lasting.to_dict())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 4:
            pass
        time.sleep(0.03)  # somewhere inside of a step, an evaluation or a checkpoint
        process.send_signal(signal.SIGKILL)
    state = load_checkpoint(tmp_path / "cut")
    assert state is not None
    assert 3 <= state["story"]["epoch"] < 12
    resumed = run(lasting, open_task(TASK), folder=tmp_path / "cut")
    whole = run(lasting, open_task(TASK), folder=tmp_path / "whole")
    assert timeless(resumed) == timeless(whole)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


# ------------------------------------------------------------------------------------------------------- bad weather
def cut_short(data: bytes) -> bytes:
    return data[: len(data) // 2]


def one_bit_flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("damage", [cut_short, one_bit_flipped, lambda data: b"", lambda data: b"nonsense" * 9])
def test_a_damaged_checkpoint_is_set_aside_named_and_the_run_starts_again(damage: Any, tmp_path: Path) -> None:
    with pytest.raises(StopError):
        run(spec(), open_task(TASK), folder=tmp_path, progress=stop_after(2))
    file = tmp_path / CHECKPOINT
    damaged = damage(file.read_bytes())
    file.write_bytes(damaged)
    events: list[dict[str, Any]] = []
    result = run(spec(), open_task(TASK), folder=tmp_path, progress=events.append)
    warnings = [event["warning"] for event in events if "warning" in event]
    assert len(warnings) == 1
    assert f"'{CHECKPOINT}.damaged-1'" in warnings[0]
    assert (tmp_path / f"{CHECKPOINT}.damaged-1").read_bytes() == damaged
    assert timeless(result) == timeless(run(spec(), open_task(TASK)))


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    events: list[dict[str, Any]] = []
    with pytest.raises(StorageError, match=r"No checkpoint can be written to '.*file/run': Not a directory"):
        run(spec("none"), open_task(TASK), folder=tmp_path / "file" / "run", progress=events.append)
    assert events == [], "it was found out before training started"


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / f".{CHECKPOINT}.12345").write_bytes(b"half")
    run(spec("none", epochs=1), open_task(TASK), folder=tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [CHECKPOINT, "model.safetensors", "run.json"]


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, {"epoch": 1})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        save_checkpoint(tmp_path, {"epoch": 2})
    assert [each.name for each in tmp_path.iterdir()] == [CHECKPOINT]
    assert load_checkpoint(tmp_path) == {"epoch": 1}


def test_every_generator_is_kept_and_put_back() -> None:
    seed_everything(4)
    state = random_state()
    draws = [float(torch.rand(())), float(np.random.rand()), random.random()]
    set_random_state(state)
    assert [float(torch.rand(())), float(np.random.rand()), random.random()] == draws
