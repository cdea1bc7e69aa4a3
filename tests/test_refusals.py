"""Bad input: each has an error of its own type that says what to do, and leaves the model exactly as it was."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

import attemper
from attemper.errors import (
    AlreadyAppliedError,
    AttemperError,
    ConflictError,
    NoSiteError,
    ParameterError,
    RecipeError,
    UnknownMethodError,
    UnsupportedError,
    WrappedModelError,
)
from attemper.methods import DropKey
from contracts import evaluate, fingerprint, original, tempered, train, unharmed
from families import call, family

VIT, ENCODER, BERT = family("timm-vit"), family("nn-encoder"), family("hf-bert")


def refused(kind: type[AttemperError], match: str, recipe: Any, name: str = "timm-vit", **options: Any) -> None:
    """`apply` raises exactly this, and the model has not changed."""
    model = original(family(name))
    with unharmed(model, lambda: evaluate(model, family(name))), pytest.raises(kind, match=match) as caught:
        attemper.apply(model, recipe, **options)
    assert caught.type is kind


# ----------------------------------------------------------------------------------------------------------- recipes
@pytest.mark.parametrize("p", ["-0.1", "1", "1.0", "2", "true"])
def test_a_rate_outside_its_range(p: str) -> None:
    refused(RecipeError, r"p must be a number in \[0, 1\), got .*\(column 1\)", f"dropkey({p})")


def test_a_rate_outside_its_range_in_python() -> None:
    with pytest.raises(ParameterError, match=r"p must be a number in \[0, 1\), got 1\.5"):
        DropKey(1.5)


def test_an_unknown_method() -> None:
    refused(UnknownMethodError, "unknown method 'dropkye'. Did you mean 'dropkey'", "dropkye(0.1)")


def test_an_unknown_parameter() -> None:
    refused(RecipeError, "no parameter 'shedule'. Did you mean 'schedule'", "dropkey(0.1, shedule=constant)")


@pytest.mark.parametrize("recipe", [3, None, 0.5, object(), DropKey], ids=["int", "none", "float", "object", "class"])
def test_a_recipe_that_is_none(recipe: Any) -> None:
    refused(RecipeError, "a recipe is", recipe)


@pytest.mark.parametrize("recipe", [["dropkey(0.1)"], [DropKey(0.1), 3], [None]])
def test_a_sequence_that_holds_something_else_than_methods(recipe: Any) -> None:
    refused(RecipeError, "among them", recipe)


def test_an_empty_recipe() -> None:
    refused(RecipeError, "write 'none'", "  ")


def test_the_same_method_twice() -> None:
    refused(ConflictError, "'dropkey' stands 2 times", "dropkey(0.1) + dropkey(0.2)")
    refused(ConflictError, "'dropkey' stands 2 times", [DropKey(0.1), DropKey(0.1)])


def test_the_same_method_twice_with_a_schedule_that_no_recipe_can_write() -> None:
    refused(ConflictError, "'dropkey' stands 2 times", [DropKey(schedule=lambda l, L: 0.1), DropKey(0.1)])


def test_a_schedule_of_the_wrong_length() -> None:
    refused(ParameterError, "the model has 3 blocks, the list has 2 rates", "dropkey(schedule=[0.1, 0.2])")


def test_a_schedule_that_leaves_the_range_in_some_block() -> None:
    refused(ParameterError, r"schedule\(2, 3\)", DropKey(schedule=lambda l, L: l / 2))
    refused(ParameterError, "rates must be below 1", "dropkey(0.8, schedule=decreasing, match=mean)")


# -------------------------------------------------------------------------------------------------------------- sites
@pytest.mark.parametrize("name", ["nn-encoder", "hf-bert", "hf-detr", "hand-written"])
def test_a_structure_without_a_grid(name: str) -> None:
    refused(ParameterError, "none is known for .*grid=", "dropkey(0.1, structure=block)", name)


def test_a_structure_larger_than_the_grid() -> None:
    refused(ParameterError, "of 4 × 4 keys of 'blocks.0.attn'; give a smaller w", "dropkey(0.1, structure=block, w=5)")


def test_a_structure_that_fits_only_some_sites() -> None:
    """The first site could take it; the model is untouched all the same."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([original(VIT), original(ENCODER)])

    model = Two()
    before = fingerprint(model)
    with pytest.raises(ParameterError, match=r"parts\.1"):
        attemper.apply(model, "dropkey(0.1, structure=cross)")
    assert fingerprint(model) == before


def test_a_model_without_attention() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten())
    before = fingerprint(model)
    with pytest.raises(NoSiteError, match=r"Sequential has none.*Conv2d, Flatten, ReLU, Sequential.*targets="):
        attemper.apply(model, "dropkey(0.1)")
    assert fingerprint(model) == before


