"""The shapes at which the operator is measured, by name."""

import re
from collections.abc import Sequence

from attemper.errors import ParameterError, suggestion
from attemper.lab.bench.results import Shape

CUDA_SHAPES = {
    "65x32": Shape(512, 12, 65, 32),
    "197x64": Shape(256, 6, 197, 64),
    "577x64": Shape(64, 12, 577, 64),
    "1024x64": Shape(32, 12, 1024, 64),
    "4096x64": Shape(8, 12, 4096, 64),
    "4096x128": Shape(4, 12, 4096, 128),
    "16384x64": Shape(2, 12, 16384, 64),
}
"""Tokens x head width → sizes: ViTs on 32-pixel images, at 224 and 384 pixels, and long sequences."""

CPU_SHAPES = {
    "65x32": Shape(16, 6, 65, 32),
    "197x64": Shape(4, 6, 197, 64),
    "577x64": Shape(1, 6, 577, 64),
    "1024x64": Shape(1, 3, 1024, 64),
}
"""The same with less work in them."""


def find_shapes(names: Sequence[str], device: str) -> list[Shape]:
    """The shapes by these names, or all named ones of the device.

    names: such as "197x64" (tokens x head width), or "8x12x4096x64" (batch x heads x tokens x head width).

    >>> find_shapes(["2x3x17x8"], "cpu")
    [Shape(batch=2, heads=3, tokens=17, width=8)]
    """
    known = CUDA_SHAPES if device == "cuda" else CPU_SHAPES
    return list(dict.fromkeys(_find(name, known, device) for name in names or known))


def _find(name: str, known: dict[str, Shape], device: str) -> Shape:
    if name in known:
        return known[name]
    sizes = [int(size) for size in name.split("x")] if re.fullmatch(r"[0-9]{1,7}(x[0-9]{1,7}){3}", name) else []
    if len(sizes) == 4 and min(sizes) > 0:
        return Shape(*sizes)
    raise ParameterError(
        f"unknown shape '{name}'.{suggestion(name, known)} Shapes on {device}: {', '.join(known)}, or four sizes of at "
        "least 1, BATCHxHEADSxTOKENSxWIDTH, such as 8x12x4096x64"
    )
