"""Recipes: text ⇄ methods.

recipe  =  "none"  |  method { "+" method }
method  =  name [ "(" [ argument { "," argument } ] ")" ]
argument = value | name "=" value           the first argument alone may go without its name
value   =  number | word | "[" [ value { "," value } ] "]"
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from attemper.errors import (
    ConflictError,
    ParameterError,
    RecipeError,
    UnknownMethodError,
    pointed_at,
    quoted,
    suggestion,
)
from attemper.methods.base import Method, parameters_of, render_method
from attemper.methods.registry import methods_by_name

MOST_CHARACTERS = 10_000
"""Of a recipe. A longer text is some other file."""
MOST_IN_A_NUMBER = 100
"""Characters. No parameter needs as many digits as that."""
MOST_NESTED = 8
"""Lists inside of each other. No parameter has more than one inside of another."""
MOST = 2**63 - 1
"""The largest value of a number, and the negative of the smallest."""

TOKEN = re.compile(  # possessive, so that a long row of digits is read once and not once from each of its digits
    r"\s*+(?:(?P<number>[+-]?+(?:[0-9]++\.?+[0-9]*+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+(?![\w.]))"
    r"|(?P<word>[A-Za-z_]\w*+|2d\b)|(?P<sign>[()\[\],=+]))"
)


@dataclasses.dataclass(frozen=True)
class Token:
    """A number, a word or a sign of a recipe, and where it stands."""

    kind: str
    text: str
    column: int


class Parser:
    """Reads one recipe from left to right; every error knows its column."""

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MOST_CHARACTERS:
            self.fail(f"the recipe has {len(text):,} characters, and at most {MOST_CHARACTERS:,} are read", 0)
        self.tokens = list(self._tokens())
        self.next = 0

    def _tokens(self) -> Iterable[Token]:
        position, end = 0, len(self.text.rstrip())
        while position < end:
            match = TOKEN.match(self.text, position)
            if match is None:
                column = position + len(self.text[position:]) - len(self.text[position:].lstrip())
                self.fail(f"{quoted(self.text[column])} cannot stand here", column)
            kind = str(match.lastgroup)
            yield Token(kind, match[kind], match.start(kind))
            position = match.end()
        yield Token("end", "", len(self.text))

    def fail(self, message: str, column: int, kind: type[RecipeError] = RecipeError) -> NoReturn:
        raise kind(f"{message} {pointed_at(self.text, column)}")

    @property
    def token(self) -> Token:
        return self.tokens[self.next]

    def take(self, *texts: str) -> Token | None:
        """The next token if it is one of these signs."""
        token = self.token
        if token.kind == "sign" and token.text in texts:
            self.next += 1
            return token
        return None

    def expect(self, *texts: str) -> Token:
        token = self.take(*texts)
        if token is None:
            found = quoted(self.token.text) if self.token.text else "the end"
            self.fail(f"expected {' or '.join(repr(t) for t in texts)}, found {found}", self.token.column)
        return token

    def recipe(self) -> list[Method]:
        if [token.text for token in self.tokens] == ["none", ""]:
            return []
        methods = [self.method()]
        while self.take("+"):
            methods.append(self.method())
        if self.token.kind != "end":
            self.fail(f"expected '+' or the end, found {quoted(self.token.text)}", self.token.column)
        return methods

    def method(self) -> Method:
        token = self.token
        if token.kind != "word":
            self.fail("expected the name of a method", token.column)
        known = methods_by_name()
        if token.text == "none":
            self.fail("'none' is the empty recipe and stands alone", token.column)
        if token.text not in known:
            message = f"unknown method {quoted(token.text)}.{suggestion(token.text, known)} Methods: {', '.join(known)}"
            self.fail(message, token.column, UnknownMethodError)
        self.next += 1
        kind = known[token.text]
        arguments = self.arguments(kind) if self.take("(") else {}
        try:
            return kind(**arguments)
        except (ParameterError, TypeError, ValueError, ArithmeticError) as error:  # of other packages' methods, too
            self.fail(f"{token.text}: {error}", token.column)

    def arguments(self, kind: type[Method]) -> dict[str, Any]:
        fields = {field.name: field for field in parameters_of(kind)}
        arguments: dict[str, Any] = {}
        while not self.take(")"):
            token = self.token
            named = token.kind == "word" and self.tokens[self.next + 1].text == "="
            if named:
                self.next += 2
                name = token.text
            elif kind.named_only:
                self.fail(f"the arguments of {kind.name} need their names", token.column)
            elif arguments:
                self.fail("only the first argument may go without its name", token.column)
            else:
                name = next(iter(fields), "")
            if name not in fields:
                message = f"{kind.name} has no parameter {quoted(name)}.{suggestion(name, fields)}"
                self.fail(f"{message} Parameters: {', '.join(fields) or 'none'}", token.column)
            if name in arguments:
                self.fail(f"'{name}' is given twice", token.column)
            value = self.value()
            arguments[name] = None if value == "none" and fields[name].default is None else value
            if not self.take(","):
                self.expect(")")
                break
        return arguments

    def value(self, depth: int = 0) -> Any:
        token = self.token
        if self.take("["):
            if depth == MOST_NESTED:
                self.fail(f"lists stand in each other at most {MOST_NESTED} deep", token.column)
            return self.items(depth + 1)
        if token.kind not in ("number", "word"):
            found = quoted(token.text) if token.text else "the end"
            self.fail(f"expected a number, a word or a list, found {found}", token.column)
        self.next += 1
        if token.kind == "number":
            return self.number(token)
        return {"true": True, "false": False}.get(token.text, token.text)

    def number(self, token: Token) -> int | float:
        if len(token.text) > MOST_IN_A_NUMBER:
            message = f"a number has at most {MOST_IN_A_NUMBER} characters, and this one has {len(token.text):,}"
            self.fail(message, token.column)
        value = int(token.text) if re.fullmatch(r"[+-]?[0-9]+", token.text) else float(token.text)
        if not -MOST <= value <= MOST:
            self.fail(f"{token.text} is too large for a number; the largest is {MOST:.2g}", token.column)
        return value

    def items(self, depth: int) -> tuple[Any, ...]:
        items: list[Any] = []
        while not self.take("]"):
            items.append(self.value(depth))
            if not self.take(","):
                self.expect("]")
                break
        return tuple(items)


def parse(text: str) -> list[Method]:
    """Read a recipe.

    >>> parse("dropkey(0.1, schedule=decreasing) + dropattention(0.2)")[1].p
    0.2
    >>> parse("none")
    []
    >>> parse("dropkye(0.1)")
    Traceback (most recent call last):
    attemper.errors.UnknownMethodError: unknown method 'dropkye'. Did you mean 'dropkey'? ... (column 1)
      dropkye(0.1)
      ^
    """
    if not isinstance(text, str):
        raise RecipeError(f"a recipe is a text such as 'dropkey(0.1)', got {text!r}")
    if not text.strip():
        raise RecipeError("the recipe is empty; write 'none' for no method at all")
    return Parser(text).recipe()


def render(methods: Iterable[Method]) -> str:
    """The recipe text of some methods; `parse` reads back the same methods.

    >>> render(parse("dropkey( p=0.1 , schedule = [0.1,0.2] )"))
    'dropkey(0.1, schedule=[0.1, 0.2])'
    """
    return " + ".join(render_method(method, strict=True) for method in methods) or "none"


def describe(methods: Iterable[Method]) -> str:
    """The same for people to read: a schedule that is a function is named, not refused."""
    return " + ".join(map(str, methods)) or "none"


def as_methods(recipe: str | Method | Sequence[Method]) -> list[Method]:
    """The methods of a recipe in whatever form it was given; the same method twice is refused."""
    if isinstance(recipe, str):
        methods = parse(recipe)
    elif isinstance(recipe, Method):
        methods = [recipe]
    elif isinstance(recipe, Iterable):
        methods = list(recipe)
    else:
        raise RecipeError(f"a recipe is text, a method or a sequence of methods; got {recipe!r}")
    for method in methods:
        if not isinstance(method, Method):
            raise RecipeError(f"a recipe is text, a method or a sequence of methods; got {method!r} among them")
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ConflictError(
                f"'{name}' stands {names.count(name)} times in the recipe {quoted(describe(methods))}; once is enough"
            )
    return methods
