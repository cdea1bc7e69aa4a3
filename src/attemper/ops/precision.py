"""Autocast, on every device; of "meta", where tensors have shapes and no values, torch's own functions do not know."""

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast makes products where a tensor lies; None: there is no autocast."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> torch.autocast:
    """Context manager: inside it, autocast leaves products alone where a tensor lies."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
