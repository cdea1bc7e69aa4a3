"""The quick search for the largest logits, in Triton's interpreter; run by `test_triton.py` with TRITON_INTERPRET=1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attemper.kernels.attention import largest, prepare
from attemper.kernels.common.plans import MaximaPlan
from attemper.ops.stream import Stream

SCALE = 0.25
LOG2E = math.log2(math.e)


class NoSecondLook:
    """Stands in for the kernel that looks again, and has the flags that it would go by."""

    unsure: Tensor

    def __getitem__(self, grid: tuple[int, ...]) -> NoSecondLook:
        return self

    def __call__(self, q: Tensor, k: Tensor, cuts: Tensor, unsure: Tensor, *_: object, **__: object) -> None:
        self.unsure = unsure


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> NoSecondLook:
    kernel = NoSecondLook()
    monkeypatch.setattr(largest, "cuts_kernel", kernel)
    return kernel


@pytest.fixture(params=[MaximaPlan(64, 64, 4, 2, wide=256), MaximaPlan(32, 32, 4, 2, wide=32)], ids=["wide", "narrow"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of half precision, in float32 too, which the interpreter multiplies exactly."""
    monkeypatch.setattr(prepare, "maxima_plan", lambda *_: request.param)


def found(logits: Tensor, count: int, rows: int = 1, scale: float = SCALE, **options: object) -> Tensor:
    """The cuts of heads of which every row has these logits, as (heads, rows) float32."""
    q = torch.zeros(1, len(logits), rows, 16)
    k = torch.zeros(1, *logits.shape, 16)
    q[..., 0], k[..., 0] = 1.0, logits
    hard = prepare.drop_table(Stream(torch.tensor(5)), 0, logits.shape[1])
    given = {"mask": None, "tops": None, "table": None, "hard": hard, "causal": False, "spare": False, **options}
    cuts = prepare.row_cuts(q, k, scale=scale, largest=count, **given)
    return cuts[0, :, :rows].to(torch.int32).view(torch.float32)


def expected(logits: Tensor, count: int, scale: float = SCALE) -> Tensor:
    """Half-way from the count-th largest to the next smaller value; −inf where one of them does not exist."""
    logits = torch.where(logits == -torch.inf, logits, logits * torch.tensor(scale * LOG2E))
    short = logits.new_full((*logits.shape[:-1], count), -torch.inf)
    value = torch.cat([logits, short], -1).topk(count, -1).values[..., -1:]
    below = logits.masked_fill(logits >= value, -torch.inf).amax(-1, keepdim=True)
    return (value * 0.5 + below * 0.5).squeeze(-1)


def patterns(keys: int) -> Tensor:
    """Heads with the largest in places where a search could miss some, or in no order at all."""
    ranks = torch.arange(keys, dtype=torch.float32) - keys / 3
    order = torch.arange(keys)
    shuffled = [ranks[torch.randperm(keys)] for _ in range(4)]
    apart = [ranks[torch.argsort(torch.argsort(-(order % step), stable=True))] for step in (2, 4, 8, 16, 32, 64)]
    return torch.stack([ranks, ranks.flip(0), *shuffled, *apart, *(x.flip(0) for x in apart)]) * 0.37


@pytest.mark.parametrize(("keys", "count"), [(197, 5), (197, 8), (150, 1), (65, 5), (17, 2), (9, 8)])
def test_nothing_is_missed_wherever_the_largest_stand(keys: int, count: int, alone: NoSecondLook, tiles: None) -> None:
    logits = patterns(keys)
    assert torch.equal(found(logits, count)[:, 0], expected(logits, count))
    assert not alone.unsure.any()


def test_random_logits_need_no_second_look(alone: NoSecondLook, tiles: None) -> None:
    logits = torch.randn(24, 197)
    assert torch.equal(found(logits, 5, rows=1)[:, 0], expected(logits, 5))
    logits = torch.randn(2, 197)
    assert torch.equal(found(logits, 5, rows=65), expected(logits, 5)[:, None].expand(2, 65))
    assert not alone.unsure.any()


@pytest.mark.parametrize("count", [1, 5, 8])
def test_rows_with_fewer_keys_need_no_second_look(count: int, alone: NoSecondLook, tiles: None) -> None:
    for keys in (1, 4, 6):
        logits = torch.randn(3, keys)
        assert torch.equal(found(logits, count)[:, 0], expected(logits, count))
        assert not alone.unsure.any()
    seen = torch.rand(3, 70) > 0.93
    logits = torch.randn(3, 70)
    cuts = found(logits, count, mask=seen[None, :, None])
    assert torch.equal(cuts[:, 0], expected(logits.masked_fill(~seen, -torch.inf), count))
    assert not alone.unsure.any()
    logits = torch.randn(1, 70)
    future = torch.ones(70, 70, dtype=torch.bool).triu(1)
    assert torch.equal(
        found(logits, count, 70, causal=True), expected(logits[:, None].masked_fill(future, -torch.inf), count)
    )
    assert not alone.unsure.any()


def test_equal_logits_at_the_border_are_seen(alone: NoSecondLook, tiles: None) -> None:
    logits = patterns(197)
    twin = logits.topk(6).indices
    tied = logits.scatter(1, twin[:, 5:], logits.gather(1, twin[:, 4:5]))
    found(tied, 5)
    assert alone.unsure.all()


@pytest.mark.parametrize("count", [1, 5, 8])
def test_equal_logits_are_told_apart_with_a_second_look(count: int, tiles: None) -> None:
    for keys in (20, 197):
        for steps in (2, 12, 60):
            logits = torch.randint(-steps, steps, (4, keys)).float()
            assert torch.equal(found(logits, count)[:, 0], expected(logits, count))
    assert torch.equal(found(torch.zeros(1, 40), count), torch.full((1, 1), -torch.inf))


@pytest.mark.parametrize("scale", [-0.25, 0.0, 1e-40])
def test_scales_that_change_the_order_or_make_logits_equal(scale: float, tiles: None) -> None:
    logits = torch.randn(3, 70)
    assert torch.equal(found(logits, 5, scale=scale)[:, 0], expected(logits, 5, scale))


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_is_spared_only_where_all_its_keys_would_go(causal: bool, tiles: None) -> None:
    logits = torch.randn(2, 40)
    limit = 2**31 - 1  # every key would be dropped
    for keys in (3, 40):
        hard = prepare.drop_table(Stream(torch.tensor(5)), limit, keys)
        cuts = found(logits[:, :keys], 5, rows=keys, hard=hard, spare=True, causal=causal)
        seen = torch.arange(1, keys + 1) if causal else torch.full((keys,), keys)
        assert torch.equal(cuts == torch.inf, (seen <= 5).expand(2, keys))
