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

__all__ = ["SCALES", "Column", "Row", "Size", "Stated", "Table", "catalogue", "find_table"]


def catalogue() -> list[Table]:
    """Every published table, those that cannot be run yet among them.

    >>> [table.key for table in catalogue()][:2]
    ['explicit-cifar10', 'explicit-cifar100']
    """
    modules = (explicit, gtzan, thumos, broadcasting, dropkey, attentiondrop, skip_attention, listed)
    return [table for module in modules for table in module.TABLES]


def find_table(key: str) -> Table:
    """The table of this key.

    >>> find_table("explicit-cifar10").rows[0].name
    'none'
    """
    tables = {table.key: table for table in catalogue()}
    if key not in tables:
        raise ParameterError(f"There is no table '{key}'.{suggestion(key, tables)} There are: {', '.join(tables)}.")
    return tables[key]
