"""torch.func.vmap over attention: masks and draws of mapped calls."""

from __future__ import annotations

import pytest
import torch

from attemper import attention
from attemper.methods import Blur, DropKey

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def inputs():
    return tuple(torch.randn(3, 2, 2, 9, 8, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize(
    ("impl", "methods"),
    [("reference", [DropKey(0.3)]), ("gather", [DropKey(0.3, share="queries"), Blur(1.0)]), ("sdpa", [Blur(1.0)])],
    ids=str,
)
def test_mapped_calls_of_one_seed_give_what_each_gives_by_itself(impl, methods):
    q, k, v = inputs()

    def call(q, k, v):
        return attention(q, k, v, methods=methods, seed=4, impl=impl)

    expected = torch.stack([call(*qkv) for qkv in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(call)(q, k, v), expected)
    mapped = torch.func.vmap(torch.func.grad(lambda q, k, v: call(q, k, v).square().sum(), argnums=1))(q, k, v)
    k = k.requires_grad_()
    (expected,) = torch.autograd.grad(sum(call(*qkv).square().sum() for qkv in zip(q, k, v, strict=True)), k)
    torch.testing.assert_close(mapped, expected)


def test_without_a_seed_vmaps_own_setting_decides():
    q, k, v = (t[:1].expand(t.shape) for t in inputs())

    def call(q, k, v):
        return attention(q, k, v, methods=[DropKey(0.4)])

    same = torch.func.vmap(call, randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = torch.func.vmap(call, randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness='same' or 'different'"):
        torch.func.vmap(call)(q, k, v)
