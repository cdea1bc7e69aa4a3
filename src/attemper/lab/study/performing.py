"""One claimed run of a study: trained, its result saved, or what went wrong noted."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attemper.errors import first_line
from attemper.lab.errors import DeviceLostError, FolderError, LostClaimError
from attemper.lab.folders import disk_error_behind, folder_error, folder_errors
from attemper.lab.study.keeping import drop_worse
from attemper.lab.training.leaving import Leave
from attemper.lab.training.tracking import follow

if TYPE_CHECKING:
    from attemper.lab.study.claims import Claim
    from attemper.lab.study.store import Result
    from attemper.lab.study.study import Study
    from attemper.lab.tasks.notifications import LogCallback

LOST = "AcceleratorError"
"""What torch raises when a kernel went wrong; from then on everything that this process asks of the GPU fails."""


class Halt(BaseException):
    """Raised inside a run that is no longer ours, to leave it as it is: its checkpoints are another worker's now."""


def perform_run(study: Study, claim: Claim, *, stop: Callable[[], bool], device: str | None, log: LogCallback) -> None:
    """Do one claimed run, unless it is done or given up by now. Whatever happens, the claim is given back."""
    try:
        if study.store.result(claim.key) is not None:
            claim.finish()
        elif claim.key not in study.given_up():
            _train_and_save(study, claim, stop, device, log)
            claim.finish()
    except (Halt, Leave, LostClaimError):
        pass
    except FolderError:
        raise
    except Exception as error:
        _note_failure(study, claim.key, error, stop, log)
    finally:
        claim.release()


def _train_and_save(study: Study, claim: Claim, stop: Callable[[], bool], device: str | None, log: LogCallback) -> None:
    key, store = claim.key, study.store
    if store.corrupt(key):
        log(f"corrupt result set aside as {store.set_aside(key)}")
    result = _train(study, claim, stop, device, log)
    claim.check()
    if study.plan.keep != "none":
        store.keep_weights(key)
    store.save(key, result)
    drop_worse(study)


def _train(study: Study, claim: Claim, stop: Callable[[], bool], device: str | None, log: LogCallback) -> Result:
    name = study.describe(claim.key)

    def progress(event: dict[str, Any]) -> None:
        if claim.lost:
            raise Halt
        if stop():
            raise Leave
        if "warning" in event:
            log(f"{name}: {event['warning']}")
        study.store.write_progress(claim.key, event)
        follower.progress(event)

    spec = study.runs[claim.key]
    folder = study.store.work(claim.key)
    with folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with follow(
        study.settings.track,
        spec,
        key=claim.key,
        project=study.folder.absolute().name,
        name=name,
        folder=study.folder,
        log=log,
    ) as follower:
        result = study.engine.run(spec, study.task, folder=folder, progress=progress, device=device)
        follower.result(result)
    return result


def _note_failure(study: Study, key: str, error: Exception, stop: Callable[[], bool], log: LogCallback) -> None:
    """Note that a run went wrong; raise where this process cannot go on, as its disk or its device fails."""
    trouble = disk_error_behind(error)
    if trouble is not None:
        raise folder_error(trouble, Path(trouble.filename or study.folder)) from error
    lost = type(error).__name__ == LOST
    if not (lost and stop()):  # workers that end together can take a shared GPU from each other
        study.store.add_failure(key, f"{type(error).__name__}: {error}", traceback.format_exc())
        log(f"{study.describe(key)} went wrong: {type(error).__name__}: {error}")
    if lost:
        raise DeviceLostError(f"{study.describe(key)} lost its device: {first_line(error)}") from error
