"""Studies: only missing runs run, each once; what is wrong is named before anything is written."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from attemper import files
from attemper.lab.errors import FolderError, PlanError, StudyError
from attemper.lab.study.performing import perform_run
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from study_fakes import FakeEngine, break_down, fill_the_disk, make_plan, make_result
from study_runs import tree, worked
from test_claims import rewrite, silence

pytestmark = pytest.mark.usefixtures("quick_workers")


def test_a_study_does_every_run_once_and_only_what_is_missing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    study = worked(tmp_path / "study", engine=FakeEngine(log))
    assert len(study.results()) == 9
    assert study.missing() == []
    assert set(Counter(log.read_text().splitlines()).values()) == {1}
    study.store.path(next(iter(study.runs))).unlink()
    again = worked(tmp_path / "study", engine=FakeEngine(log))
    assert len(again.results()) == 9
    assert len(log.read_text().splitlines()) == 2 * (9 + 1)


def test_a_finished_study_leaves_results_and_nothing_else(tmp_path: Path) -> None:
    study = worked(tmp_path)
    assert tree(tmp_path) == ["data.json", "plan.yaml", *sorted(f"runs/{key}.json" for key in study.runs)]


def test_opening_a_study_writes_nothing(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", make_plan(), engine=FakeEngine(misfits=("cb(cb)", "dropkey(0.1)")))
    with pytest.raises(PlanError) as caught:
        study.check()
    assert "2 of the plan's recipes cannot be run with vit-digits" in str(caught.value)
    assert "- dropkey(0.1): dropkey(0.1) does not fit" in str(caught.value)
    assert "- cb(cb): cb(cb) does not fit" in str(caught.value)
    assert not (tmp_path / "study").exists()


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds no study"):
        Study(tmp_path)


def test_a_study_can_be_read_without_its_data(tmp_path: Path) -> None:
    worked(tmp_path)

    class NoData(FakeEngine):
        def open_task(self, text: str, root: Path | None) -> Any:
            raise StudyError("there is no data here")

    status = status_of(Study(tmp_path, engine=NoData()))
    assert status.done == status.total


def test_changed_data_is_refused(tmp_path: Path) -> None:
    worked(tmp_path)
    with pytest.raises(StudyError, match="is not what this study began with"):
        Study(tmp_path, engine=FakeEngine(fingerprint="beef")).prepare()


def test_a_longer_plan_goes_on_with_a_folder(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worked(tmp_path / "study", engine=FakeEngine(log))
    longer = make_plan(["none", "dropkey(0.1)", "cb", "blur"], seeds=4)
    study = worked(tmp_path / "study", longer, engine=FakeEngine(log))
    assert len(log.read_text().splitlines()) == 2 * 16
    assert Study(tmp_path / "study").plan == longer
    assert len(study.results()) == 16


def test_another_plan_is_refused_unless_it_is_said_so(tmp_path: Path) -> None:
    log = tmp_path / "log"
    worked(tmp_path / "study", engine=FakeEngine(log))
    other = make_plan(["none", "blur"])
    with pytest.raises(StudyError, match="6 of its 9 runs are not in this one"):
        Study(tmp_path / "study", other, engine=FakeEngine())
    study = worked(tmp_path / "study", other, engine=FakeEngine(log), change_plan=True)
    assert len(study.results()) == 6
    assert len(log.read_text().splitlines()) == 2 * (9 + 3)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "null", "\x00" * 40], ids=repr)
def test_a_corrupt_result_is_set_aside_named_and_run_again(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study = worked(tmp_path)
    key = next(iter(study.runs))
    whole = study.results()[key]["weights"]
    study.store.path(key).write_text(text)
    assert study.missing() == [key]
    assert f"{key}.json is corrupt" in study.prepare()[0]
    study.work()
    assert f"set aside as {study.store.path(key)}.corrupt-1" in capsys.readouterr().out
    assert study.store.path(key).with_name(f"{key}.json.corrupt-1").read_text() == text
    assert study.results()[key]["weights"] == whole


def test_a_result_of_another_run_or_with_nan_is_corrupt(tmp_path: Path) -> None:
    study = worked(tmp_path)
    one, two = list(study.runs)[:2]
    study.store.path(one).write_bytes(study.store.path(two).read_bytes())
    study.store.path(two).write_text(json.dumps(make_result(study.runs[two], train={"accuracy": float("nan")})))
    assert study.missing() == [one, two]


def test_a_run_that_returns_no_result_is_a_failure(tmp_path: Path) -> None:
    class Careless(FakeEngine):
        def run(self, spec: Any, task: Any, **options: Any) -> dict[str, Any]:
            return make_result(spec, test={"accuracy": float("inf")})

    study = worked(tmp_path, make_plan(["none"], seeds=1), engine=Careless(), attempts=2)
    assert len(study.failed()) == 1
    assert "runs/" not in str(tree(tmp_path))


def test_a_run_that_fails_is_tried_again_given_up_and_reported_while_others_go_on(tmp_path: Path) -> None:
    plan = make_plan(seeds=2)
    study = worked(tmp_path, plan, engine=FakeEngine(troubles={"cb(cb)": break_down}))
    summary = summarise(study)
    assert not summary["complete"]
    assert "cb(cb), seed 0 was given up after 3 attempts: RuntimeError: the disk brake is on" in summary["notes"][0]
    assert summary["verdict"].startswith("Not complete: 2 runs are missing (2 given up after errors)")
    assert status_of(study).failed == 2
    failure = study.store.failures(study.failed()[0])[0]
    assert "break_down" in failure["traceback"]
    assert not worked(tmp_path, plan).missing(), "started again, a study tries again"
    assert not list((tmp_path / "failures").iterdir())


@pytest.mark.parametrize("moment", ["result", "checkpoint"])
def test_a_full_disk_ends_the_study_with_nothing_half_written(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(troubles={"none": fill_the_disk} if moment == "checkpoint" else {})
    study = Study(tmp_path, make_plan(), engine=engine)
    study.prepare()
    before = tree(tmp_path)
    if moment == "result":
        monkeypatch.setattr(files.os, "fsync", lambda handle: fill_the_disk(tmp_path))
    with pytest.raises(FolderError, match="no space is left on the disk; make room"):
        study.work()
    monkeypatch.undo()
    left = set(tree(tmp_path)) - set(before)
    assert not any(name.startswith("runs/") or name.endswith(".part") for name in left)
    assert not list((tmp_path / "failures").glob("*")), "the run is not to blame"
    assert len(worked(tmp_path).results()) == 9


def test_a_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="is a file, not a folder"):
        Study(tmp_path / "file" / "study", make_plan(), engine=FakeEngine()).prepare()

    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(FolderError, match="the file system is read-only; choose a folder"):
        Study(tmp_path / "study", make_plan(), engine=FakeEngine()).prepare()


def test_a_finished_study_can_be_shown_from_a_folder_that_may_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked(tmp_path)
    monkeypatch.setattr(files, "atomic_file", lambda *args, **options: pytest.fail("it writes"))
    opened = os.open

    def only_to_read(path: Any, flags: int, *more: Any, **options: Any) -> int:
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), "it writes"
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", only_to_read)
    assert status_of(Study(tmp_path)).done == 9


def test_the_worker_that_lost_its_claim_leaves_the_run_to_the_other(tmp_path: Path) -> None:
    plan, heirs = make_plan(["none"], seeds=1), []

    def take_over(folder: Path) -> None:
        other = Study(tmp_path, plan, engine=FakeEngine())
        silence(other.claims, folder.name)
        heirs.append(other.claim())

    study = Study(tmp_path, plan, engine=FakeEngine(troubles={"none": take_over}))
    study.prepare()
    claim = study.claim()
    assert claim is not None
    perform_run(study, claim, stop=lambda: False, device=None, log=print)
    assert study.results() == {}
    assert heirs[0] is not None
    heirs[0].check()


def test_a_worker_that_does_not_wait_finds_out_who_is_dead_on_another_machine_and_who_is_not(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(["none"], seeds=2), engine=FakeEngine(), stale_after=0.6)
    study.prepare()
    alive, dying = study.claim(), os.fork()
    if dying == 0:
        study.claim()
        os._exit(0)
    os.waitpid(dying, 0)
    assert alive is not None
    for key in study.runs:
        rewrite(study.claims, key, scope="another machine")
    Study(tmp_path, engine=FakeEngine(), stale_after=0.6).work(wait=False)
    assert study.missing() == [alive.key]
    alive.release()


def test_status_counts_what_is_done_running_failed_and_missing(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(seeds=4), engine=FakeEngine())
    study.prepare()
    keys = list(study.runs)
    for key in keys[:5]:
        study.store.save(key, make_result(study.runs[key], status="diverged" if key == keys[0] else "finished"))
    held = study.claim()
    assert held is not None
    study.store.write_progress(held.key, {"epoch": 2, "epochs": 4, "step": 1, "steps": 2, "loss": 0.5})
    for _ in range(3):
        study.store.add_failure(keys[6], "it broke")
    status = status_of(study)
    assert (status.total, status.done, len(status.running), status.failed, status.missing) == (12, 5, 1, 1, 5)
    assert [(r.total, r.done, len(r.running), r.failed, r.missing) for r in status.recipes] == [
        (4, 2, 0, 1, 1),
        (4, 2, 0, 0, 2),
        (4, 1, 1, 0, 2),
    ]
    assert status.recipes[0].diverged == 1
    running = status.running[0]
    assert (running.name, running.pid, running.share, running.loss) == ("cb(cb), seed 1", os.getpid(), 0.375, 0.5)
    assert status.seconds_left == pytest.approx(0.1 * (1 - 0.375) + 0.1 * 5)
    held.release()
