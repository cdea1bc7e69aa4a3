"""Models that nobody means: stopped while they are built, before they fill the memory or take hours."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from attemper.errors import ParameterError, quoted

MOST_WEIGHTS = 10**10
"""Numbers. As float32 they take 40 GB, and with gradients and an optimiser four times as much."""
MOST_TENSORS = 20_000
"""A transformer of a thousand blocks has about 12,000."""


@contextlib.contextmanager
def limited(text: str) -> Iterator[None]:
    """Context manager: a model that is built inside it and becomes too large is a `ParameterError`.

    text: what the model is called, for the message. Layers are counted when they get their weights, which is before
    anything is drawn for them: until then they take no memory.
    """
    weights = tensors = 0
    most = most_weights()

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal weights, tensors
        if parameter is None:
            return
        weights, tensors = weights + parameter.numel(), tensors + 1
        if weights > most:
            raise ParameterError(f"The model {quoted(text)} has more than {most:,} weights, the most that fit here.")
        if tensors > MOST_TENSORS:
            raise ParameterError(f"The model {quoted(text)} has more than {MOST_TENSORS:,} tensors of weights.")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise ParameterError(f"The model {quoted(text)} does not fit into the memory of this machine.") from error
    finally:
        handle.remove()


def most_weights() -> int:
    """As many as fit into the memory of this machine as float32, where that is known, and never more than a limit."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return MOST_WEIGHTS
    return min(MOST_WEIGHTS, memory // 4) if memory > 0 else MOST_WEIGHTS
