"""The command line: what it prints, how it ends, and what bad input gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attemper
from attemper.lab.cli import main
from attemper.lab.cli.commands import COMMANDS
from attemper.lab.cli.compare import Compare, folder_of
from attemper.lab.study.comparison import DEFAULT_PLAN
from attemper.lab.study.plan import Plan
from attemper.lab.study.planfile import load_plan
from attemper.lab.study.published import SCALES, catalogue, find_table
from attemper.lab.study.status import status_of
from attemper.lab.study.study import Study

pytestmark = pytest.mark.usefixtures("quick_workers")

SMALL = ["--task", "digits(train=200, test=50)", "--seeds", "2", "--epochs", "1", "--workers", "1"]


def leave(words: list[str]) -> int:
    """The exit code, also where the words themselves end the program."""
    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)


# ---------------------------------------------------------------------------------------------------------------- help
def test_without_words_it_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave([]) == 0
    listed = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in listed
    assert leave(["--help"]) == 0
    assert capsys.readouterr().out == listed


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(["--version"]) == 0
    assert capsys.readouterr().out == f"attemper {attemper.__version__}\n"


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compair"], "there is no 'attemper compair'. Did you mean 'compare'?"),
        (["study", "stauts"], "there is no 'attemper study stauts'. Did you mean 'status'?"),
        (["methods", "dropkye"], "there is no method 'dropkye'. Did you mean 'dropkey'?"),
        (["compare", "no-such-plan.yaml"], "no-such-plan.yaml cannot be read"),
        (["compare", "--seeds", "0"], "seeds"),
        (["compare", "--task", "digts"], "There is no task 'digts'. Did you mean 'digits'?"),
        (["compare", "--model", "vit-digit"], "There is no model 'vit-digit'. Did you mean 'vit-digits'?"),
        (["compare", "--recipes", "dropkey(1.5)"], "1.5"),
        (["compare", "--recipes", "cb(gate, branch=mpl)"], "branch"),
        (["compare", "--model", "convmixer", "--recipes", "dropkey(0.1)"], "1 of the plan's recipes cannot be run"),
        (["study", "status", "empty"], "empty holds no study"),
        (["report", "empty"], "empty holds no study"),
        (["train", "--recipe", "explicit"], "needs the strength of at least one component"),
        (["train", "--epochs", "0"], "epochs is 0; it must be at least 1"),
        (["data", "verify", "cifar10"], "cifar"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_named_and_ends_with_two(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTEMPER_DATA", raising=False)
    assert leave(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == [], "nothing is written for a mistake"


def test_a_wrong_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(["compare", "--recipies", "cb"]) == 2
    assert "--recipes" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "extra"), [("transformers", "transformers"), ("sklearn", "study")])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError(name=package)
    monkeypatch.setattr("attemper.lab.tasks.registry.verify", lambda *_: (_ for _ in ()).throw(missing))
    assert main(["data", "verify", "digits"]) == 2
    assert f"this needs '{package}', which is not installed: pip install 'attemper[{extra}]'" in capsys.readouterr().err


def test_without_the_extra_of_the_command_line_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)  # what an import finds where there is none
    assert main(["methods"]) == 2
    assert "this needs 'tyro', which is not installed: pip install 'attemper[study]'" in capsys.readouterr().err
    assert leave(["--version"]) == 0


# -------------------------------------------------------------------------------------------------------- the main job
@pytest.fixture(scope="module")
def study(quick_workers: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "one"
    code = main(["compare", "--recipes", "cb", "--folder", str(folder), "--no-costs", *SMALL])
    assert code == 0
    return folder


def test_compare_leaves_results_tables_and_a_page(study: Path) -> None:
    assert len(list((study / "runs").glob("*.json"))) == 4
    summary = json.loads((study / "summary.json").read_text())
    assert [row["name"] for row in summary["recipes"]] == ["none", "cb"]
    assert summary["complete"]
    page = (study / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert summary["verdict"].split(":")[0] in page


def test_the_same_command_again_runs_nothing(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in (study / "runs").iterdir()}
    assert main(["compare", "--recipes", "cb", "--folder", str(study), "--no-costs", "--json", *SMALL]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (study / "runs").iterdir()} == before
    out, _ = capsys.readouterr()
    assert json.loads(out)["complete"], "standard output is JSON and nothing else"


def test_another_plan_does_not_take_a_folder_by_accident(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--recipes", "cb", "--folder", str(study), "--no-costs", "--seeds", "1"]) == 2
    assert "holds the study of another plan" in capsys.readouterr().err


def test_a_study_can_be_looked_at_and_exported(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["study", "status", str(study)]) == 0
    assert "4 of 4 runs done" in capsys.readouterr().out
    assert main(["study", "status", str(study), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 4
    assert main(["study", "export", str(study), "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["name", "none", "cb"]
    assert main(["study", "export", str(study), "--out", str(tmp_path / "table.md")]) == 0
    assert "| cb |" in (tmp_path / "table.md").read_text()
    assert main(["study", "export", str(study), "--out", str(tmp_path)]) == 2
    assert main(["report", str(study), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_one_run_can_be_trained_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--recipe", "dropkey(0.1)", "--epochs", "1", "--folder", str(tmp_path / "run"), "--json"]
    assert main(words) == 0
    printed, said = capsys.readouterr()
    result = json.loads(printed)
    assert "note: the warm-up of 5 epochs is longer than the training of 1" in said
    assert result["spec"]["recipe"] == "dropkey(0.1)"
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result


def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["compare", "--recipes", "cb", "--folder", str(tmp_path / "study"), "--epochs", "400", "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "attemper", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  a shell's jobs may ignore it
    )
    try:
        until = time.monotonic() + 120
        while not list((tmp_path / "study").glob("progress/*")) and time.monotonic() < until:
            assert process.poll() is None, "it ended before it was stopped"
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "run the same command to go on" in said
    assert "Traceback" not in said
    status = status_of(Study(tmp_path / "study"))
    assert (status.running, status.failed, status.missing) == ((), 0, status.total), "no run stays claimed"


# --------------------------------------------------------------------------------------------------- plans from options
def test_options_go_before_what_the_plan_says() -> None:
    plan = Compare(task="cifar10", recipes=("cb",), seeds=2, epochs=3, lr=(1e-3, 5e-4)).changed(DEFAULT_PLAN)
    assert (plan.task, [entry.name for entry in plan.recipes]) == ("cifar10", ["none", "cb"])
    assert (len(plan.seeds), plan.budget.epochs, plan.lr) == (2, 3, (1e-3, 5e-4))
    assert plan.budget.batch_size == DEFAULT_PLAN["budget"]["batch_size"], "what is not said stays"
    assert Compare().changed(DEFAULT_PLAN) == Plan.from_dict(DEFAULT_PLAN)


def test_a_folder_has_the_names_of_task_and_model() -> None:
    plan = Plan.from_dict({**DEFAULT_PLAN, "task": "folder:../a b(size=32)", "model": "timm:vit_tiny_patch16_224"})
    assert folder_of(plan) == Path("runs/folder-..-a-b-size-32-timm-vit-tiny-patch16-224")


# ---------------------------------------------------------------------------------------------------------- the methods
def test_methods_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [method["name"] for method in listed] == [method.name for method in attemper.list_methods()]
    assert main(["methods", "dropkey"]) == 0
    assert "renormalises" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- the published tables
def test_published_tables_are_listed_and_their_plans_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert main(["reproduce", "explicit-cifar10", "--scale", "full", "--print-plan"]) == 0
    (tmp_path / "plan.yaml").write_text(capsys.readouterr().out)
    assert load_plan(tmp_path / "plan.yaml") == Plan.from_dict(find_table("explicit-cifar10").plan("full"))
    for table in catalogue():
        assert table.key in listed
        for scale in SCALES if table.can_run else ():
            assert Plan.from_dict(table.plan(scale)).runs()
    assert main(["reproduce", "explicit-cifr10"]) == 2
    assert "Did you mean 'explicit-cifar10'?" in capsys.readouterr().err
    assert main(["reproduce", "explicit-cifar1"]) == 2
    assert "Those that begin so: explicit-cifar10, explicit-cifar100." in capsys.readouterr().err
