"""Shards and parquet files: found, remembered, and named where something is wrong with them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.tasks import scan_files as looking
from attemper.lab.tasks.registry import open_task, verify
from attemper.lab.tasks.streaming import rowgroups, tars
from attemper.lab.tasks.streaming.source import ReadAhead
from shards import jpeg, offline, opened, write_parquet, write_shard, write_wds

WDS, STREAMED = "wds:set(size=32)", "hf:hub(size=32)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with ragged shards and parquet files."""
    folder = tmp_path_factory.mktemp("data")
    write_wds(folder / "set", train=(17, 3, 11, 1), test=(9, 2))
    write_parquet(folder / "hub", train=(20, 13), test=(9,))
    return folder


@pytest.fixture(autouse=True)
def here_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with offline(tmp_path_factory.getbasetemp() / "prepared"):
        yield


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
    (tmp_path / looking.CACHE).write_text("in the way")
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
    free, bounded = (opened(STREAMED, root).pool for _ in range(2))
    order = torch.randperm(len(free))
    expected = [targets for _, targets in free.batches(order, 5)]
    monkeypatch.setattr(rowgroups, "LANES", 2)
    monkeypatch.setattr(rowgroups, "BUFFER", 1)
    assert torch.equal(torch.cat([targets for _, targets in bounded.batches(order, 5)]), torch.cat(expected))
    assert isinstance(bounded.store, rowgroups.RowGroupStore)
    assert 0 < sum(bounded.store.rows[group] for group in bounded.store._groups) <= 2 * (1 + 4)


def test_files_far_away_are_read_again_after_a_hitch_and_named_when_that_does_not_help(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [f"file://{file}" for file in sorted((root / "hub").glob("train-*"))]
    store = rowgroups.open_row_groups(files, "image", "label", tmp_path)
    store.check_classes(3)
    opening, pauses = [0], []

    def flaky(file: str) -> Any:
        opening[0] += 1
        if opening[0] <= failures:
            raise ConnectionError("the line is bad")
        return honest(file)

    honest = rowgroups.open_parquet
    monkeypatch.setattr(rowgroups, "open_parquet", flaky)
    monkeypatch.setattr(rowgroups.time, "sleep", pauses.append)
    store._open.clear()
    failures = 2
    assert store.hand_out(torch.tensor([0]))[0][:2] == (jpeg(0, 0), 0)
    assert pauses == list(rowgroups.PAUSES[:2])
    store._open.clear()
    opening[0], failures = 0, 99
    with pytest.raises(DataError, match=r"Row group 1 of 'file://.*train-00000.*' cannot be read: the line is bad"):
        store.hand_out(torch.tensor([5]))


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
