"""Pieces of HTML: everything that comes from outside is escaped here, and nowhere else."""

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def escape(value: object) -> str:
    """Text that may stand between tags or in a quoted attribute.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    return html.escape(str(value), quote=True)


def prose(text: object) -> str:
    """Sentences as markup: what they have between backticks is code.

    >>> prose("better than `none` & others")
    'better than <code>none</code> &amp; others'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def paragraph(text: object, kind: str) -> str:
    """A paragraph of the page's head. kind: "verdict", or "notice" for what has to be known with it."""
    return f'<p class="{kind}">{prose(text)}</p>'


def facts(given: Mapping[str, object]) -> str:
    """Names with their values, side by side; nothing where there are none.

    >>> facts({"Seeds": 3})
    '<dl class="facts"><div><dt>Seeds</dt><dd>3</dd></div></dl>'
    """
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in given.items())
    return f'<dl class="facts">{items}</dl>' if items else ""


def code_block(text: object, *, wrapped: bool = False) -> str:
    """Text to be copied. wrapped: long lines go on below; otherwise they are scrolled, also with the keyboard."""
    return f'<pre class="wrapped">{escape(text)}</pre>' if wrapped else f'<pre tabindex="0">{escape(text)}</pre>'


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    numeric: bool = False
    """Numbers stand to the right and are first sorted from the largest down, or else from the smallest up."""
    rising: bool = False
    """Of numbers: the first click puts the smallest on top."""
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell: what it shows, and what it is sorted by."""

    html: str
    """Markup; what comes from outside must have gone through `escape`."""
    key: float | str | None = None
    """None stays at the bottom whichever way the table is sorted."""
    label: str = ""
    """A class for the style sheet."""


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    caption: str,
    sortable: bool = False,
    sorted_by: int | None = None,
) -> str:
    """A table in a box that scrolls by itself where the page is narrow. The first cell of a row is its heading.

    sorted_by: the column by which the rows are in order already, from the top down.
    """
    heads = "".join(_head(column, sortable, at == sorted_by) for at, column in enumerate(columns))
    body = "".join(_row(row, columns) for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f"<table{kind}><caption>{escape(caption)}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _head(column: Column, sortable: bool, sorted_now: bool) -> str:
    title = escape(column.title)
    hint = f' title="{escape(column.hint)}"' if column.hint else ""
    kind = ' class="number"' if column.numeric else ""
    if not sortable:
        return f'<th scope="col"{kind}{hint}>{title}</th>'
    falling = column.numeric and not column.rising
    order = ("descending" if falling else "ascending") if sorted_now else "none"
    first = "descending" if falling else "ascending"
    return (
        f'<th scope="col"{kind} aria-sort="{order}"><button type="button" data-first="{first}"{hint}>{title}'
        f'<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def _row(row: Sequence[Cell], columns: Sequence[Column]) -> str:
    cells = []
    for at, (cell, column) in enumerate(zip(row, columns, strict=True)):
        classes = " ".join(name for name in ("number" if column.numeric else "", cell.label) if name)
        kind = f' class="{escape(classes)}"' if classes else ""
        key = "" if cell.key is None else f' data-key="{escape(cell.key)}"'
        tag = 'th scope="row"' if at == 0 else "td"
        cells.append(f"<{tag}{kind}{key}>{cell.html}</{tag.split()[0]}>")
    return f"<tr>{''.join(cells)}</tr>"


def data_block(name: str, value: Any) -> str:
    """Data that travels in the page as JSON, for programs to read. No text in it can end the script element."""
    text = json.dumps(_plain(value), ensure_ascii=True, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def _plain(value: Any) -> Any:
    """The value with null in place of numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
