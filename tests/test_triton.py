"""impl="triton": its kernels in Triton's interpreter, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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

TESTS = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "cases",
    [
        "triton_keys_cases.py",
        "triton_penalised_cases.py",
        pytest.param("triton_packed_cases.py", marks=pytest.mark.slow),
        "triton_penalty_cases.py triton_hardmask_cases.py",
        pytest.param("triton_maxima_cases.py", marks=pytest.mark.slow),
        "triton_cases.py triton_mask_cases.py triton_whole_cases.py",
    ],
)
def test_kernels_in_the_interpreter(cases: str) -> None:
    # Triton decides whether to interpret when it is imported, so the cases need a process of their own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        *(str(TESTS / file) for file in cases.split()),
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    result = subprocess.run(
        command,
        env={**environment, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("slow", ["attemper.kernels.attention.forward", "torch._dynamo"])
def test_importing_attemper_imports_no_compiler(slow: str) -> None:
    code = f"import sys, attemper; sys.exit({slow!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_explicit_request_on_a_cpu_is_refused_and_names_who_serves() -> None:
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UnsupportedError, match=r"CUDA.*reference"):
        attemper.attention(q, q, q, methods=[DropKey(0.1)], impl="triton")


def _reason(
    methods: list[Perturbation],
    width: int = 16,
    dtype: torch.dtype = torch.float32,
    mask: torch.Tensor | None = None,
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
    assert "gradient to an additive mask" in _reason([DropKey(0.1)], mask=torch.zeros(4, 4, requires_grad=True))
    assert "boolean mask that differs between queries" in _reason([Blur()], mask=torch.ones(4, 4, dtype=torch.bool))
    assert "dropattention" in _reason([DropAttention(0.1, rescale="inverted")])
    assert "share=queries" in _reason([DropKey(0.1, share="queries")])
    assert "one method of a kind" in _reason([DropKey(0.1), DropKey(0.2)])
    assert "2: HardMask, HardMask" in _reason([HardMask(0.1, k=2), HardMask(0.2, k=2), Blur()])
    assert _reason([HardMask(0.1, k=2), DropKey(0.2), Blur(), DropHead(0.1)]) == ""


def test_auto_on_a_cpu_says_why_the_kernels_do_not_serve() -> None:
    q = torch.randn(1, 2, 4, 16)
    verdicts = {verdict.name: verdict for verdict in attemper.implementations(q, q, q, methods=[DropKey(0.1)])}
    assert not verdicts["triton"].serves
    assert "CUDA" in verdicts["triton"].reason
    assert verdicts["reference"].chosen
