"""The terminal's table of published figures beside ours."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

Summary = Mapping[str, Any]


def beside_table(summary: Summary) -> Table | None:
    """One line for each published cell; None where the study has none."""
    rows = [(row["name"], cell) for row in summary["recipes"] for cell in row.get("beside") or ()]
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, title in enumerate(("recipe", "figure", "published", "ours", "difference")):
        table.add_column(title, justify="right" if at > 1 else "left", overflow="fold")
    for name, cell in rows:
        figure = cell["column"] or f"test {summary['metric']}, %"
        published = _spread(cell["published"], cell["deviation"])
        ours = _spread(cell["ours"], cell["ours_deviation"])
        table.add_row(*map(Text, (name, figure, published, ours, _signed(cell["difference"]))))
    return table


def beside_lines(summary: Summary) -> list[str]:
    """What to know before that table is read."""
    reference = summary.get("reference") or {}
    return [line for line in (reference.get("apart"), reference.get("standing")) if line]


def _spread(value: float | None, deviation: float | None) -> str:
    if value is None:
        return "–"
    text = f"{value:.2f}" if deviation is None else f"{value:.2f} ± {deviation:.2f}"
    return text.replace("-", "−")


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}".replace("-", "−")
