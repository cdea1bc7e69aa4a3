"""`attemper methods`: what there is to choose from."""

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

import attemper
from attemper.errors import UnknownMethodError, suggestion
from attemper.lab.cli.options import Json
from attemper.lab.cli.printing import console, print_json, say


@dataclass(frozen=True)
class Methods:
    """List the methods that a recipe can name, or tell about one of them.

    Examples
      attemper methods
      attemper methods dropkey
      attemper methods --json
    """

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="")] = None
    """A method to tell about; otherwise all of them, a line each."""
    json: Json = False

    def run(self, words: Sequence[str] = ()) -> int:
        methods = {method.name: method for method in attemper.list_methods()}
        if self.name is not None and self.name not in methods:
            raise UnknownMethodError(
                f"there is no method '{self.name}'.{suggestion(self.name, methods)} There are: {', '.join(methods)}."
            )
        chosen = list(methods.values()) if self.name is None else [methods[self.name]]
        if self.json:
            print_json([_facts(method) for method in chosen])
        elif self.name is not None:
            _print_method(chosen[0])
        else:
            from rich.table import Table

            table = Table(box=None, pad_edge=False, header_style="bold")
            for title in ("name", "what it does", "from"):
                table.add_column(title, no_wrap=title == "name")
            for method in chosen:
                table.add_row(method.name, method.summary, f"{method.paper.title}, {method.paper.venue}")
            console().print(table)
        return 0


def _facts(method: Any) -> dict[str, Any]:
    return {
        "name": method.name,
        "summary": method.summary,
        "paper": method.paper.title,
        "venue": method.paper.venue,
        "parameters": {field.name: _plain(field.default) for field in dataclasses.fields(method)},
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _print_method(method: Any) -> None:
    facts = _facts(method)
    screen = console()
    say(screen, f"{method.name}: {method.summary}", f"{method.paper.title}, {method.paper.venue}", "")
    say(screen, inspect.cleandoc(method.__doc__), "")
    say(screen, "Defaults: " + ", ".join(f"{name}={value}" for name, value in facts["parameters"].items()))
