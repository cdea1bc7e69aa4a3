"""Large data sets: every sample once, in an order that only seed and epoch decide, from shards however ragged."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attemper.cli import main
from attemper.tasks import open_task
from attemper.tasks.augment import Augmentation, parse_augmentation
from attemper.tasks.errors import DataError
from attemper.tasks.opening import verify
from attemper.tasks.streaming import StreamTask, rowgroups, tars
from attemper.tasks.streaming import source as stream_source
from attemper.tasks.streaming.order import EpochOrder, Selection
from attemper.tasks.streaming.pixels import Preparation
from attemper.tasks.streaming.source import ReadAhead
from attemper.training import Budget, RunSpec, joined, loop, run
from attemper.training import ranks as ranks_module
from attemper.training.checkpoint import load_checkpoint
from attemper.training.data import RunData
from attemper.training.learner import Learner
from attemper.training.ranks import ALONE, Ranks
from shards import jpeg, write_parquet, write_shard, write_wds
from teams import DIED, team

CPU = torch.device("cpu")
WDS, STREAMED, PREPARED = "wds:set(size=32)", "hf:hub(size=32)", "hf:hub(size=32, streaming=false)"
MODEL = "vit-cifar(depth=1, width=16, heads=2, mlp=16, patch=8)"
EVERYTHING = "crop-flip+erasing(0.5)+mixup+cutmix"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with ragged shards and parquet files; one shard has more samples than a unit."""
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path_factory.mktemp("data")
    write_wds(folder / "set", train=(17, 3, 11, 1), test=(9, 2))
    write_parquet(folder / "hub", train=(20, 13), test=(9,))
    return folder


@pytest.fixture(autouse=True)
def here_alone(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, a cache that goes away, and sums in one order."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "prepared")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spec(task: str = WDS, recipe: str = "dropkey(0.2)", **budget: Any) -> RunSpec:
    settings_ = {"epochs": 2, "batch_size": 5, "lr": 3e-3, "warmup_epochs": 1, "augment": EVERYTHING, **budget}
    return RunSpec(task=task, model=MODEL, recipe=recipe, seed=3, budget=Budget(**settings_))


def opened(text: str, root: Path, workers: int = 0) -> StreamTask:
    task = open_task(text, root)
    assert isinstance(task, StreamTask)
    task.pool.workers = task.held_out.workers = workers
    return task


def timeless(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "timing"}


# ---------------------------------------------------------------------------------------------------------- arithmetic
@st.composite
def selections(draw: st.DrawFn) -> Selection:
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=60))
    ends = np.cumsum(counts)
    whole = Selection(ends - counts, np.array(counts), by_unit=draw(st.booleans()))
    held = draw(st.integers(0, len(whole)))
    return whole.divide(held, draw(st.integers(0, 3)))[draw(st.integers(0, 1))] if draw(st.booleans()) else whole


def members(selection: Selection) -> list[int]:
    return [sample for unit in range(len(selection.counts)) for sample in selection.unit(unit).tolist()]


