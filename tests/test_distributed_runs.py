"""Whole runs and studies by several processes: interrupted, gone on with, sharded, and from the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from attemper.lab.cli import main
from attemper.lab.evaluation.runs import load_run
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import loop
from attemper.lab.training import ranks as ranks_module
from attemper.lab.training.checkpoint import load_checkpoint
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import joined
from attemper.lab.training.spec import Budget, RunSpec
from endings import assert_equal_bits, flat
from stops import die_at
from teams import DIED, free_port, team

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = "digits(train=200, test=50)"
MODEL = "vit-digits(depth=2, width=16, heads=2, mlp=16)"
STEPS = 7
"""Of an epoch."""


def spec(recipe: str, **budget: Any) -> RunSpec:
    given = {"epochs": 3, "batch_size": 20, "lr": 3e-3, "warmup_epochs": 1, "augment": "crop-flip(1)+mixup"}
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=3, budget=Budget(**{**given, **budget}))


def train(folder: Path, chosen: RunSpec, parallel: Any = None, killed: tuple[int, int] | None = None) -> Any:
    """A run, checkpointed after every epoch, with the warnings that it gave; killed: which rank dies, at which step."""
    loop.CHECKPOINT_EVERY = 0.0
    ranks_module.PATIENCE = 0.2  # nobody can say why a rank was killed
    warnings: list[str] = []
    with joined(parallel) as ranks:
        if killed is not None and killed[0] == ranks.rank:
            die_at(killed[1])
        told = lambda event: warnings.extend([event["warning"]] if "warning" in event else [])  # noqa: E731
        result = run(chosen, open_task(chosen.task), folder=folder, progress=told, device="cpu")
    return {name: value for name, value in result.items() if name != "timing"}, warnings


def cannot_write(folder: Path, chosen: RunSpec) -> Any:
    """A run whose weights cannot be written in the end, and what comes after it."""
    from attemper.lab.study.rank_team import regrouping

    with joined() as ranks:
        with contextlib.suppress(Exception), regrouping(ranks):
            block = lambda event: (folder / "model.safetensors" / "in the way").mkdir(parents=True, exist_ok=True)  # noqa: E731
            run(chosen, open_task(TASK), folder=folder, progress=block, device="cpu")
            return "written"
        return ranks.gather(ranks.rank)


def assert_same_end(one: Path, other: Path) -> None:
    """Checkpoints and weights hold the same bits, the random states of all ranks among them."""
    assert_equal_bits(*(flat(load_checkpoint(each)) | load_file(each / "model.safetensors") for each in (one, other)))


# -------------------------------------------------------------------------------------------------------- interruptions
@pytest.mark.parametrize(
    ("size", "recipe", "budget", "kills"),
    [
        (2, "dropkey(0.2) + rdrop(0.5)", {"ema": 0.9, "clip": 1.0}, [(0, 2 * STEPS), (1, STEPS + 3)]),
        (4, "dropattention(0.2) + droppath(0.1) + explicit(v=5e-4)", {"batch_size": 22, "accumulate": 2}, [(2, 9)]),
    ],
)
def test_a_run_whose_ranks_are_killed_at_any_step_ends_with_the_same_bits(
    size: int, recipe: str, budget: dict[str, Any], kills: list[tuple[int, int]], tmp_path: Path
) -> None:
    chosen = spec(recipe, **budget)
    whole = team(size, train, tmp_path / "whole", chosen)
    assert all(result == whole[0][0] for result, _ in whole), "every rank has the result"
    for killed in kills:
        answers = team(size, train, tmp_path / "cut", chosen, None, killed)
        assert answers[killed[0]] == DIED
    resumed = team(size, train, tmp_path / "cut", chosen)
    assert [result for result, _ in resumed] == [result for result, _ in whole]
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_a_sharded_run_goes_on_with_the_same_bits_and_says_what_it_cannot_read(tmp_path: Path) -> None:
    chosen = spec("dropkey(0.2) + explicit(v=5e-4)", ema=0.9, accumulate=2, batch_size=10)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    (expected, _), _ = team(2, train, whole, chosen, "fsdp")
    assert len(list(whole.glob("checkpoint-shards-*"))) == 1, "the last good ones, and no others"
    assert team(2, train, cut, chosen, "fsdp", (1, 2 * STEPS + 9))[1] == DIED
    shutil.copytree(cut, tmp_path / "ragged")
    (resumed, _), _ = team(2, train, cut, chosen, "fsdp")
    assert resumed == expected
    assert_same_end(cut, whole)

    next((tmp_path / "ragged").glob("checkpoint-shards-*/__1_*")).unlink()
    (again, warnings), _ = team(2, train, tmp_path / "ragged", chosen, "fsdp")
    assert again == expected
    assert "checkpoint-shards-" in warnings[0]
    assert "cannot be read (FileNotFoundError: " in warnings[0]
    assert "__1_0.distcp" in warnings[0]
    assert "the run starts again" in warnings[0]
    for kind, text in team(2, train, whole, chosen, "ddp"):
        assert kind in ("StorageError", "RankError")
        assert "was written with --parallel fsdp" in text


def test_a_run_goes_on_with_another_number_of_processes_and_says_so(tmp_path: Path) -> None:
    chosen = spec("none")
    whole = run(chosen, open_task(TASK))
    for before, after, parallel in ((2, 3, "ddp"), (3, 2, "fsdp"), (2, 1, "ddp")):
        folder = tmp_path / f"{before}-{after}"
        team(before, train, folder, chosen, parallel, (0, STEPS + 2))
        (result, warnings), *_ = team(after, train, folder, chosen, parallel)
        words = "one process" if after == 1 else f"{after} processes"
        assert f"was written by {before} processes, and the run goes on with {words}" in warnings[0]
        assert len(result["curve"]) == 3
        for mine, expected in zip(result["curve"], whole["curve"], strict=True):
            assert mine["train_loss"] == pytest.approx(expected["train_loss"], abs=2e-3)


# ----------------------------------------------------------------------------------------------------- the command line
def typed(*words: str, failing: bool = False) -> tuple[int, str, str]:
    """What a rank answers to a command. failing: the first run goes wrong on rank 1."""
    if failing and os.environ["RANK"] == "1":
        fail_once()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def typed_with_a_failure(*words: str) -> tuple[int, str, str]:
    return typed(*words, failing=True)


def fail_once() -> None:
    import attemper.lab.training.loop

    honest = attemper.lab.training.loop.run

    def failing(*args: Any, **options: Any) -> Any:
        attemper.lab.training.loop.run = honest
        raise ValueError("out of luck")

    attemper.lab.training.loop.run = failing


SMALL = ("--task", TASK, "--model", MODEL, "--epochs", "2", "--batch-size", "20")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_train_speaks_and_writes_once_and_leaves_whole_weights(parallel: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("train", *SMALL, "--folder", str(folder), "--device", "cpu", "--json")
    zero, one = team(2, typed, *words, "--parallel", parallel)
    assert zero[0] == one[0] == 0, zero[2]
    result = json.loads(zero[1])
    assert one[1:] == ("", "")
    assert result["versions"]["ranks"] == f"2, {parallel}"
    assert json.loads((folder / "result.json").read_text()) == result
    alone = run(RunSpec.from_dict(result["spec"]), open_task(TASK))
    assert result["test"] == pytest.approx(alone["test"], abs=1e-3)
    assert load_run(folder).model.training is False


def test_what_needs_the_whole_model_is_refused_for_a_sharded_one() -> None:
    words = ("train", *SMALL, "--device", "cpu", "--parallel", "fsdp", "--evaluate", "calibration")
    for code, _, complaint in team(2, typed, *words):
        assert code == 2
        assert "--evaluate is calibration, which needs the whole model in one process" in complaint


def test_compare_trains_every_run_with_all_ranks_and_survives_a_run_that_fails_on_one(tmp_path: Path) -> None:
    words = ("compare", *SMALL, "--recipes", "dropkey(0.1)", "--seeds", "2", "--folder", str(tmp_path / "study"))
    zero, one = team(2, typed_with_a_failure, *words, "--no-costs")
    assert zero[0] == one[0] == 0, zero
    assert one[1:] == ("", "")
    assert "went wrong: RankError: Rank 1 stopped: ValueError: out of luck" in zero[1]
    results = [json.loads(path.read_text()) for path in (tmp_path / "study" / "runs").glob("*.json")]
    assert len(results) == 4
    assert {result["versions"]["ranks"] for result in results} == {"2, ddp"}
    assert json.loads((tmp_path / "study" / "summary.json").read_text())["complete"] is True
    assert (tmp_path / "study" / "report.html").exists()


def typed_without_locks(*words: str) -> tuple[int, str, str]:
    from attemper.lab.study import locks

    late = locks.RIVAL.replace("flush=True)\n", "flush=True)\nimport time\ntime.sleep(1)\n")
    locks.RIVAL = late.replace("os.O_EXCL", "0")  # a file system that forgets it
    return typed(*words)


def test_compare_refuses_a_folder_without_working_locks_on_all_ranks(tmp_path: Path) -> None:
    zero, one = team(2, typed_without_locks, "compare", *SMALL, "--seeds", "1", "--folder", str(tmp_path / "study"))
    assert zero[0] == one[0] == 2
    assert "has no working locks" in zero[2]
    assert "Rank 0 stopped: FolderError: The file system of" in one[2]


def test_what_goes_wrong_at_the_very_end_leaves_the_ranks_ready_too(tmp_path: Path) -> None:
    assert team(2, cannot_write, tmp_path / "run", spec("none", epochs=1)) == [[0, 1], [0, 1]]


def test_workers_and_ranks_are_one_too_many(tmp_path: Path) -> None:
    words = ("compare", *SMALL, "--folder", str(tmp_path / "study"), "--workers", "3")
    zero, one = team(2, typed, *words)
    assert zero[0] == one[0] == 2
    assert "workers is 3" in zero[2]
    assert "Rank 0 stopped: StudyError: workers is 3" in one[2]


@pytest.mark.parametrize(
    ("launcher", "parallel"),
    [
        (["torch.distributed.run", "--nproc-per-node", "2"], "ddp"),
        pytest.param(
            ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"],
            "fsdp",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "accelerate launch"],
)
def test_launchers_start_ranks_that_find_each_other(launcher: list[str], parallel: str, tmp_path: Path) -> None:
    words = [*launcher, f"--{'master-port' if 'torch' in launcher[0] else 'main_process_port'}", str(free_port())]
    words += ["-m", "attemper", "train", *SMALL, "--epochs", "1", "--device", "cpu", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["ranks"] == f"2, {parallel}"
