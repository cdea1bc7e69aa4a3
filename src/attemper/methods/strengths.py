"""The strengths of a penalty's components: a number each, or a list of one per block."""

from attemper.errors import ParameterError
from attemper.methods.base import Method, Place, check_strength, value_at

Strength = float | tuple[float, ...]


def check_strengths(method: Method, components: tuple[str, ...]) -> None:
    """Strengths as floats, at least one of them given, and ff not beside ff1 or ff2; raise otherwise."""
    for component in components:
        object.__setattr__(method, component, check_strength(component, getattr(method, component)))
    given = {component for component in components if getattr(method, component) != 0.0}
    if not given:
        raise ParameterError(
            f"{method.name} needs the strength of at least one component ({', '.join(components)}), "
            f"such as {method.name}(v=5e-4, ff=5e-4)"
        )
    if "ff" in given and given & {"ff1", "ff2"}:
        raise ParameterError("ff sets both ff1 and ff2; give either ff, or ff1 and ff2")


def strength_at(method: Method, component: str, place: Place) -> float:
    """λ of one component in one block, from a number or a list; ff1 and ff2 may have it from ff."""
    if component in ("ff1", "ff2") and getattr(method, "ff", 0.0) != 0.0:
        component = "ff"
    value: float = value_at(method, component, place)
    return value
