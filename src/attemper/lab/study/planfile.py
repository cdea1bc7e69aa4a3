"""Plans in files: YAML or JSON, with the line of every mistake."""

import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from attemper.errors import MissingFileError, UnreadableError, first_line, quoted
from attemper.files import parse_json, read_text
from attemper.lab.errors import PlanError, PlanPath, UnreadablePlanError
from attemper.lab.study.plan import Plan

FLOAT = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\d+\.\d*|\.\d+)\Z")
"""YAML 1.1 takes 1e-3 for a word; in a plan it is a number."""
MOST_BYTES = 2**18
"""Of a plan's file. The longest plans have a tenth of that, and YAML is read slowly."""
MOST_NESTED = 50
"""Brackets inside of each other. A plan has two or three."""
MOST_VALUES = 20_000
"""In a plan, those behind an alias counted wherever it stands: nine lines of aliases can stand for a billion values."""


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, and in which what a tag promises is a mistake like any other."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{quoted(str(node.value))} is no {kind}: {first_line(error)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as the same values."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def load_plan(path: str | Path, *, pipes: bool = False) -> Plan:
    """Read a plan from a YAML or JSON file.

    pipes: take what is no file on a disk, too, such as /dev/stdin.

    A mistake is a `PlanError` that begins with the file and the line.
    """
    path = Path(path)
    try:
        text = read_text(path, most=MOST_BYTES, pipes=pipes)
    except MissingFileError:
        raise UnreadablePlanError(f"The plan {path} cannot be read: No such file.") from None
    except UnreadableError as error:
        raise UnreadablePlanError(f"The plan cannot be read: {error} It must be YAML or JSON in UTF-8.") from None
    given, lines = read(text, str(path), as_json=path.suffix == ".json")
    try:
        return Plan.from_dict(given)
    except PlanError as error:
        raise PlanError(f"{path}{_line_of(error.path, lines)}: {error}", error.path) from None


def dump_plan(plan: Plan) -> str:
    """The plan as YAML; `load_plan` reads back an equal one."""
    text: str = yaml.dump(plan.to_dict(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    if len(text.encode()) > MOST_BYTES:
        raise PlanError(f"The plan has {len(text.encode()):,} bytes as YAML; at most {MOST_BYTES:,} are read again.")
    return text


def read(text: str, name: str, *, as_json: bool = False) -> tuple[Any, dict[PlanPath, int]]:
    """The values of a plan's text, and the line on which each stands."""
    if as_json:
        try:
            given = parse_json(text, name)
        except UnreadableError as error:
            line = getattr(error.__cause__, "lineno", None)
            problem = getattr(error.__cause__, "msg", None) or first_line(error.__cause__ or error)
            raise PlanError(f"{name}{f', line {line}' if line else ''}: this is no JSON ({problem}).") from None
        # JSON is YAML but for tabs, which it only has between values: that is enough to find the lines.
        text = text.replace("\t", " ")
    lines: dict[PlanPath, int] = {}
    _refuse_deep(text, name)
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        _collect(node, (), lines, name)
        return (given if as_json else node and loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise PlanError(f"{name}{line}: this cannot be read as YAML ({error.problem or error.context}).") from None
    except RecursionError:
        raise PlanError(f"{name}: the plan contains itself, or is nested too deeply.") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{name}: this cannot be read as YAML ({first_line(error)}).") from None


def _refuse_deep(text: str, name: str) -> None:
    """Raise where brackets stand in each other too deeply: YAML's reader takes a second to find that out."""
    depth = 0
    for found in re.finditer(r"[\[\]{}]", text):
        depth = max(0, depth + (1 if found[0] in "[{" else -1))
        if depth > MOST_NESTED:
            line = text.count("\n", 0, found.start()) + 1
            raise PlanError(f"{name}, line {line}: it is nested too deeply; at most {MOST_NESTED} brackets are read.")


def _collect(node: Any, path: PlanPath, lines: dict[PlanPath, int], name: str) -> None:
    """Note the line of every key and item below a node; a key that stands twice is refused."""
    if len(lines) > MOST_VALUES:
        raise PlanError(
            f"{name}: the plan has more than {MOST_VALUES:,} values, counting each wherever an alias stands for it."
        )
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise PlanError(f"{name}, line {key.start_mark.line + 1}: a key must be a word.")
            inner, line = (*path, str(key.value)), key.start_mark.line + 1
            if inner in lines:
                raise PlanError(
                    f"{name}, line {line}: {quoted(str(key.value))} stands twice, first on line {lines[inner]}."
                )
            lines[inner] = line
            _collect(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _collect(item, (*path, index), lines, name)


def _line_of(path: PlanPath, lines: dict[PlanPath, int]) -> str:
    """', line 7' for the innermost part of a path whose line is known."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f", line {lines[path[:length]]}"
    return ""
