"""What all tempered modules of one model share: whether methods act now, and where penalties are entered."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from attemper.errors import ProgressError, UnmetError
from attemper.methods.base import Method
from attemper.methods.kinds import Learnable, LossTerm, Penalty
from attemper.recipe import describe
from attemper.tempering.even import Evenness
from attemper.tempering.ledger import Chain, Entry, Ledger, Ledgers
from attemper.tempering.mesh import Locator
from attemper.tempering.offsets import Samples
from attemper.tempering.standing import register

When = Literal["training", "always", "never"]


@dataclass
class Control:
    """What all tempered modules of one model share."""

    methods: tuple[Method, ...]
    """The methods as the user wrote them."""
    left_alone: dict[str, str]
    partial: bool = field(default=False, kw_only=True)
    auto_penalty: bool = False
    loss_scale: float | Callable[[], float] | None = None
    """With auto_penalty: the factor that the loop gives its loss, if somebody said it."""
    divides: bool | None = None
    """Whether the model's own loss is divided by the number of labels that a loop hands over; None: not seen yet."""
    batch_share: float = 1.0
    """The part of the whole batch that this process sees."""
    fraction: float | None = None
    """How much of training has passed, from 0 to 1; None: nobody said so."""
    epochs: float | None = None
    """How long training is, where somebody said so."""
    factors: dict[str, float] = field(default_factory=dict)
    """Method → what its rate is multiplied with now, of those whose rates depend on time."""
    resting: bool = False
    """Whether every rate is zero until one is set."""
    untold: int = 0
    """Training passes that ran before anybody said how far training is."""
    when: When = "training"
    looking: bool = False
    """Whether passes only look at a model, and train nothing."""
    trial: bool = False
    """Whether the model runs on an input that was made up, which need not reach every module."""
    told: bool = False
    """Whether the user was told that the factor of the loss cannot be seen."""
    told_fitted: bool = False
    """Whether the user was told that a method asks for more keys than some attention has."""
    last_backward: tuple[int, int] | None = None
    """Of the last backward pass under auto_penalty: the sum of the weights' versions, and its number."""
    key: int = field(init=False)
    """A number for operators, which take no objects."""
    label: str = field(init=False)
    """The same as text: of all that names a model, only text is a constant for every compiler."""
    draws: bool = field(init=False)
    """Whether the recipe, at its rates of now, draws random numbers."""
    traced: set[int] = field(default_factory=set)
    """The sites that drew in compiled code."""
    locator: Locator = field(default_factory=Locator)
    """Tells where this process stands among those that share a batch."""
    samples: Samples | None = None
    """Which samples of the whole batch this process has, if somebody said it."""
    evenness: Evenness = field(init=False)
    options: dict[str, Any] = field(default_factory=dict)
    """The keywords that apply was given, for a file that says them."""
    ledgers: Ledgers = field(default_factory=Ledgers)
    compares: bool = field(init=False)
    """Whether the recipe compares passes."""
    adds: bool = field(init=False)
    """Whether the recipe adds anything to the loss."""

    def __post_init__(self) -> None:
        self.key, self.label = register(self)
        self.evenness = Evenness(describe(self.methods))
        self.draws = any(method.stochastic for method in self.methods)
        self.compares = any(isinstance(method, LossTerm) and method.strength > 0 for method in self.methods)
        self.adds = self.compares or any(
            isinstance(method, Penalty) or (isinstance(method, Learnable) and method.adds_to_loss)
            for method in self.methods
        )

    @property
    def awaits_progress(self) -> bool:
        """Whether a rate depends on how far training is, and nobody has said so yet."""
        return self.fraction is None and len(self.factors) > 0 and not self.resting

    def count_untold(self) -> None:
        """Count a training pass before progress was told; the second one is too many."""
        if self.trial or self.looking or self.ledger.muted:
            return
        if self.untold > 0:
            raise ProgressError(
                f"the rate of {' and '.join(self.factors)} depends on how far training is (until, start, ramp), and "
                "nobody has said so: call tempered.progress(step / steps) before every step, with epochs=… where times "
                "are given in epochs. Passes that are not for training belong into tempered.disabled()."
            )
        self.untold += 1

    @property
    def ledger(self) -> Ledger:
        """What this thread's passes have added to the loss, and what they know while they run."""
        return self.ledgers.own

    def on(self, training: bool) -> bool:
        """Whether what acts in training acts now."""
        return self.when == "always" or (self.when == "training" and training)

    def penalises(self, training: bool) -> bool:
        """Whether penalties are computed now."""
        return training and self.when != "never" and torch.is_grad_enabled()

    def tracks(self, training: bool) -> bool:
        """Whether a pass now adds to the loss, so that it must not be forgotten."""
        return self.adds and self.penalises(training)

    def is_inside(self) -> bool:
        """Whether a pass is open, so that none begins or ends with a module that runs now."""
        return not torch.compiler.is_compiling() and self.ledger.open is not None

    def enter(self, entry: Entry) -> None:
        """Put a term into the ledger, if this pass counts.

        A backward pass that recomputes a checkpointed block does not, nor do later passes of a comparison. Both
        compute the term all the same: checkpointing wants the tensors of the first time again.
        """
        ledger = self.ledgers.own
        if ledger.muted:
            return
        if entry.sums and self.batch_share != 1:
            entry = entry._replace(value=entry.value / self.batch_share)
        if torch.compiler.is_compiling():
            ledger.chain = Chain(entry, ledger.chain)
        elif torch._C._current_graph_task_id() == -1:
            assert ledger.open is not None
            ledger.open.entries.append(entry)
        elif not hooks_saved_tensors():
            raise UnmetError(
                f"'{entry.site}' is checkpointed with use_reentrant=True, where its penalties are known in "
                "the backward pass only, too late to be counted; use_reentrant=False can count them"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "ledgers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, ledgers=Ledgers())
        self.key, self.label = register(self)


def hooks_saved_tensors() -> bool:
    """Whether what autograd saves goes through hooks, as in a checkpoint, which will compute it once more."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
