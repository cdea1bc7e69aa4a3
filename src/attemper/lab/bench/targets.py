"""What we aim at on an NVIDIA H200, as ratios: the operator to torch's fastest kernel, a step to one without method.

The operator's are for bfloat16, forward and backward, against the fastest of torch's SDPA backends without dropout.
Those of a step are for a compiled ViT-S/16 at 224 pixels with batch 512: 1 for cheap methods where attention is our
kernel, 1.02 where it is torch's. Recipes are written as `attemper.render` does.
"""

from attemper.lab.bench.results import Machine, Shape

MACHINE = "H200"

SIZES = ((65, 32), (197, 64), (577, 64), (1024, 64), (4096, 64), (4096, 128), (16384, 64))
OPS: dict[str, dict[tuple[int, int], float]] = {
    "dropkey(0.1)": dict(zip(SIZES, (0.50, 0.90, 1.05, 1.05, 1.05, 1.05, 1.05), strict=True)),
    "hardmask(0.1)": dict(zip(SIZES, (0.75, 1.15, 1.60, 1.60, 1.60, 1.60, 1.60), strict=True)),
    "blur(1.0)": dict(zip(SIZES, (0.60, 0.95, 1.05, 1.05, 1.00, 1.00, 1.00), strict=True)),
}
"""Recipe → (tokens, head width) → largest ratio."""

STEP: dict[str, float] = {
    "dropkey(0.1)": 1.00,
    "dropkey(0.3, share=heads)": 1.00,
    "cb(cb)": 1.00,
    "explicit(q=0.001, ff=0.001)": 1.00,
    "explicit(k=0.001, ff=0.001)": 1.00,
    "explicit(v=0.001, ff=0.001)": 1.00,
    "explicit(av=0.001, ff=0.001)": 1.00,
    "graying(dct)": 1.02,
    "blur(1.0)": 1.02,
    "hardmask(0.1)": 1.05,
    "graying(svd)": 1.10,
    "dropkey(0.1) + consistency(1.0)": 1.90,
}
"""Recipe → largest ratio."""


def ops_target(machine: Machine, recipe: str, shape: Shape) -> float | None:
    """The aim for a recipe at a shape, if there is one for this machine."""
    if MACHINE not in machine.device:
        return None
    return OPS.get(recipe, {}).get((shape.tokens, shape.width))


def step_target(machine: Machine, recipe: str, mode: str) -> float | None:
    """The aim for a recipe in a training step, if there is one for this machine and mode."""
    return STEP.get(recipe) if MACHINE in machine.device and mode == "compiled" else None
