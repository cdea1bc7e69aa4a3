"""Data as people have it: arrays, tensors, datasets, rows, functions and tables of file names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from attemper.errors import AttemperError, ParameterError
from attemper.lab.errors import DataError
from attemper.lab.tasks.base import ImageTask, InputShape, SequenceShape
from attemper.lab.tasks.normalising import NORMALISATIONS, Normalisation, read_normalisation
from attemper.lab.tasks.own.opening import task_of
from attemper.lab.tasks.own.task import METRICS, OwnTask, SampleShape
from attemper.lab.tasks.registry import list_tasks, open_task

pytestmark = pytest.mark.usefixtures("one_thread")


class Pairs(torch.utils.data.Dataset[tuple[Any, Any]]):
    """A set of pairs; `change` makes other samples of them each time."""

    def __init__(self, x: Any, y: Any, change: Callable[[Any], Any] = lambda x: x) -> None:
        self.x, self.y, self.change = x, y, change

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.change(self.x[index]), self.y[index]


def labels(count: int = 40, classes: int = 4) -> Tensor:
    return torch.arange(count) % classes


def images(count: int = 40, size: int = 8) -> Tensor:
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def pictures(count: int = 40, size: int = 8) -> list[Image.Image]:
    return [Image.fromarray(each.movedim(0, -1).numpy()) for each in images(count, size)]


def stored(task: OwnTask) -> tuple[Tensor, Tensor]:
    """All training samples, as they are stored."""
    source = task.pool()
    return next(source.batches(torch.arange(len(source)), len(source)))


# ---------------------------------------------------------------------------------------------------------------- kinds
def test_bytes_are_images_whatever_the_order_of_their_axes() -> None:
    channels_first = task_of((images(), labels()), "a")
    channels_last = task_of((images().movedim(1, -1).numpy(), labels().numpy()), "b")
    as_pictures = task_of(Pairs(pictures(), labels().tolist()), "c")
    rows = task_of([{"image": x, "label": y} for x, y in zip(pictures(), labels().tolist(), strict=True)], "d")
    for task in (channels_first, channels_last, as_pictures, rows):
        assert isinstance(task, ImageTask)
        assert task.shape == InputShape(3, 8, 8, 4)
        assert torch.equal(stored(task)[0], stored(channels_first)[0])
        assert task.fingerprint == channels_first.fingerprint, "equal data, however it was handed over"
    assert task_of((images()[:, 0], labels()), "gray").shape == InputShape(1, 8, 8, 4)
    inputs = channels_first.to_input(stored(channels_first)[0])
    assert torch.allclose(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4)
    channels_first.augmentation("crop-flip+mixup(0.8)")


def test_numbers_go_to_the_model_as_they_are_in_the_shape_that_they_have() -> None:
    shapes: dict[tuple[int, ...], Any] = {
        (3, 8, 8): InputShape(3, 8, 8, 4),
        (12, 5): SequenceShape(12, 5, 4),
        (7,): SampleShape((7,), 4, torch.empty(0)),
    }
    for size, shape in shapes.items():
        x = torch.randn(40, *size)
        task = task_of((x, labels()), "x")
        assert task.shape == shape
        inputs, targets = task.shape.example(5)
        assert inputs.shape == (5, *size)
        assert targets.max() < 4
        kept = stored(task)[0]
        assert torch.equal(task.to_input(kept), kept)
        assert all(any(torch.equal(each, one) for one in x) for each in kept[:3])
    doubles = task_of((np.random.default_rng(0).normal(size=(40, 6)), labels()), "doubles")
    assert stored(doubles)[0].dtype == torch.float32
    tokens = task_of((torch.randint(9, (40, 6)), labels()), "tokens")
    assert stored(tokens)[0].dtype == torch.int64
    with pytest.raises(ParameterError, match="There is no augmentation 'crop-flip'"):
        tokens.augmentation("crop-flip")


def test_labels_of_any_kind_become_numbers_of_classes() -> None:
    words = ["cat", "dog"] * 20
    task = task_of((images(), words), "words")
    assert task.classes == ("cat", "dog")
    assert task_of((images(), [3, 17] * 20), "odd").classes == ("3", "17")
    named = task_of({"train": (images(), labels()), "classes": ["a", "b", "c", "d"]}, "named")
    assert named.classes == ("a", "b", "c", "d")
    for wrong, message in (
        ([0.5, 1.5] * 20, "A label of 'train' is 0.5; labels are whole numbers or texts"),
        ([1] * 40, "The data has 1 class; there must be at least 2"),
        (["a", 1] * 20, "Some labels are numbers and some are texts"),
        ([0, 1], "has 40 samples and 2 labels"),
        (torch.zeros(40, 2), "The labels of 'train' have 2 axes; there must be one class per sample"),
    ):
        with pytest.raises(ParameterError, match=message):
            task_of((images(), wrong), "wrong")


# ---------------------------------------------------------------------------------------------------------------- parts
@given(
    parts=st.sampled_from([("train",), ("train", "test"), ("train", "val", "test"), ("training", "dev")]),
    seed=st.integers(0, 3),
)
@settings(deadline=None, max_examples=12)
def test_every_sample_is_in_one_part_and_the_test_set_is_the_same_for_every_seed(
    parts: tuple[str, ...], seed: int
) -> None:
    x = torch.arange(160).float().reshape(160, 1)
    cut = {name: (x[i::4], labels(40)) for i, name in enumerate(parts)}
    task = task_of(cut, "parts")
    train, validation = task.split(seed, 0.25)
    there = [task.test(), train, validation]
    every = [next(source.batches(torch.arange(len(source)), 999))[0] for source in there]
    seen = torch.cat(every).flatten().tolist()
    assert sorted(seen) == sorted(each for part, _ in cut.values() for each in part.flatten().tolist())
    other = task.split(seed + 1, 0.25)[1]
    assert (set(parts) & {"val", "dev"} != set()) == torch.equal(
        next(other.batches(torch.arange(len(other)), 999))[0],
        next(validation.batches(torch.arange(len(validation)), 999))[0],
    )
    if "test" in parts:
        assert sorted(seen[: len(there[0])]) == sorted(cut["test"][0].flatten().tolist())


def test_arrays_and_sets_may_come_in_tuples() -> None:
    x, y = images(), labels()
    four = task_of((x[:30], y[:30], x[30:], y[30:]), "four")
    pair = task_of((Pairs(x[:30], y[:30].tolist()), Pairs(x[30:], y[30:].tolist())), "pair")
    assert four.fingerprint == pair.fingerprint
    assert len(four.test()) == 10
    triple = task_of(tuple(Pairs(part, labels(len(part)).tolist()) for part in (x[:20], x[20:30], x[30:])), "triple")
    assert [len(each) for each in triple.split(0, 0.5)] == [20, 10]


def test_copies_of_a_sample_are_never_on_both_sides() -> None:
    x = torch.randn(30, 4).repeat_interleave(2, 0)
    task = task_of((x, labels(30, 3).repeat_interleave(2)), "twice")
    train, validation = task.split(0, 0.3)
    sides = [{tuple(row) for row in next(s.batches(torch.arange(len(s)), 99))[0].tolist()} for s in (train, validation)]
    sides.append({tuple(row) for row in next(task.test().batches(torch.arange(len(task.test())), 99))[0].tolist()})
    assert sum(map(len, sides)) == 30


def test_a_set_of_torchvision_or_of_hugging_face_says_its_classes(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as Picture

    names = ["cat", "dog"]
    features = Features({"id": Value("int64"), "img": Picture(), "labels": ClassLabel(names=names)})
    rows = {"id": list(range(20)), "img": pictures(20), "labels": [0, 1] * 10}
    one = Dataset.from_dict(rows, features=features)
    task = task_of(DatasetDict({"train": one, "validation": one.select(range(6)), "test": one.select(range(4))}), "hf")
    assert task.classes == ("cat", "dog")
    assert task.shape == InputShape(3, 8, 8, 2)
    assert len(task.test()) == 4
    for each in range(6):
        for name in names:
            (tmp_path / name).mkdir(exist_ok=True)
            pictures(12)[each + 6 * (name == "dog")].save(tmp_path / name / f"{each}.png")
    from torchvision.datasets import ImageFolder

    assert task_of(ImageFolder(tmp_path), "folder").classes == ("cat", "dog")


# --------------------------------------------------------------------------------------------- what draws, what is long
def test_a_set_that_augments_its_samples_draws_the_same_for_every_recipe_and_after_an_interruption() -> None:
    def change(x: Tensor) -> Tensor:
        return x + torch.rand(()) + np.random.rand() * 10

    y = labels().tolist()
    task = task_of({"train": Pairs(torch.zeros(40, 3), y, change), "test": Pairs(torch.zeros(8, 3), y[:8])}, "draws")
    source = task.pool()
    assert not source.in_memory
    assert task.test().in_memory
    source.workers = 0
    order = torch.randperm(40)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    once = torch.cat([x for x, _ in source.batches(order, 8)])
    assert torch.equal(before, torch.get_rng_state()), "the streams of methods are not touched"
    again = torch.cat([x for x, _ in source.batches(order, 8)])
    after = torch.cat([x for x, _ in source.batches(order[16:], 8)])
    other = torch.cat([x for x, _ in source.batches(order.flip(0), 8)])
    assert torch.equal(once, again)
    assert torch.equal(once[16:], after)
    assert not torch.equal(once, other.flip(0))
    assert len(once[:, 0].unique()) == 40
    source.workers = 2
    assert torch.equal(once, torch.cat([x for x, _ in source.batches(order, 8)])), "in whatever process"


def test_a_set_that_does_not_fit_into_memory_is_read_while_training_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = task_of(Pairs(images(), labels().tolist()), "whole")
    monkeypatch.setattr("attemper.lab.tasks.source.MEMORY_LIMIT", 100)
    read = task_of(Pairs(images(), labels().tolist()), "read")
    assert not read.pool().in_memory
    read.pool().workers = 0  # type: ignore[attr-defined]
    mean, deviation = whole.pool().statistics()
    found, spread = read.pool().statistics()
    assert torch.allclose(mean, found)
    assert torch.allclose(deviation, spread)
    assert torch.equal(stored(whole)[1], stored(read)[1])


def test_a_collate_brings_samples_to_one_shape() -> None:
    items = [torch.ones(1 + index % 3, 4) * index for index in range(20)]

    def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        x = torch.zeros(len(samples), 3, 4)
        for row, (each, _) in zip(x, samples, strict=True):
            row[: len(each)] = each
        return x, torch.tensor([y for _, y in samples])

    task = task_of({"train": Pairs(items, [0, 1] * 10), "collate": padded}, "padded")
    assert task.shape == SequenceShape(3, 4, 2)
    source = task.pool()
    source.workers = 0  # type: ignore[attr-defined]
    x, y = next(source.batches(torch.tensor([0, 1]), 2))
    assert x.shape == (2, 3, 4)
    assert y.tolist() == source.targets[:2].tolist()
    with pytest.raises(
        ParameterError, match=r"Sample 1 of 'train' is .*, and the first is .*: give samples of one shape"
    ):
        task_of(Pairs(items, [0, 1] * 10), "ragged")
    with pytest.raises(ParameterError, match="collate gave dict as inputs"):
        task_of({"train": Pairs(items, [0, 1] * 10), "collate": lambda samples: {"x": 1}}, "dicts")


# -------------------------------------------------------------------------------------------------------------- metrics
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_by_name_is_what_torchmetrics_says(name: str) -> None:
    from torchmetrics.functional import classification

    logits, targets = torch.randn(60, 4), labels(60)
    theirs = {
        "balanced_accuracy": lambda: classification.multiclass_accuracy(logits, targets, 4, average="macro"),
        "macro_f1": lambda: classification.multiclass_f1_score(logits, targets, 4, average="macro"),
        "auroc": lambda: classification.multiclass_auroc(logits.softmax(-1), targets, 4),
    }[name]()
    assert METRICS[name](logits, targets) == pytest.approx(float(theirs), abs=1e-6)


def test_a_metric_of_ones_own_chooses_and_its_failure_is_named() -> None:
    def recall_of_last(logits: Tensor, targets: Tensor) -> float:
        return float((logits.argmax(-1)[targets == 3] == 3).float().mean())

    task = task_of({"train": (torch.randn(40, 4), labels()), "metric": recall_of_last}, "own")
    assert task.primary == "recall_of_last"
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        found = task.measure(model, task.test())
        logits = model(next(task.test().batches(torch.arange(8), 8))[0])
    assert found["recall_of_last"] == recall_of_last(logits, task.test().targets)
    assert found.keys() == {"recall_of_last", "accuracy", "loss"}
    broken = task_of({"train": (torch.randn(40, 4), labels()), "metric": lambda logits, targets: 1 / 0}, "broken")
    with pytest.raises(ParameterError, match="The metric 'metric' failed on 8 samples: ZeroDivisionError"):
        broken.measure(model, broken.test())
    with pytest.raises(ParameterError, match=r"There is no metric 'auorc'. Did you mean 'auroc'\?"):
        task_of({"train": (torch.randn(40, 4), labels()), "metric": "auorc"}, "typo")


# ------------------------------------------------------------------------------------------------------------ functions
MODULE = """
import torch

