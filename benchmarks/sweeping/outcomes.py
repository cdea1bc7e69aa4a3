"""What one recipe does to one model: it acts, is refused, does nothing, or crashes."""

from __future__ import annotations

import contextlib
import copy
import signal
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import attemper
from architectures.base import Architecture, Inputs, call
from attemper.errors import AttemperError
from sweeping.watching import NO_ATTENTION, NOT_RECOGNISED, AttentionCalls, Ran, kind_of, reason_of

RECIPES = {
    "dropkey": "dropkey(0.3)",
    "dropattention": "dropattention(0.3, rescale=normalize)",
    "hardmask": "hardmask(0.5)",
    "blur": "blur(2.0)",
    "consistency": "dropkey(0.3) + consistency",
    "rdrop": "dropattention(0.3, rescale=normalize) + rdrop",
    "explicit": "explicit(q=1, k=1, v=1, av=1)",
    "explicit(ff)": "explicit(ff=1)",
    "arora": "arora(q=1, k=1, v=1)",
    "cb": "cb",
    "graying": "graying(svd, where=tokens)",
    "skipless": "skipless",
    "drophead": "drophead(0.5)",
    "layerdrop": "layerdrop(0.5)",
    "droppath": "droppath(0.5)",
    "ffdropout": "ffdropout(0.3)",
    "dropconnect": "dropconnect(0.3)",
}
"""Every method once, and explicit dropout twice: on attention, and on feed-forward networks."""
ARCHITECTURAL = ("cb", "graying", "skipless")
"""What acts in eval mode too."""
PENALTIES = ("explicit", "explicit(ff)", "arora")
"""What acts in the loss only."""

ACTS, REFUSED, NO_OP, CRASH = "acts", "refused", "no-op", "crash"
TRIES = 4
OUTCOMES = (ACTS, REFUSED, NO_OP, CRASH)


class TookTooLongError(Exception):
    """A pair took longer than it may."""


@dataclass(frozen=True)
class Outcome:
    """What came of one pair."""

    kind: str
    reason: str = ""
    """Of a refusal: its class. Of a crash: the error's type. Of what acts: what is odd about it, mostly nothing."""
    stage: str = ""
    """Where that showed: "apply", "eval" or "training"."""
    message: str = ""
    """The whole message, or the traceback of a crash."""


@dataclass
class Plain:
    """The model as it is, and what it computes."""

    model: nn.Module
    inputs: Inputs
    evaluated: list[Tensor]
    trained: Passed
    attention: list[tuple[str, ...]] = field(default_factory=list)
    """For every attention call of a training pass, the modules that were running."""
    random: bool = False
    """Whether two training passes differ by themselves."""


@dataclass(frozen=True)
class Passed:
    """A training pass: outputs, loss and gradients."""

    outputs: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]


def measure_plain(architecture: Architecture) -> Plain:
    """Build a model and run it without Attemper; raises whatever the model raises."""
    model, inputs = architecture.build(), architecture.inputs()
    evaluated = evaluate(copy.deepcopy(model), inputs)
    trained = train(copy.deepcopy(model), inputs)
    again = train(copy.deepcopy(model), inputs, seed=2)
    watched = copy.deepcopy(model)
    with AttentionCalls(watched) as calls:
        train(watched, inputs)
    return Plain(model, inputs, evaluated, trained, calls.seen, not same(trained.outputs, again.outputs))


