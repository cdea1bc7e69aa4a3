"""What `import attemper` loads, and what the whole library does without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys
import attemper
alone = sorted(sys.modules)
for absent in ("PIL", "torchvision", "timm"):
    sys.modules[absent] = None  # what an import finds where there is none
for name in attemper.__all__:
    getattr(attemper, name)
print(json.dumps({"alone": alone, "all": sorted(name for name, module in sys.modules.items() if module is not None)}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that are loaded by `import attemper`, and those behind all of its public names."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_importing_attemper_loads_neither_torch_nor_the_laboratory(loaded: dict[str, list[str]]) -> None:
    assert not {name.partition(".")[0] for name in loaded["alone"]} & {"torch", "numpy"}
    assert [name for name in loaded["alone"] if name.startswith("attemper.")] == []


def test_the_library_needs_no_extra_no_laboratory_and_no_image_library(loaded: dict[str, list[str]]) -> None:
    assert "torch" in loaded["all"]
    extras = {"PIL", "accelerate", "rich", "scipy", "sklearn", "timm", "torchvision", "transformers", "tyro"}
    assert not {name.partition(".")[0] for name in loaded["all"]} & extras
    assert [name for name in loaded["all"] if name.startswith("attemper.lab")] == []


def test_the_library_loads_no_compiler_before_it_computes(loaded: dict[str, list[str]]) -> None:
    assert not {"attemper.kernels.attention.forward", "torch._dynamo"} & set(loaded["all"])
    assert not {name.partition(".")[0] for name in loaded["all"]} & {"triton", "flash_attn", "cutlass"}
