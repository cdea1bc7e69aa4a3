"""The winner to take home: a study keeps weights, and they predict, are exported, evaluated and looked into."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from attemper.errors import UnreadableError
from attemper.files import WEIGHTS, read_weights
from attemper.lab.cli import main
from attemper.lab.errors import PlanError, StudyError
from attemper.lab.evaluation.runs import load_run
from attemper.lab.evaluation.trained import load_trained
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import dump_plan
from attemper.lab.study.study import Study
from attemper.lab.study.winner import find_run
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.inputs import ImageInputs
from study_fakes import FakeEngine, make_plan

pytestmark = pytest.mark.long


class Weighty(FakeEngine):
    """Leaves a file of weights behind, as a real run does."""

    def run(self, spec, task, *, folder, progress, device):
        result = super().run(spec, task, folder=folder, progress=progress, device=device)
        (folder / WEIGHTS).write_text(f"{spec.recipe} {spec.budget.lr} {spec.seed}")
        return result


def done(folder, plan):
    study = Study(folder, plan, engine=Weighty())
    study.prepare()
    study.work(log=lambda line: None)
    return study


RECIPES = ("none", {"name": "grid", "recipe": "dropkey({0.1, 0.2})"}, "cb")


@pytest.mark.parametrize("keep", ["best", "all", "none"])
def test_a_study_keeps_the_weights_that_it_was_told_to(keep, tmp_path):
    plan = make_plan(recipes=RECIPES, seeds=4, lr=[1e-3, 2e-3], keep=keep)
    study = done(tmp_path / "study", plan)
    results = study.results()
    assert len(results) == 4 * 2 * 4
    if keep != "best":
        assert study.store.kept() == (set(results) if keep == "all" else set())
        return
    wanted = set()
    for entry in plan.recipes:
        keys = [key for each in study.keys_of(entry).values() for key in each]
        wanted.add(max(keys, key=lambda key: results[key]["validation"]["accuracy"]))
    assert study.store.kept() == wanted
    for key in wanted:
        spec = study.runs[key]
        assert (study.store.weights(key) / WEIGHTS).read_text() == f"{spec.recipe} {spec.budget.lr} {spec.seed}"


def test_more_seeds_replace_weights_by_better_ones_alone(tmp_path):
    few = done(tmp_path / "study", make_plan(recipes=("none",), seeds=2))
    before = few.store.kept()
    more = done(tmp_path / "study", make_plan(recipes=("none",), seeds=9))
    best = max(more.results().items(), key=lambda item: item[1]["validation"]["accuracy"])[0]
    assert more.store.kept() == {best}
    assert len(before) == 1


def test_weights_of_a_row_that_left_the_plan_stay(tmp_path):
    first = done(tmp_path / "study", make_plan(recipes=("none", "cb"), seeds=2))
    kept = first.store.kept()
    study = Study(tmp_path / "study", make_plan(recipes=("none",), seeds=2), engine=Weighty(), change_plan=True)
    study.prepare()
    assert study.store.kept() == kept


def test_what_is_kept_stands_in_the_plan(tmp_path):
    assert "keep" not in dump_plan(make_plan())
    assert "keep: all" in dump_plan(make_plan(keep="all"))
    with pytest.raises(PlanError, match="keep is 'some'; it must be one of best, all, none"):
        make_plan(keep="some")
    assert Plan.from_dict(make_plan(keep="none").to_dict()).keep == "none"
    done(tmp_path / "study", make_plan(seeds=1, keep="all"))
    assert Study(tmp_path / "study", engine=Weighty()).plan.keep == "all"


# --------------------------------------------------------------------------------------------------- with real training
PLAN = {
    "task": "digits(train=120, test=40)",
    "model": "vit-digits(depth=1)",
    "seeds": 1,
    "budget": {"epochs": 1, "batch_size": 32, "warmup_epochs": 0.0},
    "recipes": ["none", "cb + dropkey(0.2)"],
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("winner") / "study"
    made = Study(folder, Plan.from_dict(PLAN))
    made.prepare()
    made.work(log=lambda line: None)
    return folder


@pytest.fixture
def photos(tmp_path):
    """Grey images of digits, one that is none, and one whose name a spreadsheet would compute."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name in ("a.png", "deep/b.png", "=c.png"):
        Image.fromarray(generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / name)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def test_the_kept_weights_are_those_that_the_result_was_measured_with(study):
    results = Study(study).results()
    for path in (study / "weights").iterdir():
        finished = load_run(path)
        found = finished.task.measure(finished.model, finished.task.test())
        assert found["accuracy"] == results[path.name]["test"]["accuracy"]


def test_the_best_run_of_a_study_is_found_and_that_of_a_recipe(study):
    results = Study(study).results()
    best = max(results, key=lambda key: results[key]["validation"]["accuracy"])
    assert results[find_run(study).name]["validation"] == results[best]["validation"]
    one = find_run(study, "cb + dropkey(0.2)")
    assert results[one.name]["spec"]["recipe"].startswith("cb")
    assert find_run(one) == one
    with pytest.raises(StudyError, match=r"has no recipe 'nonee'\. Did you mean"):
        find_run(study, "nonee")
    with pytest.raises(StudyError, match="holds a single run"):
        find_run(one, "none")
    with pytest.raises(UnreadableError, match="neither the folder of a finished run"):
        find_run(study.parent)


