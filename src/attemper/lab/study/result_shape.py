"""What a result looks like: every part that tables, charts and estimates read has the kind that they count on."""

import base64
import math
from collections.abc import Callable
from typing import Any

from attemper.lab.evaluation.key_figures import over_seeds

Check = Callable[[Any], bool]
PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
"""How files begin that a page shows."""


def misshapen(result: dict[str, Any]) -> str | None:
    """The part of a result that is not what it should be, in words; None if all are. Parts may be missing.

    >>> misshapen({"curve": [{"epoch": "one"}]})
    'its curve is not what a run writes'
    """
    wrong = (name for name, fits in PARTS.items() if name in result and not fits(result[name]))
    return next((f"its {name.replace('_', ' ')} is not what a run writes" for name in wrong), None)


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _numbers(value: Any) -> bool:
    """Metrics by name."""
    return isinstance(value, dict) and all(map(_number, value.values()))


def _list(each: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(each, value))


def _record(needed: dict[str, Check], known: dict[str, Check] | None = None) -> Check:
    """An object that has these fields, and may have those."""

    def fits(value: Any) -> bool:
        if not isinstance(value, dict) or any(name not in value for name in needed):
            return False
        return all(check(value[name]) for name, check in {**needed, **(known or {})}.items() if name in value)

    return fits


def _either(*checks: Check) -> Check:
    return lambda value: any(check(value) for check in checks)


def _details(value: Any) -> bool:
    """A confusion matrix with a name for every class, a metric class by class, pictures: any of them."""
    if not _record({}, {"items": _count, "right": _text, "table": _class_table, "pictures": _list(_picture)})(value):
        return False
    if "confusion" not in value:
        return True
    if not _record({"classes": _list(_text), "confusion": _list(_list(_count))})(value):
        return False
    classes = len(value["classes"])
    return [len(row) for row in value["confusion"]] == [classes] * classes


def _class_table(value: Any) -> bool:
    row = _record({"name": _text, "count": _count, "value": _number})
    return _record({"metric": _text, "counted": _text, "rows": _list(row)})(value)


def _picture(value: Any) -> bool:
    """Bytes in letters, of a PNG or JPEG file."""
    if not _record({"caption": _text, "data": _text})(value):
        return False
    try:
        return base64.b64decode(value["data"], validate=True).startswith(PICTURES)
    except ValueError:
        return False


def _evaluation(value: Any) -> bool:
    """What the page asks of an evaluation, asked now."""
    try:
        return value is None or over_seeds([value]) is not None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        return False


PARTS: dict[str, Check] = {
    "metric": _text,
    "train": _numbers,
    "validation": _numbers,
    "test": _numbers,
    "curve": _list(_record({"epoch": _count}, {"validation": _either(_numbers, lambda value: value is None)})),
    "probes": _list(_record({"block": _count, "step": _count})),
    "rates": _list(_object),
    "parameters": _either(_count, lambda value: value is None),
    "flops": _either(_record({"forward": _count, "step": _count}), lambda value: value is None),
    "timing": _record({}, {"seconds": _number, "peak_memory": _number}),
    "versions": _object,
    "notes": _list(_text),
    "test_details": _details,
    "evaluation": _evaluation,
}
