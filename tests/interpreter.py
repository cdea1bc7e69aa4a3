"""Test cases for Triton's interpreter, which need a process of their own: it decides when it is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
in_parts = pytest.mark.parametrize("part", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
"""A sample of the cases under `make test`, the others under `make slow`; `conftest.py` draws the sample."""


def run_cases(files: str, part: str) -> None:
    """Run files of cases, and fail with what they print."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", part]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *(str(TESTS / file) for file in files.split()), *options],
        env={**environment, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
