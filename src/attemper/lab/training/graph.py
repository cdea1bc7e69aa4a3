"""The whole training step as one CUDA graph: on small models a step is bound by launches, not by arithmetic."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper.lab.training.data import RunData
from attemper.lab.training.learner import Learner
from attemper.methods.rates import Timed

Step = Callable[[Tensor, Tensor], None]
"""Inputs and targets of a batch → one step of training."""

WARM_UP = 3
"""Steps before the capture: libraries set themselves up, autotuners and compilers finish."""


def can_capture(learner: Learner, data: RunData) -> bool:
    """Whether a graph can serve: on one GPU, every batch of the same shape, every batch a step of the optimiser.

    Rates are numbers in a graph; one that changes with every step would need as many graphs. A task whose loss waits
    for the GPU, such as for a matching of boxes, says so by `waits`.
    """
    on_one_gpu = learner.device.type == "cuda" and learner.ranks.alone
    ramps = any(isinstance(method, Timed) and method.ramp is not None for method in learner.tempered.methods)
    waits = getattr(learner.task, "waits", False)
    return on_one_gpu and data.train.in_memory and data.accumulate == 1 and not ramps and not waits


def fastest(learner: Learner, data: RunData, warn: Callable[[str], None] = lambda text: None) -> Step:
    """The fastest form of `learner.learn` that can serve this run."""
    return GraphedStep(learner, warn) if can_capture(learner, data) else learner.learn


class GraphedStep:
    """`learner.learn`, captured when it is first called. Weights and states are what they would be without it.

    A model that cannot be captured, since something in it waits for the GPU, runs without a graph, with a warning.
    """

    def __init__(self, learner: Learner, warn: Callable[[str], None]) -> None:
        self.learner = learner
        self.warn = warn
        self.step: Step | None = None
        self.factors: dict[str, float] = {}
        """Of the rates that depend on time, as they were when the step was captured."""

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        if self.step is None or self.factors != self.learner.tempered.control.factors:
            self.factors = self.learner.tempered.control.factors
            self.inputs, self.targets = inputs.clone(), targets.clone()
            self.warm_up()
            try:
                self.graph = self.capture()
                self.step = self.replay
            except RuntimeError as error:
                self.learner.forget()
                renew_generator(self.learner.device)
                self.step = self.learner.learn
                self.warn(f"The step cannot be captured in a CUDA graph, and runs without one: {error}")
        self.step(inputs, targets)

    def replay(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.graph.replay()

    def warm_up(self) -> None:
        """Make some steps on the first batch, and undo what they changed."""
        device = self.learner.device
        before = Snapshot(self.learner)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self.learner.learn(self.inputs, self.targets)
        torch.cuda.current_stream(device).wait_stream(stream)
        before.restore()

    def capture(self) -> torch.cuda.CUDAGraph:
        """Record one step without running it."""
        self.learner.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.learner.learn(self.inputs, self.targets)
        return graph


def renew_generator(device: torch.device) -> None:
    """Give a GPU a generator in the same state. A capture that failed leaves the old one unable to draw."""
    index = torch.cuda.current_device() if device.index is None else device.index
    old = torch.cuda.default_generators[index]
    new = torch.Generator(device)
    new.set_state(old.get_state())
    old.graphsafe_set_state(new.graphsafe_get_state())


class Snapshot:
    """All tensors that a step changes. Restored in place, since a graph has them by their addresses."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.kept = [tensor.detach().clone() for tensor in self.live()]
        self.optimizer = copy.deepcopy(learner.optimizer.state_dict()["state"])
        self.random = torch.cuda.get_rng_state(learner.device)

    def live(self) -> list[Tensor]:
        learner, meter = self.learner, self.learner.meter
        average = learner.average.values if learner.average is not None else []
        counters = [meter.sums, meter.batches, meter.bad_batch, meter.bad_loss]
        return [*learner.model.parameters(), *learner.model.buffers(), *average, *counters]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, kept in zip(self.live(), self.kept, strict=True):
            tensor.copy_(kept)
        state: dict[int, dict[str, Any]] = self.learner.optimizer.state_dict()["state"]
        for index, slots in state.items():
            for name, value in slots.items():
                if index in self.optimizer:
                    value.copy_(self.optimizer[index][name])
                else:  # Adam's state is made in its first step, of zeros
                    value.zero_()
        torch.cuda.set_rng_state(self.random, self.learner.device)
