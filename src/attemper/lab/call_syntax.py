"""Names with options, written like calls: 'vit-cifar(depth=4)', 'timm:vit_tiny_patch16_224(img_size=32)'."""

import ast
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

from attemper.errors import ParameterError, first_line, quoted, suggestion

CALL = re.compile(r"(?P<name>[^()]+)(?:\((?P<arguments>.*)\))?", re.DOTALL)
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*")
"""module:function, as entry points have it."""
LIBRARIES = ("timm", "hf")
"""What stands before a colon and is a library of models, not a module."""
MOST_CHARACTERS = 2_000
"""Of a name with its options."""
MOST = 10**9
"""Of a count whose option is not among these:"""
MOST_OF = {
    **{"size": 8_192, "patch": 8_192, "channels": 4_096, "classes": 1_000_000, "train": 10**8, "test": 10**8},
    **{"width": 65_536, "mlp": 262_144, "depth": 1_000, "layers": 1_000, "heads": 4_096, "kernel": 1_023},
    **{"seconds": 36_000, "bands": 4_096, "tokens": 100_000, "window": 100_000, "length": 100_000},
    **{"bins": 10_000, "steps": 10_000, "passes": 10_000},
}
"""The largest counts that somebody can mean, by the name of the option; one more is a typing error."""


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a call. Values are Python literals; a bare word stands for itself.

    >>> parse_call("timm:vit_tiny_patch16_224(img_size=32, global_pool=avg)")
    ('timm:vit_tiny_patch16_224', {'img_size': 32, 'global_pool': 'avg'})
    """
    if len(text) > MOST_CHARACTERS:
        raise ParameterError(f"{quoted(text)} has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read.")
    match = CALL.fullmatch(text.strip())
    if match is None or not match["name"].strip():
        raise ParameterError(
            f"{quoted(text)} cannot be read; write a name, or a name with options such as vit-cifar(depth=4)."
        )
    try:
        call = ast.parse(f"f({match['arguments'] or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args:
            raise ValueError("an option has no name")
        options = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("** cannot stand here")
            options[keyword.arg] = _value(keyword.value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # as Python's reader has them
        raise ParameterError(
            f"The options of {quoted(text)} cannot be read ({first_line(error)}); write them as name=value, such as "
            "vit-cifar(depth=4)."
        ) from None
    return match["name"].strip(), options


def is_own(text: str) -> bool:
    """Whether a name is written as a function of somebody's own, module:function, and is not of a library.

    >>> is_own("my_models:small(depth=2)"), is_own("timm:vit_tiny_patch16_224"), is_own("vit-cifar")
    (True, False, False)
    """
    try:
        name = parse_call(text)[0]
    except ParameterError:
        return False
    return FUNCTION.fullmatch(name) is not None and name.partition(":")[0] not in LIBRARIES


def render_call(name: str, options: dict[str, Any]) -> str:
    """The text that `parse_call` reads back as this name and these options, which are sorted.

    >>> render_call("vit-cifar", {"depth": 4})
    'vit-cifar(depth=4)'
    """
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in sorted(options.items()))})"


def check_options(
    text: str, function: Callable[..., Any], options: dict[str, Any], given: tuple[str, ...] = ()
) -> None:
    """Raise unless a function takes these options: counts, words and flags, by its annotations.

    text: the whole call, for the message. given: parameters that are not options, since the caller fills them.
    """
    parameters = {name: each for name, each in inspect.signature(function).parameters.items() if name not in given}
    for option, value in options.items():
        if option not in parameters:
            raise ParameterError(
                f"'{text}': there is no option '{option}'.{suggestion(option, parameters)} "
                f"Options: {', '.join(parameters)}."
            )
        annotation = parameters[option].annotation
        if words := _words(annotation):
            if value not in words:
                right = " or ".join(map(repr, words))
                raise ParameterError(f"'{text}': {option} is {value!r}; it must be {right}.")
            continue
        kind = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if "int" in kind:
            check_count(f"'{text}': {option}", value)
        if kind == "bool" and not isinstance(value, bool):
            raise ParameterError(f"'{text}': {option} is {value!r}; it must be true or false.")
        if "str" in kind and not isinstance(value, str):
            raise ParameterError(f"'{text}': {option} is {value!r}; it must be a word.")


def check_count(name: str, value: Any) -> None:
    """Raise unless an option is a whole number, at least 1 and at most what its name, the last word, allows."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParameterError(f"{name} is {value!r}; it must be a whole number, at least 1.")
    most = MOST_OF.get(name.rpartition(" ")[2], MOST)
    if value > most:
        raise ParameterError(f"{name} is {value}; it must be at most {most:,}.")


def _words(annotation: Any) -> tuple[Any, ...]:
    """The words of a Literal, alone or as `Literal[…] | None`; none: the annotation is something else."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(word for each in typing.get_args(annotation) for word in _words(each))


def _dotted(node: ast.expr) -> str:
    """A name with dots, such as timm's resnet18.a1_in1k."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("a word with dots has something else before them")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return _dotted(node)
    value = ast.literal_eval(node)
    if isinstance(value, int | float) and not abs(value) < 2**63:
        raise ValueError("a number is larger than any that can be meant")
    return value
