"""A run's folder: another run's, or somebody else's files, are refused and left as they are; one's own goes on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from attemper.lab.cli import main
from attemper.lab.errors import OtherRunError, VersionsError
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import tracking
from attemper.lab.training.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from attemper.lab.training.loop import run
from attemper.lab.training.run_folder import Owner, mark_folder, take_folder
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.versions import BEFORE, RESULTS, Versions, versions_here
from attemper.lab.training.weights import save_weights
from endings import timeless
from test_versions import Switch, torch_is

__all__ = ["torch_is"]

TASK = "digits(train=60, test=20)"
MODEL = "vit-digits(depth=1, width=16, heads=2, mlp=16)"


def spec(recipe: str = "none", seed: int = 0, **budget: Any) -> RunSpec:
    chosen = Budget(**{"epochs": 2, "batch_size": 20, "warmup_epochs": 1, **budget})
    return RunSpec(task=TASK, model=MODEL, recipe=recipe, seed=seed, budget=chosen)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its bytes and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def put(kind: str, folder: Path, owner: Owner) -> None:
    """A file by which a folder belongs to a run."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "run.json":
        mark_folder(folder, owner)
    elif kind == "result.json":
        made = [versions_here().to_dict()]
        (folder / kind).write_text(json.dumps({**owner.to_dict(), "made_under": made}))
    else:
        save_weights(folder, {"w": torch.zeros(1)}, owner.spec, owner.fingerprint)


KINDS = ("run.json", "result.json", "model.safetensors")
CHANGES: dict[str, dict[str, Any]] = {
    "recipe": {"recipe": "dropkey(0.1)"},
    "seed": {"seed": 5},
    "task": {"task": "cifar10"},
    "model": {"model": "vit-tiny"},
    "evaluate": {"evaluate": ("calibration",)},
    "epochs": {"budget": Budget(epochs=3)},
    "teacher_hash": {"budget": Budget(teacher="vit-tiny", teacher_hash="abc")},
}


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), names=st.lists(st.sampled_from(list(CHANGES)), min_size=1, max_size=3, unique=True))
def test_a_folder_with_another_run_is_refused_by_name_and_not_touched(
    tmp_path_factory: pytest.TempPathFactory, kind: str, names: list[str]
) -> None:
    folder, there = tmp_path_factory.mktemp("run"), spec()
    put(kind, folder, Owner(there, "data"))
    before = contents(folder)
    asked = there
    for name in names:
        asked = dataclasses.replace(asked, **CHANGES[name])
    with pytest.raises(OtherRunError) as caught:
        take_folder(folder, asked, "data")
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    shown = {"epochs" if name == "teacher_hash" else name for name in names}
    assert any(f"{name} is " in str(caught.value) for name in shown)
    assert contents(folder) == before


@pytest.mark.parametrize("kind", KINDS)
def test_other_data_is_another_run_and_the_same_run_goes_on(kind: str, tmp_path: Path) -> None:
    put(kind, tmp_path, Owner(spec(), "data"))
    assert take_folder(tmp_path, spec(), "data") == spec()
    with pytest.raises(OtherRunError, match="the data's fingerprint is 'data' there and 'other' here"):
        take_folder(tmp_path, spec(), "other")


def test_weights_and_results_of_something_else_are_not_written_over(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OtherRunError, match=r"model.safetensors' is there already and is of no run"):
        take_folder(tmp_path, spec(), "data")
    (tmp_path / "model.safetensors").unlink()
    for text in ('{"accuracy": 1}', "[1]", "not even JSON"):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(OtherRunError, match=r"result.json' is there already and is of no run"):
            take_folder(tmp_path, spec(), "data")


