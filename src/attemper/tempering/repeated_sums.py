"""Following residual sums in a module whose last pass was checked, and that does the same again.

`residual.py` finds out what every tensor is computed from, which takes longer than many of the functions themselves.
Most modules call the same functions in every pass. So it is enough to see that they do, and that what is added are the
tensors that were added before: the input, or what the same one of these functions gave. Whatever differs is found out
in full, with all that ran before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.tempering.branches import Branch
from attemper.tempering.known import Known
from attemper.tempering.residual import Add, Residuals, Sum, first_tensor


class KnownSum(NamedTuple):
    """A residual sum as it was: see `Sum`. sources: where its terms came from."""

    at: int
    ended: tuple[Branch, ...]
    parallel: bool
    sources: tuple[int, int]


class Step(NamedTuple):
    """A function that a module called. weights: the ids of the parameters that it multiplied with."""

    func: Any
    weights: tuple[int, ...]
    sum: KnownSum | None = None


class KnownSums:
    """What a module did in a pass that was checked.

    Where a tensor came from is the number of the function that gave it, or −1 − n for input n.
    """

    def __init__(self, steps: Sequence[Step] = (), inputs: int = 0, last: int = 0) -> None:
        self.steps, self.inputs, self.last = tuple(steps), inputs, last

    def __reduce__(self) -> Any:  # a copy of the module has other parameters
        return KnownSums, ()


class SumLog:
    """Takes down what a module does in a pass."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self.steps: list[Step] = []
        self.inputs = len(inputs)
        self.sources = Known(None)
        self.complete = True
        """Whether it is known of all sums where their terms came from."""
        for number, x in enumerate(inputs):
            self.sources.note(x, -1 - number)

    def note(self, func: Any, kind: str, args: Any, out: Any) -> None:
        """A function of a kind (`functions.py`), and what it gave."""
        self.steps.append(Step(func, weights_of(args) if kind == "product" else ()))
        self.note_made(out)

    def note_sum(self, added: Sum) -> None:
        """A residual sum that is about to be made."""
        first, second = (self.sources.of(x) for x in added.terms)
        if first is None or second is None:
            self.complete = False
        else:
            known = KnownSum(added.at, added.ended, added.parallel, (first, second))
            self.steps.append(Step(added.func, (), known))

    def note_made(self, out: Any) -> None:
        """What the last function gave."""
        if isinstance(out, Tensor):
            self.sources.note(out, len(self.steps) - 1)

    def known(self, out: Any) -> KnownSums | None:
        """What can be done again; None: where a tensor came from is not known. out: what the module gave."""
        last = self.sources.of(first_tensor(out))
        return KnownSums(self.steps, self.inputs, last) if self.complete and last is not None else None


def weights_of(args: Any) -> tuple[int, ...]:
    """The ids of the parameters among arguments."""
    return tuple([id(x) for x in args if type(x) is nn.Parameter])


class RepeatedSums(TorchFunctionMode):
    """Follows a module that is expected to do what it did before.

    start: begins to find out everything, where it does not.
    """

    def __init__(self, known: KnownSums, inputs: Sequence[Tensor], add: Add, start: Callable[[], Residuals]) -> None:
        super().__init__()
        self.known, self.inputs, self.add, self.start = known, inputs, add, start
        self.done: list[tuple[Any, Any, Any, Any]] = []
        """The functions so far: each with its arguments, and what it gave."""
        self.at, self.many = 0, len(known.steps)
        """How many there were, and how many there are going to be."""
        self.full: Residuals | None = None
        """What took over, since something was not as it was."""
        if len(inputs) != known.inputs:
            self.take_over()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self.full is None and self.at < self.many:
            step = self.known.steps[self.at]
            if (step.func is func or step.func == func) and (not step.weights or step.weights == weights_of(args)):
                if step.sum is None or self.are_alike(step.sum, args):
                    known = step.sum
                    out = (
                        func(*args, **kwargs)
                        if known is None
                        else self.add(Sum(func, args, known.at, known.ended, known.parallel))
                    )
                    self.done.append((func, args, kwargs, out))
                    self.at += 1
                    return out
        return self.take_over().__torch_function__(func, types, args, kwargs)

    def are_alike(self, known: KnownSum, terms: Any) -> bool:
        """Whether these are the terms of a sum that is known."""
        if len(terms) != 2 or any(self.made_by(n) is not x for n, x in zip(known.sources, terms, strict=True)):
            return False
        return bool(terms[0].shape == terms[1].shape)

    def made_by(self, source: int) -> Any:
        """An input, or what a function has given."""
        return self.inputs[-1 - source] if source < 0 else self.done[source][3]

    def take_over(self) -> Residuals:
        """Find out everything from the beginning."""
        if self.full is None:
            self.full = self.start()
            for func, args, kwargs, out in self.done:
                self.full.follow_again(func, args, kwargs, out)
            self.done.clear()
        return self.full

    def end(self, out: Any) -> Residuals | None:
        """What found out everything; None: the module did what it did before. out: what it gave."""
        if self.full is None and self.at == self.many:
            if self.made_by(self.known.last) is first_tensor(out):
                return None
        return self.take_over()
