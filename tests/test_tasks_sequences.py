"""Windows of measurements, such as an accelerometer's, under the names and in the layouts that people have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.tasks.registry import open_task, verify
from sounds import opened

N, T, C = 40, 16, 6


def imu(count: int = N, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(3.0, 2.0, (count, T, C)).astype(np.float32)


LABELS = np.array(["sit", "stand", "walk", "walk up"])[np.arange(N) % 4]


def saved(file: Path, **arrays: Any) -> Path:
    given = {"x": imu(), "y": LABELS, **arrays}
    np.savez(file, **{name: array for name, array in given.items() if array is not None})
    return file


def everything(task: Any) -> list[np.ndarray[Any, Any]]:
    return [each.numpy() for part in (*task.split(0, 0.5), task.test()) for each in part.values]


def test_windows_with_labels_are_a_task(tmp_path: Path) -> None:
    saved(tmp_path / "imu.npz")
    task = open_task("sequences:imu.npz", tmp_path)
    assert task.shape == SequenceShape(tokens=T, features=C, classes=4)
    assert task.classes == ("sit", "stand", "walk", "walk up")
    train, validation = task.split(0, 0.25)
    assert (len(train), len(validation), len(task.test())) == (24, 8, 8)
    assert {each.tobytes() for each in everything(task)} == {each.tobytes() for each in imu()}
    values = torch.cat([task.to_input(part.values) for part in (train, validation)]).flatten(0, 1)
    torch.testing.assert_close(values.mean(0), torch.zeros(C), atol=1e-5, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(C), atol=1e-5, rtol=0)
    assert build_model("encoder(width=8, heads=2)", task.shape)(task.to_input(train.values)).shape == (24, 4)
    assert verify("sequences:imu.npz", tmp_path) == [
        "sequences:imu.npz: 32 training samples and 8 test samples of 16 tokens × 6 features and of 4 classes"
    ]


def test_the_same_windows_in_any_layout_are_the_same_data(tmp_path: Path) -> None:
    numbers = np.arange(N) % 4
    saved(tmp_path / "ntc.npz", y=numbers)
    saved(tmp_path / "nct.npz", x=None, data=imu().transpose(0, 2, 1).astype(np.float64), y=None, Labels=numbers * 1.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    np.save(folder / "X.npy", imu())
    np.save(folder / "y.npy", numbers[:, None])
    texts = ("sequences:ntc.npz", "sequences:nct.npz(layout=nct)", "sequences:folder", "sequences:folder(layout=ntc)")
    tasks = [open_task(text, tmp_path) for text in texts]
    assert len({task.fingerprint for task in tasks}) == 1
    assert tasks[0].classes == ("0", "1", "2", "3")
    assert torch.equal(tasks[0].test().values, tasks[1].test().values)
    np.savez(tmp_path / "one.npz", signals=imu()[..., 0], target=numbers)
    assert open_task("sequences:one.npz(layout=nt)", tmp_path).shape == SequenceShape(tokens=T, features=1, classes=4)


def test_parts_for_training_and_test_are_kept(tmp_path: Path) -> None:
    for names in (
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_data", "train_labels", "test_data", "test_labels"),
    ):
        given = dict(zip(names, (imu(), LABELS, imu(8, seed=1), LABELS[:8]), strict=True))
        np.savez(tmp_path / "imu.npz", **given)
        task = open_task("sequences:imu.npz", tmp_path)
        assert np.array_equal(task.test().values.numpy(), imu(8, seed=1))
        assert sum(map(len, task.split(0, 0.5))) == N
    odd = np.array(["sit", "swim", "fly"] + ["sit"] * 5)
    np.savez(tmp_path / "imu.npz", x_train=imu(), y_train=LABELS, x_test=imu(8, seed=1), y_test=odd)
    with pytest.raises(DataError, match="has labels that training lacks: fly; swim"):
        open_task("sequences:imu.npz", tmp_path)
    np.savez(tmp_path / "imu.npz", x_train=imu(), y_train=LABELS, x_test=imu(8)[:, :5, :5], y_test=LABELS[:8])
    with pytest.raises(
        DataError, match=r"training are of \(16, 6\) steps and channels, and those for test of \(5, 5\)"
    ):
        open_task("sequences:imu.npz", tmp_path)
    np.savez(tmp_path / "imu.npz", x_train=imu(), y_train=LABELS)
    with pytest.raises(DataError, match="none of them is the measurements for test"):
        open_task("sequences:imu.npz", tmp_path)


def test_windows_of_one_subject_and_copies_stay_together(tmp_path: Path) -> None:
    subjects = np.arange(N) // 8
    values = imu()
    saved(tmp_path / "imu.npz", x=values, subjects=subjects)
    task = open_task("sequences:imu.npz", tmp_path)
    place = {each.tobytes(): subject for each, subject in zip(values, subjects, strict=True)}
    for seed in range(5):
        seen = [
            {place[each.numpy().tobytes()] for each in part.values} for part in (*task.split(seed, 0.3), task.test())
        ]
        assert sum(map(len, seen)) == 5
    values[20:] = values[:20]
    saved(tmp_path / "imu.npz", x=values)
    task = open_task("sequences:imu.npz", tmp_path)
    parts = [{each.numpy().tobytes() for each in part.values} for part in (*task.split(0, 0.3), task.test())]
    assert sum(map(len, parts)) == 20
    named = saved(tmp_path / "named.npz", x=None, y=None, acc=imu(), activity=LABELS, who=subjects)
    assert open_task(f"sequences:{named}(x=acc, y=activity, groups=who)", tmp_path).shape.classes == 4


def test_steps_can_be_joined_to_tokens(tmp_path: Path) -> None:
    saved(tmp_path / "imu.npz")
    task = open_task("sequences:imu.npz(tokens=4)", tmp_path)
    assert task.shape == SequenceShape(tokens=4, features=4 * C, classes=4)
    stored = task.test().values
    plain = open_task("sequences:imu.npz", tmp_path).to_input(stored)
    assert torch.equal(task.to_input(stored)[:, 1], plain[:, 4:8].flatten(1))
    with pytest.raises(DataError, match="16 steps cannot be cut into 5 equal tokens"):
        open_task("sequences:imu.npz(tokens=5)", tmp_path)


def test_sequences_with_values_that_are_no_numbers_are_all_named_and_skipped_on_request(tmp_path: Path) -> None:
    values = imu()
    values[3, 2, 1], values[17, 0, 0] = np.nan, np.inf
    saved(tmp_path / "imu.npz", x=values)
    with pytest.raises(DataError, match=r"2 of 40 sequences .*'sequence 3' \(.*'sequence 17' \(.*broken=skip"):
        open_task("sequences:imu.npz", tmp_path)
    task, heard = opened("sequences:imu.npz(broken=skip)", tmp_path)
    assert len(everything(task)) == 38
    assert "2 of 40 sequences" in heard.notes[0]
    assert task.notes == tuple(heard.notes)
    saved(tmp_path / "clean.npz", x=np.delete(imu(), [3, 17], 0), y=np.delete(LABELS, [3, 17]))
    assert open_task("sequences:clean.npz", tmp_path).fingerprint != task.fingerprint


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": None}, "has the arrays y, and none of them is the measurements.*name it with the option x"),
        ({"y": None, "activity": LABELS}, "none of them is the labels.*name it with the option y"),
        ({"x": imu().transpose(0, 2, 1)}, r"has the shape \(40, 6, 16\), which can be read in several ways; say which"),
        ({"x": imu()[:, :, 0]}, r"layout=nt for \(windows, steps\) of one channel\. A long recording"),
        ({"x": imu()[0, 0]}, r"has the shape \(6,\); it must be \(windows, steps, channels\) or"),
        ({"x": imu()[:0]}, r"has the shape \(0, 16, 6\)"),
        ({"x": imu().astype(str)}, "holds <U32; measurements must be numbers"),
        ({"y": LABELS[:-1]}, r"has the shape \(39,\); there are 40 sequences"),
        ({"y": np.eye(4)[np.arange(N) % 4]}, r"has the shape \(40, 4\).*One-hot rows become labels by argmax\(1\)"),
        ({"y": np.linspace(0, 1, N)}, "holds float64 with fractions"),
        ({"y": np.arange(N) + 1j}, "holds complex128; it must be whole numbers or words"),
        ({"y": np.zeros(N, int)}, "has 1 classes; there must be at least 2"),
        ({"subjects": np.zeros(7, int)}, r"'subjects' of .* has the shape \(7,\); there are 40 sequences"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_with_what_would_be_right(
    tmp_path: Path, arrays: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "imu.npz", **arrays)
    with pytest.raises(DataError, match=message):
        open_task("sequences:imu.npz", tmp_path)
    assert main(["data", "verify", "sequences:imu.npz", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_layouts_and_files_are_checked(tmp_path: Path) -> None:
    saved(tmp_path / "imu.npz")
    with pytest.raises(ParameterError, match="layout is 'tnc'; it must be 'ntc' or 'nct' or 'nt'"):
        open_task("sequences:imu.npz(layout=tnc)", tmp_path)
    with pytest.raises(DataError, match=r"has the shape \(40, 16, 6\); layout=nt is for \(windows, steps\)"):
        open_task("sequences:imu.npz(layout=nt)", tmp_path)
    with pytest.raises(DataError, match=r"'none.npz' is not there"):
        open_task("sequences:none.npz", tmp_path)
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object), y=LABELS)
    with pytest.raises(DataError, match=r"'x' of .*pickled.npz' cannot be read"):
        open_task("sequences:pickled.npz", tmp_path)
    whole = (tmp_path / "imu.npz").read_bytes()
    for cut in (10, 5000, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.npz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"cut\.npz'"):
            open_task("sequences:cut.npz", tmp_path)
    with pytest.raises(ParameterError, match="There is no augmentation"):
        open_task("sequences:imu.npz", tmp_path).augmentation("mixup")
