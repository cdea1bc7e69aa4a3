"""Evaluations: what is measured, from one reading of the test set, in a run, in a study and from a run's folder."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.cli import main
from attemper.cli.compare import Compare, folder_of
from attemper.errors import AttemperError, ParameterError
from attemper.evaluation import CORRUPTIONS, Calibration, Normalise, Robustness, Stochastic, evaluate, parse_suites
from attemper.evaluation.figures import headline, over_seeds
from attemper.evaluation.metrics import Bin
from attemper.evaluation.runs import load_run
from attemper.models import build_model
from attemper.report import render
from attemper.study import DEFAULT_PLAN, Plan, PlanError, Study, summarise, to_csv, to_markdown
from attemper.study.evaluations import evaluation_table
from attemper.tasks import DataError, ImageTask, LazySource, MemorySource, open_task
from attemper.training import Budget, RunSpec, check_run, run
from attemper.training.weights import WEIGHTS, load_weights, save_weights
from study_fakes import FakeEngine, make_plan, make_result

SMALL = "robustness(epsilon=0.05, steps=2, occlusion=0.25, corruptions=['fog', 'jpeg'])"
ALL = ("calibration", SMALL, "stochastic(passes=2)")
SPEC = RunSpec(task="digits", model="vit-digits(depth=1)", recipe="none", seed=3, budget=Budget(epochs=1))


def tempered_model(recipe: str = "dropkey(0.3)") -> nn.Module:
    model = build_model("vit-digits(depth=1)", open_task("digits").shape)
    nn.init.normal_(model.get_parameter("head.weight"))  # it starts from zeros, which know no classes
    attemper.apply(model, recipe)
    return model


def some_digits(count: int = 60) -> MemorySource:
    source = open_task("digits").test()
    assert isinstance(source, MemorySource)
    return source.take(torch.arange(count))


# ---------------------------------------------------------------------------------------------------------- one model
def test_an_evaluation_is_plain_data_and_a_function_of_the_seed() -> None:
    model = tempered_model()
    options: dict[str, Any] = {"normalise": Normalise((0.3,), (0.4,)), "suites": ALL, "train": some_digits(20)}
    state = torch.get_rng_state()
    found = evaluate(model, some_digits(), **options)
    assert torch.equal(torch.get_rng_state(), state), "the process draws on as if nothing had been"
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert evaluate(model, some_digits(), **options) == found
    assert evaluate(model, some_digits(), **options, seed=1) != found
    assert found["images"] == 60
    assert set(found["calibration"]) == {"brier", "ece", "bins"}
    assert found["stochastic"]["passes"] == 2
    assert found["stochastic"]["nll"] != found["nll"], "the methods act"
    kinds = {group: [one["kind"] for one in found["robustness"][group]] for group in found["robustness"]}
    assert kinds == {
        "occlusion": ["centre", "random"],
        "attacks": ["fgsm", "pgd"],
        "corruptions": ["fog"] * 5 + ["jpeg"] * 5,
    }
    assert set(found["gap"]) == {"accuracy", "nll"}


def test_the_model_is_left_in_its_mode_with_its_gradients() -> None:
    model = tempered_model().train()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.clone() for parameter in model.parameters()]
    evaluate(model, some_digits(), suites=ALL)
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad and bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_clean_figures_are_those_of_the_eval_mode() -> None:
    model, source = tempered_model().train(), some_digits()
    found = evaluate(model, source, suites="calibration")
    with torch.no_grad():
        logits = model.eval()(source.images.float() / 255)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == source.targets).double().mean()))
    assert found["nll"] == pytest.approx(float(nn.functional.cross_entropy(logits, source.targets)), abs=1e-5)
    assert "robustness" not in found


@pytest.mark.parametrize("recipe", ["none", "cb", "dropkey(0)", "explicit(v=5e-4)"])
def test_a_recipe_without_chance_has_no_average_over_passes(recipe: str) -> None:
    model = build_model("vit-digits(depth=1)", open_task("digits").shape)
    tempered = attemper.apply(model, recipe)
    assert evaluate(model, some_digits(), suites="stochastic")["stochastic"] is None
    assert float(tempered.penalty()) == 0, "nothing is left for the next loss"


@pytest.mark.parametrize("recipe", ["blur", "hardmask(0.3, k=3)", "droppath(0.3)", "dropkey(0.3) + explicit(v=5e-4)"])
def test_whatever_draws_is_averaged(recipe: str) -> None:
    model = tempered_model(recipe)
    found = evaluate(model, some_digits(), suites="stochastic(passes=2)")
    assert found["stochastic"]["nll"] != found["nll"]
    assert float(attemper.tempering.Tempered.of(model).penalty()) == 0, "nothing is left for the next loss"


@pytest.mark.parametrize(
    "name",
    [
        "convmixer(width=8, depth=1)",
        "hf:vit(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, patch_size=4)",
        "timm:swin_tiny_patch4_window7_224(patch_size=1, embed_dim=12, depths=(1, 1), num_heads=(1, 2), window_size=4)",
    ],
    ids=lambda name: name.partition("(")[0],
)
def test_models_of_any_library_are_evaluated(name: str) -> None:
    model = build_model(name, open_task("digits").shape)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = evaluate(model, some_digits(8), suites=("calibration", SMALL))
    assert all(one["accuracy"] is not None for group in found["robustness"].values() for one in group)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items()), "batch norms stand still"


def test_what_cannot_be_evaluated_is_named() -> None:
    model = tempered_model()
    with pytest.raises(ParameterError, match=r"VisionTransformer.* does not run on images of 3 × 8 × 8"):
        evaluate(model, MemorySource(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])))
    with pytest.raises(ParameterError, match="The normalisation is for 3 channels, and the images have 1"):
        evaluate(model, some_digits(), normalise=Normalise((0.5,) * 3, (0.5,) * 3))
    with pytest.raises(ParameterError, match="must be uint8"):
        evaluate(model, MemorySource(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])))
    with pytest.raises(ParameterError, match="There is a target 11, and the model gives 10 classes"):
        evaluate(model, MemorySource(torch.zeros(1, 1, 8, 8, dtype=torch.uint8), torch.tensor([11])))
    with pytest.raises(DataError, match="no images"):
        evaluate(model, some_digits(0))
    with pytest.raises(ParameterError, match="deviations above 0"):
        Normalise((0.5,), (0.0,))


# --------------------------------------------------------------------------------------------------------------- suites
def test_suites_are_read_in_any_order_and_written_in_one() -> None:
    given = "robustness(steps=20, epsilon=[0.1, 0.2]), calibration(bins=15)"
    assert [suite.text for suite in parse_suites(given)] == ["calibration", "robustness(epsilon=[0.1, 0.2], steps=20)"]
    for text in ("calibration(bins=7)", SMALL, "stochastic(passes=3)"):
        (suite,) = parse_suites([text])
        assert parse_suites(suite.text) == (suite,)
    assert parse_suites([Stochastic(), Calibration()]) == (Calibration(), Stochastic())
    assert Robustness().text == "robustness"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("calibraton", r"no suite 'calibraton'. Did you mean 'calibration'\?"),
        ("robustness(epsilons=[1])", r"no option 'epsilons'. Did you mean 'epsilon'\?"),
        ("robustness(epsilon=-0.1)", "ε is -0.1; it must be a number of at least 0"),
        ("robustness(occlusion=[0.5, 1.5])", "cannot be larger than the image"),
        ("robustness(corruptions=['snow'])", "no corruption 'snow'"),
        ("robustness(steps=0)", "steps is 0"),
        ("stochastic(passes=none)", "passes is None"),
        ("calibration(bins=0)", "bins is 0"),
        ("calibration, calibration(bins=3)", "stands twice"),
        ("", "No suite is named"),
    ],
)
def test_a_suite_that_cannot_be_is_named(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parse_suites(text)


# ----------------------------------------------------------------------------------------------------------- in a run
def test_runs_without_an_evaluation_keep_their_keys() -> None:
    assert "evaluate" not in SPEC.to_dict()
    evaluated = dataclasses.replace(SPEC, evaluate=("calibration",))
    assert evaluated.key("data") != SPEC.key("data")
    for spec in (SPEC, evaluated):
        assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    # Made with the version before there were evaluations: results of that time must be found again.
    assert SPEC.key("data") == "b5e5d67cdebfb628c3cd"


def test_a_suite_that_cannot_be_is_found_before_training() -> None:
    with pytest.raises(ParameterError, match="no suite 'robust'"):
        check_run(dataclasses.replace(SPEC, evaluate=("robust",)), open_task("digits"))


def counted_task(reads: list[int]) -> ImageTask:
    """Digits whose test images are read from disk, as it were, each time that they are asked for."""
    task = open_task("digits")
    assert isinstance(task, ImageTask)
    held = some_digits()

    def load(index: int) -> torch.Tensor:
        reads.append(index)
        return held.images[index]

    return dataclasses.replace(task, held_out=lambda: LazySource(load, held.targets, workers=0))


def test_a_run_reads_its_test_set_once_for_everything() -> None:
    plain_reads: list[int] = []
    plain = run(SPEC, counted_task(plain_reads), device="cpu")
    reads: list[int] = []
    result = run(dataclasses.replace(SPEC, evaluate=ALL), counted_task(reads), device="cpu")
    assert reads == list(range(60)) == plain_reads
    assert "evaluation" not in plain
    found = result["evaluation"]
    assert result["test"]["accuracy"] == found["accuracy"] == plain["test"]["accuracy"]
    assert result["test"]["loss"] == pytest.approx(plain["test"]["loss"], abs=1e-6)
    assert found["gap"]["accuracy"] == pytest.approx(result["train"]["accuracy"] - found["accuracy"])
    for name in ("train", "validation", "chosen_epoch", "curve"):
        assert result[name] == plain[name], "an evaluation changes nothing else"
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_run_is_evaluated_in_its_own_precision_and_with_its_averaged_weights() -> None:
    budget = dataclasses.replace(SPEC.budget, precision="bfloat16", ema=0.9)
    with torch.backends.mkldnn.flags(enabled=False):  # it takes bfloat16 instructions for granted that some CPUs lack
        result = run(dataclasses.replace(SPEC, budget=budget, evaluate=ALL), counted_task([]), device="cpu")
        plain = run(dataclasses.replace(SPEC, budget=budget), counted_task([]), device="cpu")
    assert result["test"]["accuracy"] == plain["test"]["accuracy"]
    assert result["test"]["loss"] == pytest.approx(plain["test"]["loss"], abs=1e-6)
    assert len(result["evaluation"]["robustness"]["attacks"]) == 2


def test_a_run_can_be_stopped_while_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["attemper.training.run"], "REPORT_EVERY", 0.0)
    events: list[dict[str, Any]] = []
    spec = dataclasses.replace(SPEC, evaluate=("robustness(epsilon=[], occlusion=[], corruptions=['fog'])",))
    run(spec, counted_task([]), device="cpu", progress=events.append)
    after = [event for event in events if event["epoch"] == 1 and event["step"] == event["steps"]]
    assert len(after) >= 1 + 6, "one at the end of the epoch, then one per condition"
    assert {event["loss"] for event in after[-6:]} == {None}


# ------------------------------------------------------------------------------------------------------- from a folder
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    words = ["train", "--model", "vit-digits(depth=1)", "--recipe", "dropkey(0.2) + cb(cb_s)", "--epochs", "2"]
    assert main([*words, "--folder", str(path), "--device", "cpu", "--evaluate", "calibration"]) == 0
    return path


def test_a_finished_run_keeps_its_chosen_weights(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    loaded = load_run(folder)
    assert loaded.spec.to_dict() == result["spec"]
    assert not any(module.training for module in loaded.model.modules())
    found = evaluate(loaded.model, loaded.task.test(), normalise=loaded.normalise, suites="calibration")
    assert found["accuracy"] == result["test"]["accuracy"]
    assert found["nll"] == pytest.approx(result["test"]["loss"], abs=1e-6)
    assert found["calibration"] == result["evaluation"]["calibration"]


def test_evaluate_tells_writes_and_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(folder), "--suites", ",".join(ALL), "--json", "--device", "cpu"]) == 0
    out, told = capsys.readouterr()
    found = json.loads(out)
    assert json.loads((folder / "evaluation.json").read_text()) == found
    assert {"calibration", "robustness", "stochastic", "gap", "spec"} <= set(found)
    assert "ECE" in told
    assert "PGD 0.05" in told
    page = (folder / "evaluation.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "expected calibration error" in page


def test_evaluate_takes_other_test_sets(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from attemper.tasks import source

    grey = source.decode
    monkeypatch.setattr("attemper.evaluation.testsets.decode", lambda file, size: grey(file, size)[:1])
    for part, name in (("v2", "7"), ("a", "n00000003"), ("val", "x")):
        (tmp_path / part / name).mkdir(parents=True)
        Image.new("RGB", (9, 8)).save(tmp_path / part / name / "image.png")
    (tmp_path / "v2" / "7" / "broken.png").write_bytes(b"no")
    (tmp_path / "ids.json").write_text(json.dumps([f"n{at:08}" for at in range(10)]))
    (tmp_path / "real.json").write_text("[[1, 2]]")
    words = ["evaluate", str(folder), "--suites", "calibration", "--imagenet-v2", str(tmp_path / "v2")]
    words += ["--imagenet-a", str(tmp_path / "a"), "--wordnet", str(tmp_path / "ids.json")]
    words += ["--real", str(tmp_path / "val"), "--real-labels", str(tmp_path / "real.json"), "--device", "cpu"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "1 could not be decoded (broken.png)" in told
    found = json.loads((folder / "evaluation.json").read_text())["test_sets"]
    assert [(one["name"], one["images"]) for one in found] == [
        ("ImageNet-V2", 1),
        ("ImageNet-A", 1),
        ("ImageNet ReaL", 1),
    ]
    assert found[1]["accuracy"] == 1.0, "of one class only one can be chosen"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suites", "robustness(epsilon=-1)"], "ε is -1"),
        (["--suites", "robustness(occlusion=2)"], "larger than the image"),
        (["--imagenet-a", "."], "ImageNet-A needs --wordnet"),
        (["--real", "."], "ReaL needs both"),
        (["--imagenet-v2", "nowhere"], "is not a folder"),
    ],
    ids=str,
)
def test_bad_words_end_with_two(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_weights_of_another_model_and_other_data_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AttemperError, match="not the folder of a finished run"):
        load_run(tmp_path)
    weights, spec, fingerprint = load_weights(folder)
    save_weights(tmp_path, weights, dataclasses.replace(spec, model="vit-digits(depth=2)"), fingerprint)
    with pytest.raises(
        AttemperError, match=r"not those of vit-digits\(depth=2\) .* 'blocks.1.*' is missing, and .* more"
    ):
        load_run(tmp_path)
    save_weights(tmp_path, weights, dataclasses.replace(spec, model="vit-digits(depth=1, mlp=32)"), fingerprint)
    with pytest.raises(AttemperError, match=r"is \(64, 32\) and must be \(32, 32\)"):
        load_run(tmp_path)
    save_weights(tmp_path, weights, spec, "f00d")
    with pytest.raises(DataError, match=r"is not what the run .* was trained on"):
        load_run(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"\0" * 100)
    with pytest.raises(AttemperError, match="cannot be read"):
        load_run(tmp_path)


# ---------------------------------------------------------------------------------------------------------- in a study
def made_up(accuracy: float, shift: float = 0.0) -> dict[str, Any]:
    """An evaluation as runs have it."""
    bins = [
        Bin(low=0.0, high=0.5, count=10, confidence=0.4, accuracy=0.4 + shift),
        Bin(low=0.5, high=1.0, count=0, confidence=None, accuracy=None),
    ]
    attacks = [{"kind": kind, "epsilon": 8 / 255, "accuracy": 0.2 + shift, "nll": 2.0} for kind in ("fgsm", "pgd")]
    occlusion = [{"kind": "centre", "share": 0.5, "accuracy": 0.5 + shift, "nll": 1.0}]
    corruptions = [{"kind": "fog", "severity": s, "accuracy": 0.9 - 0.1 * s, "nll": 1.0} for s in range(1, 6)]
    return {
        "suites": ["calibration", "robustness"],
        "images": 10,
        "accuracy": accuracy,
        "top5": None,
        "nll": 0.5,
        "calibration": {"brier": 0.25, "ece": 0.1 + shift, "bins": bins},
        "robustness": {"occlusion": occlusion, "attacks": attacks, "corruptions": corruptions},
        "gap": {"accuracy": 0.05, "nll": None},
    }


def test_over_seeds_figures_are_averaged_and_diagrams_pooled() -> None:
    found = over_seeds([made_up(0.8), None, made_up(0.9, 0.1)])
    assert found is not None
    by_name = {figure["name"]: figure for figure in found["figures"]}
    assert by_name["ECE"]["values"] == [0.1, None, pytest.approx(0.2)]
    assert by_name["ECE"]["mean"] == pytest.approx(0.15)
    assert by_name["ECE"]["deviation"] == pytest.approx(0.1 / 2**0.5)
    assert by_name["PGD 8/255"]["mean"] == pytest.approx(0.25)
    assert by_name["corrupted"]["mean"] == pytest.approx(0.6)
    assert found["accuracy"] == pytest.approx(0.85)
    assert found["bins"][0] == {
        "low": 0.0,
        "high": 0.5,
        "count": 20,
        "confidence": 0.4,
        "accuracy": pytest.approx(0.45),
    }
    assert found["bins"][1]["accuracy"] is None
    centre = found["robustness"]["occlusion"][0]
    assert (centre["low"], centre["accuracy"], centre["high"]) == (0.5, pytest.approx(0.55), 0.6)
    assert over_seeds([None, None]) is None


def test_the_headline_has_what_was_asked_for_and_nothing_else() -> None:
    names = [figure["name"] for figure in headline(made_up(0.8))]
    assert names == ["NLL", "Brier", "ECE", "gap", "occluded", "corrupted", "FGSM 8/255", "PGD 8/255"]
    assert headline({"accuracy": 0.8, "nll": 0.1}) == []


def test_a_plan_says_what_is_evaluated() -> None:
    plan = make_plan(evaluate="robustness(steps=20), calibration")
    assert plan.evaluate == ("calibration", "robustness(steps=20)")
    assert {spec.evaluate for spec in plan.runs()} == {plan.evaluate}
    assert Plan.from_dict(plan.to_dict()) == plan
    assert "evaluate" not in make_plan().to_dict()
    assert make_plan(evaluate=[]) == make_plan()
    for wrong in ("calibraton", ["robustness(epsilon=-1)"], 3):
        with pytest.raises(PlanError) as caught:
            make_plan(evaluate=wrong)
        assert caught.value.path == ("evaluate",)


def test_a_summary_has_one_more_table(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(evaluate=["calibration", "robustness"]), engine=FakeEngine())
    study.prepare()
    for key, spec in study.runs.items():
        study.store.save(key, make_result(spec, evaluation=made_up(0.8)))
    summary = summarise(study)
    assert [row["evaluation"]["accuracy"] for row in summary["recipes"]] == [pytest.approx(0.8)] * 3
    json.dumps(summary, allow_nan=False)
    assert "| recipe | NLL | Brier | ECE % | gap % |" in to_markdown(summary)
    assert "| cb | 0.500 ± 0.000 | 0.250 ± 0.000 | 10.00 ± 0.00 |" in to_markdown(summary)
    header, first = to_csv(summary).splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["brier"] == "0.25"
    assert evaluation_table(summary) is not None


def test_figures_are_compared_seed_by_seed_and_corrected_over_the_whole_table(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(seeds=5, evaluate=["calibration", "robustness"]), engine=FakeEngine())
    study.prepare()
    for key, spec in study.runs.items():
        shift = 0.01 * spec.seed  # seeds differ more than recipes do: only a paired comparison sees anything
        shift -= 0.02 + 1e-4 * spec.seed if spec.recipe == "cb(cb)" else 0.0
        study.store.save(key, make_result(spec, evaluation=made_up(0.8, shift)))
    summary = summarise(study)
    by_recipe = {row["name"]: {f["name"]: f for f in row["evaluation"]["figures"]} for row in summary["recipes"]}
    assert set(by_recipe) == {"none", "dropkey(0.1)", "cb"}
    error = by_recipe["cb"]["ECE"]["difference"]
    assert error["mean"] == pytest.approx(-0.0202)
    compared = [f["difference"]["p"] for name in ("cb", "dropkey(0.1)") for f in by_recipe[name].values()]
    assert error["adjusted"] == pytest.approx(error["p"] * sum(p is not None for p in compared), rel=1e-6)
    assert "difference" not in by_recipe["none"]["ECE"]
    markdown = to_markdown(summary)
    assert re.search(r"\| cb \|.* \d+\.\d+ ± \d+\.\d+ \* \|", markdown)
    assert "\\* differs from none" in markdown
    assert "*" not in next(line for line in markdown.splitlines() if line.startswith("| dropkey(0.1) | 0.5"))
    page = render(summary)
    assert 'class="number good"' in page.split('id="evaluation"')[1], "a smaller error is better"
    assert 'class="number bad"' in page.split('id="evaluation"')[1], "a smaller accuracy is worse"


def test_a_real_study_evaluates_every_run(tmp_path: Path) -> None:
    plan = Compare(model="vit-digits(depth=1)", recipes=("dropkey(0.1)",), seeds=1, epochs=1, evaluate=",".join(ALL))
    study = Study(tmp_path, plan.changed(DEFAULT_PLAN))
    assert folder_of(study.plan) == Path("runs/digits-vit-digits-depth-1-evaluated")
    study.prepare()
    study.work()
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").iterdir()), "weights are not kept"
    none, dropkey = summarise(study)["recipes"]
    names = [figure["name"] for figure in dropkey["evaluation"]["figures"]]
    assert {"ECE", "PGD 0.05", "accuracy, 2 passes"} <= set(names)
    averaged = {"accuracy, 2 passes", "ECE, 2 passes"}
    others = [name for name in names if name not in averaged]
    assert [figure["name"] for figure in none["evaluation"]["figures"]] == others, "none has nothing to average"
    assert 'id="robustness"' in render(summarise(study))


def test_a_study_without_evaluations_is_as_it_was(tmp_path: Path) -> None:
    study = Study(tmp_path, make_plan(), engine=FakeEngine())
    study.prepare()
    summary = summarise(study)
    assert "evaluation" not in summary["recipes"][0]
    assert "ECE" not in to_markdown(summary)
    assert evaluation_table(summary) is None


def test_every_corruption_is_in_the_suite_unless_told_otherwise() -> None:
    from attemper.evaluation.conditions import conditions_of

    conditions = conditions_of(Robustness(), nn.Identity())
    names = [one.facts["kind"] for one in conditions if one.group == "corruptions"]
    assert names == [name for name in CORRUPTIONS for _ in range(5)]