def stripes(count=40, classes=2):
    y = torch.arange(count) % classes
    return {"train": (torch.randn(count, 6, 3, generator=torch.Generator().manual_seed(1)), y), "metric": "macro_f1"}

def digits():
    return "digits(train=300)"

def broken():
    raise FileNotFoundError("no photos at /here")

number = 3
"""


def test_a_task_comes_from_a_function_of_a_module_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_task_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    task = open_task("my_task_module:stripes(count=60)")
    assert task.name == "my_task_module:stripes(count=60)"
    assert task.shape == SequenceShape(6, 3, 2)
    assert task.primary == "macro_f1"
    assert sum(map(len, task.split(0, 0.5))) == 48
    assert sum(map(len, open_task("my_task_module:stripes(train=20)").split(0, 0.5))) == 20
    assert sum(map(len, open_task("my_task_module:digits").split(0, 0.5))) == 300
    for text, message in (
        ("my_task_module:stripse", "'my_task_module' has no 'stripse'. Did you mean 'stripes'"),
        ("my_task_module:stripes(cuont=3)", "has no option 'cuont'. Did you mean 'count'"),
        ("my_task_module:broken", r"failed at my_task_module.py:\d+: FileNotFoundError: no photos at /here"),
        ("my_task_module:number", "The part 'train' of the data is a int"),
        ("no_such_module_here:f", "There is no module 'no_such_module_here' for the task"),
    ):
        with pytest.raises(AttemperError, match=message):
            open_task(text)
    assert any(name == "MODULE:FUNCTION" for name in list_tasks())


# ----------------------------------------------------------------------------------------------------------------- CSVs
def write_table(folder: Path, header: str = "filename,label", rows: int = 20, **more: Any) -> Path:
    (folder / "photos").mkdir()
    lines = [header]
    for number in range(rows):
        Image.fromarray(images(rows, 12)[number].movedim(0, -1).numpy()).save(folder / "photos" / f"{number}.png")
        row = [f"photos/{number}.png", ["cat", "dog"][number % 2]]
        lines.append(",".join([*row, *(each(number) for each in more.values())]))
    path = folder / "labels.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_csv_of_file_names_and_labels_is_a_task(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    task = open_task(f"csv:{path}(size=8)")
    assert task.shape == InputShape(3, 8, 8, 2)
    assert task.classes == ("cat", "dog")  # type: ignore[attr-defined]
    assert [sum(map(len, task.split(0, 0.5))), len(task.test())] == [16, 4]
    bare = path.read_text().replace(".png", "").replace("photos/", "").replace(",", ";").replace("filename", "image_id")
    (tmp_path / "bare.csv").write_text("\ufeff" + bare)
    assert open_task(f"csv:{tmp_path}/bare.csv(size=8, folder='{tmp_path}/photos')").shape == task.shape


def test_a_csv_may_say_which_rows_are_for_test_and_which_belong_together(tmp_path: Path) -> None:
    parts = ["train", "train", "train", "val", "test"]
    write_table(
        tmp_path, "Path,Species,Split,Patient", split=lambda n: parts[n // 2 % 5], patient=lambda n: f"p{n // 4}"
    )
    task = open_task(f"csv:{tmp_path}/labels.csv(size=8)")
    assert len(task.test()) == 4
    assert sum(map(len, task.split(0, 0.4))) == 12, "without the others of the patients in the test set"


def test_what_is_wrong_with_a_table_is_told_at_once(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("photos/3.png", "photos/none.png").replace("/5.png,dog", "/5.png,"))
    with pytest.raises(
        DataError, match=r"2 of 20 rows of .* 'photos/none.png' \(there is no such file\).* \(it has no label"
    ):
        open_task(f"csv:{path}")
    assert open_task(f"csv:{path}(broken=skip)").shape.classes == 2
    path.write_text(text.replace("photos/3.png", "../../etc/passwd"))
    with pytest.raises(DataError, match=r"there is no such file|lies outside"):
        open_task(f"csv:{path}")
    path.write_text(text.replace("photos/3.png", "photos/4.png"))
    with pytest.raises(DataError, match="1 of 20 rows name a file that another row names"):
        open_task(f"csv:{path}")
    path.write_text(text.replace("label", "breed_of_it"))
    with pytest.raises(
        DataError, match=r"has no column 'label'.* It has: filename, breed_of_it; say which .* option label"
    ):
        open_task(f"csv:{path}")
    assert open_task(f"csv:{path}(label=breed_of_it)").shape.classes == 2
    path.write_text("only one column\n1\n")
    with pytest.raises(DataError, match="is no table of file names and labels"):
        open_task(f"csv:{path}")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is no text in UTF-8"):
        open_task(f"csv:{path}")


# -------------------------------------------------------------------------------------------------------- normalisation
def test_images_are_normalised_as_a_trained_model_wants_them() -> None:
    plain, task = (open_task(f"digits(train=100{more})") for more in ("", ", normalise=half"))
    pixels = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    assert torch.allclose(task.to_input(pixels), pixels / 127.5 - 1, atol=1e-6)
    assert not torch.allclose(plain.to_input(pixels), task.to_input(pixels))
    assert task.name == "digits(normalise='half', train=100)"
    own = open_task("noise(size=8, classes=3, normalise=((0.1, 0.2, 0.3), (1, 2, 3)))")
    colours = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    wanted = (colours / 255 - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([1.0, 2, 3])[:, None, None]
    assert torch.allclose(own.to_input(colours), wanted, atol=1e-5)
    assert read_normalisation("imagenet", 3) == NORMALISATIONS["imagenet"]
    assert read_normalisation("half", 1) == Normalisation((0.5,), (0.5,))
    assert read_normalisation("data", 3) is None
    for wrong in ("imagnet", 3, ((1,), (0,)), ((1, 2), (1, 2))):
        with pytest.raises(ParameterError, match=r"^normalise "):
            read_normalisation(wrong, 3)
    with pytest.raises(ParameterError, match="has no images in bytes that could be normalised"):
        open_task("planted(normalise=imagenet)")
