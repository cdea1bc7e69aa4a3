"""Models of one's own, and `attemper.compare`: changed code is another run, and nothing is trained twice."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import AttemperError, ParameterError
from attemper.lab.cli import main
from attemper.lab.errors import StoppedError
from attemper.lab.models.registry import build_model, list_models
from attemper.lab.own_code import hash_of_code
from attemper.lab.study.plan import Plan
from attemper.lab.study.study import Study
from attemper.lab.tasks.base import SequenceShape
from attemper.lab.training import loop
from attemper.lab.training.hashes import with_hashes
from attemper.lab.training.spec import Budget, RunSpec

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = SequenceShape(6, 8, 3)
HELPER = "WIDTH = 16\n\ndef unused():\n    return 1\n"
MODULE = """
import torch
from torch import nn
import my_helper

class Block(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(8, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, x):
        return self.encoder(self.embed(x)).mean(1)

def small(classes, depth: int = 1):
    block = Block(my_helper.WIDTH, depth)
    return nn.Sequential(block, nn.Linear(my_helper.WIDTH, classes))

def other():
    return nn.Linear(1, 1)

def not_a_model():
    return 3

def data():
    y = torch.arange(90) % 3
    x = torch.randn(90, 6, 8, generator=torch.Generator().manual_seed(0)) + y[:, None, None]
    return x, y
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a module of somebody's own, forgotten afterwards."""
    (tmp_path / "my_models.py").write_text(MODULE)
    (tmp_path / "my_helper.py").write_text(HELPER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    forget()


def forget() -> None:
    import linecache

    for name in ("my_models", "my_helper"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    linecache.clearcache()


def data() -> tuple[Tensor, Tensor]:
    y = torch.arange(90) % 3
    return torch.randn(90, 6, 8, generator=torch.Generator().manual_seed(0)) + y[:, None, None], y


class Mean(nn.Module):
    """Attention, mean, classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x, x, x)[0].mean(1))
        return out


def quickly(model: Any, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {"seeds": 2, "epochs": 1, "costs": False, "progress": False, **more}
    return attemper.compare(model, given.pop("data", data()), ["dropkey(0.2)"], folder=folder, **given)


# ------------------------------------------------------------------------------------------------------ module:function
def test_a_model_comes_from_a_function_of_a_module_in_the_current_directory(modules: Path) -> None:
    model = build_model("my_models:small(depth=2)", SHAPE)
    assert model(torch.randn(2, 6, 8)).shape == (2, 3)
    assert len(attemper.apply(model, "dropkey(0.1)").summary()) == 2
    assert "MODULE:FUNCTION" in list_models()
    for text, message in (
        ("my_models:smal", "'my_models' has no 'smal'. Did you mean 'small'"),
        ("my_models:small(dpth=2)", "'my_models:small' has no option 'dpth'. Did you mean 'depth'"),
        ("my_models:not_a_model", "gave a int; it must give a torch.nn.Module"),
        ("no_models_here:f", "There is no module 'no_models_here' for the model"),
    ):
        with pytest.raises(AttemperError, match=message):
            build_model(text, SHAPE)


def test_a_module_that_fails_is_one_line_with_the_place(modules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (modules / "my_models.py").write_text(
        "import torch\n\ndef f(classes):\n    return torch.zeros(2) @ torch.zeros(3)\n"
    )
    words = ["compare", "--task", "planted", "--model", "my_models:f", "--folder", "x"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "failed at my_models.py:4: RuntimeError" in told
    assert "Traceback" not in told
    forget()
    (modules / "my_models.py").write_text("import torch\n1 / 0\n")
    assert main(words) == 2
    assert "cannot be imported: ZeroDivisionError: division by zero" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.slow
def test_worker_processes_find_the_module_too(modules: Path) -> None:
    words = ["compare", "--task", "my_models:data", "--model", "my_models:small", "--recipes", "dropkey(0.1)"]
    words += ["--seeds", "1", "--epochs", "1", "--no-costs", "--folder", "study", "--workers", "2"]
    assert main(words) == 0
    assert (modules / "study" / "report.html").exists()


# --------------------------------------------------------------------------------------------------------------- hashes
def keys(text: str = "my_models:small") -> str:
    forget()
    spec = RunSpec(task="planted", model=text, recipe="none", seed=0, budget=Budget())
    from attemper.lab.tasks.own.opening import task_of

    return with_hashes(spec, task_of(data(), "x")).key("x")


def test_a_run_is_another_one_when_what_its_model_is_made_of_has_changed(modules: Path) -> None:
    first = keys()
    assert keys() == first
    assert keys("my_models:small(depth=2)") != first
    changes = {
        "a class that the function uses": (MODULE.replace(".mean(1)", ".sum(1)"), HELPER),
        "the function itself": (MODULE.replace("depth: int = 1", "depth: int = 3"), HELPER),
        "a module that it imports": (MODULE, HELPER.replace("16", "32")),
    }
    for what, (module, helper) in changes.items():
        (modules / "my_models.py").write_text(module)
        (modules / "my_helper.py").write_text(helper)
        assert keys() != first, what
    (modules / "my_models.py").write_text(MODULE.replace("nn.Linear(1, 1)", "nn.Linear(2, 2)"))
    (modules / "my_helper.py").write_text(HELPER)
    assert keys() == first, "what the model does not use does not count"


def test_hashes_follow_closures_partials_defaults_and_values() -> None:
    def made(width: int, table: Tensor) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            return nn.Linear(width, len(table))

        return build

    same = [hash_of_code(made(3, torch.ones(2))) for _ in range(2)]
    assert same[0] == same[1]
    others = [made(4, torch.ones(2)), made(3, torch.zeros(2)), functools.partial(made(3, torch.ones(2)), 1)]
    assert len({same[0], *map(hash_of_code, others)}) == 4
    torch.manual_seed(0)
    one, two = Mean(), Mean()
    assert hash_of_code(one) != hash_of_code(two), "weights count"
    two.load_state_dict(one.state_dict())
    assert hash_of_code(one) == hash_of_code(two)
    recursive: dict[str, Any] = {}
    recursive["self"] = recursive
    assert hash_of_code(recursive)


def test_code_that_changes_under_a_study_is_refused_by_its_workers(modules: Path) -> None:
    plan = {"task": "my_models:data", "model": "my_models:small", "seeds": 1, "recipes": ["none"]}
    study = Study(modules / "study", Plan.from_dict({**plan, "budget": {"epochs": 1, "warmup_epochs": 0}}))
    assert study.plan.budget.code_hash
    spec = next(iter(study.runs.values()))
    (modules / "my_models.py").write_text(MODULE.replace(".mean(1)", ".sum(1)"))
    forget()
    with pytest.raises(
        ParameterError, match=r"code_hash is .*, and the source of 'my_models:small' has .*: it was changed"
    ):
        loop.run(spec, study.task, device="cpu")
    study.prepare()
    forget()
    (modules / "my_models.py").unlink()
    assert len(Study(modules / "study").missing()) == 1, "a study is looked at without its code"


# ----------------------------------------------------------------------------------------------------- attemper.compare
def test_a_comparison_of_ones_own_shows_table_verdict_page_and_best_recipe(tmp_path: Path) -> None:
    found = quickly(Mean, tmp_path / "study")
    assert [row["name"] for row in found.table] == ["none", "dropkey(0.2)"]
    assert all(0 <= row["mean"] <= 1 for row in found.table)
    assert found.best in ("none", "dropkey(0.2)")
    assert found.verdict == found.summary["verdict"]
    assert found.page.read_text().startswith("<!")
    assert found.folder == tmp_path / "study"
    shown = found._repr_html_()
    assert shown.count("<tr>") == 3
    assert "dropkey(0.2)" in shown
    assert "none" in str(found)
    assert "Comparison of 2 recipes" in repr(found)
    assert found.summary["title"] == "data · test_own_models:Mean"


def test_run_again_it_trains_nothing_and_a_longer_one_trains_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    train = loop.Run.finish
    monkeypatch.setattr(loop.Run, "finish", lambda run: trained.append(run.key) or train(run))  # type: ignore[func-returns-value]
    first = quickly(Mean, tmp_path / "study")
    assert len(trained) == 4
    again = quickly(Mean, tmp_path / "study")
    assert len(trained) == 4
    assert main(["report", str(tmp_path / "study")]) == 0, "without the program that has made it"
    assert first.table == again.table
    quickly(Mean, tmp_path / "study", seeds=3)
    assert len(trained) == len(set(trained)) == 6


def test_stopped_in_the_middle_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    done: list[str] = []
    validate = loop.Run.validate

    def interrupted(run: loop.Run) -> Any:
        done.append(run.key)
        if len(done) == 3:
            signal.raise_signal(signal.SIGINT)
        return validate(run)

    monkeypatch.setattr(loop.Run, "validate", interrupted)
    with pytest.raises(StoppedError, match=r"Stopped with \d of 4 runs done. Nothing is lost"):
        quickly(Mean, tmp_path / "study")
    found = quickly(Mean, tmp_path / "study")
    assert found.summary["complete"]
    whole = quickly(Mean, tmp_path / "whole")
    assert [row["mean"] for row in found.table] == [row["mean"] for row in whole.table]


def test_changed_data_or_code_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(width: int, x: Tensor) -> Path:
        def model(classes: int) -> nn.Module:
            return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8), Mean(classes))

        found = attemper.compare(
            model, (x, data()[1]), ["dropkey(0.2)"], seeds=1, epochs=1, costs=False, progress=False
        )
        return found.folder

    x = data()[0]
    folders = [run(4, x), run(4, x.clone()), run(6, x), run(4, x + 1)]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") for folder in folders)


def test_a_module_is_where_every_run_starts_and_stays_as_it_was(tmp_path: Path) -> None:
    model = Mean()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = quickly(model, tmp_path / "study", lr=[1e-3, 1e-2], metric="macro_f1", title="Mine")
    assert found.summary["metric"] == "macro_f1"
    assert found.summary["title"] == "Mine"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {row["lr"] for row in found.table} <= {1e-3, 1e-2}


def test_what_cannot_be_compared_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"workers": 2}, "workers is 2, and '.*' is known in this process alone"),
        ({"epohcs": 2}, "A budget has no 'epohcs'. Did you mean 'epochs'"),
        ({"metric": "acc"}, "There is no metric 'acc'"),
        ({"data": (torch.rand(40, 3, 8, 8), data()[1][:40]), "evaluate": ["calibration"]}, "need images in bytes"),
        ({"data": [1, 2]}, "A sample of 'train' is a int; it must be a pair"),
        ({"data": iter([])}, "is a list_iterator. It can only be gone through from its beginning"),
        ({"data": "digits", "metric": "auroc"}, "metric goes with data that is handed over, and data is 'digits'"),
    ]
    for more, message in cases:
        with pytest.raises(AttemperError, match=message):
            quickly(lambda classes: Mean(classes), tmp_path / "study", **more)
    with pytest.raises(ParameterError, match="recipes is 'cb'; it must be a list of recipes"):
        attemper.compare(Mean, data(), "cb", folder=tmp_path / "study")
    with pytest.raises(ParameterError, match="model is 3; it must be a name, a function"):
        attemper.compare(3, data(), ["cb"], folder=tmp_path / "study")  # type: ignore[arg-type]
    assert not (tmp_path / "study").exists()


def test_recipes_are_texts_methods_or_names_of_either(tmp_path: Path) -> None:
    found = attemper.compare(
        Mean,
        data(),
        {
            "mine": attemper.methods.DropKey(0.3),
            "both": [attemper.methods.DropHead(0.1), attemper.methods.DropKey(0.1)],
        },
        seeds=1,
        epochs=1,
        folder=tmp_path / "study",
        costs=False,
        progress=False,
    )
    assert [row["name"] for row in found.table] == ["none", "mine", "both"]
    assert found.table[1]["recipe"] == "dropkey(0.3)"
