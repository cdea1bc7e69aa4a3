"""The published tables to compare with: other people's figures as data, and plans that run them again."""

from attemper.errors import ParameterError, suggestion
from attemper.lab.study.published import explicit, gtzan, others, thumos
from attemper.lab.study.published.table import SCALES, Row, Size, Table

__all__ = ["SCALES", "Row", "Size", "Table", "catalogue", "find_table"]


def catalogue() -> list[Table]:
    """Every published table that can be run again.

    >>> [table.key for table in catalogue()][:2]
    ['explicit-cifar10', 'explicit-cifar100']
    """
    return [*explicit.TABLES, *gtzan.TABLES, *thumos.TABLES, *others.TABLES]


def find_table(key: str) -> Table:
    """The table of this key.

    >>> find_table("explicit-cifar10").rows[0].name
    'none'
    """
    tables = {table.key: table for table in catalogue()}
    if key not in tables:
        raise ParameterError(f"There is no table '{key}'.{suggestion(key, tables)} There are: {', '.join(tables)}.")
    return tables[key]