def test_predictions_are_those_of_the_model(study, photos, tmp_path, capsys):
    out = tmp_path / "out.csv"
    words = ["predict", str(study), "--images", str(photos), "--of", "cb + dropkey(0.2)", "--out", str(out)]
    assert main([*words, "--json", "--batch-size", "2"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["skipped"] == ["broken.png"]
    assert "skipped, since they cannot be decoded (1): broken.png" in printed.err
    trained = load_trained(find_run(study, "cb + dropkey(0.2)"))
    task = open_task("digits(train=120, test=40)", None)
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["file"] for row in rows] == ["'=c.png", "a.png", "deep/b.png"]
    for row, each in zip(rows, found["images"], strict=True):
        grey = np.asarray(Image.open(photos / each["file"]).convert("RGB"), dtype=np.float64) @ [0.299, 0.587, 0.114]
        stored = torch.tensor(grey, dtype=torch.float32)[None, None]
        with torch.no_grad():
            wanted = trained.model(task.to_input(stored)).softmax(-1)[0]
        given = torch.tensor(each["probabilities"], dtype=torch.float32)
        torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-5)
        assert each["label"] == row["label"] == task.classes[int(wanted.argmax())]
        assert float(row["probability"]) == pytest.approx(float(wanted.max()), abs=1e-4)
        assert sum(float(row[name]) for name in task.classes) == pytest.approx(1, abs=1e-4)


def test_predict_says_what_is_wrong(study, photos, tmp_path, capsys):
    for words, told in (
        ([str(tmp_path), "--images", str(photos)], "neither the folder of a finished run"),
        ([str(study), "--images", str(tmp_path / "none")], "is not a folder"),
        ([str(study), "--images", str(photos), "--top", "0"], "--top is 0; it must be at least 1"),
    ):
        assert main(["predict", *words]) == 2
        assert told in capsys.readouterr().err


def test_an_exported_model_gives_what_the_model_gives(study, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    files = {name: tmp_path / f"model.{name}" for name in ("onnx", "pt2", "safetensors")}
    words = ["export", str(study), "--of", "cb + dropkey(0.2)", "--onnx", str(files["onnx"])]
    words += ["--torch-export", str(files["pt2"]), "--safetensors", str(files["safetensors"])]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "checked against the model by onnxruntime" in printed
    assert "right only with 'cb" in printed
    trained = load_trained(find_run(study, "cb + dropkey(0.2)"))
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        wanted = trained.model(x)
    session = onnxruntime.InferenceSession(str(files["onnx"]), providers=["CPUExecutionProvider"])
    given = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(given), wanted, rtol=1e-3, atol=1e-4)
    notes = session.get_modelmeta().custom_metadata_map
    assert json.loads(notes["classes"]) == list(trained.inputs.classes)
    program = torch.export.load(files["pt2"]).module()
    torch.testing.assert_close(program(x), wanted, rtol=1e-4, atol=1e-5)
    weights = read_weights(files["safetensors"])
    assert set(weights.tensors) == set(trained.model.state_dict())
    assert weights.notes["recipe"].startswith("cb")


def test_export_says_what_is_wrong(study, capsys):
    assert main(["export", str(study)]) == 2
    assert "Say what to write: --onnx FILE" in capsys.readouterr().err


def test_a_study_can_be_evaluated_and_looked_into(study, photos, tmp_path, capsys):
    assert main(["evaluate", str(study), "--of", "none", "--suites", "calibration"]) == 0
    assert (find_run(study, "none") / "evaluation.html").is_file()
    capsys.readouterr()
    other = find_run(study, "cb + dropkey(0.2)")
    words = ["diagnose", str(study), "--of", "none", "--images", str(photos), "--out", str(tmp_path / "out")]
    assert main([*words, "--pictures", "0", "--recipe", "cb", "--beside", str(other), "--json"]) == 0
    printed = capsys.readouterr()
    assert f"weights: {find_run(study, 'none').name}/{WEIGHTS}" in printed.err
    assert "random" not in printed.err
    found = json.loads(printed.out)
    assert len(found["beside"]["tables"]) == 2
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Beside each other" in page
    assert other.name in page


def test_what_a_model_takes_is_kept_beside_its_weights(study):
    task = open_task("digits(train=120, test=40)", None)
    inputs = ImageInputs.of(task)
    assert load_trained(find_run(study)).inputs == inputs
    stored = torch.randint(0, 256, (3, 1, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(inputs.normalise(stored), task.to_input(stored), rtol=1e-4, atol=1e-5)
    assert ImageInputs.from_json(inputs.to_json()) == inputs
    with pytest.raises(UnreadableError):
        ImageInputs.from_json("{}")


def test_where_more_is_done_to_inputs_than_to_normalise_them_nothing_is_kept():
    class Odd:
        shape = open_task("digits", None).shape

        def to_input(self, stored):
            return stored.float() ** 2

    assert ImageInputs.of(Odd()) is None


def test_weights_of_a_run_that_took_no_images_say_so(study, tmp_path):
    weights = read_weights(find_run(study))
    from safetensors.torch import save_file

    (tmp_path / "run").mkdir()
    notes = {name: value for name, value in weights.notes.items() if name != "inputs"}
    save_file(weights.tensors, tmp_path / "run" / WEIGHTS, metadata=notes)
    with pytest.raises(UnreadableError, match="does not say what its model takes"):
        load_trained(Path(tmp_path / "run"))
