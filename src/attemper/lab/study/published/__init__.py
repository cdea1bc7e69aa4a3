"""The published tables to compare with: other people's figures as data, and plans that run them again."""

from attemper.errors import ParameterError, suggestion
from attemper.lab.study.published import (
    attentiondrop,
    broadcasting,
    dropkey,
    explicit,
    gtzan,
    listed,
    skip_attention,
    thumos,
)
from attemper.lab.study.published.table import SCALES, Column, Row, Size, Stated, Table

__all__ = ["SCALES", "Column", "Row", "Size", "Stated", "Table", "catalogue", "find_table", "tables_of"]


def catalogue() -> list[Table]:
    """Every published table, those that cannot be run yet among them.

    >>> [table.key for table in catalogue()][:2]
    ['explicit-cifar10', 'explicit-cifar100']
    """
    modules = (explicit, gtzan, thumos, broadcasting, dropkey, attentiondrop, skip_attention, listed)
    return [table for module in modules for table in module.TABLES]


def tables_of(paper: str | None = None) -> list[Table]:
    """The tables of a paper, by a part of its name or of a table's key; all of them without one.

    >>> {table.paper for table in tables_of("dropkey")}
    {'DropKey'}
    """
    found = catalogue()
    if paper is None:
        return found
    papers = list(dict.fromkeys(table.paper for table in found))
    wanted = [table for table in found if paper.lower() in table.paper.lower()]
    wanted = wanted or [table for table in found if table.key.startswith(paper.lower())]
    if not wanted:
        near = suggestion(paper, papers)
        raise ParameterError(f"There is no table of a paper '{paper}'.{near} There are: {', '.join(papers)}.")
    return wanted


def find_table(key: str) -> Table:
    """The table of this key.

    >>> find_table("explicit-cifar10").rows[0].name
    'none'
    """
    tables = {table.key: table for table in catalogue()}
    if key in tables:
        return tables[key]
    if key and (beginning := [name for name in tables if name.startswith(key.lower())]):
        raise ParameterError(f"There is no table '{key}'. Those that begin so: {', '.join(beginning)}.")
    raise ParameterError(f"There is no table '{key}'.{suggestion(key, tables)} There are: {', '.join(tables)}.")
