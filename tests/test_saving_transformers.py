"""What Transformers' own tests hold of saving and loading holds of tempered models, with `attemper.load`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import attemper
from families import build
from saved_models import CASES, Case, loaded

SIX = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family.name)


def assert_found(info: dict[str, Any]) -> None:
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all("attemper." in name for name in info["unexpected_keys"])


@SIX
def test_save_load(case: Case, tmp_path: Path) -> None:
    tempered = case.tempered()
    expected = case.outputs(tempered.model)
    tempered.model.save_pretrained(tmp_path)
    model, info = loaded(type(tempered.model), tmp_path)
    assert_found(info)
    assert not torch.equal(case.outputs(model), expected), "without attemper.load something must be missing"
    again = attemper.load(model)
    torch.testing.assert_close(case.outputs(model), expected, atol=1e-5, rtol=0)
    assert torch.equal(case.outputs(model), expected)
    assert again.summary() == tempered.summary()
    model.save_pretrained(tmp_path / "again")
    twice, _ = loaded(type(model), tmp_path / "again")
    attemper.load(twice, tmp_path / "again")
    assert torch.equal(case.outputs(twice), expected)


@SIX
def test_save_load_keys_to_ignore_on_save(case: Case, tmp_path: Path) -> None:
    from safetensors import safe_open

    tempered = case.tempered()
    names = [name for name, _ in tempered.model.named_parameters()]
    ignored = [next(name for name in names if name.endswith(("bias", "norm.weight")))]
    tempered.model._keys_to_ignore_on_save = ignored
    tempered.model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not set(ignored) & set(file.keys())
    _, info = loaded(type(tempered.model), tmp_path)
    assert set(info["missing_keys"]) == set(ignored)


@SIX
def test_load_save_without_tied_weights(case: Case, tmp_path: Path) -> None:
    model = build(case.family).eval()
    model.config.tie_word_embeddings = False
    untied = type(model)(copy.deepcopy(model.config))
    attemper.apply(untied, case.recipe, targets=case.targets)
    untied.save_pretrained(tmp_path)
    other, info = loaded(type(untied), tmp_path)
    assert_found(info)
    attemper.load(other)
    assert untied.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in untied.state_dict().items())


@SIX
def test_sharded_checkpoint(case: Case, tmp_path: Path) -> None:
    tempered = case.tempered()
    tempered.model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, info = loaded(type(tempered.model), tmp_path)
    assert_found(info)
    attemper.load(model)
    assert torch.equal(case.outputs(model), case.outputs(tempered.model))


@SIX
def test_half_precision(case: Case, tmp_path: Path) -> None:
    tempered = case.tempered()
    tempered.model.to(torch.bfloat16).save_pretrained(tmp_path)
    model, info = loaded(type(tempered.model), tmp_path, dtype=torch.bfloat16)
    assert_found(info)
    attemper.load(model)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    ours, theirs = tempered.model.state_dict(), model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@SIX
def test_a_checkpoint_that_torch_saved(case: Case, tmp_path: Path) -> None:
    tempered = case.tempered()
    tempered.model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tempered.model.state_dict(), tmp_path / "pytorch_model.bin")
    model, info = loaded(type(tempered.model), tmp_path)
    assert_found(info)
    attemper.load(model)
    assert torch.equal(case.outputs(model), case.outputs(tempered.model))
