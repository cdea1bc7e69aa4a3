"""Large data sets: every sample once, in an order that only seed and epoch decide, from shards however ragged."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks.augment import Augmentation, parse_augmentation
from attemper.lab.tasks.streaming import source as stream_source
from attemper.lab.tasks.streaming import tars
from attemper.lab.tasks.streaming.pixels import Preparation
from attemper.lab.tasks.streaming.task import StreamTask
from attemper.lab.training import loop
from attemper.lab.training import ranks as ranks_module
from attemper.lab.training.checkpoint import load_checkpoint
from attemper.lab.training.data import RunData
from attemper.lab.training.loop import run
from attemper.lab.training.ranks import ALONE, Ranks, joined
from attemper.lab.training.spec import Budget, RunSpec
from endings import timeless
from shards import MODEL, jpeg, members, offline, opened, write_parquet, write_wds
from stops import StopError, die_at, stop_at
from teams import DIED, team

CPU = torch.device("cpu")
WDS, STREAMED, PREPARED = "wds:set(size=32)", "hf:hub(size=32)", "hf:hub(size=32, streaming=false)"
"""Else accelerate gives a rank several, which a process cannot have that was forked from one with several."""
EVERYTHING = "crop-flip+erasing(0.5)+mixup+cutmix"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with ragged shards and parquet files."""
    folder = tmp_path_factory.mktemp("data")
    write_wds(folder / "set", train=(17, 3, 11, 1), test=(9, 2))
    write_parquet(folder / "hub", train=(20, 13), test=(9,))
    return folder


@pytest.fixture(autouse=True)
def here_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, a cache that goes away, and sums in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with offline(tmp_path_factory.getbasetemp() / "prepared"):
        yield
    torch.set_num_threads(threads)


def spec(task: str = WDS, recipe: str = "dropkey(0.2)", **budget: Any) -> RunSpec:
    settings_ = {"epochs": 2, "batch_size": 5, "lr": 3e-3, "warmup_epochs": 1, "augment": EVERYTHING, **budget}
    return RunSpec(task=task, model=MODEL, recipe=recipe, seed=3, budget=Budget(**settings_))


# ------------------------------------------------------------------------------------------------------- whole epochs
def epoch_of(task: StreamTask, ranks: Ranks = ALONE, after: int = 0, **budget: Any) -> list[tuple[Tensor, Tensor]]:
    return list(RunData(spec(task.name, **budget), task, CPU, ranks).epoch(1, after))


