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


class OtherRunError(StorageError):
    """A folder holds another run, or files of something else, which would be overwritten."""


class VersionsError(AttemperError):
    """What shall be continued was made under other versions, and nobody has accepted that."""


class RankError(AttemperError):
    """Another rank stopped, or cannot be reached."""


class StudyError(AttemperError):
    """A study cannot go on; the message says why and what to do."""


class DeviceLostError(StudyError):
    """The GPU of a process can no longer be used by it: only another process can go on."""


class FolderError(StudyError):
    """A study's folder cannot be read or written."""


class UnreadableFolderError(FolderError, UnreadableError):
    """A file in a study's folder cannot be read."""


class LostClaimError(StudyError):
    """Another worker has taken this run over, because this one was silent for too long."""


class StoppedError(StudyError):
    """A run or a study was stopped by a signal; the message says how to go on.

    code: for the end of the program; 128 and the number of the signal.
    """

    def __init__(self, message: str, code: int = 130) -> None:
        super().__init__(message)
        self.code = code


PlanPath = tuple[str | int, ...]
"""Keys and indices that lead to a value of a plan, such as ("budget", "epochs")."""


class PlanError(AttemperError, ValueError):
    """A plan says something that cannot be done.

    path: where in the plan; the reader of a plan file adds the line.
    """

    def __init__(self, message: str, path: PlanPath = ()) -> None:
        super().__init__(message)
        self.path = path


class UnreadablePlanError(PlanError, UnreadableError):
    """The file of a plan cannot be opened."""


class DamagedPlanError(UnreadablePlanError):
    """A study's own copy of its plan is not what it was when it was written."""
