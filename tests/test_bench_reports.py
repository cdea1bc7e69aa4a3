"""What `attemper bench` found: its files, tables, pages, its command line, and the page in the documentation."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from attemper.errors import UnreadableError
from attemper.lab.bench import terminal as show_module
from attemper.lab.bench.__main__ import main
from attemper.lab.bench.commands import Ops, Step, command_line
from attemper.lab.bench.html_page import make_page
from attemper.lab.bench.results import Head, Machine, OpsReport, OpsRow, Shape, StepReport, StepRow, load, save
from attemper.lab.bench.step import TWIN
from attemper.lab.bench.tables import failures, full_tables, markdown, tally, targets, verdict
from attemper.lab.bench.vit_models import BASE, ViT

ROOT = Path(__file__).resolve().parents[1]
TINY = ViT("tiny", image=16, patch=8, width=16, blocks=2, heads=2, classes=4)
H200 = Machine(device="NVIDIA H200", cpu="", threads=None, versions={"torch": "2.11.0"})
NAME = "2x2x9x8"


@pytest.fixture(autouse=True)
def _no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler takes a second per step; what it measures has a test of its own."""
    monkeypatch.setattr("attemper.lab.bench.timing.peak_bytes_on_cpu", lambda step: 2**20)


def head(machine: Machine = H200, **changes: Any) -> Head:
    given: dict[str, Any] = {
        "date": "2026-11-15",
        "command": "attemper bench ops",
        "machine": machine,
        "dtype": "bfloat16",
        "rounds": 15,
        "clock": "cuda events",
    }
    return Head(**given | changes)


def ops_report(*rows: OpsRow) -> OpsReport:
    return OpsReport(head=head(), ceiling_tflops=700.0, rows=rows)


def row(**changes: Any) -> OpsRow:
    given: dict[str, Any] = {"shape": Shape(256, 6, 197, 64), "family": "attemper", "name": "triton", "recipe": "none"}
    return OpsRow(**given | changes)


# Reports.

STEP_REPORT = StepReport(
    head=head(),
    model=str(BASE),
    batch=512,
    rows=(
        StepRow(recipe="none", mode="compiled", milliseconds=56.7, ratio=1.0, low=1.0, high=1.0, target=None),
        StepRow(recipe="dropkey(0.1)", mode="compiled", milliseconds=62.4, ratio=1.1, low=1.0, high=1.2, target=1.0),
        StepRow(recipe="blur(1.0)", mode="compiled", failure="out of memory: [too] much <of> it"),
    ),
)
OPS_REPORT = ops_report(
    row(family="stock", name="cudnn", milliseconds=0.39, ratio=1.0),
    row(recipe="dropkey(0.1)", chosen=True, milliseconds=0.35, ratio=0.897, target=0.90, error=2e-3),
    row(recipe="blur(1.0)", chosen=True, milliseconds=0.43, ratio=1.1, target=0.95),
    row(recipe="hardmask(0.1)", failure="cannot <script>"),
)


@pytest.mark.parametrize("report", [OPS_REPORT, STEP_REPORT], ids=["ops", "step"])
def test_a_report_comes_back_from_its_file_as_it_was(report: Any, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "report.json"
    save(report, path)
    assert load(path) == report
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", '{"format": 9, "benchmark": "ops"}', '{"format": 1, "benchmark": "ops"}']
)
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UnreadableError, match=r"file\.json"):
        load(path)


def test_tables_say_which_targets_are_met_missed_and_not_measured() -> None:
    table = targets(OPS_REPORT)
    cells = dict(zip(table.columns, next(cells for cells in table.rows if cells[0] == "197 (64)"), strict=True))
    assert cells["`dropkey(0.1)`"] == "0.90 ≤ 0.90, met"
    assert cells["`blur(1.0)`"] == "1.10 > 0.95, missed"
    assert cells["`hardmask(0.1)`"] == "? ≤ 1.15, not measured"
    assert tally(OPS_REPORT) == "Of 21 targets: 1 met, 1 missed, 19 not measured."
    steps = dict(targets(STEP_REPORT).rows)
    assert steps["`dropkey(0.1)`"] == "1.10 > 1.00, missed"
    assert steps["`cb(cb)`"] == "? ≤ 1.00, not measured"
    assert verdict(0.953, 0.95) == "0.953 > 0.95, missed"


def test_another_machine_meets_no_target() -> None:
    fast = row(recipe="dropkey(0.1)", chosen=True, milliseconds=0.1, ratio=0.2, target=None)
    assert "0 met, 0 missed" in tally(ops_report(fast))


def test_failures_that_are_alike_share_a_line_and_name_the_shapes_unless_all_fail() -> None:
    other = Shape(8, 12, 4096, 64)
    report = ops_report(
        row(recipe="blur(1.0)", failure="no"),
        row(recipe="none", failure="no"),
        row(recipe="dropkey(0.1)", milliseconds=1.0),
        row(recipe="blur(1.0)", failure="no", shape=other),
        row(recipe="none", failure="no", shape=other),
        row(recipe="dropkey(0.1)", failure="out of memory", shape=other),
    )
    assert failures(report) == [
        "attemper triton, blur(1.0) / none: no",
        "attemper triton, dropkey(0.1) at 4096x64: out of memory",
    ]


