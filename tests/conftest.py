"""What every test starts from."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Numbers drawn in a test are the same on every run, whichever tests ran before it in the same process."""
    torch.manual_seed(20)
