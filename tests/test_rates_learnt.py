"""Learnt rates: the soft mask against formulas written out, its limit, its bounds, and the parameter in a model."""

import copy

import pytest
import timm
import torch
import torch.nn.functional as F

import attemper
from attemper.errors import ParameterError, PenaltyError, RecipeError
from attemper.methods import Blur, DropAttention, DropKey, HardMask, Place, learning
from attemper.methods.learning import LEAST, MOST, bounded
from attemper.ops.reference import perturbed_softmax
from attemper.ops.stream import Source, Stream

SHAPE = (2, 3, 5, 7)
SEED = torch.tensor(11)
CASES = {
    "dropkey": DropKey("learn"),
    "dropattention": DropAttention("learn", rescale="normalize"),
    "dropattention, detached": DropAttention("learn", detach=True, rescale="normalize"),
    "dropattention, inverted": DropAttention("learn", rescale="inverted"),
    "dropattention, by column": DropAttention("learn", unit="column", rescale="inverted"),
    "hardmask, zero": HardMask("learn", k=3),
    "hardmask, −inf": HardMask("learn", k=3, fill="neg_inf"),
    "hardmask, shared by heads": HardMask("learn", k=3, share="heads"),
}
MASKED = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])[:, None, None, :].expand(SHAPE)


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=3
    )


def inputs(each):
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    value = torch.tensor([0.03, -0.05, 0.01], dtype=torch.float64) if each == "head" else torch.tensor(0.02).double()
    return logits.requires_grad_(), value.requires_grad_()


def written_out(case, logits, value):
    """Weights by the relaxation as its paper prints it, row by row, with sigmoids of logits of uniform numbers."""
    drawn = list(SHAPE)
    if case == "dropattention, by column":
        drawn[2] = 1
    if case == "hardmask, shared by heads":
        drawn[1] = 1
    words = Stream(SEED).products(*drawn).double()
    u = ((words + 2**31 + 0.5) / 2**32).expand(SHAPE)
    p = LEAST + (MOST - LEAST) / (1 + torch.exp(-10 * value))
    p = p.reshape(-1, 1, 1) if p.dim() else p
    z = 1 / (1 + torch.exp(-(torch.log(p / (1 - p)) - torch.log(u / (1 - u))) / 0.1))
    masked = logits.masked_fill(~MASKED, -torch.inf)
    if case.startswith("hardmask"):
        kth = masked.detach().sort(-1, descending=True).values[..., 2:3]
        z = torch.where(masked.detach() >= kth, z, 0.0)
    gone = ((u < p) & (z > 0)) | ~MASKED
    z = torch.where(gone.all(-1, keepdim=True), 0.0, z)
    if case == "hardmask, zero" or case == "hardmask, shared by heads":
        return torch.where(MASKED, logits * (1 - z), -torch.inf).softmax(-1)
    if case in ("dropkey", "dropattention", "hardmask, −inf"):
        kept = masked.exp() * (1 - z)
        return kept / kept.sum(-1, keepdim=True)
    weights = masked.softmax(-1)
    kept = weights * (1 - z)
    if case == "dropattention, detached":
        return kept / kept.sum(-1, keepdim=True).detach()
    return torch.where(gone.all(-1, keepdim=True), weights, kept / (1 - p))


