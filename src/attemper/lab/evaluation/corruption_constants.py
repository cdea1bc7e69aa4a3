"""The constants of the published sets of corrupted images: Hendrycks and Dietterich, ICLR 2019.

They stand in the authors' scripts (github.com/hendrycks/robustness, ImageNet-C/create_c): one table for images of
32 × 32 (CIFAR-10-C and -100-C), one for 64 × 64 (Tiny ImageNet-C), one for 224 × 224 (ImageNet-C). Every entry has one
value, or one tuple of values, per severity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEVERITIES = (1, 2, 3, 4, 5)

MAIN = (
    *("gaussian-noise", "shot-noise", "impulse-noise"),
    *("defocus-blur", "glass-blur", "motion-blur", "zoom-blur"),
    *("snow", "fog", "brightness", "contrast"),
    *("elastic-transform", "pixelate", "jpeg-compression"),
)
"""The published benchmark without 'frost', which needs the authors' photographs of frost."""

EXTRA = ("speckle-noise", "gaussian-blur", "saturate")
"""Published for validation, and never part of a mean. 'spatter', the fourth of them, needs OpenCV's edge detector."""


@dataclass(frozen=True)
class Published:
    """One published set.

    side: of its images, in pixels. quality: of the JPEG files in which it is published; none: bytes as they are.
    """

    name: str
    side: int
    quality: int | None
    constants: Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Chosen:
    """The set whose constants images of some size get, and whether it is for images of just this size."""

    set: Published
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        return {"set": self.set.name, "side": self.set.side, "exact": self.exact}


def published_for(channels: int, height: int, width: int) -> Chosen:
    """The published set for images of this size; where there is none, that for the size nearest to it, as a ratio.

    >>> chosen = published_for(3, 32, 32)
    >>> chosen.set.name, chosen.exact
    ('CIFAR-10-C', True)
    >>> chosen = published_for(1, 8, 8)
    >>> chosen.set.name, chosen.exact
    ('CIFAR-10-C', False)
    """
    side = math.sqrt(height * width)
    nearest = min(SETS, key=lambda each: abs(math.log(side / each.side)))
    return Chosen(nearest, (channels, height, width) == (3, nearest.side, nearest.side))


def _elastic(side: float, *shares: tuple[float, float, float]) -> tuple[tuple[float, ...], ...]:
    """Strength, smoothness and shift of the elastic transform, which are published as shares of a side."""
    return tuple(tuple(side * share for share in each) for each in shares)


SETS = (
    Published(
        name="CIFAR-10-C",
        side=32,
        quality=None,
        constants={
            "gaussian-noise": (0.04, 0.06, 0.08, 0.09, 0.10),
            "shot-noise": (500, 250, 100, 75, 50),
            "impulse-noise": (0.01, 0.02, 0.03, 0.05, 0.07),
            "defocus-blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
            "glass-blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
            "motion-blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
            "zoom-blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
            "snow": (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
            ),
            "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
            "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
            "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
            "elastic-transform": _elastic(
                32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)
            ),
            "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
            "jpeg-compression": (80, 65, 58, 50, 40),
            "speckle-noise": (0.06, 0.1, 0.12, 0.16, 0.2),
            "gaussian-blur": (0.4, 0.6, 0.7, 0.8, 1),
            "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        },
    ),
    Published(
        name="Tiny ImageNet-C",
        side=64,
        quality=85,
        constants={
            "gaussian-noise": (0.04, 0.08, 0.12, 0.15, 0.18),
            "shot-noise": (250, 100, 50, 30, 15),
            "impulse-noise": (0.01, 0.02, 0.05, 0.08, 0.14),
            "defocus-blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
            "glass-blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
            "motion-blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
            "zoom-blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
            "snow": (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
            ),
            "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
            "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
            "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
            "elastic-transform": _elastic(
                64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)
            ),
            "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
            "jpeg-compression": (65, 58, 50, 40, 25),
            "speckle-noise": (0.15, 0.2, 0.25, 0.3, 0.35),
            "gaussian-blur": (0.5, 0.75, 1, 1.25, 1.5),
            "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
        },
    ),
    Published(
        name="ImageNet-C",
        side=224,
        quality=85,
        constants={
            "gaussian-noise": (0.08, 0.12, 0.18, 0.26, 0.38),
            "shot-noise": (60, 25, 12, 5, 3),
            "impulse-noise": (0.03, 0.06, 0.09, 0.17, 0.27),
            "defocus-blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
            "glass-blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
            "motion-blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
            "zoom-blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
            "snow": (
                (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
                (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
                (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
            ),
            "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
            "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
            "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
            "elastic-transform": _elastic(  # of 244, not 224: so it was published
                244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)
            ),
            "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
            "jpeg-compression": (25, 18, 15, 10, 7),
            "speckle-noise": (0.15, 0.2, 0.35, 0.45, 0.6),
            "gaussian-blur": (1, 2, 3, 4, 6),
            "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        },
    ),
)
