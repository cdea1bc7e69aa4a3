"""The papers' experiments run in parts, go on where they were stopped, and write what they found."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.cli.experiment import write
from attemper.lab.experiments import runs as running_arms
from attemper.lab.experiments.branches import spectrum
from attemper.lab.experiments.catalogue import EXPERIMENTS, choose_arms
from attemper.lab.experiments.gradients import gradient_noise, mini_batches
from attemper.lab.experiments.kept import Kept
from attemper.lab.experiments.runs import ArmRun
from attemper.lab.experiments.summary import gradient_changes
from attemper.lab.experiments.tables import markdown, shown
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.learner import Learner
from attemper.lab.training.loop import run
from attemper.probes.jacobian import branch_jacobian
from small_experiments import BUDGET, MODELS, TASK, experiment, one


@pytest.fixture(scope="module")
def digits() -> Any:
    return open_task(TASK, None)


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attemper.lab.experiments.gradients.BATCHES", 3)
    monkeypatch.setattr("attemper.lab.experiments.runs.BATCHES", 3)


# ----------------------------------------------------------------------------------------------------------- gradients
@pytest.mark.parametrize("recipe", ["none", "hardmask + consistency"])
def test_the_variance_of_gradients_is_that_of_gradients_taken_one_by_one(recipe: str, digits: Any) -> None:
    spec = one("gradient-variance", recipe).spec()
    found = gradient_noise(spec, digits, None, torch.device("cpu"))
    learner = Learner(spec, digits, torch.device("cpu"))
    learner.model.train()
    torch.manual_seed(0)
    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attemper.lab.experiments.gradients.gradient_variance", None)  # not by its way
        from attemper.lab.training.randomness import preserved_random_state, seed_everything

        with preserved_random_state():
            batches = list(mini_batches(spec, digits, torch.device("cpu")))
            seed_everything(0)
            for batch in batches:
                learner.loss(*batch).backward()
                gradients.append(torch.cat([p.grad.double().flatten() for p in learner.model.parameters()]))
                learner.optimizer.zero_grad()
    stacked = torch.stack(gradients)
    assert len(stacked) == 3
    assert found["variance"] == pytest.approx(float(stacked.var(0).sum()), rel=1e-5)
    assert found["squared_mean"] == pytest.approx(float(stacked.mean(0).square().sum()), rel=1e-5)


def test_changes_of_gradients_are_ratios_paired_by_seed() -> None:
    def record(**noise: tuple[float, float]) -> dict[str, Any]:
        point = {name: {"variance": v, "squared_mean": m} for name, (v, m) in noise.items()}
        return {"gradients": {"start": point, "middle": None, "end": point}}

    none, hardmask, blur, *rest = EXPERIMENTS["gradient-variance"].arms
    by_arm = {
        none: {
            0: record(none=(2.0, 1.0), blur=(1.0, 1.0), hardmask=(2.0, 4.0)),
            1: record(none=(4.0, 1.0), blur=(3.0, 2.0)),
        },
        blur: {0: record(blur=(3.0, 1.0)), 2: record(blur=(9.0, 9.0))},
        hardmask: {},
        **{arm: {} for arm in rest},
    }
    rows = gradient_changes(EXPERIMENTS["gradient-variance"], by_arm)
    found = {(row["arm"], row["point"], row["at"]): row for row in rows}
    same = found["blur", "start", "same weights"]
    assert same["seeds"] == [0, 1]
    assert same["variance"]["by_seed"] == [-0.5, -0.25]
    assert same["variance"]["mean"] == -0.375
    half = 12.7062 * 0.125  # t with one degree of freedom, times the standard error
    assert same["variance"]["high"] == pytest.approx(-0.375 + half, rel=1e-4)
    assert same["relative"]["by_seed"] == [-0.5, 1.5 / 4 - 1]
    own = found["blur", "end", "own training"]
    assert (own["seeds"], own["variance"]["by_seed"], own["variance"]["low"]) == ([0], [0.5], None)
    assert found["hardmask", "start", "same weights"]["relative"]["mean"] == -0.75
    assert found["hardmask", "start", "own training"]["variance"]["mean"] is None
    assert found["blur", "middle", "same weights"]["variance"]["mean"] is None


def test_the_middle_and_the_end_are_measured_at_the_weights_of_those_epochs(digits: Any, tmp_path: Path) -> None:
    job = one("gradient-variance", "blur")
    found = running_arms.run_arm(job, digits, tmp_path, torch.device("cpu"), lambda line: None)
    assert found["test"] == run(job.spec(), digits)["test"]["accuracy"], "stopping in the middle changes nothing"
    last = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert found["gradients"]["end"]["blur"] == gradient_noise(job.spec(), digits, last, torch.device("cpu"))
    start = found["gradients"]["start"]["blur"]["variance"]
    middle = found["gradients"]["middle"]["blur"]["variance"]
    assert len({start, middle, found["gradients"]["end"]["blur"]["variance"]}) == 3


def test_a_run_that_is_stopped_while_its_middle_is_measured_measures_it_later(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, device = one("gradient-variance", "none"), torch.device("cpu")
    whole = running_arms.run_arm(job, digits, tmp_path / "whole", device, lambda line: None)

    def stopped(spec: Any, task: Any, weights: Any, device: Any) -> Any:
        if weights is not None:
            raise KeyboardInterrupt
        return gradient_noise(spec, task, weights, device)

    with monkeypatch.context() as patched:
        patched.setattr(running_arms, "gradient_noise", stopped)
        with pytest.raises(KeyboardInterrupt):
            running_arms.run_arm(job, digits, tmp_path / "cut", device, lambda line: None)
    resumed = running_arms.run_arm(job, digits, tmp_path / "cut", device, lambda line: None)
    assert resumed["gradients"] == whole["gradients"]


# ----------------------------------------------------------------------------------------------------- in several parts
def test_a_stopped_experiment_goes_on_where_it_was(
    digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the middle of the second run: the first is kept, the second goes on from its checkpoint."""
    three = dataclasses.replace(EXPERIMENTS["gradient-variance"], arms=EXPERIMENTS["gradient-variance"].arms[:3])
    monkeypatch.setitem(EXPERIMENTS, "gradient-variance", three)
    whole = experiment("gradient-variance", digits, arms=["none", "hardmask"], out=tmp_path / "whole")
    trainings: list[int] = []

    def stopped(spec: Any, task: Any, **options: Any) -> Any:
        trainings.append(1)
        if len(trainings) == 4:  # start to middle and middle to end of the first; start to middle of the second
            raise KeyboardInterrupt
        return run(spec, task, **options)

    monkeypatch.setattr(running_arms, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        experiment("gradient-variance", digits, arms=["none", "hardmask"], out=tmp_path / "parts")
    folder = tmp_path / "parts" / "gradient-variance-runs"
    assert [path.suffix for path in sorted(folder.iterdir())] == ["", ".json"], "a run under way, and a finished one"
    said: list[str] = []
    again = experiment("gradient-variance", digits, arms=["none", "hardmask"], out=tmp_path / "parts", log=said.append)
    assert said[0] == "1 of 2 runs are finished already."
    assert len(trainings) == 5, "from the middle to the end"
    assert [path.suffix for path in sorted(folder.iterdir())] == [".json", ".json"]
    strip = lambda found: [{k: v for k, v in arm.items() if k != "seconds"} for arm in found["arms"]]  # noqa: E731
    assert strip(again) == strip(whole)
    assert again["gradients"] == whole["gradients"]
    rows = {(row["arm"], row["point"], row["at"]): row for row in again["gradients"]}
    start = rows["hardmask", "start", "same weights"]["variance"]
    assert start == rows["hardmask", "start", "own training"]["variance"], "there, the weights are the same"
    assert rows["blur", "middle", "own training"]["variance"]["mean"] is None
    assert rows["blur", "middle", "same weights"]["variance"]["mean"] is not None, "measured at none's weights"
    text = markdown(again)
    assert "At the same weights, those of the first arm: change against none, %" in text
    assert "Not run yet: blur, seed 0." in text
    assert write(again, tmp_path).stat().st_size > 1000


def test_finished_runs_are_kept_by_their_settings(digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def fake(job: ArmRun, *_: Any) -> dict[str, Any]:
        made.append(job.label)
        return {
            "test": 0.5, "train": 0.5, "status": "finished", "parameters": 1, "flops": None, "seconds": 1.0,
            "versions": {"torch": "x"}, "entropy": [0.5, None],
        }  # fmt: skip

    monkeypatch.setattr("attemper.lab.experiments.running.run_arm", fake)
    monkeypatch.setattr("attemper.lab.experiments.running.check_run", lambda *_: None)
    experiment("entropy-cb", digits, seeds=2, arms=["cb_s"], only_seeds=[1], out=tmp_path)
    assert made == ["cb_s, seed 1"]
    first = experiment("entropy-cb", digits, seeds=2, out=tmp_path)
    assert len(made) == 6, "the others"
    assert first["missing"] == []
    assert [arm["seeds"] for arm in first["arms"]] == [[0, 1]] * 3
    assert first["arms"][0]["median"] == [0.5, None]
    less = experiment("entropy-cb", digits, seeds=1, out=tmp_path)
    assert (len(made), [arm["seeds"] for arm in less["arms"]]) == (6, [[0, 1]] * 3), "nothing is lost from the table"
    other = dataclasses.replace(BUDGET, epochs=3)
    experiment("entropy-cb", digits, seeds=1, budget=other, out=tmp_path)
    assert len(made) == 9, "other settings are other runs"
    damaged = Kept(tmp_path / "entropy-cb-runs", digits.fingerprint).path(one("entropy-cb", "cb"))
    damaged.write_text(damaged.read_text()[:-20])
    experiment("entropy-cb", digits, seeds=2, out=tmp_path)
    assert made[9:] == ["cb, seed 0"], "a damaged file is made again"
    with pytest.raises(ParameterError, match="There is no seed 2: there are 2, from 0 to 1"):
        experiment("entropy-cb", digits, seeds=2, only_seeds=[2], out=tmp_path)


# ----------------------------------------------------------------------------------------------------- from the outside
@pytest.mark.parametrize(
    ("name", "arms", "columns"),
    [
        ("skips", ["ViT, both", "mixer, no skip", "ResNet, no"], ["κ, behind the last block", "κ(J) by block"]),
        ("graying", ["none", "svd on patches, ε = 0.5"], ["κ, patches", "κ, going in"]),
        ("entropy-cb", ["cb"], ["entropy, last block"]),
    ],
)
def test_an_experiment_trains_its_arms_and_writes_what_it_found(
    name: str, arms: list[str], columns: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment", name, "--task", TASK, "--vit", MODELS["VIT"], "--mixer", MODELS["MIXER"], "--epochs", "1"]
    words += ["--resnet", MODELS["RESNET"], "--seeds", "1", "--out", str(tmp_path), "--arms", *arms]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert all(column in said for column in [*columns, "FLOPs, forward", "FLOPs, step"])
    found = json.loads((tmp_path / f"{name}.json").read_text())
    chosen = choose_arms(EXPERIMENTS[name], arms)
    assert [arm["name"] for arm in found["arms"]] == [arm.name for arm in chosen]
    assert all(0 <= arm["mean"] <= 1 and arm["flops"]["step"] > arm["flops"]["forward"] for arm in found["arms"])
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    lines = (tmp_path / f"{name}.md").read_text().split("\n\n")[0].splitlines()
    assert len(lines) == len(chosen) + 2
    assert len({line.count("|") for line in lines}) == 1
    if name == "skips":
        assert main([*words[: -len(arms)], "nothing"]) == 2
        assert "There is no arm 'nothing'" in capsys.readouterr().err
        assert main(["experiment", "skips", "--out", str(tmp_path)]) == 2
        assert "its task is digits(test=100, train=300), not digits" in capsys.readouterr().err


def test_of_many_blocks_a_table_shows_three() -> None:
    assert shown(list(range(12))) == [0, 6, 11]
    assert shown(list(range(4))) == [0, 1, 2, 3]


def test_experiments_are_listed_and_wrong_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in EXPERIMENTS)
    assert main(["experiment", "skipss"]) == 2
    assert "Did you mean 'skips'?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["skips", "graying", "gradient-variance"])
def test_on_digits_the_published_tables_come_out_again(name: str, tmp_path: Path) -> None:
    """Every arm under the first seed, with the settings of docs/results: the accuracies that stand there."""
    assert main(["experiment", name, "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]) == 0
    here = json.loads((tmp_path / f"{name}.json").read_text())
    there = json.loads((Path(__file__).parent.parent / "docs" / "results" / f"{name}.json").read_text())
    for ours, kept in zip(here["arms"], there["arms"], strict=True):
        assert ours["name"] == kept["name"]
        assert ours["flops"] == kept["flops"]
        assert ours["test"][0] == pytest.approx(kept["test"][0], abs=0.06)  # another CPU rounds otherwise


def test_the_experiments_and_the_probe_of_jacobians_agree_on_what_is_zero():
    """Half and twice of eps · 64, the share that rounding may make of a zero of 64 coordinates."""
    eps = torch.finfo(torch.float64).eps
    for share, zero in ((32 * eps, True), (128 * eps, False)):
        scale = torch.ones(64, dtype=torch.float64)
        scale[0] = share

        def scaled(x: Tensor, scale: Tensor = scale) -> Tensor:
            return x * scale

        x = torch.randn(1, 64, dtype=torch.float64)
        found, report = spectrum(scaled, x), branch_jacobian(scaled, x)
        assert found is not None
        assert (found.lost > 0) == zero
        assert math.isinf(report.condition) == zero
