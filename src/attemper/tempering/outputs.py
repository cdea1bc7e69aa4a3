"""What models return, and how to run one several times as if it had run once."""

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn

from attemper.errors import ParameterError

IGNORED = -100
"""The target of a position at which nothing is to be predicted, such as padding. torch's cross-entropy skips it."""


def logits_of(out: Any) -> Tensor:
    """The predictions in a model's output: the tensor itself, its "logits", or the first tensor of a tuple."""
    if isinstance(out, Tensor):
        return out
    found = out.get("logits") if isinstance(out, dict) else getattr(out, "logits", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(out, tuple | list):
        for part in out:
            if isinstance(part, Tensor):
                return part
    raise ParameterError(
        "a comparison of passes needs logits: a tensor, a dict or output with 'logits', or a tuple that starts "
        f"with them; the model returned {type(out).__name__}"
    )


def map_tensors(out: Any, function: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """A model's output with every tensor mapped: itself, or one inside of containers and plain objects."""
    if isinstance(out, Tensor):
        return function(out)
    if isinstance(out, MutableMapping):
        for name, value in list(out.items()):
            if (new := map_tensors(value, function, depth + 1)) is not value:
                out[name] = new
        return out
    if isinstance(out, tuple | list):
        parts = [map_tensors(part, function, depth + 1) for part in out]
        if all(new is old for new, old in zip(parts, out, strict=True)):
            return out
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)
    if depth < DEPTH and hasattr(out, "__dict__") and not isinstance(out, nn.Module | type):
        for name, value in list(vars(out).items()):
            if (new := map_tensors(value, function, depth + 1)) is not value:
                setattr(out, name, new)
    return out


DEPTH = 4
"""How deep tensors are looked for in the attributes of objects."""


def counted_in(targets: Tensor) -> Tensor | None:
    """Which positions of a batch have something to predict, boolean (B, N); None: all of them.

    targets: classes (B, N), `IGNORED` at padding; or one class per sample, or probabilities, where everything counts.
    """
    return targets != IGNORED if targets.dim() > 1 and not targets.is_floating_point() else None


@contextlib.contextmanager
def frozen_batch_norm(model: nn.Module) -> Iterator[None]:
    """Context manager: inside it, batch norms do not update their running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    before = [
        (m, m.momentum, m.num_batches_tracked.clone() if m.num_batches_tracked is not None else None) for m in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            if count is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(count)