@pytest.mark.parametrize("each", ["block", "head"])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_are_the_formula(case, each):
    found = []
    for written in (False, True):
        logits, value = inputs(each)
        if written:
            weights = written_out(case, logits, value)
        else:
            soft = CASES[case].with_value(value)
            weights = perturbed_softmax(logits.masked_fill(~MASKED, -torch.inf), [soft], Source(SEED))
        probe = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        found.append((weights, *torch.autograd.grad((weights * probe).sum(), (logits, value))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert found[0][2].abs().max() > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_without_temperature_it_is_the_mask_of_a_constant_rate(case, monkeypatch):
    monkeypatch.setattr(learning, "TEMPERATURE", 1e-7)
    logits, value = inputs("block")
    logits = logits.detach().masked_fill(~MASKED, -torch.inf)
    rate = float(bounded(value.detach(), MOST))
    soft = perturbed_softmax(logits, [CASES[case].with_value(value.detach())], Source(SEED))
    torch.testing.assert_close(soft, perturbed_softmax(logits, [CASES[case].with_rate(rate)], Source(SEED)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rate", [-40.0, 0.0, 40.0])
def test_nothing_leaves_the_numbers_and_masked_keys_stay_masked(dtype, rate):
    q, k, v = (torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    mask = torch.tensor([True, True, False, False])
    value = torch.tensor(rate, requires_grad=True)
    for method in (each.fitted(4) for each in CASES.values()):
        out = attemper.attention(q, k, v, attn_mask=mask, methods=[method.with_value(value)], seed=4)
        far = v.masked_fill(~mask[:, None], 100.0)
        same = attemper.attention(q, k, far, attn_mask=mask, methods=[method.with_value(value)], seed=4)
        assert torch.equal(out, same)
        (gradient,) = torch.autograd.grad(out.float().sum(), value)
        assert torch.isfinite(out).all()
        assert torch.isfinite(gradient)


def test_rates_stay_in_their_bounds_and_the_entropy_keeps_them_from_zero():
    value = torch.linspace(-60, 60, 25, requires_grad=True)
    rate = bounded(value, MOST)
    assert rate.min() > 0
    assert float(rate.max()) <= MOST
    for method, start in ((DropKey("learn", entropy=0.5), 0.1), (Blur("learn", entropy=0.5), 1.0)):
        value = method.first_value(Place(0, 1), None).requires_grad_()
        torch.testing.assert_close(method.value_shown(value), torch.tensor([start]), rtol=1e-5, atol=0)
        (gradient,) = torch.autograd.grad(method.value_term(value), value)
        assert gradient < 0  # descent raises the rate
    p = torch.tensor(0.1, dtype=torch.float64)
    entropy = -(p * p.log() + (1 - p) * (1 - p).log())
    torch.testing.assert_close(DropKey("learn", entropy=0.5).value_term(DropKey("learn").first_value(Place(0, 1), 1)),
                               (-0.5 * entropy).float(), rtol=1e-5, atol=0)  # fmt: skip


def test_a_learnt_width_has_the_gradient_of_its_drawn_width():
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64)
    value = torch.tensor(0.03, dtype=torch.float64, requires_grad=True)
    method = Blur("learn", w=3)
    ours = method.with_value(value).perturb_keys(k, None, False, Stream(SEED))
    sigma = (LEAST + (1.5 - LEAST) / (1 + torch.exp(-10 * value))) * Stream(SEED).uniform()
    taps = torch.stack([torch.exp(-0.5 / sigma**2), torch.ones_like(sigma), torch.exp(-0.5 / sigma**2)])
    rows = []
    for j in range(6):
        near = [i for i in (j - 1, j, j + 1) if 0 <= i < 6]
        weight = torch.stack([taps[i - j + 1] for i in near])
        rows.append(sum(w * k[:, :, i] for w, i in zip(weight, near, strict=True)) / weight.sum())
    theirs = torch.stack(rows, 2)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    slopes = [torch.autograd.grad(each.square().sum(), value)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-9, atol=1e-12)
    assert slopes[0].abs() > 1e-3


def test_a_learnt_width_has_a_gradient_beside_padding():
    """Keys far behind the last real one have no neighbour that counts: what divides by their weight must not."""
    for seed in range(8):
        value = torch.tensor([-0.3], requires_grad=True)  # narrow, so that weights underflow
        k, real = torch.randn(1, 1, 9, 4), torch.tensor([True, True] + [False] * 7)[None, None, None]
        out = Blur("learn").with_value(value).perturb_keys(k, real, False, Stream(torch.tensor(seed)))
        (gradient,) = torch.autograd.grad(out[:, :, :2].square().sum(), value)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("dropkey(learn, share=queries)", "p=learn needs share=none and structure=none"),
        ("dropkey(learn, ramp=0.1)", "ramp multiplies a rate"),
        ("dropkey(0.1, each=head)", "each and entropy belong to p=learn"),
        ("dropkey(learn, schedule=[0, 0.1])", "a learnt rate begins between 0 and 0.9"),
        ("dropattention(learn, unit=column, w=3)", "p=learn needs w=1"),
        ("drophead(learn)", "p must be a number in [0, 1), got 'learn'"),
        ("blur(learn, w=1)", "sigma=learn needs w=3 at least"),
        ("blur(1, entropy=0.5)", "entropy belongs to sigma=learn"),
    ],
)
def test_what_cannot_be_learnt_is_refused(recipe, words):
    with pytest.raises(RecipeError) as error:
        attemper.parse(recipe)
    assert words in str(error.value)


def test_a_call_by_itself_has_nothing_to_learn():
    q = torch.randn(1, 1, 2, 4)
    for method in (
        DropKey("learn"),
        HardMask("learn", k=1),
        DropAttention("learn", rescale="normalize"),
        Blur("learn"),
    ):
        with pytest.raises(ParameterError, match=rf"{method.name}\(learn\) learns .* in a tempered model"):
            attemper.attention(q, q, q, methods=[method])


RECIPES = [
    "dropkey(learn)",
    "dropattention(learn, rescale=inverted, each=head)",
    "hardmask(learn, k=3, schedule=decreasing)",
    "blur(learn)",
]


def step(tempered, x, y, optimizer=None):
    loss = tempered.loss(lambda: tempered.model(x), lambda out: F.cross_entropy(out, y))
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("recipe", RECIPES)
def test_in_a_model_rates_are_parameters_that_move(recipe, tmp_path):
    model, x, y = vit(), torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 0])
    plain = model.eval()(x)
    tempered = attemper.apply(model, recipe)
    assert torch.equal(model(x), plain)
    names = [name for name, _ in model.named_parameters() if name.startswith("attemper.")]
    assert len(names) == 2
    model.load_state_dict(vit().state_dict())  # a plain checkpoint
    before = [row.rate for row in tempered.summary()]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model.train()
    for _ in range(2):
        step(tempered, x, y, optimizer)
    after = [row.rate for row in tempered.summary()]
    assert all(a != b for a, b in zip(before, after, strict=True))
    assert [row.component for row in tempered.penalties()] == ["entropy", "entropy"]
    copied = attemper.Tempered.of(copy.deepcopy(model))
    assert [row.rate for row in copied.summary()] == after
    tempered.save(tmp_path)
    loaded = attemper.load(vit(), tmp_path)
    assert [row.rate for row in loaded.summary()] == after
    tempered.remove()
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in vit().named_parameters()}