def test_a_run_does_not_move_into_a_study(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").touch()
    with pytest.raises(OtherRunError, match="holds a study"):
        take_folder(tmp_path, spec(), "data")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_of_the_same_run_is_made_again(kind: str, tmp_path: Path) -> None:
    put("run.json", tmp_path, Owner(spec(), "data"))
    (tmp_path / kind).write_bytes(b"\xff{half")
    assert take_folder(tmp_path, spec(), "data") == spec()


def test_a_checkpoint_alone_tells_whose_it_is(tmp_path: Path) -> None:
    task = open_task(TASK)
    run(spec(), task, folder=tmp_path)
    for name in ("run.json", "model.safetensors"):
        (tmp_path / name).unlink()
    before = contents(tmp_path)
    with pytest.raises(OtherRunError, match=r"recipe is 'none' there and 'cb\(cb\)' here"):
        run(spec("cb(cb)"), task, folder=tmp_path)
    assert contents(tmp_path) == before
    again = run(spec(), task, folder=tmp_path)
    assert timeless(again) == timeless(run(spec(), task))


def test_a_checkpoint_from_before_versions_were_recorded_goes_on_when_it_is_accepted(tmp_path: Path) -> None:
    task, chosen = open_task(TASK), spec()
    whole = run(chosen, task, folder=tmp_path)
    state = load_checkpoint(tmp_path)
    assert state is not None
    for name in ("spec", "fingerprint"):
        del state[name]
    del state["story"]["made_under"]
    (tmp_path / "run.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    save_checkpoint(tmp_path, {**state, "key": "another"})
    with pytest.raises(OtherRunError, match="is of another run"):
        run(chosen, task, folder=tmp_path, accept_versions=True)
    save_checkpoint(tmp_path, {**state, "key": dataclasses.replace(chosen, versions=BEFORE).key(task.fingerprint)})
    with pytest.raises(VersionsError, match=r"results 0 \(from before versions were recorded\)"):
        run(chosen, task, folder=tmp_path)
    result = run(chosen, task, folder=tmp_path, accept_versions=True)
    assert result["test"] == whole["test"]
    assert result["made_under"] == [BEFORE.to_dict(), versions_here().to_dict()]


class StopError(Exception):
    pass


def stop(event: dict[str, Any]) -> None:
    if event["validation"] is not None:
        raise StopError


def test_a_run_that_goes_on_under_another_torch_needs_to_be_told_and_says_so(
    tmp_path: Path, torch_is: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attemper.lab.training.loop.CHECKPOINT_EVERY", 0.0)
    task, chosen = open_task(TASK), dataclasses.replace(spec(), versions=torch_is("2.11.0"))
    with pytest.raises(StopError):
        run(chosen, task, folder=tmp_path, progress=stop)
    before = contents(tmp_path)
    here = dataclasses.replace(chosen, versions=torch_is("2.12.0"))
    with pytest.raises(VersionsError) as caught:
        run(here, task, folder=tmp_path)
    assert (
        f"{CHECKPOINT}' was made under results {RESULTS}, torch 2.11, and here are results {RESULTS}, torch 2.12"
        in str(caught.value)
    )
    assert contents(tmp_path) == before
    result = run(here, task, folder=tmp_path, accept_versions=True)
    assert result["made_under"] == [Versions(RESULTS, text).to_dict() for text in ("2.11", "2.12")]
    assert result["key"] == chosen.key(task.fingerprint), "it goes on under its name"


def test_a_finished_result_of_another_torch_is_not_written_over(tmp_path: Path, torch_is: Switch) -> None:
    torch_is("2.11.0")
    put("result.json", tmp_path, Owner(spec(), "data"))
    torch_is("2.12.0")
    with pytest.raises(VersionsError, match=rf"result.json' was made under results {RESULTS}, torch 2.11"):
        take_folder(tmp_path, spec(), "data")
    take_folder(tmp_path, spec(), "data", accept_versions=True)


def test_train_leaves_a_finished_run_of_another_recipe_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--task", TASK, "--model", MODEL, "--epochs", "1", "--folder", str(tmp_path / "one")]
    assert main(words) == 0
    before = contents(tmp_path)
    assert "result.json" in str(before)
    capsys.readouterr()
    assert main([*words, "--recipe", "cb", "--track", "tensorboard"]) == 2
    said = capsys.readouterr().err
    assert f"'{tmp_path / 'one'}' holds another run, which was left as it is: recipe is 'none' there" in said
    assert said.count("\n") == 1
    assert contents(tmp_path) == before
    assert main(words) == 0


def test_train_goes_on_under_its_name_when_other_versions_are_accepted(
    tmp_path: Path, torch_is: Switch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, keys = tracking.follow, list[str]()

    def follow(*args: Any, key: str, **options: Any) -> Any:
        keys.append(key)
        return honest(*args, key=key, **options)

    monkeypatch.setattr(tracking, "follow", follow)
    words = ["train", "--task", TASK, "--model", MODEL, "--epochs", "1", "--folder", str(tmp_path), "--json"]
    torch_is("2.11.0")
    assert main(words) == 0
    torch_is("2.12.0")
    assert main(words) == 2
    assert "--accept-versions to go on all the same" in capsys.readouterr().err
    assert main([*words, "--accept-versions"]) == 0
    assert [each["torch"] for each in json.loads(capsys.readouterr().out)["made_under"]] == ["2.11", "2.12"]
    assert len(keys) == 2
    assert len(set(keys)) == 1
