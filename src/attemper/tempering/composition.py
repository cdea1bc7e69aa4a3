"""Which methods go together, by what they declare."""

from collections.abc import Sequence

from attemper.errors import ConflictError
from attemper.methods.base import Method
from attemper.methods.kinds import BranchMap, LossTerm, Penalty, SkipRemover
from attemper.ops.perturbation import Perturbation
from attemper.recipe import describe


def check_composition(methods: Sequence[Method]) -> None:
    """Raise for a pair of methods that makes no sense together, with the reason."""
    for index, one in enumerate(methods):
        for other in methods[index + 1 :]:
            reason = _why_not(one, other) or _why_not(other, one) or one.conflict(other) or other.conflict(one)
            if reason:
                raise ConflictError(f"'{describe(methods)}': {reason}")


def _why_not(one: Method, other: Method) -> str | None:
    if isinstance(one, LossTerm) and isinstance(other, LossTerm):
        return f"{one.name} and {other.name} are two forms of one comparison; choose one"
    if isinstance(one, Penalty) and isinstance(other, Penalty):
        reductions = one.normalisation, other.normalisation
        if None not in reductions and reductions[0] != reductions[1]:
            return (
                f"{one.name} has reduction={reductions[0]} and {other.name} has reduction={reductions[1]}, so that "
                "equal strengths would mean different things in one loss; give both the same reduction"
            )
    if isinstance(one, Penalty) and isinstance(other, Perturbation):
        component = one.needs_unit_rows
        if component and other.uneven_rows:
            return (
                f"{one.name}({component}) needs rows of attention that sum to 1, and {other.uneven_rows}; use another "
                "component"
            )
        if one.needs_own_weights:
            return (
                f"{one.name}({one.needs_own_weights}) needs attention's own weights, and {other.name} makes them "
                "inside of a fused call; use expectation=paper, or another component"
            )
    if isinstance(one, SkipRemover) and isinstance(other, BranchMap) and other.needs_skip:
        return (
            f"{other.name} changes branches and relies on the skip connection that {one.name} removes: tokens would be "
            "zero"
        )
    return None
