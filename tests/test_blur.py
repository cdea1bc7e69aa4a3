"""Blur, against an explicit convolution of the logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attemper
from attemper import attention, implementations
from attemper.errors import ParameterError, UnsupportedError
from attemper.methods import Blur, Place
from attemper.methods.blur import blur, gaussian
from attemper.ops.stream import Stream
from families import FAMILIES, build, call

FAMILY = {family.name: family for family in FAMILIES}
SIGMA = 0.8
BATCH, HEADS, QUERIES, WIDTH = 2, 3, 7, 4


@pytest.fixture(autouse=True)
def fixed_sigma(monkeypatch, request):
    """σ is SIGMA wherever it is drawn from U(0, 1)."""
    if "drawn" not in request.node.name:
        monkeypatch.setattr(Stream, "uniform", lambda self: torch.tensor(SIGMA, dtype=torch.float64))


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(keys, queries=QUERIES):
    sizes = ((BATCH, HEADS, queries, WIDTH), (BATCH, HEADS, keys, WIDTH), (BATCH, HEADS, keys, 5))
    return [randn(*size, seed=i) for i, size in enumerate(sizes)]


def kernel(allowed, w=5, sigma=SIGMA, causal=False, grid=None, prefix=0):
    """(keys, keys): row j holds the weights with which key j takes in the others; the convolution, written out."""
    keys = len(allowed)
    half = w // 2
    G = torch.zeros(keys, keys, dtype=torch.float64)
    for j in range(keys):
        for i in range(keys):
            if grid is not None and (j < prefix or i < prefix):
                G[j, i] = float(i == j)
                continue
            if grid is None:
                steps = [i - j]
            else:
                (r, c), (s, d) = (divmod(x - prefix, grid[1]) for x in (j, i))
                steps = [s - r, d - c]
            if all(abs(step) <= half for step in steps) and allowed[i] and not (causal and i > j):
                G[j, i] = math.prod(math.exp(-(step**2) / (2 * sigma**2)) for step in steps)
        if G[j].sum() > 0:
            G[j] /= G[j].sum()
    return G


def by_hand(q, k, v, kernels, allowed=None, bias=None):
    """Attention whose logits are convolved with kernels (…, keys, keys), one per (sample, query) where they differ."""
    content = (q @ k.mT) / math.sqrt(q.shape[-1])
    blurred = torch.einsum("bhqi,bqji->bhqj", content, kernels.expand(BATCH, q.shape[2], -1, -1))
    if bias is not None:
        blurred = blurred + bias
    if allowed is not None:
        blurred = blurred.masked_fill(~allowed, -torch.inf)
    return blurred.softmax(-1) @ v


def assert_same(given, expected):
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=0)


ROUTES = ["sdpa", "reference"]
GRIDS = {
    "raster": (Blur(1.0), {}, 9),
    "wide raster": (Blur(1.0, w=9), {"w": 9}, 6),
    "2d": (Blur(1.0, grid="2d", size=(3, 4)), {"grid": (3, 4)}, 12),
    "2d with prefix": (Blur(1.0, w=3, grid="2d", size=(2, 4), prefix=2), {"w": 3, "grid": (2, 4), "prefix": 2}, 10),
}


@pytest.mark.parametrize("impl", ROUTES)
@pytest.mark.parametrize("name", list(GRIDS))
def test_blur_is_a_convolution_of_the_logits(name, impl):
    method, options, keys = GRIDS[name]
    q, k, v = inputs(keys)
    expected = by_hand(q, k, v, kernel([True] * keys, **options))
    assert_same(attention(q, k, v, methods=method, seed=0, impl=impl), expected)


@pytest.mark.parametrize("kind", ["boolean", "float"])
@pytest.mark.parametrize("impl", ROUTES)
@pytest.mark.parametrize("name", list(GRIDS))
def test_padding_is_left_out_of_the_kernel(name, impl, kind):
    method, options, keys = GRIDS[name]
    q, k, v = inputs(keys)
    real = torch.ones(BATCH, keys, dtype=torch.bool)
    real[1, keys - 3 :] = False
    mask = real[:, None, None]
    kernels = torch.stack([kernel(row.tolist(), **options) for row in real])[:, None]
    given = mask if kind == "boolean" else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    out = attention(q, k, v, attn_mask=given, methods=method, seed=0, impl=impl)
    assert_same(out, by_hand(q, k, v, kernels, mask))
    k[1, :, keys - 3 :] += 100
    assert torch.equal(attention(q, k, v, attn_mask=given, methods=method, seed=0, impl=impl), out)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("impl", ROUTES)
def test_causal_blur_looks_back_only(impl, padded):
    q, k, v = inputs(QUERIES)
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    real = torch.ones(BATCH, QUERIES, dtype=torch.bool)
    real[1, :2] = not padded  # padding on the left, as language models have it
    mask = real[:, None, None] if padded else None
    kernels = torch.stack([kernel(row.tolist(), causal=True) for row in real])[:, None]
    allowed = causal & real[:, None, None]
    if padded and impl == "sdpa":
        with pytest.raises(UnsupportedError, match="either attn_mask or is_causal"):
            attention(q, k, v, attn_mask=mask, is_causal=True, methods=Blur(), seed=0, impl=impl)
        return
    out = attention(q, k, v, attn_mask=mask, is_causal=True, methods=Blur(), seed=0, impl=impl)
    seeing = allowed.any(-1, keepdim=True)
    assert_same(out * seeing, torch.nan_to_num(by_hand(q, k, v, kernels, allowed)) * seeing)


@pytest.mark.parametrize("order", ["is_causal", "boolean mask", "float mask"])
def test_a_later_key_moves_no_earlier_row(order):
    q, k, v = inputs(QUERIES)
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    floats = torch.zeros(QUERIES, QUERIES, dtype=q.dtype).masked_fill(~causal, -torch.inf)
    options = {"is_causal": True} if order == "is_causal" else {"attn_mask": causal}
    if order == "float mask":
        options = {"attn_mask": floats}
    before = attention(q, k, v, methods=Blur(1.0, w=7), seed=0, **options)
    k[:, :, 4] += 100
    after = attention(q, k, v, methods=Blur(1.0, w=7), seed=0, **options)
    assert torch.equal(after[:, :, :4], before[:, :, :4])
    assert not torch.equal(after[:, :, 4:], before[:, :, 4:])


@pytest.mark.parametrize("name", list(GRIDS))
def test_a_mask_that_differs_between_queries_renormalises_each_row(name):
    method, options, keys = GRIDS[name]
    q, k, v = inputs(keys)
    allowed = torch.rand(BATCH, 1, QUERIES, keys, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[..., 0] = True
    kernels = torch.stack([torch.stack([kernel(row.tolist(), **options) for row in rows]) for rows in allowed[:, 0]])
    out = attention(q, k, v, attn_mask=allowed, methods=method, seed=0, impl="reference")
    assert_same(out, by_hand(q, k, v, kernels, allowed))
    with pytest.raises(UnsupportedError, match="boolean mask that differs between queries"):
        attention(q, k, v, attn_mask=allowed, methods=method, seed=0, impl="sdpa")
    assert_same(attention(q, k, v, attn_mask=allowed, methods=method, seed=0), out)


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float64).min, -100.0])
def test_an_additive_mask_that_differs_between_queries_leaks_nothing(low):
    q, k, v = inputs(9)
    allowed = torch.rand(BATCH, 1, QUERIES, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[..., 0] = True
    bias = randn(BATCH, 1, QUERIES, 9, seed=5)
    mask = bias.masked_fill(~allowed, low)
    kernels = torch.stack([torch.stack([kernel(row.tolist()) for row in rows]) for rows in allowed[:, 0]])
    expected = by_hand(q, k, v, kernels, allowed, bias)
    assert_same(attention(q, k, v, attn_mask=mask, methods=Blur(), seed=0), expected)
    verdicts = {verdict.name: verdict for verdict in implementations(q, k, v, attn_mask=mask, methods=Blur())}
    assert "additive mask that differs between queries" in verdicts["sdpa"].reason
    assert verdicts["reference"].chosen
    assert "sdpa and triton cannot serve" in verdicts["reference"].because


def masks_alike(keys, seed):
    """Masks that have a row for every query, of which all that see anything see the same keys, and those keys."""
    generator = torch.Generator().manual_seed(seed)
    real = torch.rand(BATCH, 1, 1, keys, generator=generator) < 0.6
    real[..., 0] = True
    looking = torch.rand(BATCH, 1, QUERIES, 1, generator=generator) < 0.8  # padded queries see nothing
    bias = torch.randn(BATCH, HEADS, QUERIES, keys, generator=generator, dtype=torch.float64)
    masks = {
        "expanded": real.expand(BATCH, 1, QUERIES, keys),
        "boolean": real.expand(BATCH, 1, QUERIES, keys).clone(),
        "with padded queries": real & looking,
        "bias and -inf": bias.masked_fill(~real, -torch.inf),
        "bias and the lowest number": bias.masked_fill(~real, torch.finfo(torch.float64).min),
        "bias and -100": bias.masked_fill(~real, -100.0),
    }
    return masks, real


@settings(max_examples=20, deadline=None, derandomize=True)
@given(name=st.sampled_from(list(masks_alike(2, 0)[0])), impl=st.sampled_from(ROUTES), seed=st.integers(0, 99))
def test_a_mask_of_which_all_queries_see_the_same_keys_is_padding(name, impl, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "uniform", lambda self: torch.tensor(SIGMA, dtype=torch.float64))
        masks, real = masks_alike(9, seed)
        (q, k, v), mask = inputs(9), masks[name]
        kernels = torch.stack([kernel(row[0, 0].tolist()) for row in real])[:, None]
        seen = mask if mask.dtype == torch.bool else real
        rows = seen.any(-1, keepdim=True)
        bias = None if mask.dtype == torch.bool else torch.where(seen, mask, 0.0)
        expected = by_hand(q, k, v, kernels, seen | ~rows, bias) * rows
        out = attention(q, k, v, attn_mask=mask, methods=Blur(), seed=0, impl=impl)
        torch.testing.assert_close(out * rows, expected, atol=1e-12, rtol=0)


def test_a_bias_of_heads_that_share_keys_hides_nothing_from_any_of_them():
    q, k, v = inputs(9)
    bias = randn(1, HEADS, QUERIES, 9, seed=5)
    shared = [x[:, :1] for x in (k, v)]
    expected = attention(q, *(x.expand(-1, HEADS, -1, -1) for x in shared), attn_mask=bias, methods=Blur(), seed=0)
    assert_same(attention(q, *shared, attn_mask=bias, methods=Blur(), seed=0, impl="sdpa"), expected)
    bias[:, 1, :, 3] = -torch.inf
    with pytest.raises(UnsupportedError, match="differs between heads"):
        attention(q, *shared, attn_mask=bias, methods=Blur(), seed=0, impl="sdpa")


def test_where_nobody_can_look_a_mask_of_rows_may_hide_other_keys_from_each(monkeypatch):
    q, k, v = inputs(9)
    bias = randn(1, HEADS, QUERIES, 9, seed=5)
    expected = attention(q, k, v, attn_mask=bias, methods=Blur(), seed=0, impl="sdpa")
    monkeypatch.setattr("attemper.ops.call._is_readable", lambda mask: False)
    with pytest.raises(UnsupportedError, match="where nobody can look"):
        attention(q, k, v, attn_mask=bias, methods=Blur(), seed=0, impl="sdpa")
    assert_same(attention(q, k, v, attn_mask=bias, methods=Blur(), seed=0), expected)
    padding = torch.arange(9) < 6
    one_row = padding.expand(BATCH, 1, QUERIES, 9)
    out = attention(q, k, v, attn_mask=one_row, methods=Blur(), seed=0, impl="sdpa")
    assert_same(out, by_hand(q, k, v, kernel(padding.tolist()), padding))


@pytest.mark.parametrize("impl", ROUTES)
def test_a_bias_is_added_unblurred(impl):
    q, k, v = inputs(9)
    bias = randn(1, HEADS, QUERIES, 9, seed=5)
    out = attention(q, k, v, attn_mask=bias, methods=Blur(), seed=0, impl=impl)
    assert_same(out, by_hand(q, k, v, kernel([True] * 9), bias=bias))


@pytest.mark.parametrize("impl", ROUTES)
def test_a_width_near_zero_is_the_identity(impl):
    q, k, v = inputs(9)
    plain = attention(q, k, v, impl=impl)
    assert_same(attention(q, k, v, methods=Blur(1e-9), seed=0, impl=impl), plain)
    assert Blur(0.0).idle
    assert Blur(1.0, w=1).idle
    assert torch.equal(gaussian(torch.tensor(0.0, dtype=torch.float64), 5), torch.tensor([0, 0, 1, 0, 0]).double())
    assert torch.equal(gaussian(torch.tensor(1.0), 5, causal=True)[3:], torch.zeros(2))


def test_gradients_are_right():
    q, k, v = (x[:1, :1, :4].clone().requires_grad_() for x in inputs(4, 4))
    real = torch.tensor([True, True, True, False])

    def run(q, k, v):
        return attention(q, k, v, attn_mask=real, methods=Blur(1.0, w=3), seed=0)

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradcheck(lambda x: blur(x, gaussian(torch.tensor(0.7).double(), 3), grid=(2, 2)), (k,))


def test_the_width_is_uniform_and_drawn_once_per_call():
    words = torch.stack([Stream(torch.tensor(seed)).uniform() for seed in range(4000)])
    assert (words >= 0).all()
    assert (words < 1).all()
    assert abs(words.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 4000)
    assert (words.histc(10, 0, 1) - 400).abs().max() < 5 * math.sqrt(400)
    q, k, v = inputs(9)
    first, second = (attention(q, k, v, methods=Blur(2.0), seed=seed) for seed in (1, 2))
    assert not torch.allclose(first, second)
    taps = gaussian(Stream(torch.tensor(1)).uniform() * 2.0, 5)
    assert_same(first, by_hand(q, k, v, kernel([True] * 9, sigma=float((-0.5 / taps[3].log()).sqrt()))))


# -------------------------------------------------------------------------------------------------------- whole models
def blurred(content):
    return content @ kernel([True] * content.shape[-1]).to(content.dtype).T


def swin_by_hand(self, x, mask=None):
    batch, tokens, _ = x.shape
    q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    content = q @ k.mT * self.scale
    if mask is None:
        logits = blurred(content) + self._get_rel_pos_bias()
    else:  # −100 hides keys of other windows, which a blur of the others must not show
        rows = torch.stack([torch.stack([kernel((row > -50).tolist()) for row in one]) for one in mask.to(content)])
        content = content.view(-1, len(mask), self.num_heads, tokens, tokens)
        content = torch.einsum("bwhij,wikj->bwhik", content, rows.to(content))
        logits = (content + self._get_rel_pos_bias() + mask[:, None]).flatten(0, 1)
    return self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1))


def talking_heads_by_hand(self, x):
    batch, tokens, width = x.shape
    q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    logits = self.proj_l(blurred(q @ k.mT * self.scale).movedim(1, -1)).movedim(-1, 1)
    weights = self.proj_w(logits.softmax(-1).movedim(1, -1)).movedim(-1, 1)
    return self.proj((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


def class_attention_by_hand(self, x):
    parts = (self.q(x[:, :1]), self.k(x), self.v(x))
    q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
    out = blurred(q @ k.mT * self.scale).softmax(-1) @ v
    return self.proj(out.transpose(1, 2).flatten(2))


def pvt_by_hand(self, x, height, width, output_attentions=False):
    small = x
    if self.sequences_reduction_ratio > 1:
        small = self.sequence_reduction(x.mT.unflatten(-1, (height, width))).flatten(2).mT
        small = self.layer_norm(small)
    parts = (self.query(x), self.key(small), self.value(small))
    q, k, v = (part.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for part in parts)
    out = blurred(q @ k.mT / math.sqrt(self.attention_head_size)).softmax(-1) @ v
    return (out.transpose(1, 2).flatten(2),)


BY_HAND = {
    "WindowAttention": swin_by_hand,
    "TalkingHeadAttn": talking_heads_by_hand,
    "ClassAttn": class_attention_by_hand,
    "PvtEfficientSelfAttention": pvt_by_hand,
}


def double_inputs(family):
    given = family.inputs()
    return {n: v.double() if torch.is_tensor(v) else tuple(x.double() for x in v) for n, v in given.items()}


@pytest.mark.parametrize("name", ["timm-swin", "timm-cait", "hf-pvt"])
def test_at_the_softmax_door_the_content_is_blurred_and_the_position_bias_is_not(name):
    family = FAMILY[name]
    model, plain = build(family).double().train(), build(family).double().train()
    unblurred = call(model, double_inputs(family))
    attemper.apply(model, "blur(1.0)")
    given = call(model, double_inputs(family))
    replaced = 0
    for module in plain.modules():
        forward = BY_HAND.get(type(module).__name__)
        if forward is not None:
            module.forward = forward.__get__(module)
            replaced += 1
    assert replaced == family.attentions
    torch.testing.assert_close(given, call(plain, double_inputs(family)), atol=1e-9, rtol=0)
    assert (given - unblurred).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["hf-bert", "nn-encoder"])
def test_what_stands_in_the_padding_of_a_model_moves_nothing(name):
    model = build(FAMILY[name]).train()
    attemper.apply(model, "blur(1.0)")
    if name == "hf-bert":
        inputs = FAMILY[name].inputs()
        before = call(model, inputs)
        inputs["input_ids"][1, 6:] = 50
        assert torch.equal(call(model, inputs), before)
        return
    x, padding = randn(2, 9, 48).float(), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    before = model(x, src_key_padding_mask=padding)
    x[1, 6:] += 10
    after = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(after[1, :6], before[1, :6], atol=1e-6, rtol=0)


def test_a_model_gives_its_grid_to_2d_and_one_without_is_refused():
    model = build(FAMILY["timm-vit"]).train()
    tempered = attemper.apply(model, "blur(1.0, grid=2d)")
    assert all("size=[4, 4], prefix=1" in row.recipe for row in tempered.summary())
    plain = build(FAMILY["timm-vit"]).train()
    assert not torch.allclose(call(model, FAMILY["timm-vit"].inputs()), call(plain, FAMILY["timm-vit"].inputs()))
    encoder = build(FAMILY["nn-encoder"])
    with pytest.raises(ParameterError, match=r"grid=2d needs the keys to lie on an image grid.*size=\[rows, columns\]"):
        attemper.apply(encoder, "blur(1.0, grid=2d)")
    assert not any("_attemper" in module.__dict__ for module in encoder.modules())


def test_evaluation_is_untouched_bit_for_bit():
    family = FAMILY["timm-swin"]
    model = build(family).eval()
    before = call(model, family.inputs())
    attemper.apply(model, "blur(1.0)")
    assert torch.equal(call(model, family.inputs()), before)


# ------------------------------------------------------------------------------------------------------ a σ per block
def encoder(blocks=3):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).train()


@pytest.mark.parametrize("recipe", ["blur([1.5, 0.0, 0.5])", "dropkey(0.1) + blur([1.5, 0.0, 0.5], w=3)"])
def test_each_block_takes_its_sigma(recipe):
    tempered = attemper.apply(encoder(), recipe)
    sigmas = [row.recipe.removeprefix("blur(")[:3] for row in tempered.summary() if row.method == "blur"]
    assert sigmas == ["1.5", "0.0", "0.5"]
    assert attemper.render(tempered.methods) == recipe
    tempered.model(torch.randn(2, 9, 8)).sum().backward()
    if "dropkey" in recipe:
        tempered.set_rate(0.3)
        assert attemper.render(tempered.methods) == recipe.replace("dropkey(0.1)", "dropkey(0.3)")


def test_a_list_of_sigma_acts_as_each_of_its_numbers_and_0_as_nothing():
    x = randn(2, 9, 8)
    model = encoder().double()
    plain = [layer.self_attn(x, x, x, need_weights=False)[0] for layer in model.layers]
    attemper.apply(model, "blur([1.0, 0.0, 2.0])")
    for sigma, layer, before in zip((1.0, 0.0, 2.0), model.layers, plain, strict=True):
        q, k, v = torch.nn.functional.linear(x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(
            3, -1
        )
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in (q, k, v))
        convolved = kernel([True] * 9, sigma=SIGMA * sigma) if sigma else torch.eye(9, dtype=x.dtype)
        out = by_hand(q, k, v, convolved).transpose(1, 2).flatten(2)
        given = layer.self_attn(x, x, x, need_weights=False)[0]
        assert_same(given, layer.self_attn.out_proj(out))
        assert torch.equal(given, before) is (sigma == 0)


def test_a_list_of_another_length_names_how_many_blocks_there_are():
    with pytest.raises(ParameterError, match=r"sigma of blur must have one value per block: the model has 3 blocks"):
        attemper.apply(encoder(), "blur([1.0, 2.0])")
    with pytest.raises(ParameterError, match="the list has 0 values"):
        attemper.apply(encoder(), "blur([])")


def test_one_call_has_no_block_to_take_sigma_of():
    q, k, v = inputs(9)
    with pytest.raises(ParameterError, match="has a sigma per block, and one call has no block"):
        attention(q, k, v, methods=Blur([1.0, 2.0]), seed=0)


def test_a_list_of_zeros_is_idle_and_another_is_not():
    assert Blur([0, 0.0]).idle
    assert Blur([1.0, 2.0], w=1).idle
    assert not Blur([0, 0.1]).idle


def test_the_prefix_that_was_given_stands_where_the_grid_comes_from_the_model():
    here = Blur(grid="2d", prefix=2).at(Place(0, 1, grid=(2, 3), prefix=1))
    assert (here.size, here.prefix) == ((2, 3), 2)


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"w": 4}, "w must be an odd integer of at least 1, got 4"),
        ({"w": 0}, "w must be an odd integer of at least 1, got 0"),
        ({"w": 2.5}, "w must be an odd integer of at least 1, got 2.5"),
        ({"sigma": -1}, "sigma must be a number of at least 0, got -1"),
        ({"sigma": math.nan}, "sigma must be a number of at least 0, got nan"),
        ({"sigma": math.inf}, "sigma must be a number of at least 0, got inf"),
        ({"sigma": [1.0, -1]}, r"sigma\[1\] must be a number of at least 0, got -1"),
        ({"sigma": [1.0, True]}, r"sigma\[1\] must be a number of at least 0, got True"),
        ({"grid": "3d"}, "grid must be one of raster, 2d; got '3d'"),
        ({"size": (2, 2)}, "size and prefix belong to grid=2d"),
    ],
)
def test_bad_parameters_are_named(options, message):
    with pytest.raises(ParameterError, match=message):
        Blur(**options)


def test_keys_that_do_not_fit_the_grid_and_a_causal_grid_are_refused():
    q, k, v = inputs(9)
    with pytest.raises(ParameterError, match="keys = prefix \\+ rows × columns; this call has 9 keys"):
        attention(q, k, v, methods=Blur(grid="2d", size=(2, 4)), seed=0)
    q, k, v = inputs(QUERIES)
    with pytest.raises(ParameterError, match="grid=2d has no causal order"):
        attention(q, k, v, is_causal=True, methods=Blur(grid="2d", size=(1, 7)), seed=0)
    with pytest.raises(ParameterError, match="grid=2d needs"):
        Blur(grid="2d").at(Place(0, 1, name="stack.0"))