def test_a_model_whose_only_attention_was_left_alone_says_so() -> None:
    model = original(family("timm-volo")).network[0]
    with pytest.raises(NoSiteError, match=r"'0\.attn' was left alone: outlook attention"):
        attemper.apply(model, "dropkey(0.1)")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("edgenext_xx_small", r"'stages\.1\.blocks\.1\.xca' and 2 more were left alone: cross-covariance attention"),
        ("coat_lite_tiny", r"'serial_blocks1\.0\.factoratt_crpe' and 7 more were left alone: factorised attention"),
    ],
)
@pytest.mark.parametrize("recipe", ["dropkey(0.1)", "explicit(v=0.1)", "cb + explicit(q=0.1, ff=0.1)", "arora(k=0.1)"])
def test_what_looks_like_attention_over_keys_and_is_not(name: str, message: str, recipe: str) -> None:
    model = timm.create_model(name, num_classes=2)
    before = fingerprint(model)
    with pytest.raises(NoSiteError, match=f"acts on attention;.*{message}"):
        attemper.apply(model, recipe)
    assert fingerprint(model) == before
    attemper.apply(model, "cb + explicit(ff=0.1)")  # its MLPs are MLPs all the same


@pytest.mark.parametrize(
    "recipe", ["explicit(v=0.1)", "explicit(v=[0, 0.1])", "explicit(av=0.1, ff=0.1)", "arora(q=0.1)"]
)
def test_penalties_on_attention_that_a_model_does_not_have(recipe: str) -> None:
    mixer = MlpMixer(num_classes=2, img_size=32, num_blocks=2, embed_dim=16)
    with pytest.raises(NoSiteError, match="acts on attention; MlpMixer has none"):
        attemper.apply(mixer, recipe)


def test_targets_may_choose_one_part_of_a_penalty() -> None:
    """The other has no place there, which is no mistake; a recipe that acts nowhere is one."""
    model = original(family("timm-vit"))
    handle = attemper.apply(model, "explicit(v=0.1, ff=0.1)", targets="blocks.*.attn")
    train(model, VIT)
    assert {row.component for row in handle.penalties()} == {"v"}
    handle.remove()
    with pytest.raises(NoSiteError, match="acts on feed-forward networks"):
        attemper.apply(model, "explicit(ff=0.1)", targets="blocks.*.attn")


@pytest.mark.parametrize("targets", ["encoder.*", ["blocks.0", "encoder.*"]])
def test_targets_that_match_nothing(targets: Any) -> None:
    refused(NoSiteError, r"'encoder\.\*' matches no module", "dropkey(0.1)", targets=targets)


def test_no_targets_at_all() -> None:
    refused(ParameterError, "targets is empty", "dropkey(0.1)", targets=[])


# ------------------------------------------------------------------------------------------------------------- models
def test_applying_twice() -> None:
    model, handle = tempered(VIT, "dropkey(0.1)")
    rows = handle.summary()
    with unharmed(model, lambda: train(model, VIT)):
        for again in ("dropkey(0.1)", "dropattention(0.1)", "none"):
            with pytest.raises(AlreadyAppliedError, match=r"dropkey\(0\.1\).*remove\(\)"):
                attemper.apply(model, again)
        with pytest.raises(AlreadyAppliedError, match="'0' is tempered"):
            attemper.apply(nn.Sequential(model), "dropkey(0.1)")
    assert handle.summary() == rows


def test_applying_twice_where_the_schedule_is_a_function() -> None:
    model = original(VIT)
    attemper.apply(model, DropKey(schedule=lambda l, L: 0.1))
    with pytest.raises(AlreadyAppliedError, match="remove"):
        attemper.apply(model, "dropkey(0.1)")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def wrapped_is_refused(wrapped: Any, match: str, output: Callable[[], Tensor]) -> None:
    context = unharmed(wrapped, output) if isinstance(wrapped, nn.Module) else contextlib.nullcontext()
    with context, pytest.raises(WrappedModelError, match=match):
        attemper.apply(wrapped, "dropkey(0.1)")


@pytest.mark.usefixtures("group")
def test_a_model_wrapped_in_ddp() -> None:
    model = original(VIT)
    wrapped = nn.parallel.DistributedDataParallel(model)
    wrapped_is_refused(wrapped, "DistributedDataParallel.*then wrap", lambda: evaluate(wrapped, VIT))
    tempered_model, _ = tempered(VIT, "dropkey(0.3)")
    inside = nn.parallel.DistributedDataParallel(tempered_model)
    assert not torch.equal(train(inside, VIT, seed=1), train(inside, VIT, seed=2))


