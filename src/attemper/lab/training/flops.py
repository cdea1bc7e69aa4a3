"""Floating-point operations: of one sample's forward pass, and of a training step, forward and backward.

They are counted by torch's `FlopCounterMode` on the meta device, where nothing is computed. So the count is that of
the plain computation, the same on every machine, whatever kernels a run is made with. Matrix products, convolutions and
attention count, a product and its addition as two; elementwise work, norms, softmax and factorisations do not.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch

import attemper
from attemper.lab.models.registry import build_model
from attemper.lab.tasks.base import Task, output_of
from attemper.lab.tasks.seed_streams import drawing_from
from attemper.lab.training.distillation import prepare_student
from attemper.lab.training.randomness import preserved_random_state
from attemper.lab.training.rates import at_full_rate
from attemper.lab.training.spec import RunSpec
from attemper.tempering.outputs import counted_in


class Flops(TypedDict):
    """What was counted."""

    forward: int
    """Of one sample in eval mode."""
    step: int
    """Of all batches between two steps of the optimiser in training mode, with all that the recipe adds to the loss;
    without what a teacher computes."""


_KNOWN: dict[Any, Flops | None] = {}
"""What was counted before in this process: the seeds of a study have all of it in common."""


def count_flops(spec: RunSpec, task: Task, batch_size: int, accumulate: int = 1) -> Flops | None:
    """What a run computes; None where its model does not run on the meta device.

    batch_size: samples per batch, of all ranks together. accumulate: batches per step of the optimiser.
    """
    wanted = (spec.model, spec.recipe, task.shape, type(task), batch_size, accumulate, spec.budget.teacher is not None)
    if wanted not in _KNOWN:
        try:
            with preserved_random_state(), drawing_from(0):
                _KNOWN[wanted] = _counted(spec, task, batch_size, accumulate)
        except Exception:  # models of other libraries that look at values, in ways that nobody can list
            _KNOWN[wanted] = None
    return _KNOWN[wanted]


def _counted(spec: RunSpec, task: Task, batch_size: int, accumulate: int) -> Flops:
    model = build_model(spec.model, task.shape, trained=False)
    tempered = attemper.apply(model, at_full_rate(spec).recipe)
    if spec.budget.teacher is not None:
        prepare_student(model)
    model.to("meta")
    inputs, targets = (part.to("meta") for part in task.shape.example(batch_size))

    def criterion(out: Any) -> torch.Tensor:
        seen = output_of(task, out)  # a loss that waits for values has none here; it is no more than elementwise work
        return seen.sum() if getattr(task, "waits", False) else task.loss(seen, targets)

    def step() -> None:
        tempered.loss(lambda: model(inputs), criterion, counted_in(targets)).backward()

    model.eval()
    with torch.no_grad():
        forward = count(lambda: model(inputs[:1]))
    model.train()
    return Flops(forward=forward, step=accumulate * count(step))


def count(act: Callable[[], Any]) -> int:
    """The floating-point operations of whatever `act` does.

    >>> count(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60
    """
    from torch.utils.flop_counter import FlopCounterMode  # which loads Triton

    with FlopCounterMode(display=False, custom_mapping=CORRECTED) as counter:
        act()
    return int(counter.get_total_flops())


def _convolution_backward(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool], **_: object,
) -> int:  # fmt: skip
    """Each of the two gradients, of inputs and of weights, has as many products as the convolution itself.

    torch's own formula takes the channels of all groups to meet in the gradient of weights: for a depthwise convolution
    of 256 channels it counts 256 times as much.
    """
    places = math.prod((x if transposed else grad)[2:])
    return 2 * x[0] * places * math.prod(weight) * sum(wanted[:2])


CORRECTED = {torch.ops.aten.convolution_backward: _convolution_backward}
