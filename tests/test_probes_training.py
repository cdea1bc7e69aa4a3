"""Probes during training change nothing about it, and the study's page shows them."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pickle
import re

import pytest
import torch
from torch import nn

from attemper.errors import NoSiteError, ParameterError
from attemper.lab.cli import main
from attemper.lab.report import probe_curves as section
from attemper.lab.report.entries import entries
from attemper.lab.report.study import render
from attemper.lab.study.engine import Training
from attemper.lab.study.plan import Plan
from attemper.lab.study.study import Study
from attemper.lab.study.summary import summarise
from attemper.lab.tasks.registry import open_task
from attemper.lab.training.loop import run
from attemper.lab.training.spec import Budget, RunSpec
from attemper.probes.recording import Recorder
from summaries import NAMES, entry

MODEL = "vit-digits(depth=2, width=16, heads=2, mlp=16)"


def spec(recipe="none", **budget):
    given = {"epochs": 2, "batch_size": 64, **budget}
    return RunSpec(task="digits(train=300, test=100)", model=MODEL, recipe=recipe, seed=0, budget=Budget(**given))


@pytest.fixture(scope="module")
def digits():
    return open_task("digits(train=300, test=100)", None)


@pytest.mark.parametrize("recipe", ["none", "dropkey(0.2) + explicit(v=1e-3)", "cb"])
def test_a_run_that_is_probed_ends_with_the_same_bits(recipe, digits):
    plain, probed = run(spec(recipe), digits), run(spec(recipe), digits, probe_every=2)
    assert {key for key in plain if plain[key] != probed[key]} == {"probes", "timing"}
    assert plain["probes"] == []
    steps = [at["step"] for at in probed["probes"] if at["block"] == 0]
    assert steps == [2, 4, 6]
    assert {at["block"] for at in probed["probes"]} == {0, 1}
    assert all(0 < at["entropy"] <= 1 and at["logit_max"] > 0 for at in probed["probes"])


def test_steps_are_those_of_the_optimiser(digits):
    probed = run(spec(accumulate=3), digits, probe_every=1)
    assert [at["step"] for at in probed["probes"] if at["block"] == 0] == [1, 2]


def test_a_run_that_was_interrupted_has_every_look_once(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.import_module("attemper.lab.training.loop"), "CHECKPOINT_EVERY", 0.0)
    whole = run(spec(), digits, probe_every=2)

    class StoppedError(Exception):
        pass

    def stop(event):
        if event["epoch"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(spec(), digits, folder=tmp_path, progress=stop, probe_every=2)
    again = run(spec(), digits, folder=tmp_path, probe_every=2)
    assert again["probes"] == whole["probes"]
    assert again["test"] == whole["test"]


def test_a_model_that_learns_from_wrong_numbers_is_refused(digits):
    with pytest.raises(ParameterError, match="probe_every is 0; it must be a number of steps"):
        run(spec(), digits, probe_every=0)
    with pytest.raises(NoSiteError, match="no attention that is recognised"):
        Recorder(nn.Linear(2, 2), torch.randn(3, 2), 1)


def test_a_study_that_cannot_be_probed_is_refused_before_it_trains(digits):
    mixer = dataclasses.replace(spec(), model="convmixer(width=8, depth=2, kernel=3)")
    Training().check(mixer, digits)
    random = torch.get_rng_state()
    with pytest.raises(NoSiteError, match="ConvMixer has no attention that is recognised"):
        Training(probe_every=5).check(mixer, digits)
    assert torch.equal(torch.get_rng_state(), random)
    Training(probe_every=5).check(spec(), digits)


def test_growing_logits_are_recorded_as_they_grow():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1, enable_nested_tensor=False
    )
    recorder = Recorder(model, torch.randn(50, 6, 16), 5)
    assert recorder.after(4) == []
    (before,) = recorder.after(5)
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight[:16] *= 20
    (after,) = recorder.after(10)
    assert after["logit_max"] == pytest.approx(20 * before["logit_max"], rel=1e-4)
    assert after["entropy"] < before["entropy"]


# ----------------------------------------------------------------------------------------------------------- the study
def test_a_study_with_probes_shows_them_recipe_against_recipe(tmp_path):
    plan = Plan.from_dict(
        {
            "task": "digits(train=300, test=100)",
            "model": MODEL,
            "seeds": 2,
            "budget": {"epochs": 1, "batch_size": 64},
            "recipes": ["none", "dropkey(0.2)"],
        }
    )
    engine = Training(probe_every=1)
    assert pickle.loads(pickle.dumps(engine)) == engine
    study = Study(tmp_path, plan, engine=engine)
    study.prepare()
    study.work()
    summary = summarise(study)
    assert [len(runs) for row in summary["recipes"] for runs in row["probes"]] == [6, 6, 6, 6]
    page = render(summary)
    assert "Attention during training" in page
    shown = re.search(r'<section id="attention-during-training".*?</section>', page, re.DOTALL)[0]
    for title in ("Entropy, all blocks", "Entropy, first block", "Entropy, last block", "Largest logit, all blocks"):
        assert title in shown
    assert "dropkey(0.2)" in shown
    data = json.loads(re.search(r'id="summary">(.*?)</script>', page, re.DOTALL)[1])
    assert "probes" not in data["recipes"][0], "the page's own data stay small"


def recorded(seeds, blocks=3):
    return [
        [
            {"step": s, "block": b, "entropy": 0.9 - 0.1 * b, "logit_max": 1.0 + s}
            for s in (10, 20)
            for b in range(blocks)
        ]
        for _ in range(seeds)
    ]


def test_a_study_without_probes_or_with_few_has_a_page_all_the_same():
    import random

    rows = [entry(at, name, seeds=2, epochs=3, rng=random.Random(at)) for at, name in enumerate(NAMES[:2])]
    assert section.attention(entries({"recipes": rows})) is None
    rows[1]["probes"] = [recorded(1)[0], []]
    found = section.attention(entries({"recipes": rows}))
    assert found is not None
    assert NAMES[1] in found.body
    rows[1]["probes"] = [[{"step": 10, "block": 0, "entropy": None, "logit_max": None}], []]
    assert "no data yet" in section.attention(entries({"recipes": rows})).body


def test_probe_every_is_refused_below_one(capsys, tmp_path):
    assert main(["compare", "--probe-every", "0", "--folder", str(tmp_path / "study")]) == 2
    assert "--probe-every is 0; it must be at least 1" in capsys.readouterr().err
    assert not (tmp_path / "study").exists()


def test_one_run_can_be_probed_from_the_command_line(capsys):
    words = ["train", "--task", "digits(train=300, test=100)", "--model", MODEL, "--epochs", "1", "--json"]
    assert main([*words, "--batch-size", "64", "--probe-every", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [at["step"] for at in result["probes"]] == [2, 2]