@pytest.mark.usefixtures("group")
def test_a_model_wrapped_in_fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    model = original(family("hand-written"))
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    before = fingerprint(model)
    with pytest.raises(WrappedModelError, match="FSDP"):
        attemper.apply(model, "dropkey(0.1)")
    assert fingerprint(model) == before


def test_a_model_wrapped_in_data_parallel() -> None:
    wrapped = nn.DataParallel(original(VIT))
    wrapped_is_refused(wrapped, "DataParallel", lambda: evaluate(wrapped, VIT))


def test_a_compiled_model() -> None:
    wrapped = torch.compile(original(VIT), backend="eager")
    wrapped_is_refused(wrapped, "compiled already; apply to the model first", lambda: evaluate(wrapped._orig_mod, VIT))


def test_a_model_compiled_in_place() -> None:
    model = original(VIT)
    model.compile(backend="eager")
    before = fingerprint(model)
    with pytest.raises(WrappedModelError, match=r"apply first, then call \.compile"):
        attemper.apply(model, "dropkey(0.1)")
    assert fingerprint(model) == before


def test_a_model_with_a_block_compiled_in_place() -> None:
    model = original(VIT)
    model.blocks[1].compile(backend="eager")
    before = fingerprint(model)
    with pytest.raises(WrappedModelError, match=r"'blocks\.1' \(Block\) is compiled"):
        attemper.apply(model, "dropkey(0.1)")
    assert fingerprint(model) == before


def test_a_scripted_model() -> None:
    scripted = torch.jit.trace(original(family("hand-written")), torch.randn(2, 10, 48), check_trace=False)
    with pytest.raises(WrappedModelError, match="scripted"):
        attemper.apply(scripted, "dropkey(0.1)")


def test_a_model_whose_forward_was_replaced() -> None:
    model = original(VIT)
    module = model.blocks[1].attn
    module.forward = types.MethodType(type(module).forward, module)
    wrapped_is_refused(model, r"'blocks\.1\.attn' \(Attention\) was replaced", lambda: evaluate(model, VIT))


def test_a_forward_that_was_replaced_elsewhere_is_no_matter() -> None:
    """timm's FasterNet gives some of its convolutions another forward when it is built."""
    model = original(VIT)
    model.patch_embed.forward = types.MethodType(type(model.patch_embed).forward, model.patch_embed)
    attemper.apply(model, "dropkey(0.5)")
    assert not torch.equal(train(model, VIT, seed=1), train(model, VIT, seed=2))


def test_something_that_is_no_module() -> None:
    wrapped_is_refused(lambda x: x, "needs a torch.nn.Module, got function", lambda: torch.zeros(()))


@pytest.mark.parametrize("recipe", ["explicit(conv=1)", "dropkey(0.1)", "explicit(ff=1)", "cb"])
def test_a_model_whose_weights_have_no_shape_yet(recipe: str) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.LazyConv1d(8, 3), nn.Flatten(2), layer)
    with pytest.raises(NoSiteError, match=r"weights of '0' \(LazyConv1d\) have no shape yet.*; run the model once"):
        attemper.apply(model, recipe)
    model(torch.zeros(2, 3, 10))
    attemper.apply(model, recipe).remove()


# ---------------------------------------------------------------------------------------------------- implementations
def test_an_unknown_implementation() -> None:
    refused(ParameterError, "impl must be one of auto, .*'tritn'.*Did you mean 'triton'", "dropkey(0.1)", impl="tritn")


@pytest.mark.parametrize("impl", ["triton", "fa4", "sdpa"])
@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "nn-mha", "nn-encoder"])
def test_an_implementation_that_cannot_serve_on_the_cpu(name: str, impl: str) -> None:
    """Which one serves depends on the call, so it is refused where the call is made: in the first training pass."""
    model = original(family(name))
    before = fingerprint(model)
    handle = attemper.apply(model, "dropkey(0.1)", impl=impl)
    with unharmed(model, lambda: evaluate(model, family(name))):
        model.train()
        with pytest.raises(UnsupportedError, match=f"impl='{impl}'.*reference"):
            call(model, family(name).inputs())
        model.eval()
    handle.remove()
    assert fingerprint(model.train()) == before
    assert torch.equal(evaluate(model, family(name)), evaluate(original(family(name)), family(name)))


def test_the_reference_implementation_is_obeyed() -> None:
    model, twin = original(VIT), original(VIT)
    attemper.apply(model, "dropkey(0.3)", impl="reference")
    attemper.apply(twin, "dropkey(0.3)")
    assert torch.equal(train(model, VIT), train(twin, VIT))
