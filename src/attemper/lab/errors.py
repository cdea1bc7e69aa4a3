"""What can go wrong in the laboratory, one type per kind of mistake."""

from attemper.errors import AttemperError, UnreadableError


class DataError(UnreadableError):
    """A data file is missing, damaged, or not what the task needs."""


class NoShardError(DataError):
    """There is no shard of that name."""


class DamagedError(UnreadableError):
    """A checkpoint is damaged, or belongs to another run."""


class StorageError(AttemperError):
    """A file could not be written: a full disk, a folder without permission."""


class RankError(AttemperError):
    """Another rank stopped, or cannot be reached."""


class StudyError(AttemperError):
    """A study cannot go on; the message says why and what to do."""


class FolderError(StudyError):
    """A study's folder cannot be read or written."""


class UnreadableFolderError(FolderError, UnreadableError):
    """A file in a study's folder cannot be read."""


class LostClaimError(StudyError):
    """Another worker has taken this run over, because this one was silent for too long."""


class StoppedError(StudyError):
    """The study was stopped with Ctrl-C; the message says how to resume."""


class PlanError(AttemperError, ValueError):
    """A plan says something that cannot be done.

    path: where in the plan, such as ("budget", "epochs"); the reader of a plan file adds the line.
    """

    def __init__(self, message: str, path: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class UnreadablePlanError(PlanError, UnreadableError):
    """The file of a plan cannot be opened."""
