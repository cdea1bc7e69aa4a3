"""Plans in files: YAML or JSON, with the line of every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from attemper.lab.errors import PlanError, UnreadablePlanError
from attemper.lab.study.plan import Plan

Where = tuple[str | int, ...]
FLOAT = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\d+\.\d*|\.\d+)\Z")
"""YAML 1.1 takes 1e-3 for a word; in a plan it is a number."""


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number."""


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back as the same values."""


for _side in (Loader, Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))


def load_plan(path: str | Path) -> Plan:
    """Read a plan from a YAML or JSON file.

    A mistake is a `PlanError` that begins with the file and the line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadablePlanError(f"The plan {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise PlanError(f"The plan {path} is no text file; it must be YAML or JSON in UTF-8.") from None
    given, lines = read(text, str(path), as_json=path.suffix == ".json")
    try:
        return Plan.from_dict(given)
    except PlanError as error:
        raise PlanError(f"{path}{_line_of(error.path, lines)}: {error}", error.path) from None


def dump_plan(plan: Plan) -> str:
    """The plan as YAML; `load_plan` reads back an equal one."""
    text: str = yaml.dump(plan.to_dict(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def read(text: str, name: str, *, as_json: bool = False) -> tuple[Any, dict[Where, int]]:
    """The values of a plan's text, and the line on which each stands."""
    if as_json:
        try:
            given = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{name}, line {error.lineno}: this is no JSON ({error.msg}).") from None
        # JSON is YAML but for tabs, which it only has between values: that is enough to find the lines.
        text = text.replace("\t", " ")
    lines: dict[Where, int] = {}
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        _collect(node, (), lines, name)
        return (given if as_json else node and loader.construct_document(node)), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise PlanError(f"{name}{where}: this cannot be read as YAML ({error.problem}).") from None
    except RecursionError:
        raise PlanError(f"{name}: the plan contains itself, or is nested too deeply.") from None
    except yaml.YAMLError as error:
        raise PlanError(f"{name}: this cannot be read as YAML ({error}).") from None


def _collect(node: Any, path: Where, lines: dict[Where, int], name: str) -> None:
    """Note the line of every key and item below a node; a key that stands twice is refused."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner, line = (*path, str(key.value)), key.start_mark.line + 1
            if inner in lines:
                raise PlanError(f"{name}, line {line}: '{key.value}' stands twice, first on line {lines[inner]}.")
            lines[inner] = line
            _collect(value, inner, lines, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _collect(item, (*path, index), lines, name)


def _line_of(path: Where, lines: dict[Where, int]) -> str:
    """', line 7' for the innermost part of a path whose line is known."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return f", line {lines[path[:length]]}"
    return ""
