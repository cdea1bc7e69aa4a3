"""Consistency and R-Drop: what the loss is, and that the two passes count as one."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attemper
from attemper.errors import ConflictError, ParameterError
from attemper.methods import Consistency, RDrop
from attemper.methods.consistency import divergence
from attemper.tempering.outputs import logits_of
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
STOCHASTIC = [
    "dropkey(0.3)",
    "dropattention(0.3)",
    "hardmask(0.5, k=3)",
    "blur(2.0)",
    "drophead(0.4)",
    "layerdrop(0.4)",
    "droppath(0.4)",
    "ffdropout(0.3)",
    "dropconnect(0.3)",
]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kl(first, second):
    p, q = first.softmax(-1), second.softmax(-1)
    return (p * (p / q).log()).sum(-1).mean()


def vit():
    return build(FAMILY["timm-vit"]).train(), FAMILY["timm-vit"].inputs()


class Watched:
    """A forward that keeps what it returned."""

    def __init__(self, run):
        self.run, self.outputs = run, []

    def __call__(self):
        self.outputs.append(self.run())
        return self.outputs[-1]


def mean_square(out):
    return logits_of(out).square().mean()


# --------------------------------------------------------------------------------------------------------- the formula
def test_the_divergence_is_the_mean_kl_over_samples():
    first, second = randn(4, 7).double(), randn(4, 7, seed=1).double()
    torch.testing.assert_close(divergence(first, second), kl(first, second), atol=1e-13, rtol=0)
    by_torch = F.kl_div(second.log_softmax(-1), first.softmax(-1), reduction="batchmean")
    torch.testing.assert_close(divergence(first, second), by_torch, atol=1e-13, rtol=0)
    assert divergence(first, first).item() == 0.0
    tokens = randn(2, 3, 7).double(), randn(2, 3, 7, seed=1).double()
    torch.testing.assert_close(divergence(*tokens), kl(*(t.flatten(0, 1) for t in tokens)), atol=1e-13, rtol=0)
    assert divergence(first.half(), second.half()).dtype == torch.float32


@pytest.mark.parametrize("recipe", ["consistency(0.7)", "consistency(0.7, direction=symmetric)", "rdrop(0.7)"])
def test_the_loss_is_the_mean_of_both_and_the_divergence(recipe):
    model, inputs = vit()
    labels = torch.tensor([1, 3])
    tempered = attemper.apply(model, f"dropkey(0.5) + {recipe}")
    torch.manual_seed(5)
    loss = tempered.loss(lambda: call(model, inputs), lambda out: F.cross_entropy(out, labels))
    torch.manual_seed(5)
    first, second = call(model, inputs), call(model, inputs)
    task = (F.cross_entropy(first, labels) + F.cross_entropy(second, labels)) / 2
    compared = kl(first, second) if recipe == "consistency(0.7)" else (kl(first, second) + kl(second, first)) / 2
    torch.testing.assert_close(loss, task + 0.7 * compared, atol=1e-6, rtol=1e-5)
    assert compared > 0
    grads = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.autograd.grad(task + 0.7 * compared, list(model.parameters()))
    for given, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(given, other, atol=1e-6, rtol=1e-4)


def test_forward_has_a_direction_and_symmetric_has_none():
    first, second = randn(3, 5), 2 * randn(3, 5, seed=1)
    forward, symmetric = Consistency(), Consistency(direction="symmetric")
    assert abs(forward.compare(first, second) - forward.compare(second, first)) > 1e-2
    torch.testing.assert_close(symmetric.compare(first, second), symmetric.compare(second, first))
    torch.testing.assert_close(symmetric.compare(first, second), RDrop().compare(first, second))


# ------------------------------------------------------------------------------------------------------ the two passes
@pytest.mark.parametrize("method", STOCHASTIC)
def test_the_two_passes_differ_under_every_stochastic_method_alone(method):
    model, inputs = vit()
    tempered = attemper.apply(model, f"{method} + consistency(1.0)")
    forward = Watched(lambda: call(model, inputs))
    torch.manual_seed(2)
    loss = tempered.loss(forward, mean_square)
    first, second = forward.outputs
    assert not torch.equal(first, second)
    divergence_here = loss - (mean_square(first) + mean_square(second)) / 2
    assert divergence_here > 0
    torch.testing.assert_close(divergence_here, kl(first, second), atol=1e-6, rtol=1e-2)


def test_every_stochastic_method_is_among_them():
    names = {attemper.parse(method)[0].name for method in STOCHASTIC}
    assert names == {method.name for method in attemper.list_methods() if method.stochastic}


@pytest.mark.parametrize(
    ("recipe", "passes"), [("dropkey(0.3)", 1), ("dropkey(0.3) + rdrop(0.0)", 1), ("rdrop + dropkey", 2)]
)
def test_nothing_more_runs_than_is_needed(recipe, passes):
    model, inputs = vit()
    tempered = attemper.apply(model, recipe)
    forward = Watched(lambda: call(model, inputs))
    tempered.loss(forward, mean_square)
    assert len(forward.outputs) == passes


def test_evaluation_is_one_pass_and_the_plain_loss():
    model, inputs = vit()
    tempered = attemper.apply(model, "explicit(v=1) + dropkey(0.3) + consistency(1.0)")
    model.eval()
    forward = Watched(lambda: call(model, inputs))
    loss = tempered.loss(forward, mean_square)
    assert len(forward.outputs) == 1
    assert torch.equal(loss, mean_square(forward.outputs[0]))


class Normed(nn.Module):
    """A transformer with a batch norm."""

    def __init__(self, momentum):
        super().__init__()
        self.norm = nn.BatchNorm1d(5, momentum=momentum)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)

    def forward(self, x):
        return self.encoder(self.norm(x)).mean(1)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_counts_the_two_passes_once(momentum):
    torch.manual_seed(0)
    model = Normed(momentum).train()
    plain = copy.deepcopy(model)
    tempered = attemper.apply(model, "dropkey(0.3) + consistency(1.0)")
    for seed in (0, 1):
        x = randn(4, 5, 16, seed=seed)
        tempered.loss(lambda x=x: model(x), mean_square)
        plain(x)
    assert model.norm.num_batches_tracked.item() == 2
    assert model.norm.momentum == momentum
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)


def test_penalties_count_the_two_passes_once():
    model, inputs = vit()
    tempered = attemper.apply(model, "explicit(v=0.5, ff=0.5) + dropkey(0.3) + consistency(1.0)")
    torch.manual_seed(3)
    loss = tempered.loss(lambda: call(model, inputs), mean_square)
    rows = tempered.penalties()
    assert len(rows) == 3 * 3
    assert tempered.penalty().item() == 0.0
    torch.manual_seed(3)
    first, second = call(model, inputs), call(model, inputs)
    without = (mean_square(first) + mean_square(second)) / 2 + kl(first, second)
    assert (loss - without).item() == pytest.approx(sum(row.value for row in rows), rel=1e-4)


def test_an_error_in_the_second_pass_leaves_penalties_on():
    model, inputs = vit()
    tempered = attemper.apply(model, "explicit(v=0.5) + dropkey(0.3) + consistency(1.0)")
    passes = iter([lambda: call(model, inputs), lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        tempered.loss(lambda: next(passes)(), mean_square)
    call(model, inputs)
    assert len(tempered.penalties()) == 3


# ----------------------------------------------------------------------------------------------------- what models give
class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 1)

    def forward(self, x):
        out = self.encoder(x).mean(1)
        return {
            "tensor": out,
            "tuple": (out, x),
            "list": [out],
            "dict": {"features": x, "logits": out},
            "object": SimpleNamespace(logits=out),
        }[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "dict", "object"])
def test_any_kind_of_output_is_compared_by_its_logits(kind):
    torch.manual_seed(0)
    model = Returning(kind).train()
    tempered = attemper.apply(model, "dropkey(0.5) + consistency(1.0)")
    forward = Watched(lambda: model(randn(3, 6, 16)))
    loss = tempered.loss(forward, mean_square)
    first, second = (logits_of(out) for out in forward.outputs)
    assert first.shape == (3, 16)
    expected = (first.square().mean() + second.square().mean()) / 2 + kl(first, second)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    loss.backward()


@pytest.mark.parametrize("name", ["hf-vit", "hf-bert"])
def test_a_transformers_output_with_its_own_loss(name):
    family = FAMILY[name]
    model = build(family).train()
    inputs = {**family.inputs(), "labels": torch.tensor([0, 1])}
    tempered = attemper.apply(model, "dropkey(0.5) + rdrop(0.5)")
    forward = Watched(lambda: model(**inputs))
    loss = tempered.loss(forward, lambda out: out.loss)
    first, second = forward.outputs
    compared = (kl(first.logits, second.logits) + kl(second.logits, first.logits)) / 2
    torch.testing.assert_close(loss, (first.loss + second.loss) / 2 + 0.5 * compared, atol=1e-6, rtol=1e-5)


def test_an_output_without_logits_is_an_error_that_says_what_is_needed():
    with pytest.raises(ParameterError, match=r"needs logits: a tensor, a dict or output with 'logits'.*returned int"):
        logits_of(3)
    with pytest.raises(ParameterError, match="the model returned dict"):
        logits_of({"features": randn(2)})


# ------------------------------------------------------------------------------------------------- something stochastic
@pytest.mark.parametrize(
    "extra", ["", "explicit(v=1) + ", "cb + ", "dropkey(0.0) + ", "dropkey(0.0, schedule=decreasing) + "]
)
@pytest.mark.parametrize("comparison", ["consistency", "rdrop"])
def test_without_anything_stochastic_there_is_nothing_to_compare(extra, comparison):
    model, _ = vit()
    message = rf"{comparison} compares stochastic passes.*'dropkey\(0.1\) \+ {comparison}'"
    with pytest.raises(ConflictError, match=message):
        attemper.apply(model, f"{extra}{comparison}(1.0)")
    assert not any("_attemper" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("own", ["nn", "timm", "hf"])
def test_dropout_of_the_models_own_is_enough(own):
    if own == "nn":
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True), 2)
        x = (randn(2, 5, 16),)
        run = lambda: model(*x)  # noqa: E731
    elif own == "timm":
        import timm

        options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "drop_path_rate": 0.5}
        model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **options)
        run = lambda: model(randn(2, 3, 32, 32))  # noqa: E731
    else:
        import transformers

        config = transformers.BertConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50
        )
        model = transformers.BertForSequenceClassification(config)
        run = lambda: model(torch.arange(8).view(2, 4)).logits  # noqa: E731
    tempered = attemper.apply(model.train(), "consistency(1.0)")
    torch.manual_seed(0)
    forward = Watched(run)
    tempered.loss(forward, mean_square).backward()
    assert not torch.equal(*forward.outputs)
    assert kl(*forward.outputs) > 0


def test_the_two_forms_exclude_each_other_and_bad_strengths_are_named():
    model, _ = vit()
    with pytest.raises(ConflictError, match="consistency and rdrop are two forms of one comparison; choose one"):
        attemper.apply(model, "dropkey(0.1) + consistency + rdrop")
    for kind in (Consistency, RDrop):
        with pytest.raises(ParameterError, match="strength must be a number of at least 0, got -1"):
            kind(-1)
        with pytest.raises(ParameterError, match="strength must be a number of at least 0, got nan"):
            kind(float("nan"))
    with pytest.raises(ParameterError, match="direction must be one of forward, symmetric; got 'backward'"):
        Consistency(direction="backward")
