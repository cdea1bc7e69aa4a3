"""auto_penalty: how penalties reach a training loop that cannot be changed."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import PenaltyError
from attemper.tempering.outputs import map_tensors
from attemper.tempering.penalties import Control


def share_of_step(module: nn.Module, kwargs: Any, control: Control) -> Tensor | float:
    """Which part of an optimiser's step this pass is, where the loop says so and the model's loss comes as such a part.

    Transformers' Trainer hands over how many labels the whole step has, in all batches whose gradients it adds up. The
    model then divides the sum of its losses by that number, and nothing is divided by the number of batches.
    """
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels", kwargs.get("labels"))
    if items is None or not isinstance(labels, Tensor) or control.divides is False:
        return 1.0
    if "shift_labels" not in kwargs and predicts_next(module):
        labels = labels[..., 1:]  # the first token of a text is never predicted
    share: Tensor = labels.ne(-100).sum() / items
    return share


class DivisorWatch(TorchFunctionMode):
    """Sees whether a loss is computed with the number of labels of the step, which many models take and never read."""

    def __init__(self, items: Any, control: Control) -> None:
        super().__init__()
        self.items, self.control = items, control

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(each is self.items for each in (*args, *(kwargs or {}).values())):
            self.control.divides = True
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.control.divides is None:
            self.control.divides = False


def watch_divisor(items: Any, control: Control) -> contextlib.AbstractContextManager[Any]:
    """Context manager: the first pass inside of one tells whether the loss is divided by the number of labels."""
    if not isinstance(items, Tensor) or control.divides is not None or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return DivisorWatch(items, control)


def predicts_next(module: nn.Module) -> bool:
    """Whether a model of Transformers predicts the next token, and shifts its labels itself."""
    kinds = ("ForCausalLM", "ForConditionalGeneration", "CsmForConditionalGeneration")
    encodes = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    return getattr(module, "loss_type", None) in kinds and not encodes


def with_penalty(out: Any, penalty: Tensor, control: Control, module: nn.Module) -> Any:
    """A model's output, changed so that backward through it adds the penalty's gradient.

    An output that is or holds a loss (a scalar with a gradient) gets the penalty added to it: whatever factor the loop
    gives the loss, the penalty gets, too. Any other keeps its values, and the gradient of loss_scale · penalty is added
    when backward passes through it.
    """
    loss = own_loss(out)
    if loss is not None:
        return map_tensors(out, lambda x: x + penalty if x is loss else x)
    if torch.compiler.is_compiling():
        first = next((x for x in found(out) if x.requires_grad), None)
        return map_tensors(out, lambda x: Attach.apply(x, penalty, control) if x is first else x)
    factor = Factor(control, module)
    factor.check(out)
    return map_tensors(out, lambda x: AttachOnce.apply(x, penalty, factor) if x.requires_grad else x)


def found(out: Any) -> list[Tensor]:
    """The tensors of an output."""
    tensors: list[Tensor] = []
    map_tensors(out, lambda x: tensors.append(x) or x)  # type: ignore[func-returns-value]
    return tensors


def own_loss(out: Any) -> Tensor | None:
    """The loss that a model computed itself: what is called so, or the first scalar that has a gradient."""
    named = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(named, Tensor):
        return named
    return next((x for x in found(out) if x.dim() == 0 and x.requires_grad), None)


class Factor:
    """What the penalty of one pass is multiplied with where the loss is computed outside of the model."""

    def __init__(self, control: Control, module: nn.Module) -> None:
        self.control, self.module = control, module
        self.task = -1
        """The backward pass in which the penalty was sent off."""

    def check(self, out: Any) -> None:
        """Say that the loop's factor cannot be seen; refuse where it is certain that there is one."""
        if self.control.loss_scale is not None:
            return
        half = any(x.dtype == torch.float16 or _float16(x.device.type) for x in found(out) if x.requires_grad)
        if half:
            raise PenaltyError(
                "auto_penalty cannot see the factor of a loss scaler, which float16 needs: set tempered.loss_scale = "
                "scaler.get_scale (or 1.0 if the loss is not scaled), or let the model compute its own loss"
            )
        if not self.control.told:
            self.control.told = True
            warnings.warn(
                "auto_penalty: the loss is computed outside of the model, so the factor that the training loop gives "
                "it cannot be seen, and penalties are added with the factor 1. Under gradient accumulation or loss "
                "scaling set tempered.loss_scale; tempered.loss_scale = 1.0 says that there is neither.",
                stacklevel=2,
            )

    def __call__(self) -> float:
        """The factor, once in every backward pass, however many parts of the output it goes through."""
        task = torch._C._current_graph_task_id()
        if task == self.task:
            return 0.0
        self.task = task
        if self.control.loss_scale is not None:
            return evaluated(self.control.loss_scale)
        self.refuse_accumulation()
        return 1.0

    def refuse_accumulation(self) -> None:
        """Raise where gradients of an earlier backward pass wait for a step: the loop may divide its losses."""
        weights = [p for p in self.module.parameters() if p.requires_grad]
        versions, task = sum(p._version for p in weights), torch._C._current_graph_task_id()
        before, self.control.last_backward = self.control.last_backward, (versions, task)
        if before is None or before[0] != versions or before[1] == task:
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in weights):
            raise PenaltyError(
                "auto_penalty: gradients of several backward passes are added up, and whether the loop divides each "
                "loss cannot be seen. Set tempered.loss_scale = 1/steps if it does, 1.0 if it does not."
            )


def evaluated(scale: float | Callable[[], float]) -> float:
    """A factor, from a number or from a function that gives it."""
    return float(scale() if callable(scale) else scale)


def _float16(device: str) -> bool:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


class Attach(torch.autograd.Function):
    """The first argument as it is; backward sends the loss scale to the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, control: Control) -> Tensor:
        ctx.control, ctx.like = control, penalty
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.control.loss_scale
        return grad, torch.full_like(ctx.like, 1.0 if scale is None else evaluated(scale)), None


class AttachOnce(torch.autograd.Function):
    """The same for each of several parts of an output, where one backward pass sends it once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor, factor: Factor) -> Tensor:
        ctx.factor, ctx.dtype, ctx.device = factor, penalty.dtype, penalty.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.factor(), dtype=ctx.dtype, device=ctx.device), None
