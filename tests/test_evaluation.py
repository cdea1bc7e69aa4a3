"""Evaluations: what is measured, from one reading of the test set, in a run, in a study and from a run's folder."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attemper
from attemper.errors import AttemperError, ParameterError, UnreadableError
from attemper.files import WEIGHTS
from attemper.lab.cli import main
from attemper.lab.errors import DataError
from attemper.lab.evaluation.corruption_constants import MAIN
from attemper.lab.evaluation.measure import Normalise, evaluate
from attemper.lab.evaluation.runs import examine, load_run
from attemper.lab.evaluation.suites import Calibration, Robustness, Stochastic, parse_suites
from attemper.lab.models.registry import build_model
from attemper.lab.study.engine import Training
from attemper.lab.tasks.base import ImageTask
from attemper.lab.tasks.registry import open_task
from attemper.lab.tasks.source import LazySource, MemorySource
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.lab.training.versions import BEFORE
from attemper.lab.training.weights import read_run, save_weights
from evaluated import ALL, SMALL

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
    assert found["corruption_constants"] == {"set": "CIFAR-10-C", "side": 32, "exact": False}
    kinds = {group: [one["kind"] for one in found["robustness"][group]] for group in found["robustness"]}
    assert kinds == {
        "occlusion": ["centre", "random"],
        "attacks": ["fgsm", "pgd"],
        "corruptions": ["fog"] * 5 + ["contrast"] * 5,
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
        ("robustness(corruptions=['frost'])", "no corruption 'frost'"),
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
    assert dataclasses.replace(SPEC, versions=BEFORE).key("data") == "b5e5d67cdebfb628c3cd"


def test_a_suite_that_cannot_be_is_found_before_training() -> None:
    with pytest.raises(ParameterError, match="no suite 'robust'"):
        Training().check(dataclasses.replace(SPEC, evaluate=("robust",)), open_task("digits"))
    with pytest.raises(ParameterError, match="nothing evaluates it"):
        run(dataclasses.replace(SPEC, evaluate=("calibration",)), open_task("digits"), device="cpu")


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
    result = run(dataclasses.replace(SPEC, evaluate=ALL), counted_task(reads), device="cpu", examine=examine)
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
        result = run(
            dataclasses.replace(SPEC, budget=budget, evaluate=ALL), counted_task([]), device="cpu", examine=examine
        )
        plain = run(dataclasses.replace(SPEC, budget=budget), counted_task([]), device="cpu")
    assert result["test"]["accuracy"] == plain["test"]["accuracy"]
    assert result["test"]["loss"] == pytest.approx(plain["test"]["loss"], abs=1e-6)
    assert len(result["evaluation"]["robustness"]["attacks"]) == 2


def test_a_run_can_be_stopped_while_it_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["attemper.lab.training.loop"], "REPORT_EVERY", 0.0)
    events: list[dict[str, Any]] = []
    spec = dataclasses.replace(SPEC, evaluate=("robustness(epsilon=[], occlusion=[], corruptions=['fog'])",))
    run(spec, counted_task([]), device="cpu", progress=events.append, examine=examine)
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

    from attemper.lab.tasks import source

    grey = source.decode
    monkeypatch.setattr("attemper.lab.evaluation.testsets.decode", lambda file, size: grey(file, size)[:1])
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
    weights, spec, fingerprint = read_run(folder)
    save_weights(tmp_path, weights.tensors, dataclasses.replace(spec, model="vit-digits(depth=2)"), fingerprint)
    with pytest.raises(
        AttemperError, match=r"not those of vit-digits\(depth=2\) .* 'blocks.1.*' is missing, and .* more"
    ):
        load_run(tmp_path)
    save_weights(tmp_path, weights.tensors, dataclasses.replace(spec, model="vit-digits(depth=1, mlp=32)"), fingerprint)
    with pytest.raises(AttemperError, match=r"is \(64, 32\) and must be \(32, 32\)"):
        load_run(tmp_path)
    save_weights(tmp_path, weights.tensors, spec, "f00d")
    with pytest.raises(DataError, match=r"is not what the run .* was trained on"):
        load_run(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"\0" * 100)
    with pytest.raises(UnreadableError, match="cannot be read"):
        load_run(tmp_path)


def test_the_published_benchmark_is_in_the_suite_unless_told_otherwise() -> None:
    from attemper.lab.evaluation.conditions import conditions_of

    conditions = conditions_of(Robustness(), nn.Identity())
    names = [one.facts["kind"] for one in conditions if one.group == "corruptions"]
    assert names == [name for name in MAIN for _ in range(5)]