@pytest.mark.parametrize("report", [OPS_REPORT, STEP_REPORT], ids=["ops", "step"])
def test_a_screen_shows_every_figure_and_every_failure(
    report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for fancy in (False, True):
        monkeypatch.setattr(show_module, "_fancy", lambda stream, fancy=fancy: fancy)
        show_module.show(report)
        shown = capsys.readouterr().out
        for table in full_tables(report):
            assert all(cell in shown for cells in table.rows for cell in cells)
        assert all(line in shown for line in failures(report))
        assert ("━" in shown) == fancy, "rich draws lines, plain text does not"


def test_output_is_plain_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    show_module.show(OPS_REPORT, stream)
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("report", [OPS_REPORT, STEP_REPORT], ids=["ops", "step"])
def test_the_page_stands_alone_and_escapes_what_it_shows(report: Any) -> None:
    page = make_page(report)
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "<script>cannot" not in page
    assert "cannot <script>" not in page
    assert "<of>" not in page
    for line in failures(report):
        assert line.split("<")[0] in page
    assert "<svg" in page
    assert report.head.machine.device in page


def test_markdown_leaves_out_columns_without_entries() -> None:
    table = full_tables(OPS_REPORT)[0]
    first = markdown(table).splitlines()[0]
    assert "95 %" in table.columns
    assert "95 %" not in first
    assert "target" in first


# The command line.


def test_the_command_measures_shows_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json, page = tmp_path / "ops.json", tmp_path / "ops.html"
    words = f"ops --device cpu --shapes {NAME} --methods blur --backends math --rounds 2 --threads 1 --note busy"
    words += " --date 2026-01-02"
    assert main([*words.split(), "--json", str(json), "--page", str(page)]) == 0
    report = load(json)
    assert report.head.command == f"attemper bench {words} --json ops.json --page ops.html"
    assert (report.head.date, report.head.note, report.head.rounds) == ("2026-01-02", "busy", 2)
    assert report.head.machine.versions["torch"] == torch.__version__
    assert "blur(1.0)" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")


def test_the_step_command_measures_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.lab.bench.step.SMALL", TINY)
    json = tmp_path / "step.json"
    words = "step --device cpu --methods blur cb --batch 1 --rounds 2 --threads 1 --json"
    assert main([*words.split(), str(json)]) == 0
    assert [r.recipe for r in load(json).rows] == ["none", TWIN, "blur(1.0)", "cb(cb)"]


def test_a_mistake_is_a_message_and_exit_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ops", "--shapes", "64x32"]) == 2
    assert "Did you mean '65x32'?" in capsys.readouterr().err
    assert main(["ops", "--json", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["step", "--page", str(tmp_path / "file" / "page.html")]) == 2
    assert "not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("plan", [Ops, Step])
def test_every_option_is_explained(plan: type[Ops | Step], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([plan.__name__.lower(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(plan):
        after = shown.split(f"--{field.name} X")[-1]
        assert after.removeprefix(" [X ...]").strip()[0].isupper(), field.name


def test_tyro_reads_the_plans_as_they_are() -> None:
    tyro = pytest.importorskip("tyro")
    words = ["--shapes", "65x32", "197x64", "--rounds", "3", "--json", "o.json"]
    assert tyro.cli(Ops, args=words) == Ops(shapes=("65x32", "197x64"), rounds=3, json=Path("o.json"))
    assert tyro.cli(Step, args=["--modes", "eager", "compiled"]) == Step(modes=("eager", "compiled"))


def test_a_report_does_not_tell_where_its_files_were() -> None:
    assert command_line(["ops", "--json", "/home/me/ops.json"]) == "attemper bench ops --json ops.json"
    assert command_line(["step", "--note", "two words"]) == "attemper bench step --note 'two words'"


# The documentation.


def figures_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "benchmarks" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["figures"] = module
    spec.loader.exec_module(module)
    return module


def test_the_documentation_shows_the_figures_of_the_result_files() -> None:
    script = figures_script()
    for page in script.PAGES:
        text = page.read_text(encoding="utf-8")
        assert script.MARKED.search(text), f"{page.name} shows no figures"
        assert script.fill(text) == text, f"run python benchmarks/figures.py: {page.name} shows other figures"


def test_figures_that_differ_from_their_file_are_noticed(tmp_path: Path) -> None:
    script = figures_script()
    save(STEP_REPORT, tmp_path / "step.json")
    page = script.fill("<!-- figures: summary step.json -->\n<!-- /figures -->", tmp_path)
    assert "| `dropkey(0.1)` | 62.4 ms | 1.10 |" in page
    assert script.fill(page, tmp_path) == page
    assert script.fill(page.replace("62.4", "52.4"), tmp_path) != page.replace("62.4", "52.4")


def test_what_one_file_has_not_measured_the_next_one_adds(tmp_path: Path) -> None:
    script = figures_script()
    none, dropkey, _ = STEP_REPORT.rows
    rows = (none, dataclasses.replace(dropkey, ratio=0.5), dataclasses.replace(dropkey, recipe="blur(1.0)"))
    save(STEP_REPORT, tmp_path / "one.json")
    save(dataclasses.replace(STEP_REPORT, rows=rows), tmp_path / "two.json")
    alone, both = (
        script.fill(f"<!-- figures: summary {names} -->\n<!-- /figures -->", tmp_path)
        for names in ("one.json", "one.json two.json")
    )
    lines, added = alone.splitlines()[1:], "| `blur(1.0)` | 62.4 ms | 1.10 | 1.00 … 1.20 | – |"
    assert any(line.startswith("| `blur(1.0)` | – |") for line in lines)
    assert both.splitlines()[1:] == [added if line.startswith("| `blur") else line for line in lines]


RESULTS = sorted(path.name for kind in ("ops", "step") for path in (ROOT / "benchmarks/results").glob(f"{kind}-*.json"))


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_says_on_what_and_when_it_was_taken(name: str) -> None:
    report = load(ROOT / "benchmarks" / "results" / name)
    assert report.head.machine.device
    assert report.head.date
    assert report.head.command
    assert {"attemper", "torch"} <= set(report.head.machine.versions)
