"""Trackers by name: our own, and those that other packages add under the entry point `attemper.trackers`."""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable

from attemper.errors import AttemperError, ParameterError, suggestion
from attemper.lab.tracking.base import Tracker

OWN = {
    "tensorboard": ("attemper.lab.tracking.tensorboard:TensorBoard", "event files in the study's folder"),
    "trackio": ("attemper.lab.tracking.wandb:trackio", "trackio's local dashboard, or a Space of Hugging Face"),
    "wandb": ("attemper.lab.tracking.wandb:wandb", "Weights & Biases"),
}
INSTALL = {"tensorboard": "'attemper[study]'", "trackio": "trackio", "wandb": "wandb"}
"""What to install for a tracker."""


def list_trackers() -> dict[str, str]:
    """Every tracker's name, with a line about it."""
    own = {name: line for name, (_, line) in OWN.items()}
    return own | {name: f"from {entry.value}" for name, entry in _added().items()}


@functools.cache
def _added() -> dict[str, importlib.metadata.EntryPoint]:
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group="attemper.trackers"):
        if entry.name in OWN or entry.name in found:
            raise AttemperError(f"entry point '{entry.name}' of attemper.trackers names a tracker that exists")
        found[entry.name] = entry
    return found


def make_tracker(name: str) -> Tracker:
    """A new tracker for one run; a package that it lacks is named, with what to install."""
    maker = _maker(name)
    try:
        tracker = maker()
    except ModuleNotFoundError as error:
        install = f": pip install {INSTALL[name]}" if name in INSTALL else ""
        raise ParameterError(f"--track {name} needs '{error.name}', which is not installed{install}") from None
    missing = [method for method in ("start", "log", "finish") if not callable(getattr(tracker, method, None))]
    if missing:
        raise AttemperError(f"The tracker '{name}' lacks {', '.join(missing)}; a tracker has start, log and finish.")
    return tracker


def _maker(name: str) -> Callable[[], Tracker]:
    if name in OWN:
        module, _, attribute = OWN[name][0].partition(":")
        maker: Callable[[], Tracker] = getattr(importlib.import_module(module), attribute)
        return maker
    if name in _added():
        added: Callable[[], Tracker] = _added()[name].load()
        return added
    known = list_trackers()
    raise ParameterError(f"There is no tracker '{name}'.{suggestion(name, known)} There are: {', '.join(known)}.")


def check_trackers(names: Iterable[str]) -> None:
    """Raise if one does not exist, stands twice, or lacks its package."""
    names = list(names)
    for name in names:
        if names.count(name) > 1:
            raise ParameterError(f"--track names {name} twice.")
        make_tracker(name)
