"""What callbacks for other people's training loops have in common: they temper, tell progress, probe and log."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from attemper.errors import NoSiteError, ParameterError
from attemper.methods.base import Method
from attemper.methods.kinds import LossTerm
from attemper.methods.rates import Timed
from attemper.probes.diagnosis import diagnose
from attemper.probes.table import Table
from attemper.recipe import as_methods, describe
from attemper.tempering import Tempered, apply

SAMPLES = 8
"""How many samples are probed where nobody gave a batch."""


class Companion:
    """Goes along with the training of one model in a loop that belongs to somebody else.

    recipe: what `attemper.apply` takes; None: the model is tempered already.
    probes: names of `attemper.probes.PROBES`, to be looked at before training, and then on a schedule.
    probe_every: steps of the optimiser between two looks; None: once at the end of every epoch.
    probe_batch: what the model is called with for that; None: the first samples of the training data.
    options: further keywords of `attemper.apply`.
    """

    def __init__(
        self,
        recipe: str | Method | Sequence[Method] | None = None,
        *,
        probes: Sequence[str] = (),
        probe_every: int | None = None,
        probe_batch: Any = None,
        **options: Any,
    ) -> None:
        if probe_every is not None and (isinstance(probe_every, bool) or probe_every < 1):
            raise ParameterError(f"probe_every must be a number of steps, at least 1, or None; got {probe_every!r}")
        if "auto_penalty" in options:
            raise ParameterError("auto_penalty is not an option of a callback: it brings penalties along by itself")
        self.recipe = None if recipe is None else tuple(as_methods(recipe))
        self.probes = (probes,) if isinstance(probes, str) else tuple(probes)
        self.probe_every, self.probe_batch = probe_every, probe_batch
        self.options = options
        self.handle: Tempered | None = None
        self.tables: dict[int, Table] = {}
        """What the probes found, by step of the optimiser."""

    @property
    def tempered(self) -> Tempered:
        """The handle to the model."""
        if self.handle is None:
            raise NoSiteError("the model is not tempered yet: that is done when the trainer gets it")
        return self.handle

    # ----------------------------------------------------------------------------------------------------- beginning
    def temper(self, model: nn.Module, automatic: bool) -> Tempered:
        """Temper a model, unless this was done before.

        automatic: whether penalties have to come along by themselves.
        """
        if self.handle is None or self.handle.model is not model:
            if self.recipe is None:
                self.handle = Tempered.of(model)
            else:
                self.handle = apply(model, self.recipe, **self.options)
        self.handle.control.auto_penalty = automatic and self.handle.control.adds
        return self.handle

    @property
    def comparison(self) -> str | None:
        """The method of the recipe that compares passes, if it has one."""
        methods = self.handle.methods if self.handle is not None else self.recipe or ()
        return next((method.name for method in methods if isinstance(method, LossTerm)), None)

    @property
    def timed(self) -> bool:
        """Whether a rate depends on how far training is."""
        return any(isinstance(method, Timed) and method.is_timed for method in self.tempered.methods)

    def progress(self, step: int, steps: float, epochs: float | None) -> None:
        """Say how far training is, in steps of the optimiser; epochs: how long it is in all."""
        if not self.timed:
            return
        if not (math.isfinite(steps) and steps > 0):
            raise ParameterError(
                f"the rates of '{describe(self.tempered.methods)}' depend on how far training is, and this trainer "
                "does not know how long it will be; give it a number of steps (max_steps) or of epochs"
            )
        self.tempered.progress(min(step / steps, 1.0), epochs)

    # ---------------------------------------------------------------------------------------------------- in numbers
    def figures(self) -> dict[str, float]:
        """Rates and penalties of now, by the names under which they are logged."""
        rates: dict[str, list[float]] = {}
        for row in self.tempered.summary():
            if row.rate is not None:
                rates.setdefault(row.method, []).append(row.rate)
        found = {f"attemper/rate/{name}": sum(each) / len(each) for name, each in rates.items()}
        for term in self.tempered.penalties():
            name = f"attemper/penalty/{term.method}"
            found[name] = found.get(name, 0.0) + term.value
        return found

    def probe(self, step: int, batch: Any) -> dict[str, float]:
        """Look at the model, keep what was seen, and give it in numbers."""
        if not self.probes:
            return {}
        table = self.tables[step] = diagnose(
            self.tempered.model, batch, self.probes, targets=self.options.get("targets")
        )
        return {f"attemper/{name}": value for name, value in averages(table).items()}

    def due(self, step: int) -> bool:
        """Whether the probes are to look behind this step."""
        return self.probe_every is not None and step % self.probe_every == 0


def averages(table: Table) -> dict[str, float]:
    """What probes found, one number for each column: means over heads and places; of logits the largest."""
    found: dict[str, float] = {}
    for name in ("normalised", "to_uniform", "distance", "q_norm", "k_norm"):
        values = [value for row in table.heads if (value := getattr(row, name)) is not None]
        if values:
            found["entropy" if name == "normalised" else name] = sum(values) / len(values)
    logits = [row.logit_max for row in table.heads if row.logit_max is not None]
    if logits:
        found["logit_max"] = max(logits)
    for name in ("condition", "effective_rank", "similarity"):
        values = [getattr(row, name) for row in table.tokens]
        if values:
            found[name] = sum(values) / len(values)
    found["flagged_heads"] = float(sum(len(row.flags) > 0 for row in table.heads))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def first_samples(loader: Any) -> Any:
    """The first samples of a data loader's data set, collated; random states are as before."""
    try:
        data, collate = loader.dataset, loader.collate_fn
        with same_randomness():
            return collate([data[at] for at in range(min(SAMPLES, len(data)))])
    except (AttributeError, TypeError, NotImplementedError):
        raise ParameterError(
            "the probes need a batch, and this data set cannot be asked for its first samples: give one as probe_batch="
        ) from None


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Context manager: what is drawn inside leaves the random states as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {name: on_device(part, device) for name, part in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(part, device) for part in batch)
    return batch
