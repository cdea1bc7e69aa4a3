"""impl="triton": its kernels in Triton's interpreter, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attemper
from attemper.errors import UnsupportedError
from attemper.kernels.attention.arguments import refuse_tensors
from attemper.kernels.implementations import triton as triton_attention
from attemper.methods import Blur, DropAttention, DropHead, DropKey, HardMask
from attemper.ops.call import make_call
from attemper.ops.outside_softmax import refuse_keys
from attemper.ops.perturbation import Perturbation
from interpreter import in_parts, needs_triton, run_cases

TESTS = Path(__file__).parent


@needs_triton
@in_parts
@pytest.mark.parametrize(
    "cases",
    [
        "triton_cases.py triton_mask_cases.py triton_whole_cases.py triton_lse_cases.py",
        "triton_penalty_cases.py triton_hardmask_cases.py triton_maxima_cases.py",
        "triton_passed_cases.py triton_lengths_cases.py",
        "triton_weight_drop_cases.py triton_softmax_cases.py triton_mask_gradient_cases.py triton_seeds_cases.py",
        "triton_keys_cases.py triton_parts_cases.py triton_penalised_cases.py triton_packed_cases.py",
        "triton_repeat_cases.py triton_operators_cases.py",
    ],
)
def test_kernels_in_the_interpreter(cases: str, part: str) -> None:
    run_cases(cases, part)


def test_an_explicit_request_on_a_cpu_is_refused_and_names_who_serves() -> None:
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UnsupportedError, match=r"CUDA.*reference"):
        attemper.attention(q, q, q, methods=[DropKey(0.1)], impl="triton")


def _reason(
    methods: list[Perturbation], width: int = 16, dtype: torch.dtype = torch.float32, mask: torch.Tensor | None = None
) -> str:
    q = torch.randn(1, 2, 4, width, dtype=dtype)
    call = make_call(q, q, q, mask, False, None, methods, None)
    given = triton_attention._refuse_methods(call) or refuse_tensors(call) or refuse_keys(call)
    return given or ""


def test_refusals_name_what_is_unsupported() -> None:
    assert _reason([DropKey(0.1)]) == ""
    assert "not 20" in _reason([DropKey(0.1)], width=20)
    assert "not 136" in _reason([DropKey(0.1)], width=136)
    assert "float64" in _reason([DropKey(0.1)], dtype=torch.float64)
    assert _reason([DropKey(0.1)], mask=torch.zeros(4, 4)) == ""
    assert _reason([DropKey(0.1)], mask=torch.zeros(4, 4, requires_grad=True)) == ""
    assert "all queries or all keys share" in _reason([DropKey(0.1)], mask=torch.zeros(1, 4, requires_grad=True))
    assert "boolean mask that differs between queries" in _reason([Blur()], mask=torch.eye(4, dtype=torch.bool))
    assert _reason([DropAttention(0.1)]) == ""
    assert "dropattention" in _reason([DropAttention(0.1, unit="column", w=3)])
    assert "share=queries" in _reason([DropKey(0.1, share="queries")])
    assert "one method of a kind" in _reason([DropKey(0.1), DropKey(0.2)])
    assert "2: HardMask, HardMask" in _reason([HardMask(0.1, k=2), HardMask(0.2, k=2), Blur()])
    assert _reason([HardMask(0.1, k=2), DropKey(0.2), Blur(), DropHead(0.1)]) == ""
    assert _reason([DropKey(0.1, structure="block", w=1, grid=(2, 2))]) == ""
    assert "one method of a kind" in _reason([DropKey(0.1, structure="cross", grid=(2, 2)), DropKey(0.1)])


def test_auto_on_a_cpu_says_why_the_kernels_do_not_serve() -> None:
    q = torch.randn(1, 2, 4, 16)
    verdicts = {verdict.name: verdict for verdict in attemper.implementations(q, q, q, methods=[DropKey(0.1)])}
    assert not verdicts["triton"].serves
    assert "CUDA" in verdicts["triton"].reason
    assert verdicts["tiled"].chosen
