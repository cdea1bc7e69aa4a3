"""Devices by name, refused in one line where this machine has none such, and waiting for one."""

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


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
