"""Whatever becomes of a file in a study's or a run's folder, a command works all the same, or names the file."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import AttemperError, UnreadableError
from attemper.lab.models.registry import build_model
from attemper.lab.study.claims import Claims
from attemper.lab.study.planfile import dump_plan, load_plan
from attemper.lab.study.study import Study
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.weights import save_weights
from damage import ANY, JSON, Damage, a_pipe, check, remove, told
from evaluated import made_up
from study_fakes import make_plan, make_result

QUICK, SLOW = range(6), range(6, 200)
TASK = "digits(train=100, test=20)"


def rounds(test: Callable[..., None]) -> Callable[..., None]:
    """Once with a few damages of every kind of file, and under `make slow` with many."""
    many = pytest.param(SLOW, marks=pytest.mark.slow, id="many")
    return pytest.mark.parametrize("seeds", [pytest.param(QUICK, id="few"), many])(test)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of which one run is done, and another one is in our own hands."""
    folder = tmp_path_factory.mktemp("damaged") / "study"
    task = open_task(TASK)
    plan = make_plan(["none", "cb"], seeds=1, task=TASK, evaluate=["calibration"])
    study = Study(folder, plan)
    study.prepare()
    done, missing = study.runs
    probes = [{"block": 0, "step": 1, "entropy": 0.5, "logit_max": 2.0}]
    details = {"classes": ["a", "b"], "confusion": [[3, 1], [0, 4]]}
    more = {"evaluation": made_up(0.8), "probes": probes, "test_details": details, "notes": ["a note"]}
    rates = [{"method": "dropkey", "block": 0, "rate": 0.1}]
    result = make_result(study.runs[done], task.fingerprint, rates=rates, **more)
    study.store.save(done, result)
    cost = {"ratio": 1.0, "low": 0.9, "high": 1.1, "milliseconds": 3.0, "peak_memory": None}
    (folder / "cost.json").write_text(json.dumps({"machine": "m", "costs": {"none": cost, "cb(cb)": cost}}))
    (folder / "settings.json").write_text(json.dumps({"probe_every": 5, "track": ["tensorboard"]}))
    study.store.write_progress(missing, {"epoch": 1, "epochs": 2, "step": 1, "steps": 2, "loss": 0.7})
    study.store.add_failure(missing, "RuntimeError: once", "a traceback")
    (folder / "claims").mkdir(exist_ok=True)
    (folder / "claims" / f"{missing}.0").write_text(json.dumps(Claims(folder / "claims").card("mine")))
    return folder


FILES = {
    "plan.yaml": [*ANY, a_pipe],
    "data.json": JSON,
    "settings.json": JSON,
    "cost.json": JSON,
    "runs/*.json": JSON,
    "claims/*.0": JSON,
    "progress/*.json": JSON,
    "failures/*.json": JSON,
}
COMMANDS = [
    ["study", "status", "STUDY"],
    ["study", "status", "STUDY", "--json"],
    ["study", "export", "STUDY", "--format", "csv"],
    ["study", "export", "STUDY", "--format", "json"],
    ["report", "STUDY", "--out", "STUDY/page.html"],
]


