"""What `attemper diagnose` writes: the table as JSON, heat maps and curves as PNG, and the page."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attemper.errors import ParameterError

if TYPE_CHECKING:
    from PIL.Image import Image

    from attemper.probes.comparison import Comparison
    from attemper.probes.table import JacobianRow, Table, TokenRow

WRITTEN = ("index.html", "table.json", "heat-*.png", "curve-*.png", "looks-*.png", "rollout-*.png")
"""What is written into the folder."""


def check_out(out: Path, of: Mapping[str, str]) -> None:
    """Raise if a folder holds a diagnosis of something else, or files of others that would be written over."""
    from attemper.errors import UnreadableError
    from attemper.files import read_bytes
    from attemper.lab.folders import read_object

    try:
        there = read_object(read_bytes(out / "table.json")).get("of")
    except UnreadableError:
        there = None
    if isinstance(there, dict):
        names = [name for name in dict.fromkeys((*there, *of)) if there.get(name) != of.get(name)]
        other = f"the diagnosis of another {names[0]} ({there.get(names[0], 'none')})" if names else ""
    else:
        found = sorted(path.name for pattern in WRITTEN for path in out.glob(pattern))
        other = f"{found[0]}, which does not come from a diagnosis" if found else ""
    if other:
        raise ParameterError(f"{out} holds {other}, and was left as it is. Choose another folder with --out.")


def write_all(
    out: Path,
    table: Table,
    drawn: Mapping[str, Image],
    about: Sequence[str],
    of: Mapping[str, str],
    beside: Comparison | None = None,
) -> Path:
    """Write PNGs, the table as JSON and the page; returns the page's path. of: what was diagnosed."""
    from attemper.files import atomic_write
    from attemper.lab.folders import folder_errors
    from attemper.lab.report.diagnosis import make_page

    pictures = {name: _png(picture) for name, picture in drawn.items()}
    captions = {_caption(name): png for name, png in pictures.items()}
    page = make_page(table, title=f"Attention of {of['model']}", about=about, pictures=captions, beside=beside)
    figures = {"of": dict(of), **table.to_dict()} | ({"beside": beside.to_dict()} if beside else {})
    with folder_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        for name, png in (pictures | {name: _png(picture) for name, picture in charts(table).items()}).items():
            atomic_write(out / f"{name}.png", png)
        atomic_write(out / "table.json", json.dumps(figures, indent=1, allow_nan=False) + "\n")
        atomic_write(out / "index.html", page)
    return out / "index.html"


def charts(table: Table) -> dict[str, Image]:
    """Heat maps and curves of a table, by file name."""
    from attemper.lab.report.diagnosis import HEATS, bounds_of, by_block
    from attemper.lab.report.png import curves, heat_map
    from attemper.probes.tokens import PLACES

    drawn: dict[str, Image] = {}
    for name, (title, _) in HEATS.items():
        labels, values = by_block(table.heads, name)
        if any(value is not None for row in values for value in row):
            drawn[f"heat-{name.replace('_', '-')}"] = heat_map(
                values, title=title, rows=labels, bounds=bounds_of(name, values)
            )
    for name, title, y, log in (
        ("condition", "Condition number of the tokens", "κ", True),
        ("effective_rank", "Effective rank of the tokens", "rank", False),
        ("similarity", "Similarity of two tokens", "mean cosine", False),
    ):
        if table.tokens:
            lines = over_blocks(table.tokens, PLACES, name)
            drawn[f"curve-{name.replace('_', '-')}"] = curves(lines, title=title, y=y, log=log)
    for name, title, y in (
        ("condition", "Condition number of the Jacobian", "κ"),
        ("largest", "Largest singular value of the Jacobian", "σ max"),
    ):
        lines = over_blocks(table.jacobians, list(dict.fromkeys(row.place for row in table.jacobians)), name)
        if any(value is not None for values in lines.values() for value in values):
            drawn[f"curve-jacobian-{name}"] = curves(lines, title=title, y=y, log=True)
    return drawn


def over_blocks(
    rows: Sequence[TokenRow | JacobianRow], places: Sequence[str], name: str
) -> dict[str, list[float | None]]:
    """One column of rows by place, each a list over all blocks; None where a block has no such place."""
    blocks = sorted({row.block for row in rows})
    found = {(row.block, row.place): getattr(row, name) for row in rows}
    return {place: [found.get((block, place)) for block in blocks] for place in places}


def _caption(name: str) -> str:
    kind, _, at = name.partition("-")
    return f"Image {at}: " + ("attention rollout" if kind == "rollout" else "per block and head")


def _png(picture: Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
