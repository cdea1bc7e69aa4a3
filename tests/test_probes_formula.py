"""What probes compute of one attention call: exact, under every mask, and in linear memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from attemper.probes import attention as probing
from attemper.probes.attention import Seen, allowed_keys, entropy, head_statistics, see
from attemper.sites import Geometry

pytestmark = pytest.mark.usefixtures("one_thread")


def map_entropy(q, k, mask, is_causal, scale):
    """−Σ P log P from the whole map, written down once more."""
    logits = torch.einsum("bhqe,bhke->bhqk", q, k) * scale
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)


def boolean(*shape):
    mask = torch.rand(shape) > 0.4
    mask[..., 0] = True
    return mask


CASES = {
    "plain": (None, False),
    "causal": (None, True),
    "boolean": (lambda: boolean(2, 1, 11, 13), False),
    "boolean, per head": (lambda: boolean(2, 3, 11, 13), False),
    "padding": (lambda: boolean(2, 1, 1, 13), False),
    "two axes": (lambda: boolean(11, 13), False),
    "bias": (lambda: torch.randn(1, 3, 11, 13, dtype=torch.float64), False),
    "bias with holes": (
        lambda: torch.randn(11, 13, dtype=torch.float64).masked_fill(~boolean(11, 13), -math.inf),
        False,
    ),
    "Swin's mask": (
        lambda: torch.zeros(2, 1, 11, 13, dtype=torch.float64).masked_fill(~boolean(2, 1, 11, 13), -100.0),
        False,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_entropy_is_that_of_the_map_to_1e_10_in_float64(case, sharpness):
    make, is_causal = CASES[case]
    mask = make() if make else None
    q, k = torch.randn(2, 3, 11, 8, dtype=torch.float64), torch.randn(2, 3, 13, 8, dtype=torch.float64)
    expected = map_entropy(q, k, mask, is_causal, sharpness)
    found = entropy(see(q, k, mask, is_causal, sharpness))
    assert (found - expected).abs().max() < 1e-10
    assert (expected > 0.1).any(), "the case must not be trivial"


@pytest.mark.parametrize("case", list(CASES))
def test_entropy_of_a_half_precision_call_is_right_to_1e_3(case):
    make, is_causal = CASES[case]
    mask = make() if make else None
    q, k = torch.randn(2, 3, 11, 8).bfloat16(), torch.randn(2, 3, 13, 8).bfloat16()
    given = mask.bfloat16() if mask is not None and mask.dtype != torch.bool else mask
    exact = given.double() if given is not None and given.dtype != torch.bool else given
    expected = map_entropy(q.double(), k.double(), exact, is_causal, 8**-0.5)
    found = entropy(see(q, k, given, is_causal)).double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_grouped_heads_and_further_axes_are_taken_as_torch_takes_them():
    q, k = torch.randn(2, 6, 5, 4, dtype=torch.float64), torch.randn(2, 2, 7, 4, dtype=torch.float64)
    expected = map_entropy(q, k.repeat_interleave(3, 1), None, False, 0.5)
    torch.testing.assert_close(entropy(see(q, k)), expected)
    windows = torch.randn(2, 3, 4, 5, 8, dtype=torch.float64)
    mask = boolean(3, 1, 5, 5)
    expected = map_entropy(windows.flatten(0, 1), windows.flatten(0, 1), mask.repeat(2, 1, 1, 1), False, 8**-0.5)
    torch.testing.assert_close(entropy(see(windows, windows, mask)), expected)
    heads = boolean(6, 5, 7)  # three axes are heads, queries and keys where Q has four
    expected = map_entropy(q, k.repeat_interleave(3, 1), heads, False, 0.5)
    torch.testing.assert_close(entropy(see(q, k, heads)), expected)
    samples, mask = torch.randn(3, 5, 8, dtype=torch.float64), boolean(3, 5, 5)
    expected = map_entropy(samples[:, None], samples[:, None], mask[:, None], False, 8**-0.5)
    torch.testing.assert_close(entropy(see(samples, samples, mask)), expected)
    single = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(entropy(see(single, single)), entropy(see(single[None, None], single[None, None])))


def test_a_row_that_may_attend_to_nothing_has_no_entropy_and_does_not_count():
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1] = False
    for given in (mask, torch.zeros(3, 6).masked_fill(~mask, -math.inf)):
        call = see(q, k, given)
        assert (entropy(call)[:, :, 1] == 0).all()
        assert torch.isfinite(entropy(call)).all()
    found = head_statistics(see(q, k, mask), frozenset({"entropy"}), None)
    torch.testing.assert_close(found.entropy, entropy(see(q, k, mask))[:, :, [0, 2]].mean((0, 2)).double())


def test_normalised_entropy_counts_only_allowed_keys():
    q, k = torch.zeros(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    mask = boolean(2, 1, 9, 9)
    mask[..., :2] = True
    for each in (see(q, k), see(q, k, mask), see(q, k, is_causal=True), see(q, k, torch.zeros(9, 9))):
        found = head_statistics(each, frozenset({"entropy"}), None)
        torch.testing.assert_close(found.normalised, torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(found.to_uniform, torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    additive = torch.zeros(2, 1, 9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    assert torch.equal(allowed_keys(see(q, k, mask)), allowed_keys(see(q, k, additive)))
    assert torch.equal(allowed_keys(see(q, k, mask)), mask.sum(-1))


def test_distance_to_uniform_is_the_kl_divergence():
    q, k = torch.randn(1, 2, 5, 8, dtype=torch.float64), torch.randn(1, 2, 6, 8, dtype=torch.float64)
    p = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
    expected = F.kl_div(torch.full_like(p, 1 / 6).log(), p, reduction="none").sum(-1).mean((0, 2))
    found = head_statistics(see(q, k), frozenset({"entropy"}), None)
    torch.testing.assert_close(found.to_uniform, expected)


@pytest.mark.parametrize("chunk", [1, 40, 2**22])
def test_logits_and_distances_are_those_of_the_map_however_many_rows_are_held(chunk, monkeypatch):
    monkeypatch.setattr(probing, "CHUNK", chunk)
    q, k = torch.randn(2, 3, 14, 8, dtype=torch.float64), torch.randn(2, 3, 14, 8, dtype=torch.float64)
    logits = q @ k.transpose(-2, -1) / 8**0.5
    found = head_statistics(see(q, k), frozenset({"distance", "logits"}), Geometry((3, 4), prefix=2))
    torch.testing.assert_close(found.logit_max, logits.abs().amax((0, 2, 3)))
    places = torch.tensor([[row, column] for row in range(3) for column in range(4)], dtype=torch.float64)
    apart = (places[:, None] - places).norm(dim=-1)
    patches = logits[:, :, 2:, 2:].softmax(-1)
    torch.testing.assert_close(found.distance, (patches * apart).sum(-1).mean((0, 2)))
    torch.testing.assert_close(found.q_norm, q.norm(dim=-1).mean((0, 2)))
    bias = torch.randn(14, 14, dtype=torch.float64)
    torch.testing.assert_close(entropy(see(q, k, bias)), map_entropy(q, k, bias, False, 8**-0.5))


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple) else (out,):
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return out


@pytest.mark.parametrize("probes", [("entropy",), ("entropy", "distance", "logits")])
def test_memory_is_linear_in_the_number_of_tokens(probes, monkeypatch):
    monkeypatch.setattr(probing, "CHUNK", 2**13)

    def largest(tokens):
        q = torch.randn(1, 2, tokens, 8)
        with Largest() as seen:
            head_statistics(see(q, q), frozenset(probes), Geometry((tokens // 8, 8)))
        return seen.elements

    small, large = largest(128), largest(1024)
    assert large <= 8 * small
    assert large < 2 * 1024 * 1024 / 16, "far below a map of 2 heads"


def test_logits_alone_are_enough_where_no_product_was_seen():
    logits = torch.randn(2, 3, 4, 5)
    found = head_statistics(Seen(None, None, logits=logits), frozenset({"entropy", "logits"}), None)
    torch.testing.assert_close(found.entropy, torch.special.entr(logits.softmax(-1)).sum(-1).mean((0, 2)).double())
    assert found.q_norm is None