@rounds
@pytest.mark.parametrize("pattern", FILES)
def test_a_damaged_file_of_a_study_is_named_or_harmless(
    pattern: str, seeds: range, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in seeds:
        r = random.Random(f"{pattern} {seed}")
        study = tmp_path / "study"
        shutil.copytree(whole, study)
        path = next(study.glob(pattern))
        r.choice(FILES[pattern])(r, path)
        name = "" if pattern == "plan.yaml" and is_a_plan(path) else path.name
        for words in r.sample(COMMANDS, 2):
            check([word.replace("STUDY", "study") for word in words], name)
        remove(study)


@pytest.mark.parametrize("pattern", FILES)
def test_garbage_and_deep_nesting_are_named_or_harmless(
    pattern: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (b"\xff\xfe\x00garbage", b"[" * 100_000, b'{"a":' * 100_000, b'{"pid": 1e999, "since": -1e999}'):
        shutil.copytree(whole, tmp_path / "study")
        path = next((tmp_path / "study").glob(pattern))
        path.write_bytes(data)
        for words in (COMMANDS[1], COMMANDS[2]):
            check([word.replace("STUDY", "study") for word in words], path.name)
        remove(tmp_path / "study")


def test_a_loss_that_is_no_number_does_not_stop_the_status(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "study")
    path = next((tmp_path / "study").glob("progress/*.json"))
    for loss in ("NaN", '"low"', "-1e999", "{}"):
        path.write_text(f'{{"epoch": 1, "epochs": 2, "step": 1, "steps": 2, "loss": {loss}}}')
        code, out, _ = told(["study", "status", str(tmp_path / "study"), "--json"])
        assert code == 0
        assert json.loads(out)["running"][0]["loss"] is None


def is_a_plan(path: Path) -> bool:
    """Of another task, say: then that is what an error is about."""
    try:
        return bool(load_plan(path).task)
    except AttemperError:
        return False


def test_without_any_damage_all_of_these_commands_work(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "study")
    for words in COMMANDS:
        check([word.replace("STUDY", "study") for word in words])  # without a name, no error is allowed
    assert (tmp_path / "study" / "page.html").read_text().count("a note")


def damaged(whole: Path, tmp_path: Path, name: str, text: str) -> Study:
    shutil.copytree(whole, tmp_path / "study")
    (tmp_path / "study" / name).write_text(text)
    return Study(tmp_path / "study")


def test_a_damaged_cost_is_told_in_the_summary_and_measured_again(whole: Path, tmp_path: Path) -> None:
    from attemper.lab.study.costs import read_costs
    from attemper.lab.study.summary import summarise

    study = damaged(whole, tmp_path, "cost.json", '{"costs": {"none": {"ratio": "fast"}, "cb(cb)": ')
    assert read_costs(study) == {}
    assert any("cost.json" in note for note in summarise(study)["notes"])


def test_a_claim_that_cannot_be_read_is_taken_over_when_it_is_old(whole: Path, tmp_path: Path) -> None:
    study = damaged(whole, tmp_path, "notes.txt", "")
    (path,) = study.claims.folder.iterdir()
    key = path.name.partition(".")[0]
    path.unlink()
    path.mkdir()
    assert study.claims.take(key) is None, "it may have been written a moment ago"
    study.claims.stale_after = -1.0
    claim = study.claims.take(key)
    assert claim is not None
    assert claim.generation == 1
    claim.release()


# ------------------------------------------------------------------------------------------------------- a run's folder
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never trained."""
    folder = tmp_path_factory.mktemp("run") / "run"
    folder.mkdir()
    task, model = open_task(TASK), "vit-digits(depth=1)"
    spec = RunSpec(task=task.name, model=model, recipe="none", seed=0, budget=Budget(epochs=1))
    weights = dict(build_model(model, task.shape).state_dict())
    save_weights(folder, weights, spec, task.fingerprint)
    save_checkpoint(folder, {"epoch": 1, "weights": weights})
    torch.save(weights, folder / "weights.pt")
    (folder / "photo.ppm").write_bytes(b"P6 8 8 255 " + bytes(192))
    return folder


WEIGHTS: dict[str, list[list[str]]] = {
    "model.safetensors": [
        ["evaluate", "RUN", "--suites", "calibration", "--device", "cpu"],
        ["diagnose", "vit-digits(depth=1)", "--images", "RUN", "--size", "8", "--channels", "1", "--out", "RUN/out"],
    ],
    "weights.pt": [
        ["diagnose", "vit-digits(depth=1)", "--images", "RUN", "--size", "8", "--channels", "1", "--out", "RUN/out"]
    ],
}


@rounds
@pytest.mark.parametrize("name", WEIGHTS)
def test_damaged_weights_are_named(
    name: str, seeds: range, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attemper.lab.cli.evaluate._page", lambda found: "")
    for seed in seeds[: max(4, len(seeds) // 3)]:
        r = random.Random(f"{name} {seed}")
        folder = tmp_path / "run"
        shutil.copytree(run, folder)
        r.choice(ANY)(r, folder / name)
        words = [word.replace("RUN", "run") for word in r.choice(WEIGHTS[name])]
        words += ["--checkpoint", f"run/{name}", "--probes", "entropy"] if words[0] == "diagnose" else []
        check(words, name, "run")
        remove(folder)


@rounds
def test_a_damaged_checkpoint_is_named(seeds: range, run: Path, tmp_path: Path) -> None:
    def damaged_by(damage: Damage, r: random.Random) -> Any:
        path = tmp_path / CHECKPOINT
        shutil.copy(run / CHECKPOINT, path)
        damage(r, path)
        said = CHECKPOINT
        try:
            load_checkpoint(tmp_path)
        except UnreadableError as error:
            said = str(error)
        remove(path)
        assert CHECKPOINT in said
        assert "\n" not in said

    for seed in seeds:
        r = random.Random(seed)
        damaged_by(r.choice([damage for damage in ANY if damage.__name__ != "another_file"]), r)


def test_a_plan_that_the_folder_writes_is_one_that_it_reads(whole: Path) -> None:
    study = Study(whole)
    first, _, text = (whole / "plan.yaml").read_text().partition("\n")
    assert first.startswith("# attemper study ")
    assert text == dump_plan(study.plan)
    assert load_plan(whole / "plan.yaml") == study.plan
