"""Probes during training: the same few images every so many steps, without any effect on the training."""

import math
import statistics
from typing import Any

import torch
from torch import nn

from attemper.errors import ParameterError
from attemper.probes.diagnosis import head_rows
from attemper.probes.table import HeadRow
from attemper.probes.watching import find_attention, in_eval

IMAGES = 32
"""So many images are looked at: enough for means over queries, few enough to cost less than a step."""

LOOKED_AT = frozenset({"entropy", "logits"})


class Recorder:
    """Entropy and largest logit of every block.

    inputs: what the model takes; its first images are kept.
    every: steps between two looks.
    """

    def __init__(self, model: nn.Module, inputs: Any, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ParameterError(f"probe_every is {every!r}; it must be a number of steps, at least 1.")
        self.model, self.inputs, self.every = model, inputs[:IMAGES], every
        self.sites = find_attention(model)

    def after(self, step: int) -> list[dict[str, Any]]:
        """What is recorded after this step: one entry per block, or nothing where it is not time.

        entropy: normalised, the mean over heads. logit_max: the largest of all heads.
        """
        if step % self.every:
            return []
        with in_eval(self.model), torch.no_grad():
            rows, _ = head_rows(self.model, self.inputs, self.sites, LOOKED_AT)
        return [
            {
                "step": step,
                "block": block,
                "entropy": _finite(statistics.fmean(_of(rows, block, "normalised"))),
                "logit_max": _finite(max(_of(rows, block, "logit_max"))),
            }
            for block in sorted({row.block for row in rows})
        ]


def _of(rows: tuple[HeadRow, ...], block: int, name: str) -> list[float]:
    return [getattr(row, name) for row in rows if row.block == block]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