def assert_equal(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> None:
    for (inputs, targets), (same, also) in zip(one, other, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, also)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("text", [WDS, STREAMED, PREPARED])
def test_batches_do_not_depend_on_the_number_of_worker_processes(text: str, root: Path) -> None:
    expected = epoch_of(opened(text, root))
    for workers in (1, 3):
        assert_equal(epoch_of(opened(text, root, workers)), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")
def test_workers_are_forked_even_in_a_process_that_was_spawned(root: Path) -> None:
    task = opened(WDS, root, workers=1)
    task.pool.store.cannot_be_sent = lambda: None  # type: ignore[attr-defined]
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    try:
        assert len(epoch_of(task)) == 4
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_the_pieces_that_workers_share(
    workers: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = epoch_of(opened(WDS, root))
    monkeypatch.setattr(stream_source, "PIECE", 2)
    assert_equal(epoch_of(opened(WDS, root, workers)), expected)


@pytest.mark.parametrize("text", [WDS, STREAMED])
@pytest.mark.parametrize("augment", ["none", EVERYTHING])
def test_ranks_together_have_the_batches_of_one_process(text: str, augment: str, root: Path) -> None:
    task = opened(text, root)
    whole = epoch_of(task, augment=augment)
    parts = [epoch_of(task, Ranks(rank, 3), augment=augment) for rank in range(3)]
    assert {len(part) for part in parts} == {len(whole)}, "no rank runs out before another"
    joined_up = [
        (torch.cat([inputs for inputs, _ in batch]), torch.cat([targets for _, targets in batch]))
        for batch in zip(*parts, strict=True)
    ]
    assert_equal(joined_up, whole)


@pytest.mark.parametrize("text", [WDS, STREAMED, PREPARED])
def test_an_epoch_and_its_validation_part_are_the_training_set(text: str, root: Path) -> None:
    task = opened(text, root)
    data = RunData(spec(text, augment="none", batch_size=1), task, CPU)
    seen = [inputs[0] for inputs, _ in data.epoch(1)]
    seen += [task.to_input(stored)[0] for stored, _ in data.validation.batches(torch.arange(len(data.validation)), 1)]
    every = [task.to_input(stored)[0] for stored, _ in task.pool.batches(torch.arange(len(task.pool)), 1)]
    assert len(every) == 32 + ("hub" in text)
    assert {each.numpy().tobytes() for each in seen} == {each.numpy().tobytes() for each in every}
    assert len(seen) == len(every) == len({each.numpy().tobytes() for each in every})


@pytest.mark.parametrize("text", [WDS, STREAMED, PREPARED])
def test_images_come_with_their_own_classes(text: str, root: Path) -> None:
    for source in (opened(text, root).pool, opened(text, root).test()):
        for stored, targets in source.batches(torch.arange(len(source)), 4):
            brightest = stored.float().mean((2, 3)).argmax(1)  # class 0 is red, 1 green, 2 blue
            assert torch.equal(brightest, targets)
        assert torch.equal(source.targets, torch.cat([t for _, t in source.batches(torch.arange(len(source)), 4)]))


def test_what_came_before_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = opened(WDS, root)
    whole = epoch_of(task)
    read = []
    fetch = tars.TarStore.fetch
    monkeypatch.setattr(tars.TarStore, "fetch", lambda self, item: (read.append(item), fetch(self, item))[1])
    assert_equal(epoch_of(task, after=3), whole[3:])
    assert len(read) == 5 * (len(whole) - 3)


def test_a_forked_worker_does_not_share_the_position_in_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(WDS, root).pool.store
    assert isinstance(store, tars.TarStore)
    (item,) = store.hand_out(torch.tensor([3]))
    data, _ = store.fetch(item)
    before = dict(store._open)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert store.fetch(item)[0] == data
    assert all(store._open[shard] is not file for shard, file in before.items())


def test_limits_keep_the_same_samples_for_everybody(root: Path) -> None:
    text = "wds:set(size=32, train=12, test=5)"
    one, other = opened(text, root), opened(text, root)
    assert (len(one.pool), len(one.test())) == (12, 5)
    assert members(one.pool.selection) == members(other.pool.selection)
    with pytest.raises(DataError, match="asks for 99 training images, and there are 32"):
        opened("wds:set(train=99)", root)


def test_ranks_share_repeated_crops_of_whole_files_as_one_process_has_them(root: Path) -> None:
    task = opened(WDS, root)
    budget = {"augment": f"resized-crop(0.2)+randaugment(9, p=0.5)+{EVERYTHING}", "batch_size": 6, "repeats": 3}
    whole = epoch_of(task, **budget)
    parts = [epoch_of(task, Ranks(rank, 2), **budget) for rank in range(2)]
    joined_up = [(torch.cat([a, c]), torch.cat([b, d])) for (a, b), (c, d) in zip(*parts, strict=True)]
    assert_equal(joined_up, whole)


def test_repeats_augment_every_image_anew(root: Path) -> None:
    source = opened(WDS, root).pool
    augmentation = parse_augmentation("crop-flip(8)")
    ((images, targets),) = source.epoch(0, 1, range(1), 12, slice(0, 12), augmentation, repeats=3)
    assert torch.equal(targets, targets[:4].repeat(3))
    assert len({image.numpy().tobytes() for image in images}) == 12
    ((plain, _),) = source.epoch(0, 1, range(1), 12, slice(0, 12), Augmentation(), repeats=3)
    assert len({image.numpy().tobytes() for image in plain}) == 4


# -------------------------------------------------------------------------------------------------------- single images
@dataclasses.dataclass(frozen=True)
class Crop:
    name: ClassVar[str] = "resized-crop"
    stage: ClassVar[str] = "pixels"
    scale: float = 0.08
    flip: float = 0.5
    interpolation: str = "bicubic"


def test_what_is_drawn_for_an_image_is_a_function_of_its_seed_and_disturbs_nobody() -> None:
    prepare, left = Preparation(16, 0.875).augmented(
        Augmentation((*parse_augmentation("mixup+erasing(1.0)").transforms, Crop()))
    )
    assert str(left) == "mixup"
    torch.manual_seed(0)
    random.seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    pictures = [prepare(jpeg(1, 0), seed) for seed in (5, 6)]
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    random.seed(9)
    torch.manual_seed(9)
    assert torch.equal(prepare(jpeg(1, 0), 5), pictures[0])
    assert not torch.equal(*pictures)
    assert pictures[0].shape == (3, 16, 16)
    assert pictures[0].dtype == torch.uint8


def test_what_works_on_inputs_leaves_all_other_pixels_as_they_were() -> None:
    plain = Preparation(32, 1.0)
    erased, _ = plain.augmented(parse_augmentation("erasing(1.0)"))
    before, after = plain(jpeg(1, 0), 3), erased(jpeg(1, 0), 3)
    changed = (before != after).any(0)
    assert 0.02 <= float(changed.double().mean()) <= 0.4
    assert after[:, changed].unique(dim=1).flatten().tolist() == [124, 116, 104], "ImageNet's mean colour"


def test_evaluation_cuts_the_middle_as_timm_does() -> None:
    import io

    from PIL import Image
    from timm.data import create_transform

    transform = create_transform(24, crop_pct=0.8, interpolation="bicubic", use_prefetcher=True)
    assert torch.equal(
        Preparation(24, 0.8)(jpeg(4, 1), 0), transform(Image.open(io.BytesIO(jpeg(4, 1))).convert("RGB"))
    )


# -------------------------------------------------------------------------------------------------------- interruptions
def stopped(batch: int, chosen: RunSpec, folder: Path, task: StreamTask) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(batch, patch)
        with pytest.raises(StopError):
            run(chosen, task, folder=folder, device="cpu")


@pytest.mark.parametrize("text", [WDS, STREAMED])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(
    text: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_WITHIN", -1.0)
    monkeypatch.setattr(loop, "CHECKPOINT_SHARE", float("inf"))
    chosen = spec(text, ema=0.9, accumulate=2, batch_size=3)
    whole = run(chosen, opened(text, root), device="cpu")
    for batch in (2, 4, 6):
        stopped(batch, chosen, tmp_path, opened(text, root, workers=batch % 4 // 2))
    assert timeless(run(chosen, opened(text, root), folder=tmp_path, device="cpu")) == timeless(whole)


def train(folder: Path, root: Path, killed: tuple[int, int] | None) -> Any:
    """A run of one of some ranks, checkpointed after every step; killed: which rank dies, at which batch."""
    loop.CHECKPOINT_WITHIN, loop.CHECKPOINT_SHARE, loop.REPORT_BATCHES = -1.0, float("inf"), 1
    ranks_module.PATIENCE = 0.2
    with joined() as ranks:
        if killed is not None and killed[0] == ranks.rank:
            die_at(killed[1])
        return timeless(run(spec(recipe="none"), opened(WDS, root), folder=folder, device="cpu"))


def test_two_ranks_go_on_with_the_same_bits_and_one_goes_on_where_two_were(root: Path, tmp_path: Path) -> None:
    whole = team(2, train, tmp_path / "whole", root, None)
    assert DIED in team(2, train, tmp_path / "cut", root, (1, 4))
    shutil.copytree(tmp_path / "cut", tmp_path / "alone")
    assert team(2, train, tmp_path / "cut", root, None) == whole
    state = load_checkpoint(tmp_path / "alone")
    assert state is not None
    assert state["story"]["batch"] in (2, 3)
    events: list[dict[str, Any]] = []
    result = run(
        spec(recipe="none"), opened(WDS, root), folder=tmp_path / "alone", device="cpu", progress=events.append
    )
    assert "was written by 2 processes, and the run goes on with one process" in events[0]["warning"]
    for mine, expected in zip(result["curve"], whole[0]["curve"], strict=True):
        assert mine["train_loss"] == pytest.approx(expected["train_loss"], abs=2e-3)


# ----------------------------------------------------------------------------------------------------- the command line
def test_train_on_shards_from_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", WDS, "--model", MODEL, "--recipe", "dropkey(0.1)", "--epochs", "6", "--batch-size", "8"]
    words += ["--augment", "crop-flip+mixup", "--warmup-epochs", "0", "--lr", "3e-3", "--data", str(root), "--json"]
    assert main(["train", *words, "--folder", str(tmp_path / "run"), "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["spec"]["task"] == WDS
    assert result["test"]["accuracy"] > 0.6, "red, green and blue are easy to tell apart"
    assert (tmp_path / "run" / "model.safetensors").exists()
