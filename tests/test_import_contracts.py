"""Which room may import which: every contract of pyproject.toml fails when its arrow is turned."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = Path(sys.executable).with_name("lint-imports")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

TURNED = {
    "library-without-lab": ("methods/dropkey.py", "from attemper.lab.tasks import open_task"),
    "library-layers": ("methods/base.py", "from attemper.tempering.layers import Layout"),
    "no-kernels": ("methods/blur.py", "from attemper.kernels.keys import blur_keys"),
    "methods-stay-small": ("methods/hardmask.py", "from attemper.ops.dispatch import attend"),
    "kernels-know-ops": ("kernels/keys/operators.py", "from attemper.methods.dropkey import DropKey"),
    "kernel-rooms": ("kernels/common/launch.py", "from attemper.kernels.attention.operators import fused_attention"),
    "implementations": (
        "kernels/implementations/gather.py",
        "from attemper.kernels.implementations.triton import attention as other",
    ),
    "no-concrete-method": ("tempering/placement.py", "from attemper.methods.broadcast import ContextBroadcast"),
    "lab-layers": ("lab/tasks/base.py", "from attemper.lab.study.plan import Plan"),
    "no-circles": ("sites/base.py", "from attemper.tempering.outputs import logits_of"),
}
"""Contract → a file, and an import that it forbids there; one inside of a function would count, too."""


def lint(root: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    chosen = [word for contract in contracts for word in ("--contract", contract)]
    command = [str(LINT), "--config", str(ROOT / "pyproject.toml"), "--no-logo", "--no-cache", *chosen]
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin", "TERM": "dumb"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def test_every_contract_has_an_arrow_to_turn() -> None:
    assert {contract["id"] for contract in CONTRACTS} == set(TURNED)


@pytest.mark.slow
@pytest.mark.parametrize("contract", TURNED)
def test_a_turned_arrow_breaks_its_contract(contract: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    kept = lint(tmp_path, contract)
    assert kept.returncode == 0, kept.stdout + kept.stderr
    name, line = TURNED[contract]
    file = tmp_path / "src/attemper" / name
    file.write_text(f"{file.read_text()}\n\ndef _turned() -> None:\n    {line}\n")
    broken = lint(tmp_path, contract)
    assert broken.returncode != 0
    assert "BROKEN" in broken.stdout
    assert f".{Path(name).parts[0]}" in broken.stdout
