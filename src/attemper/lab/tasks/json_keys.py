"""Ids and texts in JSON files, by whichever program they were written."""

import re
from collections.abc import Hashable
from typing import Any

Key = Hashable
WRITTEN = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""A text that is a whole number and nothing else: '7', and neither '007' nor '7.0'."""


def as_key(value: Any) -> int | str | None:
    """An id, which is a whole number or a text; None: it is neither. Some programs write 7 as 7.0 or as "7".

    >>> [as_key(each) for each in (7, 7.0, "7", "007", "a", 7.5, True)]
    [7, 7, 7, '007', 'a', None, None]
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    if isinstance(value, str):
        return int(value) if WRITTEN.fullmatch(value) else value
    return value if isinstance(value, int) else None


def as_text(value: Any) -> str | None:
    """A text that can be shown and written; None: it is none, or has half a character, as JSON can have.

    >>> as_text("caf\\u00e9"), as_text("\\ud800"), as_text(3)
    ('café', None, None)
    """
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value
