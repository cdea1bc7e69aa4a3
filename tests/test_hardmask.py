"""HardMask: which logits it touches, and what becomes of them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import attemper
from attemper import attention, keep_mask
from attemper.errors import FittedWarning, ParameterError, UnmetError
from attemper.methods import DropKey, HardMask
from attemper.methods.dropkey import dropkey
from attemper.methods.hardmask import largest
from attemper.ops.call import make_call
from attemper.ops.dispatch import attend
from attemper.ops.perturbation import LargestDrop
from attemper.ops.stream import Source, Stream, site_word
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
SHAPE = (2, 3, 8, 12)
SEED = 17


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(shape=SHAPE, dtype=torch.float64):
    batch, heads, queries, keys = shape
    sizes = ((batch, heads, queries, 4), (batch, heads, keys, 4), (batch, heads, keys, 5))
    return [randn(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def stream(seed=SEED):
    return Stream(torch.tensor(seed))


def top_k(logits: Tensor, k: int, allowed: Tensor | None = None) -> Tensor:
    """The k largest allowed entries of every row, one by one."""
    found = torch.zeros_like(logits, dtype=torch.bool)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape[:-1])):
        row = tuple(index.tolist())
        order = sorted(range(logits.shape[-1]), key=lambda j, row=row: -float(logits[(*row, j)]))
        offered = [j for j in order if allowed is None or bool(allowed.expand(logits.shape)[(*row, j)])]
        for j in offered[:k]:
            found[(*row, j)] = True
    return found


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
@pytest.mark.parametrize("k", [1, 5, 12])
def test_only_the_k_largest_logits_of_a_row_are_touched(k, fill):
    logits = randn(*SHAPE)
    given, _ = HardMask(0.5, k=k, fill=fill).perturb_logits(logits, None, stream())
    touched = given != logits
    top = top_k(logits, k)
    assert not (touched & ~top).any()
    assert touched.any()
    assert (given[touched] == (0.0 if fill == "zero" else -math.inf)).all()


def test_every_one_of_them_is_dropped_at_rate_p():
    logits = randn(200, 4, 8, 12)
    given, _ = HardMask(0.3, k=4).perturb_logits(logits, None, stream())
    touched = given == 0
    assert touched.sum(-1).max() == 4
    for rank in range(4):
        place = logits.argsort(-1, descending=True)[..., rank : rank + 1]
        share = touched.gather(-1, place).double().mean()
        assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / (200 * 4 * 8))


def test_zero_multiplies_the_logit_and_leaves_its_key_some_weight():
    q, k, v = inputs()
    out = attention(q, k, v, methods=HardMask(0.4, k=3), seed=SEED)
    logits = q @ k.mT / 2
    keep = keep_mask(SEED, SHAPE, 0.4)
    by_hand = torch.where(top_k(logits, 3) & ~keep, torch.zeros_like(logits), logits)
    torch.testing.assert_close(out, by_hand.softmax(-1) @ v, atol=1e-12, rtol=0)
    assert (by_hand.softmax(-1) > 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_neg_inf_is_dropkey_restricted_to_the_largest(masked):
    q, k, v = inputs()
    logits = q @ k.mT / 2
    allowed = None
    if masked:
        allowed = torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.5
        allowed[..., 0] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    keep = keep_mask(SEED, SHAPE, 0.4) | ~top_k(logits, 3, allowed)
    expected = dropkey(logits, keep, allowed) @ v
    given = attention(q, k, v, attn_mask=allowed, methods=HardMask(0.4, k=3, fill="neg_inf"), seed=SEED)
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=0)


def test_neg_inf_over_all_keys_is_dropkey():
    q, k, v = inputs()
    hard = attention(q, k, v, methods=HardMask(0.4, k=12, fill="neg_inf"), seed=SEED)
    assert torch.equal(hard, attention(q, k, v, methods=DropKey(0.4), seed=SEED))


def test_logits_are_what_softmax_would_see_bias_included():
    q, k, v = inputs()
    bias = 20 * randn(1, 3, 8, 12, seed=9)
    logits = q @ k.mT / 2 + bias
    hit = top_k(logits, 3) & ~keep_mask(SEED, SHAPE, 0.5)
    assert not torch.equal(top_k(logits, 3), top_k(q @ k.mT / 2, 3))
    given = attention(q, k, v, attn_mask=bias, methods=HardMask(0.5, k=3), seed=SEED)
    torch.testing.assert_close(given, logits.masked_fill(hit, 0.0).softmax(-1) @ v, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("fraction", "keys", "count"), [(0.25, 12, 3), (0.5, 7, 4), (0.01, 12, 1), (0.999, 12, 12)])
def test_a_fraction_is_of_the_keys_and_at_least_one(fraction, keys, count):
    assert HardMask(k=fraction).count(keys) == count
    logits = randn(1, 1, 500, keys)
    given, _ = HardMask(0.9, k=fraction).perturb_logits(logits, None, stream())
    assert (given != logits).sum(-1).max() == count


def test_a_row_with_fewer_allowed_keys_than_k_offers_all_of_them():
    logits = randn(*SHAPE)
    allowed = torch.zeros(12, dtype=torch.bool)
    allowed[[2, 7]] = True
    found = largest(logits, 5, allowed)
    assert torch.equal(found, allowed.expand(SHAPE))
    assert torch.equal(found, top_k(logits, 5, allowed))


@pytest.mark.parametrize("kind", ["padding", "causal", "float"])
@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_a_masked_out_key_is_never_among_them(kind, fill):
    q, k, _ = inputs((2, 3, 12, 12))
    eye = torch.eye(12, dtype=q.dtype).expand(2, 3, 12, 12)
    allowed = torch.ones(12, 12, dtype=torch.bool)
    options = {}
    if kind == "causal":
        allowed, options = allowed.tril(), {"is_causal": True}
    else:
        allowed[:, 4:] = False
        mask = allowed[:1]
        if kind == "float":
            mask = torch.zeros(1, 12, dtype=q.dtype).masked_fill(~mask, -1e4)
        options = {"attn_mask": mask}
    weights = attention(q, k, eye, methods=HardMask(0.9, k=12, fill=fill), seed=SEED, **options)
    assert (weights[..., ~allowed] < 1e-12).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 12, dtype=q.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [1, 2, 7])
@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_no_row_is_lost_and_none_is_nan(fill, keys, dtype):
    q, k, v = (x.requires_grad_() for x in inputs((2, 2, 7, keys), dtype))
    padding = torch.ones(2, 1, 1, keys, dtype=torch.bool)
    padding[1, ..., 1:] = False
    method = HardMask(0.99, k=1 if keys == 1 else 2, fill=fill)
    out = attention(q, k, v, attn_mask=padding, methods=method, seed=SEED)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))
    torch.testing.assert_close(out[1], v[1, :, :1].expand(-1, 7, -1), msg="one allowed key keeps all the weight")


def test_gradients_pass_the_kept_logits_only():
    logits = randn(1, 1, 6, 8).requires_grad_()
    given, _ = HardMask(0.5, k=4).perturb_logits(logits, None, stream())
    given.square().sum().backward()
    assert torch.equal(logits.grad == 0, given == 0)
    assert (given == 0).any()


def test_more_than_there_are_keys_is_an_error_that_tells_both_numbers():
    q, k, v = inputs()
    with pytest.raises(ParameterError, match="k=13 is more than the number of keys, 12"):
        attention(q, k, v, methods=HardMask(k=13), seed=SEED)


class Pooled(nn.Module):
    """Attention over six tokens, then over three of them."""

    def forward(self, x):
        for step in (1, 2):
            x = x[:, :, ::step]
            x = x + torch.nn.functional.scaled_dot_product_attention(x, x, x)
        return x


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_attention_of_a_model_with_fewer_keys_has_all_of_them_in_question(fill):
    model = nn.Sequential(Pooled()).train()
    tempered = attemper.apply(model, f"hardmask(0.5, k=5, fill={fill})")
    x = randn(2, 3, 6, 4)
    with pytest.warns(FittedWarning, match=r"'0' has 3 keys, fewer than hardmask's k=5: there it acts with k=3"):
        out = drawn_from(SEED, model, x)
    wanted = x + attended(x, HardMask(0.5, k=5, fill=fill), tempered.pass_seed, call=0)
    wanted = wanted[:, :, ::2]
    wanted = wanted + attended(wanted, HardMask(0.5, k=3, fill=fill), tempered.pass_seed, call=1)
    torch.testing.assert_close(out, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)  # it is said once
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(drawn_from(SEED, compiled, x), wanted)


def test_a_model_without_any_attention_of_so_many_keys_takes_them_all():
    outputs = []
    for k in (400, 17):
        model = build(FAMILY["timm-vit"]).train()
        attemper.apply(model, f"hardmask(0.5, k={k})")
        torch.manual_seed(4)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            outputs.append(call(model, FAMILY["timm-vit"].inputs()))
        assert [each.category for each in said] == ([FittedWarning] if k == 400 else [])
    assert torch.equal(*outputs)


# Shared by heads.


@pytest.mark.parametrize("fill", ["zero", "neg_inf"])
def test_shared_heads_apply_one_draw_each_to_its_own_largest_logits(fill):
    q, k, v = inputs()
    logits = q @ k.mT / 2
    keep = keep_mask(SEED, (SHAPE[0], 1, *SHAPE[2:]), 0.4)
    hit = top_k(logits, 3) & ~keep
    assert not torch.equal(hit[:, 0], hit[:, 1])
    by_hand = logits.masked_fill(hit, 0.0 if fill == "zero" else -math.inf)
    by_hand = torch.where(hit.all(-1, keepdim=True), logits, by_hand)
    out = attention(q, k, v, methods=HardMask(0.4, k=3, fill=fill, share="heads"), seed=SEED)
    torch.testing.assert_close(out, by_hand.softmax(-1) @ v, atol=1e-12, rtol=0)


def test_over_all_keys_shared_heads_drop_the_same_and_other_heads_do_not():
    logits = randn(*SHAPE)
    for share, same in (("heads", True), ("none", False)):
        given, _ = HardMask(0.5, k=12, share=share).perturb_logits(logits, None, stream())
        dropped = given == 0
        assert torch.equal(dropped[:, 0], dropped[:, 1]) is same
        assert not torch.equal(dropped[0], dropped[1])  # samples share nothing


def test_shared_heads_need_heads_that_can_be_told_from_samples():
    assert HardMask(share="heads").tells_heads
    assert not HardMask().tells_heads
    assert HardMask(0.2, share="heads").largest_drop(12) == LargestDrop(0.2, 5, "zero", shared=True)
    assert HardMask(0.2).largest_drop(12) == LargestDrop(0.2, 5, "zero")


class OneOfSeveral(nn.Module):
    """One head of attention by hand, whose samples have no axis for heads beside them."""

    def forward(self, x):
        return (x @ x.transpose(1, 2)).softmax(-1) @ x


def test_a_model_whose_heads_are_not_known_refuses_to_share_them():
    model = nn.Sequential(OneOfSeveral()).train()
    tempered = attemper.apply(model, "hardmask(0.5, k=2, share=heads)", targets="0")
    with pytest.raises(UnmetError, match="hardmask must tell them apart"):
        model(torch.randn(2, 5, 4))
    tempered.remove()
    attemper.apply(model, "hardmask(0.5, k=2)", targets="0")
    model(torch.randn(2, 5, 4))


# A k per block.


def encoder(blocks=3):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).train()


def test_each_block_takes_its_k_and_a_new_rate_leaves_them():
    recipe = "hardmask(0.2, schedule=[0.2, 0.1, 0.05], k=[4, 0.5, 2])"
    tempered = attemper.apply(encoder(), recipe)
    wanted = ["hardmask(0.2, k=4)", "hardmask(0.1, k=0.5)", "hardmask(0.05, k=2)"]
    assert [row.recipe for row in tempered.summary()] == wanted
    assert attemper.render(tempered.methods) == recipe
    assert attemper.parse(recipe) == [HardMask(0.2, (0.2, 0.1, 0.05), k=[4, 0.5, 2])]
    tempered.set_rate(0.3)
    assert [row.recipe.partition("k=")[2] for row in tempered.summary()] == ["4)", "0.5)", "2)"]
    tempered.model(torch.randn(2, 9, 8)).sum().backward()


def test_a_list_of_k_acts_as_each_of_its_numbers():
    x = torch.randn(2, 3, 9, 4)
    ks = ("[1, 6]", "1", "6")
    models = [nn.ModuleList([nn.Sequential(Plain()), nn.Sequential(Plain())]).train() for _ in ks]
    for model, k in zip(models, ks, strict=True):
        attemper.apply(model, f"hardmask(0.5, k={k}, fill=neg_inf)")
    listed, *alone = ([drawn_from(SEED, part, x) for part in model] for model in models)
    assert torch.equal(listed[0], alone[0][0])
    assert torch.equal(listed[1], alone[1][1])
    assert not torch.equal(alone[0][0], alone[1][0]), "k makes no difference"


def attended(x, method, seed, call):
    """What the attention module '0' of a tempered model gives in a call of it."""
    source = Source(torch.tensor(seed), site_word("0"), call)
    return attend(make_call(x, x, x, None, False, None, (method,), source), "reference")


def drawn_from(seed, model, x):
    torch.manual_seed(seed)
    return model(x)


class Plain(nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_list_of_another_length_names_how_many_blocks_there_are():
    with pytest.raises(ParameterError, match=r"k of hardmask must have one value per block: the model has 3 blocks, "):
        attemper.apply(encoder(), "hardmask(0.2, k=[4, 2])")


def test_one_call_has_no_block_to_take_k_of():
    q, k, v = inputs()
    with pytest.raises(ParameterError, match="has a k per block, and one call has no block; give the k itself"):
        attention(q, k, v, methods=HardMask(0.2, k=[4, 2]), seed=SEED)


@pytest.mark.parametrize("name", ["timm-vit", "timm-swin", "hf-bert", "nn-encoder"])
def test_it_acts_on_models_in_training_and_not_in_evaluation(name):
    family = FAMILY[name]
    model = build(family)
    trained, evaluated = call(model.train(), family.inputs()), call(model.eval(), family.inputs())
    attemper.apply(model, "hardmask(0.9, k=3, fill=neg_inf)")
    assert not torch.allclose(call(model.train(), family.inputs()), trained, atol=1e-6)
    assert torch.equal(call(model.eval(), family.inputs()), evaluated)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be an integer of at least 1, or a fraction of the keys in \\(0, 1\\); got 0"),
        ({"k": 1.5}, "k must be an integer.*got 1.5"),
        ({"k": True}, "k must be an integer.*got True"),
        ({"k": math.nan}, "k must be an integer.*got nan"),
        ({"k": [5, 0]}, "k\\[1\\] must be an integer.*got 0"),
        ({"k": [5, [3]]}, "k\\[1\\] must be an integer.*got \\[3\\]"),
        ({"k": "all"}, "k must be an integer.*got 'all'"),
        ({"share": "queries"}, "share must be one of none, heads; got 'queries'"),
        ({"fill": "one"}, "fill must be one of zero, neg_inf; got 'one'"),
        ({"p": 1.0}, "p must be a number in \\[0, 1\\), got 1.0"),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(ParameterError, match=message):
        HardMask(**options)
