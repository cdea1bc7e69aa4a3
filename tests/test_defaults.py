"""What a comparison is run with where nobody says: from model and data, printed, in the plan, and open to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from attemper.errors import AttemperError
from attemper.lab.call_syntax import parse_call
from attemper.lab.cli import main
from attemper.lab.cli.compare import Compare
from attemper.lab.models.registry import build_model
from attemper.lab.study.comparison import DEFAULT_PLAN
from attemper.lab.study.defaults import completed, missed
from attemper.lab.study.plan import Plan
from attemper.lab.tasks.registry import open_task

pytestmark = pytest.mark.usefixtures("one_thread")

VIT = "timm:vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with photos of three kinds."""
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number, colour in enumerate(("red", "green", "blue")):
        (folder / colour).mkdir(parents=True)
        for each in range(8):
            pixels = torch.randint(120, (40, 50, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(each))
            pixels[:, :, number] += 130
            Image.fromarray(pixels.numpy()).save(folder / colour / f"{each}.jpg")
    return str(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ViT's weights in a file of nobody's in particular."""
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("vit_tiny_patch16_224", depth=1).state_dict(), path)
    return str(path)


# ------------------------------------------------------------------------------------------------------- from the model
def test_photos_get_the_size_of_the_model_and_fine_tuning_its_colours(photos: str, weights: str) -> None:
    scratch = completed({"task": f"folder:{photos}", "model": VIT})
    assert parse_call(scratch.task)[1] == {"size": 224}
    tuned = completed({"task": f"folder:{photos}", "model": VIT, "budget": {"init": weights}})
    assert parse_call(tuned.task)[1] == {"size": 224, "normalise": "half"}, "what timm says of this model"
    assert open_task(tuned.task).shape.height == 224  # type: ignore[attr-defined]
    assert "size 224" in tuned.notes[0]
    assert "normalise half" in tuned.notes[0]
    said = completed({"task": f"folder:{photos}(size=32, normalise=data)", "model": VIT, "budget": {"init": weights}})
    assert parse_call(said.task)[1] == {"size": 32, "normalise": "data"}
    chosen = completed({"task": f"folder:{photos}", "model": f"{VIT}(img_size=96)"})
    assert parse_call(chosen.task)[1] == {"size": 96}
    own = completed({"task": f"folder:{photos}", "model": "vit-tiny"})
    assert own.task == f"folder:{photos}", "a model of any size takes the task's"


def test_a_run_that_is_gone_on_from_gives_its_images(photos: str, tmp_path: Path) -> None:
    spec = {"task": f"folder:{photos}(size=48, normalise=clip)", "model": "vit-tiny(depth=1)", "recipe": "none"}
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"spec": json.dumps(spec)})
    for init in (str(path), str(tmp_path)):
        plan = completed({"task": f"folder:{photos}", "model": "vit-tiny(depth=1)", "budget": {"init": init}})
        assert parse_call(plan.task)[1] == {"size": 48, "normalise": "clip"}


def test_a_plan_that_says_everything_stays_as_it_is_and_is_told_what_the_model_was_trained_on(
    photos: str, weights: str, tmp_path: Path
) -> None:
    given = {"task": f"folder:{photos}", "model": VIT, "recipes": ["none"], "budget": {"init": weights}}
    plan = Plan.from_dict(given)
    (note,) = missed(plan)
    assert "size=224" in note
    assert "normalise='half'" in note
    assert missed(Plan.from_dict({**given, "budget": {}})) == ()
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(given))
    read = Compare(plan=file).planned()
    assert read == plan
    assert note in read.notes


# -------------------------------------------------------------------------------------------------------- from the data
@given(
    epochs=st.integers(1, 300),
    train=st.sampled_from([100, 1_999, 5_000, 40_000]),
    size=st.sampled_from([8, 32, 128]),
    tuned=st.booleans(),
)
@settings(deadline=None, max_examples=25)
def test_the_warm_up_is_never_more_than_a_fifth_and_whatever_is_chosen_can_be_run(
    epochs: int, train: int, size: int, tuned: bool
) -> None:
    task = f"noise(size={size}, classes=3, train={train}, test=30)"
    budget: dict[str, Any] = {"epochs": epochs} | ({"init": "weights.pt"} if tuned else {})
    plan = completed({"task": task, "model": "vit-cifar(depth=2, width=24, heads=2)", "budget": budget})
    assert plan.budget.warmup_epochs <= epochs / 5
    assert plan.budget.epochs == epochs
    assert (plan.budget.layer_decay < 1) == tuned
    assert plan.lr == ((3e-4,) if tuned else (1e-3,))
    assert plan.budget.augment.startswith("resized-crop" if size > 96 else "crop-flip")
    kept = train * (1 - plan.budget.validation)
    assert plan.budget.batch_size <= kept / 2
    opened = open_task(plan.task)
    opened.augmentation(plan.budget.augment)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_what_somebody_says_stays_and_what_is_chosen_is_said() -> None:
    said = {
        **{"epochs": 7, "warmup_epochs": 3.0, "augment": "none", "optimizer": "adam", "batch_size": 20},
        **{"validation": 0.4, "weight_decay": 0.0, "clip": None},
    }
    plan = completed(
        {"task": "noise(size=8, classes=3, train=100)", "model": "vit-digits", "lr": [0.1], "budget": said}
    )
    assert {name: getattr(plan.budget, name) for name in said} == said
    assert plan.lr == (0.1,)
    (note, *_) = plan.notes
    assert note.startswith("chosen for training from nothing on 100 images: recipes ")
    assert not {part.partition(" ")[0] for part in note.partition(": ")[2].split(", ")} & {*said, "lr"}
    fewer = completed({"task": "noise(size=8, classes=3, train=100)", "model": "vit-digits"})
    for name in ("epochs 60", "batch_size 32", "optimizer adamw", "lr 0.001", "augment crop-flip", "warmup_epochs 5"):
        assert name in fewer.notes[0]


def test_tasks_that_are_no_images_get_a_model_and_settings_that_fit() -> None:
    for task, model in (("tones", None), ("planted", "encoder"), ("noise(size=32, classes=3, train=90)", "vit-cifar")):
        plan = completed({"task": task})
        assert plan.model == model or model is None
        open_task(plan.task).augmentation(plan.budget.augment)
    assert completed({"task": "planted"}).budget.augment == "none"


def test_the_plan_of_the_digits_is_for_digits_alone() -> None:
    assert Compare().planned() == Plan.from_dict(DEFAULT_PLAN)
    deeper = Compare(task="digits(train=500)", model="vit-digits(depth=2)", epochs=3).planned()
    assert deeper.lr == (3e-3,)
    assert deeper.budget.batch_size == DEFAULT_PLAN["budget"]["batch_size"]
    assert deeper.budget.warmup_epochs == pytest.approx(0.6)
    assert deeper.title == ""
    other = Compare(task="noise(size=8, classes=3, train=100)").planned()
    assert other.lr != deeper.lr
    assert other.budget.optimizer == "adamw"
    assert [entry.recipe for entry in other.recipes] != [entry.recipe for entry in deeper.recipes]


# ------------------------------------------------------------------------------------------------------ command line
def test_options_of_compare_change_what_is_chosen(weights: str, photos: str) -> None:
    plan = Compare(
        task=f"folder:{photos}",
        model=VIT,
        recipes=("dropkey(0.1)",),
        size=64,
        init=weights,
        freeze="stem",
        layer_decay=0.9,
        optimizer="adam",
        warmup_epochs=1.5,
        validation=0.35,
        keep_head=True,
    ).planned()
    assert parse_call(plan.task)[1]["size"] == 64
    budget = plan.budget
    assert (budget.init, budget.freeze, budget.layer_decay, budget.keep_head) == (weights, "stem", 0.9, True)
    assert (budget.optimizer, budget.warmup_epochs, budget.validation) == ("adam", 1.5, 0.35)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "sgd"], "optimizer is 'sgd'; it must be 'adam' or 'adamw'"),
        (["--freeze", "all"], "freeze is 'all'; it must be 'none', 'stem' or 'backbone'"),
        (["--validation", "1.5"], "validation is 1.5; it must be between 0 and 1"),
        (["--warmup-epochs", "-1"], "warmup_epochs is -1.0; it must be at least 0"),
        (["--layer-decay", "2"], "layer_decay is 2.0; it must be above 0 and at most 1"),
        (["--init", "nowhere.pt"], "init: There is no file 'nowhere.pt'"),
        (["--size", "0"], "size is 0; it must be a whole number, at least 1"),
        (["--model", "timm:vit_tinny"], "timm has no model 'vit_tinny'. Did you mean"),
    ],
)
def test_a_mistake_in_an_option_is_one_line(
    words: list[str], message: str, photos: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "study"
    given = [] if "--model" in words else ["--model", "vit-tiny(depth=1)"]
    assert main(["compare", "--task", f"folder:{photos}", *given, *words, "--folder", str(folder)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert not folder.exists()


def test_a_plan_is_checked_with_the_same_defaults(photos: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "check", "--task", f"folder:{photos}(size=32)", "--model", "vit-tiny(depth=1)", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == 4


@pytest.mark.parametrize("model", ["vit-cifarr", "timm:no_such", "vit-cifar(dpth=2)", "vit-cifar("])
def test_a_model_that_does_not_exist_is_told_where_it_is_built(model: str) -> None:
    with pytest.raises(AttemperError, match=r"vit-cifarr|no_such|dpth|cannot be read"):
        built_with_defaults(model)


def built_with_defaults(model: str) -> None:
    plan = completed({"task": "noise(size=8, classes=3, train=90)", "model": model, "budget": {"init": "x.pt"}})
    build_model(plan.model, open_task(plan.task).shape)
