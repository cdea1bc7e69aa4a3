"""Penalties of a tempered model: the ledger that collects them, and how they reach a loop that cannot be changed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method

When = Literal["training", "always", "never"]


@dataclass(frozen=True)
class Entry:
    """One term that a forward pass added to the loss."""

    site: str
    block: int
    method: str
    component: str
    value: Tensor
    sums: bool = False
    """Whether the value is a sum over samples; otherwise it is a mean."""


@dataclass
class Control:
    """What all tempered modules of one model share."""

    methods: tuple[Method, ...]
    """The methods as the user wrote them."""
    left_alone: dict[str, str]
    partial: bool = field(default=False, kw_only=True)
    auto_penalty: bool = False
    loss_scale: float | Callable[[], float] = 1.0
    batch_share: float = 1.0
    """The part of the whole batch that this process sees."""
    when: When = "training"
    muted: bool = False
    """While True, penalties do not count: the second pass of a comparison."""
    ledger: list[Entry] = field(default_factory=list)
    padding: dict[int, Tensor] = field(default_factory=dict)
    """Block → boolean (B, N), True for real tokens, as its attention saw them last."""
    entry_padding: Tensor | None = None
    """The same before the first block, as far as the arguments of the block tell."""
    embedded: list[tuple[str, Tensor, Tensor]] | None = None
    """While two passes are compared: the name, the image and the tokens of every patch embedding in the first one."""

    def on(self, training: bool) -> bool:
        """Whether what acts in training acts now."""
        return self.when == "always" or (self.when == "training" and training)

    def penalises(self, training: bool) -> bool:
        """Whether penalties are computed now."""
        return training and self.when != "never" and torch.is_grad_enabled()

    def enter(self, entry: Entry) -> None:
        """Put a term into the ledger, if this pass counts.

        A backward pass that recomputes a checkpointed block does not, nor does the second pass of a comparison. Both
        compute the term all the same: checkpointing wants the tensors of the first time again.
        """
        if self.muted:
            return
        if entry.sums and self.batch_share != 1:
            entry = replace(entry, value=entry.value / self.batch_share)
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            self.ledger.append(entry)
        elif not hooks_saved_tensors():
            raise UnmetError(
                f"'{entry.site}' is checkpointed with use_reentrant=True, where its penalties are known in "
                "the backward pass only, too late to be counted; use_reentrant=False can count them"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "ledger": [], "padding": {}, "entry_padding": None, "embedded": None}


def hooks_saved_tensors() -> bool:
    """Whether what autograd saves goes through hooks, as in a checkpoint, which will compute it once more."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def share_of_step(module: nn.Module, kwargs: Any) -> Tensor | float:
    """Which part of an optimiser's step this pass is, where the loop says so.

    Transformers' Trainer hands over how many labels the whole step has, in all batches whose gradients it adds up. The
    model then divides the sum of its losses by that number, and nothing is divided by the number of batches.
    """
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels", kwargs.get("labels"))
    if items is None or not isinstance(labels, Tensor):
        return 1.0
    if "shift_labels" not in kwargs and getattr(module, "loss_type", None) == "ForCausalLM":
        labels = labels[..., 1:]  # the first token of a text is never predicted
    share: Tensor = labels.ne(-100).sum() / items
    return share


def with_penalty(out: Any, penalty: Tensor, control: Control) -> Any:
    """A model's output, changed so that backward through it adds the penalty's gradient.

    An output that holds its own loss, as Transformers' do, gets the penalty added to it. Any other keeps its values,
    and the gradient of control.loss_scale · penalty is added when backward passes through its first tensor.
    """
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        out["loss"] = loss + penalty
        return out
    if isinstance(out, Tensor):
        return cast(Tensor, Attach.apply(out, penalty, control))
    if isinstance(out, dict):
        name = next(name for name, value in out.items() if isinstance(value, Tensor) and value.requires_grad)
        out[name] = Attach.apply(out[name], penalty, control)
        return out
    index = next(i for i, value in enumerate(out) if isinstance(value, Tensor) and value.requires_grad)
    parts = [Attach.apply(value, penalty, control) if i == index else value for i, value in enumerate(out)]
    return type(out)(parts)


class Attach(torch.autograd.Function):
    """The first argument as it is; backward sends the loss scale to the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, control: Control) -> Tensor:
        ctx.control, ctx.like = control, penalty
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.control.loss_scale
        return grad, torch.full_like(ctx.like, scale() if callable(scale) else scale), None
