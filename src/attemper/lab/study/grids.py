"""Grids: one text with braces stands for several recipes."""

import itertools
import math
from typing import NoReturn

from attemper.errors import RecipeError, pointed_at, quoted
from attemper.recipe import MOST_CHARACTERS

MOST = 1000
"""Recipes behind one text. A grid with more is a typo rather than a plan."""
OPENING, CLOSING = "([", ")]"


def expand(text: str) -> list[str]:
    """Every recipe that a text with braces stands for; the last braces vary fastest.

    >>> expand("explicit(v={1e-4, 5e-4}, p={0.1, 0.2})")[1:3]
    ['explicit(v=1e-4, p=0.2)', 'explicit(v=5e-4, p=0.1)']
    >>> expand("dropkey(0.1)")
    ['dropkey(0.1)']
    """
    if len(text) > MOST_CHARACTERS:
        raise RecipeError(f"{quoted(text)} has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read")
    pieces = _pieces(text)
    count = math.prod(map(len, pieces))
    if count > MOST:
        many = f"{count:,}" if count < 10**9 else "billions of"
        raise RecipeError(f"{quoted(text)} stands for {many} recipes; at most {MOST:,} are run")
    return ["".join(parts) for parts in itertools.product(*pieces)]


def _pieces(text: str) -> list[list[str]]:
    """The text cut at its braces: plain parts with one alternative, braces with theirs."""
    pieces, start, opened = [], 0, -1
    for column, sign in enumerate(text):
        if sign == "{":
            if opened >= 0:
                _fail(text, column, "braces cannot stand inside braces")
            pieces.append([text[start:column]])
            opened = column
        elif sign == "}":
            if opened < 0:
                _fail(text, column, "this brace is never opened")
            pieces.append(_alternatives(text, opened, column))
            start, opened = column + 1, -1
    if opened >= 0:
        _fail(text, opened, "this brace is never closed")
    return [*pieces, [text[start:]]]


def _alternatives(text: str, opened: int, closed: int) -> list[str]:
    """What stands between two braces, cut at the commas that are not inside of brackets."""
    items, depth = [""], 0
    for sign in text[opened + 1 : closed]:
        depth += (sign in OPENING) - (sign in CLOSING)
        if sign == "," and depth == 0:
            items.append("")
        else:
            items[-1] += sign
    items = [item.strip() for item in items]
    if not all(items):
        _fail(text, opened, "between braces stand values with commas between them, such as {1e-4, 5e-4}")
    return items


def _fail(text: str, column: int, message: str) -> NoReturn:
    raise RecipeError(f"{message} {pointed_at(text, column)}")
