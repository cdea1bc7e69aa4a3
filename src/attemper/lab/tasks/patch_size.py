"""Into how large patches images are cut."""

from attemper.errors import ParameterError
from attemper.lab.tasks.base import InputShape


def fitting_patch(shape: InputShape, patch: int | None) -> int:
    """The side of a patch, if images can be cut into such patches; None: whatever gives about 8 × 8 of them."""
    patch = patch_for(shape) if patch is None else patch
    if shape.height % patch or shape.width % patch:
        raise ParameterError(
            f"patch is {patch}; images of {shape.height} × {shape.width} cannot be cut into such patches."
        )
    return patch


def patch_for(shape: InputShape) -> int:
    """The patch size that divides both sides and comes nearest to an eighth of the shorter one, and to 2 at least."""
    short = min(shape.height, shape.width)
    fitting = [size for size in range(2, short // 2 + 1) if shape.height % size == 0 and shape.width % size == 0]
    return min(fitting, key=lambda size: abs(size - short / 8), default=1)
