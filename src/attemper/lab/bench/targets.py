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

LOOP_RECIPES = (
    "dropkey(0.1)",
    "dropattention(0.1)",
    "cb(cb)",
    "hardmask(0.1)",
    "blur(1.0)",
    "explicit(v=0.0005, ff=0.0005)",
    "dropkey(0.1) + cb(cb) + explicit(v=0.0005, ff=0.0005)",
)


def _loop(*groups: float) -> dict[str, float]:
    """dropkey, dropattention, cb; hardmask, blur; explicit; the combination."""
    sizes = (3, 2, 1, 1)
    values = [value for value, size in zip(groups, sizes, strict=False) for _ in range(size)]
    return dict(zip(LOOP_RECIPES, values, strict=False))


LOOP: dict[tuple[str, int, str], dict[str, float]] = {
    ("vit-s", 8, "eager"): _loop(1.10, 1.20, 1.40, 1.50),
    ("vit-s", 32, "eager"): _loop(1.10, 1.20, 1.40, 1.50),
    ("vit-s", 256, "eager"): _loop(1.00, 1.05, 1.10, 1.10),
    ("swin-t", 64, "eager"): _loop(1.10, 1.20),
    ("call", 8, "eager"): dict.fromkeys(("dropkey(0.1)", "hardmask(0.1)", "blur(1.0)"), 1.50),
    ("vit-s", 8, "compiled"): _loop(1.03, 1.06, 1.12, 1.15),
    ("vit-s", 256, "compiled"): _loop(1.00, 1.03, 1.02, 1.05),
    ("vit-s", 512, "compiled"): _loop(1.00, 1.03, 1.02, 1.05),
    ("swin-t", 64, "compiled"): _loop(1.00, 1.05),
}
"""Model, batch and mode → recipe → largest ratio of a step; of a single call, of the time of the host."""


def loop_target(machine: Machine, cell: tuple[str, int, str], recipe: str) -> float | None:
    """The aim for a recipe in a training loop, if there is one for this machine and cell."""
    return LOOP.get(cell, {}).get(recipe) if MACHINE in machine.device else None


def ops_target(machine: Machine, recipe: str, shape: Shape) -> float | None:
    """The aim for a recipe at a shape, if there is one for this machine."""
    if MACHINE not in machine.device:
        return None
    return OPS.get(recipe, {}).get((shape.tokens, shape.width))


def step_target(machine: Machine, recipe: str, mode: str) -> float | None:
    """The aim for a recipe in a training step, if there is one for this machine and mode."""
    return STEP.get(recipe) if MACHINE in machine.device and mode == "compiled" else None
