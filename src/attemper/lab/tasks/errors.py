"""What can be wrong with data."""

from __future__ import annotations

from attemper.errors import AttemperError

__all__ = ["DataError"]


class DataError(AttemperError):
    """A data file is missing, damaged, or not what the task needs."""
