"""Names with options, written like calls: 'vit-cifar(depth=4)', 'timm:vit_tiny_patch16_224(img_size=32)'."""

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

from attemper.errors import ParameterError, suggestion

CALL = re.compile(r"\s*(?P<name>[^()\s][^()]*?)\s*(?:\((?P<arguments>.*)\))?\s*", re.DOTALL)


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a call. Values are Python literals; a bare word stands for itself.

    >>> parse_call("timm:vit_tiny_patch16_224(img_size=32, global_pool=avg)")
    ('timm:vit_tiny_patch16_224', {'img_size': 32, 'global_pool': 'avg'})
    """
    match = CALL.fullmatch(text)
    if match is None:
        raise ParameterError(
            f"'{text}' cannot be read; write a name, or a name with options such as vit-cifar(depth=4)."
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
    except (SyntaxError, ValueError) as error:
        raise ParameterError(
            f"The options of '{text}' cannot be read ({error}); write them as name=value, such as vit-cifar(depth=4)."
        ) from None
    return match["name"], options


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
        kind = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        if "int" in kind:
            check_count(f"'{text}': {option}", value)
        if kind == "bool" and not isinstance(value, bool):
            raise ParameterError(f"'{text}': {option} is {value!r}; it must be true or false.")
        if "str" in kind and not isinstance(value, str):
            raise ParameterError(f"'{text}': {option} is {value!r}; it must be a word.")


def check_count(name: str, value: Any) -> None:
    """Raise unless an option is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ParameterError(f"{name} is {value!r}; it must be a whole number, at least 1.")


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, node.id)
    return ast.literal_eval(node)
