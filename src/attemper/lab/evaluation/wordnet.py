"""Which of a model's classes a WordNet id stands for.

ImageNet's classes have no numbers of their own: a model's output 0 is whichever id came first when its training folder
was sorted. The ids come from whoever has ImageNet, so that no list of them has to be kept here.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from attemper.errors import UnreadableError
from attemper.files import parse_json, read_text
from attemper.lab.errors import DataError

WORDNET = re.compile(r"n\d{8}")


def wordnet_ids(given: str | Path) -> list[str]:
    """The ids of a model's classes, in the order of its outputs.

    given: a folder with one subfolder per id, such as ImageNet's train or val, which is sorted as everybody sorts it; a
        JSON file with a list of ids, with {"0": ["n01440764", "tench"], …} or with {"n01440764": 0, …}; or a text file
        whose lines each begin with an id.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        found = sorted(each.name for each in path.iterdir() if each.is_dir() and WORDNET.fullmatch(each.name))
        problem = "has no subfolder that is called like one"
    else:
        try:
            text = read_text(path)
        except UnreadableError as error:
            raise DataError(f"The WordNet ids cannot be read: {error}") from None
        found = _of_json(text, path) if path.suffix == ".json" else _of_lines(text)
        problem = "names none"
    if not found:
        raise DataError(f"'{path}' {problem}; WordNet ids look like n01440764.")
    for name, count in Counter(found).items():
        if count > 1:
            raise DataError(f"'{path}' names '{name}' more than once; every class has one id.")
    return found


def _of_lines(text: str) -> list[str]:
    words = (line.split()[0] for line in text.splitlines() if line.strip())
    return [word for word in words if WORDNET.fullmatch(word)]


def _of_json(text: str, path: Path) -> list[str]:
    try:
        given: Any = parse_json(text, f"'{path}'")
    except UnreadableError as error:
        raise DataError(str(error)) from None
    try:
        if isinstance(given, dict) and all(WORDNET.fullmatch(key) for key in given):
            given = [name for name, _ in _numbered({index: name for name, index in given.items()}, path)]
        elif isinstance(given, dict):
            given = [names if isinstance(names, str) else names[0] for names, _ in _numbered(given, path)]
        if isinstance(given, list) and all(isinstance(name, str) and WORDNET.fullmatch(name) for name in given):
            return list(given)
    except (TypeError, ValueError, IndexError, KeyError):
        pass
    raise DataError(
        f'\'{path}\' is no list of WordNet ids; write ["n01440764", …], {{"0": ["n01440764", "tench"], …}} or '
        '{"n01440764": 0, …}.'
    )


def _numbered(given: dict[Any, Any], path: Path) -> list[tuple[Any, int]]:
    """Values with their class numbers, which must be 0, 1, 2 and so on."""
    pairs = sorted(((value, int(index)) for index, value in given.items()), key=lambda pair: pair[1])
    if [index for _, index in pairs] != list(range(len(pairs))):
        raise DataError(f"The classes in '{path}' must be numbered 0 to {len(pairs) - 1}, each once.")
    return pairs
