"""What a benchmark runs on: the device, its name, and the versions of what matters to speed."""

import importlib.metadata
import os
import platform

import torch

import attemper
from attemper.errors import ParameterError
from attemper.lab.bench.results import Machine

PACKAGES = ("numpy", "triton", "flash-attn-4", "timm", "torchvision", "transformers")


def pick_device(name: str) -> torch.device:
    """The device by this name; "auto" is a CUDA device where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise ParameterError(f"device must be auto, cpu or cuda; got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ParameterError("device is cuda, and torch finds no CUDA device here; use cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def describe_cpu() -> str:
    """Such as '2-core x86 CPU'."""
    kind = "x86" if platform.machine().lower() in ("x86_64", "amd64", "i686") else platform.machine()
    return f"{os.cpu_count()}-core {kind} CPU"


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Attemper, Python, torch and CUDA, and those of the packages that are installed."""
    found = {"attemper": attemper.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_machine(device: torch.device) -> Machine:
    """The machine as a report names it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else describe_cpu()
    return Machine(device=name, cpu=describe_cpu(), threads=torch.get_num_threads(), versions=versions())