@settings(max_examples=60, deadline=None)
@given(selections(), st.integers(1, 5), st.integers(1, 20), st.integers(1, 9), st.integers(1, 6), st.data())
def test_an_epoch_has_every_sample_once_wherever_it_is_entered_and_whoever_shares_it(
    selection: Selection, lanes: int, buffer: int, batch_size: int, ranks: int, data: st.DataObject
) -> None:
    order = EpochOrder(selection, seed=1, epoch=2, lanes=lanes, buffer=buffer)
    assert len(order) == len(selection)
    batches = [order.stretch(b * batch_size, (b + 1) * batch_size) for b in range(len(selection) // batch_size)]
    rest = order.stretch(len(batches) * batch_size, len(selection))
    assert sorted(torch.cat([*batches, rest]).tolist()) == members(selection)

    entered = data.draw(st.integers(0, len(batches)))
    later = EpochOrder(selection, seed=1, epoch=2, lanes=lanes, buffer=buffer)
    for number in range(entered, len(batches)):
        again = later.stretch(number * batch_size, (number + 1) * batch_size)
        assert torch.equal(again, batches[number])
        parts = [again[Ranks(rank, ranks).part(batch_size)] for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), batches[number])


@settings(max_examples=60, deadline=None)
@given(selections(), st.integers(0, 5), st.data())
def test_a_division_loses_nothing_shares_nothing_and_is_a_function_of_its_seed(
    selection: Selection, seed: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, len(selection)))
    exactly = data.draw(st.booleans())
    kept, out = selection.divide(held, seed, exactly=exactly)
    assert sorted(members(kept) + members(out)) == members(selection)
    assert not set(members(kept)) & set(members(out))
    assert members(selection.divide(held, seed, exactly=exactly)[1]) == members(out)
    if exactly or not selection.by_unit:
        assert len(out) == held
    for part in (kept, out):
        assert len(part) == len(members(part))
        assert part.stored(torch.arange(len(part))).tolist() == members(part)
        taken = data.draw(st.permutations(range(len(part))))[: len(part) // 2]
        assert members(part.take(torch.tensor(taken, dtype=torch.int64))) == [members(part)[each] for each in taken]


def many_units(by_unit: bool) -> Selection:
    starts = np.arange(0, 4000, 10)
    return Selection(starts, np.full(400, 10), by_unit)


def test_orders_and_divisions_differ_by_seed_and_epoch_and_are_well_mixed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return EpochOrder(many_units(False), seed, epoch).stretch(0, 200).tolist()

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(*each)) for each in ((0, 1), (0, 2), (1, 1))}) == 3
    assert len({sample // 10 for sample in order(0, 1)}) > 100, "a batch comes from many units"
    assert members(many_units(False).divide(40, 0)[1]) != members(many_units(False).divide(40, 1)[1])


def test_units_that_are_read_as_a_whole_are_held_out_as_a_whole_and_shared_by_few_ranks() -> None:
    kept, out = many_units(by_unit=True).divide(800, seed=0)
    assert len(out.counts) == 80
    assert set(out.counts.tolist()) == {10}
    order = EpochOrder(kept, seed=0, epoch=1)
    read: list[set[int]] = [set() for _ in range(4)]
    for batch in range(3200 // 64):
        samples = order.stretch(64 * batch, 64 * batch + 64)
        for rank in range(4):
            read[rank] |= {sample // 10 for sample in samples[Ranks(rank, 4).part(64)].tolist()}
    assert sum(map(len, read)) <= 1.1 * 320, "together they read hardly more than one process would"


def test_a_class_that_fills_its_shards_is_held_out_in_its_proportion() -> None:
    _, out = Selection(np.arange(0, 1000, 100), np.full(10, 100)).divide(100, seed=5)
    assert out.counts.tolist() == [10] * 10


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
class StopError(Exception):
    pass


def stopped(batch: int, chosen: RunSpec, folder: Path, task: StreamTask) -> None:
    learn, begun = Learner.learn, [0]

    def counting(self: Learner, inputs: Tensor, targets: Tensor) -> None:
        begun[0] += 1
        if begun[0] == batch:
            raise StopError
        learn(self, inputs, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "learn", counting)
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
            learn, begun = Learner.learn, [0]

            def counting(self: Learner, inputs: Tensor, targets: Tensor) -> None:
                begun[0] += 1
                if begun[0] == killed[1]:
                    os.kill(os.getpid(), signal.SIGKILL)
                learn(self, inputs, targets)

            Learner.learn = counting  # type: ignore[method-assign]
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
    assert "was written by 2 processes, and one process go on with it" in events[0]["warning"]
    for mine, expected in zip(result["curve"], whole[0]["curve"], strict=True):
        assert mine["train_loss"] == pytest.approx(expected["train_loss"], abs=2e-3)


# --------------------------------------------------------------------------------------------------------------- stores
def test_headers_are_read_once_and_again_when_a_shard_changes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wds(tmp_path / "set", train=(4, 4), test=(2,))
    first = opened(WDS, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(tars, "scan", lambda *_: pytest.fail("the headers were read again"))
        assert opened(WDS, tmp_path).fingerprint == first.fingerprint
    write_shard(tmp_path / "set" / "train-0001.tar", [("a", {"jpg": jpeg(0, 0), "cls": b"1"})])
    assert len(opened(WDS, tmp_path).pool) == 5


def test_the_fingerprint_is_of_the_samples_and_not_of_times_or_places(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_wds(tmp_path / name / "set", train=(4, 4), test=(2,))
    os.utime(tmp_path / "two" / "set" / "train-0000.tar", (1, 1))
    one, two = (opened(WDS, tmp_path / name).fingerprint for name in ("one", "two"))
    assert one == two
    samples = [(f"{i:06d}", {"jpg": jpeg(i, i % 3), "cls": b"2"}) for i in range(4)]
    write_shard(tmp_path / "two" / "set" / "train-0000.tar", samples)
    assert opened(WDS, tmp_path / "two").fingerprint != one
    assert opened("wds:set(size=24)", tmp_path / "one").fingerprint != one


def test_a_data_root_that_cannot_be_written_costs_a_note_and_nothing_else(tmp_path: Path) -> None:
    write_wds(tmp_path / "set", train=(4,), test=(2,))
    (tmp_path / tars.CACHE).write_text("in the way")
    lines = verify(WDS, tmp_path)
    assert "The index of the shards cannot be kept" in lines[1]


@pytest.mark.parametrize("layout", ["info", "folders", "names"])
def test_parts_are_found_by_description_by_folder_and_by_name(layout: str, tmp_path: Path) -> None:
    write_wds(tmp_path / "set", train=(4, 3), test=(2,), info=layout == "info")
    if layout == "folders":
        for part in ("train", "val"):
            for shard in list((tmp_path / "set").glob(f"{part}-*.tar")):
                (tmp_path / "set" / part).mkdir(exist_ok=True)
                shard.rename(tmp_path / "set" / part / shard.name.removeprefix(part))
    task = opened(WDS, tmp_path)
    assert (len(task.pool), len(task.test()), task.classes) == (7, 2, ("0", "1", "2"))


def test_patterns_name_shards(root: Path) -> None:
    for held_out in ("val-{0000..0001}.tar", "set/val-{0000..0001}.tar"):
        task = opened(f"wds:set/train-{{0000..0002}}.tar(size=32, held_out='{held_out}')", root)
        assert (len(task.pool), len(task.test())) == (31, 11)


def test_row_groups_in_memory_are_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = opened(STREAMED, root)
    monkeypatch.setattr(rowgroups, "LANES", 2)
    monkeypatch.setattr(rowgroups, "BUFFER", 1)
    expected = epoch_of(opened(STREAMED, root), augment="none")
    assert_equal(epoch_of(task, augment="none"), expected)
    store = task.pool.store
    assert isinstance(store, rowgroups.RowGroupStore)
    assert 0 < sum(store.rows[group] for group in store._groups) <= 2 * (1 + 4)


def test_reading_ahead_passes_values_and_errors_on_and_ends_when_nobody_listens() -> None:
    def values() -> Iterator[int]:
        yield from range(3)
        raise OSError("gone")

    ahead = ReadAhead(values(), 2)
    taken = iter(ahead)
    assert [next(taken) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="gone"):
        next(taken)
    endless = ReadAhead(iter(int, 1), 2)
    next(iter(endless))
    endless.close()
    assert not endless.thread.is_alive()


# ------------------------------------------------------------------------------------------------------------ bad input
def cut_off(folder: Path) -> None:
    shard = folder / "set" / "train-0001.tar"
    shard.write_bytes(shard.read_bytes()[:2100])


def header_broken(folder: Path) -> None:
    shard = folder / "set" / "train-0001.tar"
    data = bytearray(shard.read_bytes())
    second = data.index(b"000005.jpg")
    data[second : second + 512] = b"x" * 512
    shard.write_bytes(data)


def replaced(files: dict[str, bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        write_shard(
            folder / "set" / "train-0001.tar", [("a/first", {"jpg": jpeg(0, 0), "cls": b"0"}), ("a/odd", files)]
        )

    return damage


def renamed(folder: Path) -> None:
    (folder / "set" / "val-0000.tar").rename(folder / "set" / "held-0000.tar")


def promised(folder: Path) -> None:
    write_wds(folder / "set", train=(4, 4), test=(2,), info=True)
    described = json.loads((folder / "set" / "_info.json").read_text())
    described["splits"]["train"]["shard_lengths"] = [4, 6]
    (folder / "set" / "_info.json").write_text(json.dumps(described))


BAD_SHARDS: list[tuple[str, Callable[[Path], None], str]] = [
    (WDS, cut_off, r"train-0001.tar' is damaged, or not a tar file without compression: unexpected end of data"),
    (WDS, header_broken, r"train-0001.tar' is damaged.*there is neither a file nor the end"),
    (
        WDS,
        lambda folder: (folder / "set" / "train-0001.tar").write_bytes(b"no tar" * 200),
        "train-0001.tar' is damaged",
    ),
    (WDS, lambda folder: write_shard(folder / "set" / "train-0001.tar", []), "train-0001.tar' has no sample in it"),
    (
        WDS,
        replaced({"cls": b"1"}),
        r"Sample 'a/odd' in '.*0001.tar' has no image: it has .cls, and none of .jpg, .jpeg",
    ),
    (WDS, replaced({"jpg": b""}), r"Sample 'a/odd' in '.*0001.tar' has no class: it has .jpg, and no .cls"),
    (WDS, replaced({"jpg": b"", "cls": b"cat"}), r"'a/odd.cls' in '.*' is b'cat'; it must be the number of a class"),
    (WDS, replaced({"jpg": b"", "cls": b"-1"}), r"Sample 'a/odd' in '.*' has class -1, and classes are counted from 0"),
    (
        "wds:set(classes=2)",
        lambda _: None,
        r"'000002.jpg' in '.*train-0000.tar' has class 2, and there are 2, from 0 to 1",
    ),
    (WDS, renamed, "has no shards for test, val or validation; name the test part with held_out"),
    (WDS, promised, "train-0001.tar' has 4 samples, and _info.json promises 6"),
    (
        "wds:set(held_out=train)",
        lambda _: None,
        "2 shards are in the training and in the test part of '.*train-0000.tar'",
    ),
    ("wds:nowhere", lambda _: None, "'nowhere' is not a folder with shards"),
    ("wds:set(training=fit)", lambda _: None, "no shards for 'fit': neither _info.json, nor a folder 'fit'"),
    ("wds:set/train-{0000..0001}.tar", lambda _: None, "name those of the test set too"),
    (
        "wds:set/train-{0000..0009}.tar(held_out='val-0000.tar')",
        lambda _: None,
        "8 of the 10 shards of 'train-{0000..0009}.tar' are not in '.*', the first of them 'train-0002.tar'",
    ),
    ("wds:none/train-{0..1}.tar", lambda _: None, "there is no folder 'none'"),
    ("wds:https://host/train-{0..1}.tar", lambda _: None, "is not on this machine.*stream the data set with hf:NAME"),
    ("wds:set(crop=1.5)", lambda _: None, r"crop is 1.5; it must be a share"),
]


@pytest.mark.parametrize(("text", "damage", "message"), BAD_SHARDS)
def test_bad_shards_are_named_with_what_would_be_right(
    text: str, damage: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wds(tmp_path / "set", train=(4, 4), test=(2,))
    damage(tmp_path)
    assert main(["data", "verify", text, "--data", str(tmp_path)]) == 2
    complaint = " ".join(capsys.readouterr().err.split())
    assert re.search(message, complaint), complaint


def test_an_image_that_cannot_be_decoded_is_named_from_a_worker_too(tmp_path: Path) -> None:
    write_wds(tmp_path / "set", train=(4,), test=(2,))
    broken = {"jpg": jpeg(0, 0)[:200], "cls": b"1"}
    write_shard(tmp_path / "set" / "train-0001.tar", [("a/broken", broken)])
    for workers in (0, 1):
        source = opened(WDS, tmp_path, workers).pool
        with pytest.raises(DataError, match=r"^'a/broken.jpg' in '.*train-0001.tar' is not an image that can be read"):
            list(source.batches(torch.arange(len(source)), 2))


def unlabelled(folder: Path) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    for part, label in (("train", 0), ("test", -1)):
        rows = {"image": [{"bytes": jpeg(0, 0), "path": None}] * 3, "label": [label] * 3}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "hub" / f"{part}.parquet")


BAD_HUB: list[tuple[str, str]] = [
    (
        "hf:hub(training=trian)",
        r"'hub' has no split 'trian'. Did you mean 'train'\? It has: train, test; choose with the option training",
    ),
    ("hf:hub(held_out=dev)", "'hub' has no split 'dev'.*choose with the option held_out"),
    ("hf:hub(held_out=train)", "would train and test on the same split, 'train'"),
    ("hf:hub(image=img)", "has no column 'img'.*It has: image, label; choose with the option image"),
    ("hf:hub(label=image)", "The column 'image' of '.*' holds struct.*no numbers of classes"),
    ("hf:hub(image=label)", "The column 'label' of '.*' holds int64, and no images"),
    ("hf:hub(classes=5)", "'hub' has 3 classes in 'label', and the option classes says 5"),
    ("hf:hub(streaming=false, label=klass)", "timm's reader .* cannot open .* 'image' and 'klass'"),
    ("hf:hub(streaming=false, config=default)", "config is 'default'; it can be chosen with streaming=true only"),
    ("hf:hub(config=small)", "cannot open '.*hub' with the configuration 'small'"),
    ("hf:no-such-set-anywhere", "Hugging Face's library cannot open 'no-such-set-anywhere'"),
]


@pytest.mark.parametrize(("text", "message"), BAD_HUB)
def test_splits_and_columns_that_are_not_there_are_named_beside_those_that_are(
    text: str, message: str, root: Path
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        open_task(text, root)
    assert type(caught.value).__module__.startswith("attemper.")


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_test_split_without_classes_is_named(streaming: str, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    unlabelled(tmp_path)
    with pytest.raises(DataError, match=r"has class -1 in 'label', and there are 3, counted from 0.* held_out"):
        open_task(f"hf:hub(size=32, streaming={streaming})", tmp_path)


def test_a_class_that_cannot_be_is_named_when_it_is_read(root: Path) -> None:
    store = opened(STREAMED, root).pool.store
    with pytest.raises(DataError, match=r"Row 3 of row group 1 in '.*train-00000-of-00002.parquet' has class 3"):
        store.fetch((jpeg(0, 0), 3, 1, 3))
    with pytest.raises(DataError, match=r"Row 3 of row group 1 in '.*' has no image in 'image'"):
        store.fetch((None, 0, 1, 3))


def test_what_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "hub")
    damaged = next((tmp_path / "hub").glob("train-00001*"))
    damaged.write_bytes(b"PAR1" + b"nonsense" * 9)
    with pytest.raises(DataError, match=r"train-00001-of-00002.parquet' is damaged, or not a parquet file"):
        open_task("hf:hub", tmp_path)
    for file in (tmp_path / "hub").glob("*.parquet"):
        file.unlink()
    (tmp_path / "hub" / "train.csv").write_text("label\n1\n")
    (tmp_path / "hub" / "test.csv").write_text("label\n1\n")
    with pytest.raises(DataError, match=r"has other files than parquet, such as '.*train.csv'.* With streaming=false"):
        open_task("hf:hub", tmp_path)


@pytest.mark.parametrize(("text", "absent"), [(WDS, "webdataset"), (STREAMED, "datasets")])
def test_an_extra_that_is_not_installed_is_named(
    text: str, absent: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(DataError, match=rf"{absent} is not installed: pip install 'attemper\[stream\]'"):
        open_task(text, root)


# ----------------------------------------------------------------------------------------------------- the command line
def test_train_on_shards_from_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", WDS, "--model", MODEL, "--recipe", "dropkey(0.1)", "--epochs", "6", "--batch-size", "8"]
    words += ["--augment", "crop-flip+mixup", "--warmup-epochs", "0", "--lr", "3e-3", "--data", str(root), "--json"]
    assert main(["train", *words, "--folder", str(tmp_path / "run"), "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["spec"]["task"] == WDS
    assert result["test"]["accuracy"] > 0.6, "red, green and blue are easy to tell apart"
    assert (tmp_path / "run" / "model.safetensors").exists()
