"""What can go wrong with a study, one type per kind of mistake."""

from __future__ import annotations

from attemper.errors import AttemperError

__all__ = ["FolderError", "PlanError", "StoppedError", "StudyError"]


class StudyError(AttemperError):
    """A study cannot go on; the message says why and what to do."""


class FolderError(StudyError):
    """A study's folder cannot be read or written."""


class StoppedError(StudyError):
    """Somebody pressed Ctrl-C; the message says how to resume."""


class PlanError(AttemperError, ValueError):
    """A plan says something that cannot be done.

    path: where in the plan, such as ("budget", "epochs"); whoever read the plan from a file adds its line.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
