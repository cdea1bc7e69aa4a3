"""Files are written atomically, and everything that cannot be read is one kind of error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attemper import files
from attemper.errors import UnreadableError
from attemper.files import WEIGHTS, atomic_file, atomic_write, read_weights, remove_parts, weights_in
from attemper.lab.bench.results import load as load_report
from attemper.lab.errors import DamagedError, DataError
from attemper.lab.study.planfile import load_plan
from attemper.lab.study.settings import read_settings
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "made" / "file"
    atomic_write(path, "one")
    with pytest.raises(TypeError), atomic_file(path) as file:
        file.writelines([b"tw", 0])  # type: ignore[list-item]

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(path, b"two")
    assert path.read_text() == "one"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write(path, "one")
    with atomic_file(path) as file:
        file.write("zwölf".encode())
        file.flush()
        assert path.read_text() == "one"
    assert path.read_text(encoding="utf-8") == "zwölf"


def test_only_a_durable_write_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(files.os, "fsync", waited.append)
    atomic_write(tmp_path / "file", "one", durable=False)
    assert not waited
    atomic_write(tmp_path / "file", "two")
    assert len(waited) == 2, "for the file, and for its name"


def test_remnants_of_killed_processes_are_removed_when_they_are_old(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (".a.1234.part", ".b.1234.part", "c.part"))
    for path in (old, new, other):
        path.touch()
    os.utime(old, (0, 0))
    remove_parts(tmp_path, older_than=3600)
    assert sorted(tmp_path.iterdir()) == [new, other]
    remove_parts(tmp_path)
    assert sorted(tmp_path.iterdir()) == [other]


def test_one_error_stands_for_every_file_that_cannot_be_read(tmp_path: Path) -> None:
    for name in (WEIGHTS, CHECKPOINT, "settings.json", "report.json"):
        (tmp_path / name).write_text("[")
    with pytest.raises(UnreadableError, match="cannot be read as weights"):
        read_weights(tmp_path)
    with pytest.raises(UnreadableError, match="not the folder of a finished run"):
        weights_in(tmp_path / "nowhere")
    with pytest.raises(UnreadableError, match="is damaged"):
        load_checkpoint(tmp_path)
    with pytest.raises(UnreadableError, match="remove it and run the same command again"):
        read_settings(tmp_path)
    with pytest.raises(UnreadableError, match="no result of `attemper bench`"):
        load_report(tmp_path / "report.json")
    with pytest.raises(UnreadableError, match=r"The plan .* cannot be read"):
        load_plan(tmp_path / "nowhere.yaml")
    assert issubclass(DataError, UnreadableError)
    assert issubclass(DamagedError, UnreadableError)
