"""`python -m attemper.lab.bench ops`, `step`, `loop`: the benchmarks where only torch and Attemper are installed."""

import argparse
import ast
import dataclasses
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path

from attemper.errors import AttemperError
from attemper.lab.bench.commands import Loop, Ops, Step

COMMANDS: dict[str, type[Ops] | type[Step] | type[Loop]] = {"ops": Ops, "step": Step, "loop": Loop}


def make_parser() -> argparse.ArgumentParser:
    """One option per field of the plans."""
    parser = argparse.ArgumentParser(prog="python -m attemper.lab.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, plan in COMMANDS.items():
        command = commands.add_parser(name, description=plan.__doc__)
        kinds, helps = typing.get_type_hints(plan), help_of(plan)
        for field in dataclasses.fields(plan):
            many, kind = single(kinds[field.name])
            command.add_argument(
                f"--{field.name}",
                type=kind,
                nargs="+" if many else None,
                default=field.default,
                metavar="X",
                help=helps[field.name].replace("%", "%%"),
            )
    return parser


def help_of(plan: type) -> dict[str, str]:
    """What stands below each field in the source, which is where tyro reads it too."""
    found: dict[str, str] = {}
    for kind in reversed(plan.__mro__[:-1]):
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def single(kind: object) -> tuple[bool, type]:
    """Whether an option takes several values, and the type of one of them."""
    many = typing.get_origin(kind) is tuple
    if many or isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return many, kind if kind in (int, float, Path) else str


def main(words: Sequence[str]) -> int:
    """Run the command line; the exit status: 0, or 2 for a mistake in what was asked."""
    options = vars(make_parser().parse_args(words))
    plan = COMMANDS[options.pop("command")]
    given: dict[str, typing.Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
    try:
        plan(**given).run(words)
    except AttemperError as error:
        print(f"attemper bench: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
