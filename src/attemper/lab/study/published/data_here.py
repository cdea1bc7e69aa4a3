"""Whether the data of a table are on this machine, without reading them."""

from pathlib import Path

from attemper.lab.call_syntax import parse_call
from attemper.lab.study.published.table import Table
from attemper.lab.tasks import cifar
from attemper.lab.tasks.registry import data_root

INSIDE = ("vqa:shapes", "vqa:easy")
"""Tasks that are made up, or lie in a package, though their names look like those of files."""


def missing_data(table: Table, root: Path | None = None, scale: str = "full") -> str | None:
    """What a scale of a table needs and what is not here; None where nothing is missing.

    >>> from attemper.lab.study.published import find_table
    >>> missing_data(find_table("explicit-cifar10"), Path("nowhere"))
    'cifar10'
    >>> missing_data(find_table("explicit-cifar10"), Path("nowhere"), "smoke") is None
    True
    """
    name, place = parse_call(table.size(scale).task)[0], data_root(root)
    if name in cifar.CIFAR:
        return None if cifar.is_there(cifar.CIFAR[name], place) else name
    kind, _, path = name.partition(":")
    if not path or name in INSIDE:
        return None
    there = any(each.exists() for each in (place / path, Path(path)))
    return None if there else f"{'folder' if kind in ('folder', 'translation') else 'file or folder'} {path}"
