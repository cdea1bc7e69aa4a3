"""Devices by name: whether this machine has them is found out at once, and told in one line."""

import torch

from attemper.errors import ParameterError, first_line, quoted


def usable_device(name: torch.device | str) -> torch.device:
    """The device of that name; raise unless torch can use it here."""
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("nothing is computed on meta")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word, no driver, no such number, a torch without it
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        there += ["mps"] * torch.backends.mps.is_available()
        reason = quoted(first_line(error).partition(". ")[0].partition(" with ")[0])[1:-1]
        raise ParameterError(
            f"device is {quoted(str(name))}, and torch can use {', '.join(there)} here ({reason})."
        ) from error
    return device
