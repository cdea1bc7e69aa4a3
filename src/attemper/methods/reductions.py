"""By what a penalty is divided: one set of choices for all penalties of a recipe."""

from typing import Literal

from torch import Tensor

from attemper.methods.base import check_choice

Reduction = Literal["mean", "sum", "literal", "authors"]
REDUCTIONS = ("mean", "sum", "literal", "authors")


def check_reduction(value: object) -> None:
    """Raise unless `value` is one of `REDUCTIONS`."""
    check_choice("reduction", value, REDUCTIONS)


def reduced(square: Tensor, samples: int, tokens: int, reduction: str) -> Tensor:
    """Half of a square that was summed over samples and tokens, divided as a reduction has it.

    mean: by samples and tokens. sum: by nothing. literal: by samples. authors: by tokens, and it is not halved.
    So at equal strength sum = samples · tokens × mean, literal = tokens × mean, authors = 2 · samples × mean.
    """
    return square / divisor(samples, tokens, reduction)


def divisor(samples: int, tokens: int, reduction: str) -> int:
    """What `reduced` divides by."""
    return {"mean": 2 * samples * tokens, "sum": 2, "literal": 2 * samples, "authors": tokens}[reduction]


def sums_over_samples(reduction: str) -> bool:
    """Whether twice the batch gives twice the penalty."""
    return reduction in ("sum", "authors")
