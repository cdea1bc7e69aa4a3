"""Which methods go together: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Sequence

from attemper.errors import ConflictError
from attemper.methods import Consistency, DropAttention, DropHead, DropPath, ExplicitDropout, Method, RDrop, Skipless
from attemper.ops.perturbation import Perturbation
from attemper.recipe import describe

__all__ = ["check_composition"]


def check_composition(methods: Sequence[Method]) -> None:
    """Raise for a pair of methods that makes no sense together, with the reason."""
    for one in methods:
        for other in methods:
            reason = _why_not(one, other)
            if reason:
                raise ConflictError(f"'{describe(methods)}': {reason}")


def _why_not(one: Method, other: Method) -> str | None:
    if isinstance(one, Consistency) and isinstance(other, RDrop):
        return "consistency and rdrop are two forms of one comparison; choose one"
    if isinstance(one, ExplicitDropout) and one.av and isinstance(other, DropAttention) and other.rescale == "inverted":
        return (
            "explicit(av=…) needs rows of attention that sum to 1, and dropattention(rescale=inverted) leaves them "
            "uneven; use rescale=normalize or another component"
        )
    if isinstance(one, ExplicitDropout) and one.av and one.expectation != "paper" and isinstance(other, Perturbation):
        return (
            f"explicit(av=…, expectation={one.expectation}) needs attention's own weights, and {other.name} makes "
            "them inside of a fused call; use expectation=paper, or another component"
        )
    if isinstance(one, ExplicitDropout) and one.av and isinstance(other, DropHead):
        return "explicit(av=…) needs rows of attention that sum to 1, and drophead scales them; use another component"
    if isinstance(one, Skipless) and isinstance(other, DropPath):
        return "droppath drops branches and relies on the skip connection that skipless removes: tokens would be zero"
    return None