def test_a_loop_that_leaves_out_the_entropy_is_told():
    model, x, y = vit().train(), torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    attemper.apply(model, "dropkey(learn)")
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(PenaltyError, match="penalties of dropkey"):
        model(x)


def test_a_rate_that_is_set_is_learnt_no_more(tmp_path):
    tempered = attemper.apply(vit(), "dropkey(learn, schedule=[0.2, 0.1])")
    assert [row.rate for row in tempered.summary()] == pytest.approx([0.2, 0.1])
    tempered.set_rate(0.0)
    assert [row.recipe for row in tempered.summary()] == ["dropkey(0.0)"] * 2
    assert not [name for name, _ in tempered.model.named_parameters() if name.startswith("attemper.")]
    tempered.save(tmp_path)
    assert str(attemper.load(vit(), tmp_path).methods[0]).startswith("dropkey(0.0")


def test_a_learnt_rate_may_end_with_time():
    tempered = attemper.apply(vit(), "dropkey(learn, until=0.5)")
    tempered.progress(0.2)
    assert [row.recipe for row in tempered.summary()] == ["dropkey(learn)"] * 2
    tempered.progress(0.6)
    assert [row.recipe for row in tempered.summary()] == ["dropkey(0.0)"] * 2


def test_parameters_lie_where_their_attention_does_and_have_a_dimension():
    model = vit()
    model.blocks[1].to("meta")
    attemper.apply(model, "dropkey(learn) + blur(learn)")
    found = {name: p for name, p in model.named_parameters() if name.startswith("attemper.")}
    assert [p.device.type for name, p in found.items() if "BLOCKS_1" in name] == ["meta", "meta"]
    assert {p.shape for p in found.values()} == {(1,)}  # FSDP2 takes no scalars


def test_heads_that_are_not_known_cannot_have_rates():
    with pytest.raises(ParameterError, match="each=head needs to know how many heads"):
        DropKey("learn", each="head").first_value(Place(0, 1, name="attn"), None)
