"""Versions and digests: results of different versions do not mix unsaid, and a file that was edited or cut is named."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import attemper
from attemper.lab.cli import main
from attemper.lab.errors import DamagedPlanError, StudyError, VersionsError
from attemper.lab.study import workers
from attemper.lab.study.export import to_csv, to_markdown
from attemper.lab.study.live import status_table
from attemper.lab.study.planfile import dump_plan
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.versions import BEFORE, RESULTS, Versions, versions_here
from study_fakes import FakeEngine, make_plan, make_result

Switch = Callable[[str], Versions]

OLDER, NEWER = (f"results {RESULTS}, torch {torch}" for torch in ("2.11", "2.12"))
"""As they are told."""


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Switch:
    """Pretends that another version of torch is installed."""

    def switch(version: str) -> Versions:
        monkeypatch.setattr(torch, "__version__", version)
        versions_here.cache_clear()
        return versions_here()

    yield switch  # type: ignore[misc]
    monkeypatch.undo()
    versions_here.cache_clear()


def begun(folder: Path, runs: int = 2) -> Study:
    """A study of six runs, some of which are done."""
    study = Study(folder, make_plan(seeds=2), engine=FakeEngine())
    study.prepare()
    for key in list(study.runs)[:runs]:
        study.store.save(key, make_result(study.runs[key]))
    return study


def opened(folder: Path, **options: Any) -> Study:
    return Study(folder, engine=FakeEngine(), **options)


# ------------------------------------------------------------------------------------------------------------ versions
def test_the_result_format_counts_up_when_the_random_stream_changes() -> None:
    """If this fails, the same run gives another result than before: raise `RESULTS`, and pin what is drawn now."""
    drawn = attemper.keep_mask(7, (2, 3, 40, 50), 0.3).to(torch.uint8).numpy().tobytes()
    assert (RESULTS, hashlib.sha256(drawn).hexdigest()[:16]) == (4, "b4e5bd979d50f1b7")


def test_keys_depend_on_versions_and_runs_from_before_keep_theirs() -> None:
    spec = RunSpec(task="t", model="m", recipe="none", seed=0, budget=Budget(), versions=Versions(1, "2.11"))
    keys = {
        dataclasses.replace(spec, versions=versions).key("x")
        for versions in (BEFORE, Versions(1, "2.11"), Versions(1, "2.12"), Versions(2, "2.11"))
    }
    assert len(keys) == 4
    assert "versions" not in dataclasses.replace(spec, versions=BEFORE).to_dict()
    for each in (spec, dataclasses.replace(spec, versions=BEFORE)):
        assert RunSpec.from_dict(json.loads(json.dumps(each.to_dict()))) == each


def test_a_patch_release_of_torch_changes_nothing_and_a_minor_one_does(torch_is: Switch) -> None:
    assert torch_is("2.11.0+cu130") == torch_is("2.11.1") == Versions(RESULTS, "2.11")
    assert torch_is("2.12.0") == Versions(RESULTS, "2.12")


def test_a_study_under_another_torch_says_so_and_needs_to_be_told(tmp_path: Path, torch_is: Switch) -> None:
    torch_is("2.11.0")
    begun(tmp_path)
    torch_is("2.12.0")
    with pytest.raises(VersionsError) as caught:
        opened(tmp_path).prepare()
    assert f"2 results made under {OLDER}, and here are {NEWER}" in str(caught.value)
    assert "--accept-versions" in str(caught.value)
    assert status_of(opened(tmp_path)).notes == (), "looking is free, and nothing is mixed yet"

    study = opened(tmp_path, accept_versions=True)
    assert (
        f"mixes results made under results {RESULTS}, torch 2.11 and results {RESULTS}, torch 2.12"
        in study.prepare()[0]
    )
    study.work()
    assert len(study.results()) == 6, "what was there is kept"
    assert opened(tmp_path).versions == (Versions(RESULTS, "2.11"), Versions(RESULTS, "2.12"))
    opened(tmp_path).prepare()  # accepted once, it is accepted


def test_mixed_versions_are_seen_in_status_summary_export_and_page(tmp_path: Path, torch_is: Switch) -> None:
    from attemper.lab.report.study import render

    torch_is("2.11.0")
    begun(tmp_path)
    torch_is("2.12.0")
    study = opened(tmp_path, accept_versions=True)
    study.prepare()
    study.work()
    line = f"2 runs under {OLDER}; 4 runs under {NEWER}"
    summary = summarise(study)
    assert line in status_of(study).notes[0]
    assert line in to_markdown(summary)
    assert line in render(summary)
    assert f",{OLDER} and {NEWER},".replace("results 4, ", "results 4 ") in to_csv(summary)
    assert line in text_of(status_of(study))


def text_of(status: Any) -> str:
    out = io.StringIO()
    Console(width=400, file=out).print(status_table(status))
    return out.getvalue()


def test_a_study_of_which_nothing_was_run_begins_under_whatever_is_here(tmp_path: Path, torch_is: Switch) -> None:
    torch_is("2.11.0")
    begun(tmp_path, runs=0)
    here = torch_is("2.12.0")
    study = opened(tmp_path)
    study.prepare()
    study.work()
    assert study.versions == (here,)
    assert {result["spec"]["versions"]["torch"] for result in study.results().values()} == {"2.12"}


def test_a_complete_study_can_be_summarised_under_any_version(tmp_path: Path, torch_is: Switch) -> None:
    torch_is("2.11.0")
    begun(tmp_path, runs=6)
    torch_is("2.12.0")
    study = opened(tmp_path)
    study.prepare()
    assert summarise(study)["complete"]


def test_workers_on_machines_with_other_versions_are_refused_unless_they_are_accepted(
    tmp_path: Path, torch_is: Switch
) -> None:
    torch_is("2.11.0")
    study = begun(tmp_path)
    config = workers.WorkerConfig.of(study, threads=1, device=None)
    torch_is("2.12.0")
    with pytest.raises(VersionsError, match=r"the missing runs \(4\) would not be comparable"):
        config.open()
    joined = dataclasses.replace(config, accept_versions=True).open()
    assert list(joined.runs) == list(study.runs), "the study's keys stay what they are"
    assert opened(tmp_path).versions == (Versions(RESULTS, "2.11"), Versions(RESULTS, "2.12"))
    config.open()


def test_a_study_from_before_versions_were_recorded_is_read_and_continued_when_it_is_said(tmp_path: Path) -> None:
    study = old_study(tmp_path)
    assert status_of(opened(tmp_path)).done == 2
    with pytest.raises(VersionsError, match=r"results 0 \(from before versions were recorded\)"):
        opened(tmp_path).prepare()
    again = opened(tmp_path, accept_versions=True)
    again.prepare()
    again.work()
    assert list(again.runs) == list(study)
    assert len(again.results()) == 6
    assert opened(tmp_path).versions == (BEFORE, versions_here())
    assert "2 runs under results 0 (from before versions were recorded), torch 2.9" in status_of(again).notes[0]


def old_study(folder: Path) -> list[str]:
    """A study as it was written before there were versions and digests; gives its keys."""
    plan = make_plan(seeds=2)
    specs = [dataclasses.replace(spec, versions=BEFORE) for spec in plan.runs()]
    (folder / "runs").mkdir()
    (folder / "plan.yaml").write_text(dump_plan(plan))
    (folder / "data.json").write_text(json.dumps({"plan": "fake", "task": "fake", "fingerprint": "f00d"}))
    for spec in specs[:2]:
        result = make_result(spec, versions={"torch": "2.9.1"})
        del result["made_under"]
        (folder / "runs" / f"{result['key']}.json").write_text(json.dumps(result))
    return [spec.key("f00d") for spec in specs]


# ------------------------------------------------------------------------------------------------------------- digests
def test_a_plan_cut_at_any_line_is_found(tmp_path: Path) -> None:
    begun(tmp_path)
    path = tmp_path / "plan.yaml"
    lines = path.read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_text("".join(lines[:kept]))
        with pytest.raises(DamagedPlanError, match="was edited or cut after the study began"):
            opened(tmp_path)
    path.write_text("".join(lines[1:]))
    with pytest.raises(DamagedPlanError, match="its first line is missing"):
        opened(tmp_path)
    path.write_text("".join(lines))
    opened(tmp_path)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_plan_with_any_other_character_is_found(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("study")
    begun(folder, runs=0)
    path = folder / "plan.yaml"
    text = path.read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="ascii", exclude_characters=text[at] + "\r"))
    path.write_text(text[:at] + other + text[at + 1 :])
    with pytest.raises(DamagedPlanError):
        opened(folder)


def test_a_damaged_plan_can_be_replaced_and_its_results_are_found_again(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "plan.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(DamagedPlanError, match="it is no text"):
        Study(tmp_path, make_plan(seeds=2), engine=FakeEngine())
    study = Study(tmp_path, make_plan(seeds=2), engine=FakeEngine(), change_plan=True)
    study.prepare()
    assert len(study.results()) == 2
    assert opened(tmp_path).plan == make_plan(seeds=2)


def test_a_plan_of_ones_own_may_be_edited_until_a_run_is_there(tmp_path: Path) -> None:
    text = "# mine\n" + dump_plan(make_plan(seeds=2))
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(StudyError, match="is another plan than this, and nothing of it was run"):
        Study(tmp_path, make_plan(seeds=3), engine=FakeEngine())
    study = Study(tmp_path, make_plan(seeds=2), engine=FakeEngine())
    study.prepare()
    written = (tmp_path / "plan.yaml").read_text()
    assert written.partition("\n")[2] == text, "comments stay"
    assert opened(tmp_path).plan == study.plan


def edited(text: str) -> str:
    return text.replace('"accuracy": 0.', '"accuracy": 0.9', 1)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (edited, "its digest does not fit"),
        (lambda text: text.replace('"digest"', '"tsegid"'), "its digest does not fit"),
        (lambda text: text[: len(text) // 2], "only a part of it is there"),
        (lambda text: "[" * 100_000, "it is no JSON"),
    ],
    ids=["edited", "without a digest", "cut", "nested"],
)
def test_a_result_that_was_edited_or_cut_is_named_and_done_again(
    tmp_path: Path, damage: Callable[[str], str], problem: str
) -> None:
    study = begun(tmp_path)
    key = next(iter(study.runs))
    path = study.store.path(key)
    path.write_text(damage(path.read_text()))
    study = opened(tmp_path)
    [note] = status_of(study).notes
    assert str(path) in note
    assert problem in note
    assert f"'attemper study resume {tmp_path}'" in note
    assert note in summarise(study)["notes"]
    study.prepare()
    study.work()
    assert path.with_name(f"{path.name}.corrupt-1").exists()
    assert status_of(study).notes == ()


@pytest.mark.parametrize("name", ["data.json", "summary.md", "runs", "run.json"])
def test_a_folder_with_files_that_a_study_would_write_over_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir() if name == "runs" else (tmp_path / name).write_text("mine")
    (tmp_path / "settings.json").write_text("mine")
    with pytest.raises(StudyError, match=f"holds .*{name}.* of something else, and no study"):
        Study(tmp_path, make_plan(), engine=FakeEngine())


def test_the_command_line_hands_it_on(
    tmp_path: Path, torch_is: Switch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attemper.lab.study.study.Training", lambda *_: FakeEngine())
    words = ["study", "submit", str(tmp_path), "--slurm"]
    torch_is("2.11.0")
    study = begun(tmp_path)
    torch_is("2.12.0")
    for command in (words, ["study", "resume", str(study.folder)], ["study", "work", str(study.folder)]):
        assert main(command) == 2
        assert "--accept-versions" in capsys.readouterr().err
    assert main([*words, "--accept-versions"]) == 0
    assert f"study work {study.folder} --accept-versions" in capsys.readouterr().out