def measure_pair(plain: Plain, name: str, seconds: int = 60) -> Outcome:
    """Apply a recipe to a copy of the model, run it in both modes, and say what came of it."""
    stage = ["apply"]
    try:
        with warnings.catch_warnings(), at_most(seconds):
            warnings.simplefilter("ignore")
            return _measured(plain, name, stage)
    except AttemperError as error:
        reason = reason_of(str(error))
        if reason == NOT_RECOGNISED and not plain.attention:
            reason = NO_ATTENTION
        return Outcome(REFUSED, reason, stage[0], f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(CRASH, type(error).__name__, stage[0], traceback.format_exc())


def _measured(plain: Plain, name: str, stage: list[str]) -> Outcome:
    model = copy.deepcopy(plain.model)
    tempered = attemper.apply(model, RECIPES[name])
    stage[0] = "eval"
    evaluated = evaluate(model, plain.inputs)
    if name not in ARCHITECTURAL and not same(evaluated, plain.evaluated):
        return Outcome(CRASH, "eval output differs", "eval", "eval mode does not give what the model gave before")
    stage[0] = "training"
    sites = list(dict.fromkeys(row.site for row in tempered.summary()))
    with Ran(model) as ran:
        passed = train(model, plain.inputs, tempered=tempered)
    if not all(gradient.isfinite().all() for gradient in passed.gradients.values()):
        if all(gradient.isfinite().all() for gradient in plain.trained.gradients.values()):
            return Outcome(CRASH, "gradients not finite", "training", "gradients are infinite or not a number")
    differs = changed(plain.trained, passed) if is_told(plain, name) else False
    for seed in range(2, 2 + TRIES):  # few coins may all fall alike
        if not differs:
            differs = tried_again(plain, model, tempered, name, seed)
    if not differs:
        return Outcome(NO_OP, "", "training", f"summary: {sites[:6]}")
    return oddity(plain, tempered, sites, ran) if name == "dropkey" else idle(sites, ran)


def is_told(plain: Plain, name: str) -> bool:
    """Whether a training pass tells what a recipe does; of a model that is random itself, only what penalties do."""
    return not plain.random or name in PENALTIES


def tried_again(plain: Plain, model: nn.Module, tempered: attemper.Tempered, name: str, seed: int) -> bool:
    """Whether another seed shows a difference, in training or, for a model that is random itself, in eval mode."""
    if is_told(plain, name):
        return changed(plain.trained, train(model, plain.inputs, seed, tempered))
    with tempered.stochastic():
        return differ(plain.evaluated, evaluate(model, plain.inputs, seed))


def idle(sites: list[str], ran: Ran) -> Outcome:
    """It acts; is there a row in the summary whose module did not run?"""
    missing = [site for site in sites if kind_of(site) not in ran.kinds]
    return Outcome(ACTS, IDLE, "training", str(missing[:6])) if missing else Outcome(ACTS)


def oddity(plain: Plain, tempered: attemper.Tempered, sites: list[str], ran: Ran) -> Outcome:
    """It acts on attention; is there any that ran neither in a site nor in a module that is said to be left alone?"""
    known = {*sites, *tempered.left_alone}
    missed = [chain[0] for chain in plain.attention if not known.intersection(chain)]
    if missed:
        return Outcome(ACTS, PAST, "training", f"{len(missed)} of {len(plain.attention)} calls: {missed[:6]}")
    return idle(sites, ran)


IDLE, PAST = "a module of the summary did not run", "attention past all sites"


# ------------------------------------------------------------------------------------------------------ running a model
def evaluate(model: nn.Module, inputs: Inputs, seed: int = 1) -> list[Tensor]:
    """The outputs in eval mode."""
    model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        return call(model, copy.deepcopy(inputs))


def train(model: nn.Module, inputs: Inputs, seed: int = 1, tempered: attemper.Tempered | None = None) -> Passed:
    """One training pass, forward and backward."""
    model.train()
    model.zero_grad()
    torch.manual_seed(seed)
    outputs: list[Tensor] = []

    def forward() -> Any:
        found = call(model, copy.deepcopy(inputs))
        outputs[:] = [tensor.detach() for tensor in found]
        return found

    loss = tempered.loss(lambda: Logits(forward()), criterion) if tempered else criterion(Logits(forward()))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Passed(outputs, loss.detach(), gradients)


class Logits(dict[str, Any]):
    """All outputs of a model; the first that gets a gradient is what consistency compares."""

    def __init__(self, tensors: list[Tensor]) -> None:
        first = next((tensor for tensor in tensors if tensor.requires_grad and tensor.dim() > 1), tensors[0])
        super().__init__(logits=first)
        self.tensors = tensors


def criterion(out: Logits) -> Tensor:
    """A loss with a gradient everywhere: the outputs' mean products with fixed random numbers."""
    generator = torch.Generator().manual_seed(3)
    terms = []
    for tensor in out.tensors:
        if tensor.requires_grad:
            finite = torch.where(tensor.isfinite(), tensor, 0.0)
            terms.append((finite * torch.randn(tensor.shape, generator=generator)).mean())
    return torch.stack(terms).sum()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit; not a number equals itself."""
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True)
    )


def differ(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether tensors differ by more than another order of the same sums would make of the largest of their numbers."""
    if [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return True
    flat = [torch.cat([tensor.nan_to_num().flatten().float() for tensor in part]) for part in (one, other) if part]
    return len(flat) > 0 and bool((flat[0] - flat[1]).abs().max() > ROUNDING * flat[0].abs().max())


ROUNDING = 1e-5
"""Of float32, with some hundred operations behind each number."""


def changed(plain: Passed, tempered: Passed) -> bool:
    """Whether a training pass gave another loss, other outputs or other gradients."""
    if differ(plain.outputs, tempered.outputs) or differ([plain.loss], [tempered.loss]):
        return True
    names = [name for name in plain.gradients if name in tempered.gradients]
    return differ([plain.gradients[name] for name in names], [tempered.gradients[name] for name in names])


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Context manager: what takes more processor time inside it is interrupted. Of the main thread only."""

    def stop(signum: int, frame: Any) -> None:
        raise TookTooLongError(f"took more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
