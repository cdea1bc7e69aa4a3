"""No command writes over something else: files that it did not make, or that tell of other things, are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import attemper
from attemper.errors import ParameterError, UnsavableError
from attemper.lab.bench.commands import check_files
from attemper.lab.cli import main
from attemper.lab.cli.diagnosis_files import check_out as check_diagnosis
from attemper.lab.cli.evaluate import _keep_other
from attemper.lab.cli.experiment import check_out as check_experiment
from attemper.lab.folders import refuse_foreign
from attemper.lab.report.page import is_page, page
from attemper.lab.study.study import Study
from study_fakes import FakeEngine, make_plan

MINE = b"my own notes\n"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("attemper.lab.study.study.Training", lambda *_: FakeEngine())
    made = Study(tmp_path / "study", make_plan(), engine=FakeEngine())
    made.prepare()
    made.work()
    return made.folder


@pytest.mark.parametrize(
    "words",
    [
        ["report", "{study}"],
        ["study", "export", "{study}", "--format", "csv"],
        ["study", "export", "{study}", "--format", "markdown"],
        ["study", "export", "{study}", "--format", "json"],
        ["study", "submit", "{study}", "--slurm"],
    ],
    ids=" ".join,
)
def test_a_file_of_somebody_elses_is_refused_and_an_own_one_is_replaced(
    words: list[str], study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = [word.format(study=study) for word in words] + ["--out", str(out)]
    out.write_bytes(MINE)
    assert main(command) == 2
    assert f"{out} is there already, and is not " in capsys.readouterr().err
    assert out.read_bytes() == MINE
    out.unlink()
    assert main(command) == 0
    written = out.read_bytes()
    assert main(command) == 0
    assert out.read_bytes() == written
    assert main([*command[:-1], str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_figures_of_another_benchmark_are_not_replaced(tmp_path: Path) -> None:
    figures, web = tmp_path / "figures.json", tmp_path / "page.html"
    check_files(figures, web, "ops")
    figures.write_text(json.dumps({"format": 1, "benchmark": "step"}))
    with pytest.raises(ParameterError, match="is not figures of 'attemper bench ops'"):
        check_files(figures, web, "ops")
    check_files(figures, web, "step")
    web.write_text("<html>mine</html>")
    with pytest.raises(ParameterError, match="is not a page of Attemper"):
        check_files(figures, web, "step")
    web.write_text(page("ours", []))
    check_files(figures, web, "step")


def test_an_empty_file_may_be_written_and_our_pages_are_known(tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    refuse_foreign(tmp_path / "new", is_page, "a page")
    results = Path(__file__).resolve().parents[1] / "docs" / "results"
    for committed in results.glob("*.html"):
        assert is_page(committed.read_bytes())


OF = {"model": "vit-tiny", "recipe": "none", "images": "photos"}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("index.html", "mine", "index.html, which does not come from a diagnosis"),
        ("heat-entropy.png", "mine", "heat-entropy.png, which does not come from a diagnosis"),
        ("table.json", '{"rows": []}', "table.json, which does not come from a diagnosis"),
        ("table.json", json.dumps({"of": {**OF, "recipe": "cb"}}), r"the diagnosis of another recipe \(cb\)"),
        ("table.json", json.dumps({"of": {**OF, "beside": "b.pt"}}), r"the diagnosis of another beside \(b.pt\)"),
    ],
)
def test_a_diagnosis_leaves_others_files_and_other_diagnoses_alone(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ParameterError, match=said):
        check_diagnosis(tmp_path, OF)
    (tmp_path / "table.json").write_text(json.dumps({"of": OF}))
    check_diagnosis(tmp_path, OF)
    check_diagnosis(tmp_path / "new", OF)


ASKED: dict[str, Any] = {"task": "digits", "seeds": 3, "budget": {"epochs": 2}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("skips.md", "mine", "it is of no experiment"),
        ("skips.json", "mine", "it is of no experiment"),
        ("skips.json", json.dumps({**ASKED, "task": "cifar10"}), "its task is cifar10, not digits"),
        ("skips.json", json.dumps({**ASKED, "budget": {"epochs": 9}}), "its epochs is 9, not 2"),
    ],
)
def test_an_experiment_leaves_others_files_and_other_experiments_alone(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ParameterError, match=said):
        check_experiment(tmp_path, "skips", ASKED)
    (tmp_path / "skips.json").write_text(json.dumps(ASKED))
    check_experiment(tmp_path, "skips", ASKED)
    check_experiment(tmp_path, "graying", ASKED)


def test_an_evaluation_of_other_things_is_kept_under_another_name(tmp_path: Path) -> None:
    path, web = tmp_path / "evaluation.json", tmp_path / "evaluation.html"
    found = {"suites": ["calibration"], "test_sets": [{"name": "ImageNet-A"}]}
    assert _keep_other(found, path, web) == []
    path.write_text(json.dumps(found))
    web.write_text("page")
    assert _keep_other(found, path, web) == []
    for other in ({**found, "suites": ["robustness"]}, {**found, "test_sets": []}):
        kept = _keep_other(other, path, web)
        assert [each.exists() for each in kept] == [True, True]
        assert json.loads(kept[0].read_text()) == found
        path.write_text(json.dumps(found))
        web.write_text("page")


def model() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "spec": "{}"}], ids=["another library's", "a run's"])
def test_saving_leaves_weights_alone_that_it_did_not_write(metadata: Any, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors", metadata=metadata)
    before = (tmp_path / "model.safetensors").read_bytes()
    tempered = attemper.apply(model(), "dropkey(0.1)")
    with pytest.raises(UnsavableError, match=r"model.safetensors' is there already, without an attemper.json"):
        tempered.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "attemper.json").exists()


def test_saving_again_replaces_what_was_saved_before(tmp_path: Path) -> None:
    tempered = attemper.apply(model(), "dropkey(0.1)")
    tempered.save(tmp_path)
    tempered.set_rate(0.3)
    tempered.save(tmp_path)
    attemper.load(model(), tmp_path)
