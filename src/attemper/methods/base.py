"""What every method is: a small frozen dataclass that knows its name, its paper and how to check its parameters."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, Self

from attemper.errors import ParameterError

MOST_WIDTH = 1023
"""Of a window or a blur, in keys or patches."""
MOST_STRENGTH = 1e18
"""Of a penalty or a width: more is no number that a float32 computes with."""


@dataclasses.dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    title: str
    venue: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where in the network a method is put, as far as it matters to the method."""

    block: int
    """Index l of the block, 0 … blocks − 1, running over all stages."""
    blocks: int
    """L, how many blocks the network has."""
    grid: tuple[int, int] | None = None
    """(rows, columns) of the keys that are patches, where known."""
    prefix: int = 0
    """How many keys stand before the patches (class token, registers)."""
    class_token: bool = False
    """Whether the first token is a class token."""
    grid_follows: bool = False
    """Whether the grid is found, or found anew, in every call of the model."""
    name: str = ""
    """The module's name in the model."""
    unit: Literal["block", "convolution"] = "block"
    """What `block` and `blocks` count: convolutions, for one of them in a model that has no blocks."""

    @property
    def where(self) -> str:
        """The module, for messages."""
        return f"'{self.name}'" if self.name else "the model"


@dataclasses.dataclass(frozen=True)
class Method:
    """A regulariser with its parameters. Subclasses are frozen dataclasses with a default for every field."""

    name: ClassVar[str]
    """Its name in recipes."""
    summary: ClassVar[str]
    """What it does, in one sentence."""
    paper: ClassVar[Paper]
    stochastic: ClassVar[bool] = False
    """Whether it draws random numbers, in training mode."""
    named_only: ClassVar[bool] = False
    """Whether a recipe must name every parameter; otherwise the first one may go without its name."""
    replaces_own: ClassVar[Literal["drop_path", "mlp_dropout"] | None] = None
    """What a model may have of its own that does the same. A model that has it is refused, or loses it for as long as
    it is tempered where the method has a field `replace` that is true."""

    @property
    def idle(self) -> bool:
        """Whether it has no effect as it is."""
        return False

    @property
    def plainest(self) -> Method:
        """The plainest method that computes the same from the same draws; of most methods themselves."""
        return self

    def at(self, place: Place) -> Self:
        """The method as it acts in one place of the network: rates resolved, geometry filled in."""
        return self

    def conflict(self, other: Method) -> str | None:
        """Why it makes no sense beside another method, or None. What kinds declare is checked without being asked."""
        return None

    def with_rate(self, rate: float) -> Self:
        """The same method at another rate; methods without a rate return themselves."""
        return self

    def __str__(self) -> str:
        return render_method(self)


def render_method(method: Method, strict: bool = False) -> str:
    """The recipe text of one method: its first parameter, then whatever differs from the defaults.

    strict: refuse what no recipe can say, a schedule that is a function; otherwise it is named in angle brackets.

    >>> from attemper.methods import DropKey
    >>> render_method(DropKey(0.2, schedule="decreasing"))
    'dropkey(0.2, schedule=decreasing)'
    """
    words = []
    for index, field in enumerate(parameters_of(method)):
        value = getattr(method, field.name)
        if index == 0 and not method.named_only:
            words.append(render_value(value, strict))
        elif value != field.default:
            words.append(f"{field.name}={render_value(value, strict)}")
    return f"{method.name}({', '.join(words)})" if words else method.name


def parameters_of(method: Method | type[Method]) -> list[dataclasses.Field[Any]]:
    """The parameters of a method, those that always need their names last."""
    return sorted(dataclasses.fields(method), key=lambda field: bool(field.kw_only))


def render_value(value: Any, strict: bool = False) -> str:
    """One parameter's value as a recipe writes it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(render_value(item, strict) for item in value) + "]"
    if not callable(value):
        return str(value)
    if strict:
        raise ParameterError(f"a schedule that is a function cannot be written in a recipe: {value!r}")
    return f"<{getattr(value, '__name__', None) or value}>"


def value_at(method: Method, parameter: str, place: Place) -> Any:
    """A parameter of a method in one block, from one value for all blocks or a list of one per block.

    >>> from attemper.methods import HardMask
    >>> value_at(HardMask(k=[5, 0.1]), "k", Place(1, 2))
    0.1
    """
    value = getattr(method, parameter)
    if not isinstance(value, tuple):
        return value
    if len(value) != place.blocks:
        raise ParameterError(
            f"{parameter} of {method.name} must have one value per {place.unit}: the model has {place.blocks} "
            f"{place.unit}s, the list has {len(value)} values"
        )
    return value[place.block]


def check_rate(name: str, value: float) -> float:
    """`value` as a float in [0, 1), or an error that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ParameterError(f"{name} must be a number in [0, 1), got {value!r}")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ParameterError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_odd(name: str, value: int) -> None:
    """Raise unless `value` is an odd integer from 1 to `MOST_WIDTH`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 2 == 0:
        raise ParameterError(f"{name} must be an odd integer of at least 1, got {value!r}")
    if value > MOST_WIDTH:
        raise ParameterError(f"{name} must be at most {MOST_WIDTH}, got {value!r}")


def check_grid(name: str, value: object) -> tuple[int, int]:
    """`value` as (rows, columns), both at least 1, or an error that names the parameter."""
    grid = tuple(value) if isinstance(value, list | tuple) else ()
    if len(grid) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in grid):
        raise ParameterError(f"{name} must be [rows, columns], both at least 1; got {value!r}")
    return grid


def check_prefix(value: object) -> None:
    """Raise unless `value` says how many keys stand before the patches."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ParameterError(f"prefix must be a number of keys, 0 or more; got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be true or false, got {value!r}")


def check_strength(name: str, value: object) -> float | tuple[float, ...]:
    """A finite number, or one per block, as floats; raise otherwise."""
    if isinstance(value, list | tuple):
        return tuple(check_number(f"{name}[{i}]", item) for i, item in enumerate(value))
    return check_number(name, value)


def check_number(name: str, value: object) -> float:
    """`value` as a float from 0 to `MOST_STRENGTH`, or an error that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ParameterError(f"{name} must be a number of at least 0, got {value!r}")
    if value > MOST_STRENGTH:
        raise ParameterError(f"{name} must be at most {MOST_STRENGTH:g}, got {value!r}")
    return float(value)
