"""Names with options, written like calls: 'vit-cifar(depth=4)', 'timm:vit_tiny_patch16_224(img_size=32)'."""

from __future__ import annotations

import ast
import re
from typing import Any

from attemper.errors import ParameterError

__all__ = ["parse_call", "render_call"]

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


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, node.id)
    return ast.literal_eval(node)
