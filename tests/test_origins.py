"""Where axes come from: after any views, every entry is known by the row of the weight that made it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.tempering.axes import as_it_was, plain_arrangement, regroup, sorted_by_role, whole
from attemper.tempering.origins import Origins

SAMPLES, TOKENS, ROWS = 2, 3, 24


class Follow(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.origins = Origins()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.origins.after(func, args, kwargs or {}, out)
        return out


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def a_view(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[str, tuple]:
    """Some view of a tensor of this shape."""
    kind = draw(st.sampled_from(["permute", "unflatten", "flatten", "chunk", "index", "narrow", "unsqueeze", "cat"]))
    axis = draw(st.integers(0, len(shape) - 1))
    if kind == "permute":
        return kind, tuple(draw(st.permutations(range(len(shape)))))
    if kind == "unflatten":
        d = draw(st.sampled_from(divisors(shape[axis])))
        return kind, (axis, (d, shape[axis] // d))
    if kind == "flatten":
        return kind, (axis, draw(st.integers(axis, len(shape) - 1)))
    if kind in ("chunk", "cat"):
        return kind, (draw(st.sampled_from(divisors(shape[axis]))), axis, draw(st.integers(0, len(shape) - 1)))
    if kind == "narrow":
        start = draw(st.integers(0, shape[axis] - 1))
        return kind, (axis, start, draw(st.integers(1, shape[axis] - start)))
    return kind, (axis, draw(st.integers(0, shape[axis] - 1)))


def taken(x: Tensor, view: tuple[str, tuple], which: int) -> Tensor:
    kind, how = view
    if kind == "permute":
        return x.permute(how)
    if kind == "unflatten":
        return x.unflatten(*how)
    if kind == "flatten":
        return x.flatten(*how)
    if kind == "chunk":
        parts = x.chunk(how[0], how[1])
        return parts[which % len(parts)]
    if kind == "cat":
        return torch.cat(x.chunk(how[0], how[1]), how[2])
    if kind == "narrow":
        return x.narrow(*how)
    if kind == "unsqueeze":
        return x.unsqueeze(how[0])
    return x[(slice(None),) * how[0] + (how[1],)] if x.dim() > 1 else x


def rows_by_axes(origin, shape: tuple[int, ...]) -> Tensor | None:
    """The row that made each entry, from the factors of the axes; None: not known."""
    factors = [factor for axis in origin.axes for factor in axis if factor.root.weight is not None]
    if not factors:
        return None
    total = torch.zeros(shape, dtype=torch.long)
    for i, axis in enumerate(origin.axes):
        index, rest = torch.arange(shape[i]), shape[i]
        for factor in axis:
            rest //= factor.size
            if factor.root.weight is not None:
                digit = index // rest % factor.size * factor.stride + factor.start
                total += digit.view([-1 if j == i else 1 for j in range(len(shape))])
    return total + factors[0].root.start


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_entry_behind_views_is_known_by_its_row(data: st.DataObject) -> None:
    weight = nn.Parameter(torch.arange(ROWS, dtype=torch.float64)[:, None])
    with Follow() as follow, torch.no_grad():
        x = F.linear(torch.ones(SAMPLES, TOKENS, 1, dtype=torch.float64), weight)
        for _ in range(data.draw(st.integers(1, 6))):
            x = taken(x, data.draw(a_view(tuple(x.shape))), data.draw(st.integers(0, 3)))
            origin = follow.origins.of(x)
            if origin is None:
                break
            assert [math.prod(f.size for f in axis) for axis in origin.axes] == list(x.shape)
            rows = rows_by_axes(origin, tuple(x.shape))
            if rows is not None:
                assert torch.equal(rows, x.long())


def test_rows_stay_known_through_the_ways_in_which_people_split_heads() -> None:
    heads, each = 4, 2
    weight = nn.Parameter(torch.arange(ROWS, dtype=torch.float64)[:, None])
    x = torch.ones(SAMPLES, TOKENS, 1, dtype=torch.float64)
    ways = {
        "thirds": lambda y: y.chunk(3, -1)[1].unflatten(-1, (heads, each)).transpose(1, 2),
        "three, heads": lambda y: y.view(SAMPLES, TOKENS, 3, heads, each).permute(2, 0, 3, 1, 4)[1],
        "heads, three": lambda y: y.view(SAMPLES, TOKENS, heads, 3, each).unbind(3)[1].transpose(1, 2),
        "heads, thirds": lambda y: y.view(SAMPLES, TOKENS, heads, 3 * each).chunk(3, -1)[1].transpose(1, 2),
        "slices": lambda y: y[..., 8:16].reshape(SAMPLES, TOKENS, heads, each).transpose(1, 2),
        "in front": lambda y: torch.cat(y.chunk(3, -1)[1].split(each, 2), 0),
        "put together again": lambda y: torch.cat(y.chunk(3, -1)[1].unflatten(-1, (heads, each)).split(1, -1), -1),
    }
    wanted = {"heads, three": [6 * h + 2 + d for h in range(heads) for d in range(each)]}
    wanted["heads, thirds"] = wanted["heads, three"]
    for name, way in ways.items():
        with Follow() as follow, torch.no_grad():
            y = way(F.linear(x, weight))
        source = follow.origins.source(y, -1)
        assert source is not None, name
        assert source.weight is weight
        assert source.exact
        rows = [source.start]
        for stride, size in source.digits:
            rows = [row + digit * stride for row in rows for digit in range(size)]
        assert rows == wanted.get(name, list(range(8, 16))), name


def test_what_is_computed_is_no_longer_what_a_layer_gave() -> None:
    layer = nn.Linear(4, 8)
    with Follow() as follow:
        y = layer(torch.ones(2, 3, 4))
        assert follow.origins.source(y, -1).exact
        assert follow.origins.source(y.contiguous().view(2, 3, 2, 4).transpose(1, 2), -1).exact
        assert not follow.origins.source(y * 2, -1).exact
        assert follow.origins.source(y.repeat_interleave(2, -1), -1) is None, "its rows are no longer known"
        assert follow.origins.source(torch.cat([y[..., 4:], y[..., :4]], -1), -1) is None
        plain = torch.ones(2, 3, 4) @ layer.weight.T + layer.bias
        assert follow.origins.source(plain, -1).exact
        assert follow.origins.of(plain).bias is layer.bias


@settings(max_examples=50, deadline=None)
@given(st.permutations(["batch", "heads", "queries", "keys", "batch"]), st.integers(0, 4))
def test_logits_are_sorted_by_role_and_put_back(roles: list[str], folded: int) -> None:
    sizes = {"batch": 2, "heads": 3, "queries": 4, "keys": 5}
    axes = tuple(whole(role, sizes[role]) for role in roles)
    shape = [sizes[role] for role in roles]
    if folded < 4:  # two neighbouring axes in one
        shape = [*shape[:folded], shape[folded] * shape[folded + 1], *shape[folded + 2 :]]
        axes = (*axes[:folded], (*axes[folded], *axes[folded + 1]), *axes[folded + 2 :])
    x = torch.arange(math.prod(shape)).view(shape)
    given_ = sorted_by_role(x, axes)
    assert given_.shape == (4, 3, 4, 5)
    assert torch.equal(as_it_was(given_, axes), x)


def test_a_view_that_cuts_through_factors_is_not_known() -> None:
    assert regroup((whole("a", 4), whole("b", 3)), (6, 2)) is None
    assert regroup((whole("a", 4), whole("b", 3)), (2, 6)) is not None
    assert plain_arrangement(4).is_plain
