"""A kernel that is launched again without Triton's bookkeeping is the one that Triton would have launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attemper.kernels.common import direct

pytest.importorskip("triton")

INTEGERS = st.one_of(
    st.integers(-40, 40),
    st.sampled_from([2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, 2**32]),
)
BASE = torch.zeros(64, dtype=torch.float32)
TENSORS = st.sampled_from([BASE, BASE[1:], BASE[4:], BASE.half(), BASE.half()[1:], BASE.bfloat16(), BASE.int()])
ARGUMENTS = st.tuples(
    st.tuples(TENSORS, INTEGERS, INTEGERS), INTEGERS, st.floats(allow_nan=False), st.tuples(INTEGERS, TENSORS)
)


def specialisation(arguments: Any) -> Any:
    """What Triton compiles a kernel for."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    return [native_specialize_impl(type(backend), each, False, True, True) for each in arguments]


@settings(deadline=None, max_examples=300)
@given(ARGUMENTS, ARGUMENTS)
@example(((BASE, 1, 2), 3, 0.0, (1, BASE)), ((BASE, 16, 2), 3, 0.0, (1, BASE)))
def test_arguments_of_one_kind_are_compiled_for_alike(one: Any, other: Any) -> None:
    kinds: list[list[Any]] = [[], []]
    for each, found in zip((one, other), kinds, strict=True):
        direct.add_kinds(each, found)
    if tuple(kinds[0]) == tuple(kinds[1]):
        assert specialisation(one) == specialisation(other)


class Kernel:
    """Stands for a kernel and for what Triton compiles it to: writes down how it was launched."""

    arg_names = ("x", "n", "EVEN", "BLOCK")
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.slow: list[Any] = []
        self.fast: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Kernel:
            self.slow.append((grid, arguments, constants))
            return self

        return start

    def run(self, *arguments: Any) -> None:
        self.fast.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(direct, "_known", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return Kernel()


def test_the_second_launch_of_a_kind_runs_what_the_first_one_compiled(kernel: Kernel) -> None:
    constants = {"BLOCK": 64, "EVEN": True, "num_warps": 4}
    for n in (3, 5):
        direct.launch(kernel, (7, 2), BASE, n, **constants)
    assert kernel.slow == [((7, 2), (BASE, 3), constants)]
    assert kernel.fast == [(7, 2, 1, "stream", "function", "metadata", None, None, None, BASE, 5, True, 64)]


@pytest.mark.parametrize("changed", [{"n": 1}, {"n": 16}, {"x": BASE[1:]}, {"EVEN": False}, {"num_warps": 8}])
def test_another_kind_is_compiled_anew(kernel: Kernel, changed: dict[str, Any]) -> None:
    for more in ({}, changed):
        given_ = {"x": BASE, "n": 3, "EVEN": True, "BLOCK": 64, "num_warps": 4, **more}
        direct.launch(kernel, (1,), given_.pop("x"), given_.pop("n"), **given_)
    assert len(kernel.slow) == 2
    assert not kernel.fast


def test_a_layout_whose_tensors_are_not_aligned_does_not_run_what_was_compiled_for_aligned_ones(kernel: Kernel) -> None:
    launch = direct.Launch(kernel, 7, 0, EVEN=True, BLOCK=64)
    for x in (BASE, BASE[1:], BASE):
        launch(direct.is_aligned(x), x, 3)
    assert [each[1][0] is BASE for each in kernel.slow] == [True, False]
    assert [each[9] is BASE for each in kernel.fast] == [True]


def test_a_profiler_is_told_of_every_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "_is_watched", lambda: True)
    for _ in range(3):
        direct.launch(kernel, (1,), BASE, 3, EVEN=True, BLOCK=64)
    assert len(kernel.slow) == 3
    assert not kernel.fast


def test_ever_new_shapes_do_not_fill_the_memory(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "MOST", 10)
    for block in range(35):
        direct.launch(kernel, (1,), BASE, 3, EVEN=True, BLOCK=block)
    assert len(direct._known) <= 10


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=3, max_size=3), st.permutations([0, 1, 2]), st.sampled_from([1, 2]))
def test_tensors_of_one_layout_differ_in_nothing_but_their_addresses(sizes: Any, order: Any, step: int) -> None:
    def make() -> Tensor:
        return torch.empty(sizes)[..., ::step].permute(order)

    one, other = make(), make()
    assert direct.layout(one, None) == direct.layout(other, None)
    if one.shape != one.contiguous().mT.shape:
        assert direct.layout(one) != direct.layout(one.contiguous().mT)
    assert direct.layout(one) != direct.layout(one.double())
