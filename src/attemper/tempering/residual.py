"""Following the residual stream through a block: where branches are added to it, and what each of them computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

ATTENTION, MLP, STREAM = 1, 2, 4
"""What a tensor was computed from since the last sum: attention, the last layer of an MLP, the residual stream."""

Add = Callable[[Any, tuple[Tensor, Tensor], Tensor, int], Tensor]
"""Makes the sum of stream and branch: (the addition, its two terms, the branch among them, what it was made of)."""


def plain_sum(func: Any, terms: tuple[Tensor, Tensor], branch: Tensor, made_of: int) -> Tensor:
    """The sum as it is."""
    out: Tensor = func(*terms)
    return out


class Residuals(TorchFunctionMode):
    """Follows the residual stream while a block runs, and hands over each sum of the stream and a branch.

    Every tensor that is computed in the block inherits what its operands were made of, up to the sum that ends the
    branch. So a branch is known by what it computes, not by its turn: a position that is added is no branch, and two
    branches that are computed side by side are told apart.
    """

    def __init__(self, inputs: Sequence[Tensor], lasts: Sequence[nn.Module], add: Add = plain_sum) -> None:
        super().__init__()
        self.lasts = lasts
        """The last layers of the block's MLPs."""
        self.add = add
        self.origins = Known(-1)
        """The number of the input whose stream a tensor belongs to."""
        self.earlier = Known(-1)
        """The same for what the stream was before its last sum."""
        self.made = Known(0)
        """What a tensor was made of."""
        self.sums: list[int] = []
        """What the branches were made of that were added to the stream, in order."""
        self.since = 0
        """What was computed since the last sum."""
        self.overwrites = False
        """Whether an input was changed in place."""
        self.inputs = inputs
        for number, x in enumerate(inputs):
            self.follow(x, number)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDITIONS and len(args) == 2 and len(kwargs) == 0 and isinstance(args[1], Tensor):
            left, right = self.origin(args[0]), self.origin(args[1])
            if left >= 0 or right >= 0:
                return self.sum(func, args, left, right)
        out = func(*args, **kwargs)
        if func in CHANGES and self.origin(args[0]) >= 0:  # what was the stream is something else now
            self.overwrites = self.overwrites or any(args[0] is x for x in self.inputs)
            self.origins.forget(args[0])
        if func in SAME_STREAM and len(args) > 0:
            if self.origin(args[0]) >= 0:
                self.follow(out, self.origin(args[0]))
                return out
            if self.earlier.of(args[0]) >= 0:
                self.earlier.note(out, self.earlier.of(args[0]))
        elif func is torch.cat and self.joins_streams(args):
            self.follow(out, max(self.origin(part) for part in args[0]))
            return out
        made_of = self.made_of(args) | self.made_of(kwargs.values())
        if is_attention(func):
            made_of |= ATTENTION
        elif func in PRODUCTS and any(uses_weight(layer, args) for layer in self.lasts):
            made_of |= MLP
        if made_of:
            self.since |= made_of & ~STREAM
            for part in out if isinstance(out, tuple | list) else (out,):
                if isinstance(part, Tensor):
                    self.made.note(part, made_of)
        return out

    def sum(self, func: Any, terms: Any, left: int, right: int) -> Tensor:
        """An addition that has the stream among its terms."""
        origin, branch = (left, terms[1]) if left >= 0 else (right, terms[0])
        if func in IN_PLACE and any(terms[0] is x for x in self.inputs):
            self.overwrites = True
        both = left >= 0 and right >= 0
        made_of = 0 if both else self.made_of((branch,))
        if not made_of & STREAM and not isinstance(branch, nn.Parameter) and not both:
            made_of |= self.since  # computed where it could not be followed, as in an autograd function
        out: Tensor
        if not made_of & (ATTENTION | MLP):  # a position, or what is no branch that methods know of
            out = func(*terms)
            if out.shape == (terms[0] if left >= 0 else terms[1]).shape:
                self.follow(out, origin)
            return out
        if terms[0].shape != terms[1].shape:
            out = func(*terms)
            return out
        made_of &= ~STREAM
        out = self.add(func, terms, branch, made_of)
        self.sums.append(made_of)
        self.since = 0
        self.earlier.take_over(self.origins)
        self.origins = Known(-1)
        self.follow(out, origin)
        return out

    def joins_streams(self, args: Any) -> bool:
        """Whether tokens are put together that are all on the stream: some with a branch added, others as they were."""
        parts = args[0] if len(args) > 0 and isinstance(args[0], tuple | list) else ()
        now = [self.origin(part) >= 0 for part in parts]
        before = [self.earlier.of(part) >= 0 for part in parts]
        return any(now) and all(here or there for here, there in zip(now, before, strict=True))

    def follow(self, x: Any, origin: int) -> None:
        """Take a tensor for the stream."""
        for part in x if isinstance(x, tuple | list) else (x,):
            if isinstance(part, Tensor):
                self.origins.note(part, origin)
                self.made.note(part, STREAM)

    def origin(self, x: Any) -> int:
        """The number of the input whose stream x belongs to; -1: it is not on a stream."""
        number: int = self.origins.of(x)
        return number

    def made_of(self, operands: Any) -> int:
        """What any of the operands was made of."""
        made_of = 0
        for x in operands:
            if isinstance(x, tuple | list):
                for part in x:
                    made_of |= self.made.of(part)
            else:
                made_of |= self.made.of(x)
        return made_of

    @property
    def covered(self) -> int:
        """Everything that the branches were made of."""
        covered = 0
        for made_of in self.sums:
            covered |= made_of
        return covered


class Known:
    """What is known of some tensors, which are not kept alive.

    missing: what is given for all others. While a model is traced, tensors are compared one by one: not every version
    of the compiler knows their ids.
    """

    def __init__(self, missing: Any) -> None:
        self.missing = missing
        self.by_id: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self.traced: list[tuple[Tensor, Any]] = []

    def note(self, x: Tensor, what: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced.append((x, what))
        else:
            self.by_id[id(x)] = (weakref.ref(x), what)

    def of(self, x: Any) -> Any:
        """What is known of this very tensor; another one may have its id after its death."""
        if torch.compiler.is_compiling():
            for known, what in self.traced[::-1]:
                if known is x:
                    return what
            return self.missing
        found = self.by_id.get(id(x))
        return self.missing if found is None or found[0]() is not x else found[1]

    def first(self, operands: Any) -> Any:
        """What is known of the first operand of which anything is."""
        found = (self.of(x) for x in operands)
        return next((what for what in found if what != self.missing), self.missing)

    def forget(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            self.traced = [(known, what) for known, what in self.traced if known is not x]
        else:
            del self.by_id[id(x)]

    def take_over(self, others: Known) -> None:
        """Add what others know."""
        self.traced = [*self.traced, *others.traced]
        self.by_id.update(others.by_id)


def is_attention(func: Any) -> bool:
    """Whether a function computes attention, or the softmax inside of it."""
    if isinstance(func, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        return "attemper" in str(func) and "attention" in str(func)
    return func in ATTENTION_CALLS


def uses_weight(layer: nn.Module, operands: Any) -> bool:
    """Whether a product is that of a layer: it has the layer's weight among its operands, or a view of it."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    if torch.compiler.is_compiling():
        return any(x is weight for x in operands)
    made = parametrize.is_parametrized(layer, "weight")  # a new tensor whenever it is asked for
    for x in operands:
        if isinstance(x, Tensor) and (x is weight or x._base is weight or (made and x.shape == weight.shape)):
            return True
    return False


def first_tensor(out: Any) -> Tensor | None:
    """What a block gives: a tensor, or the first one of a tuple, a list or a dict."""
    if isinstance(out, Tensor):
        return out
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else ()
    for part in parts:
        if isinstance(part, Tensor):
            return part
    return None


def tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a module was called with, those in tuples and lists too."""
    found = []
    for x in (*args, *kwargs.values()):
        for part in x if isinstance(x, tuple | list) else (x,):
            if isinstance(part, Tensor):
                found.append(part)
    return found


ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
IN_PLACE = (Tensor.add_, Tensor.__iadd__)
CHANGES = (
    Tensor.mul_, Tensor.__imul__, Tensor.sub_, Tensor.__isub__, Tensor.div_, Tensor.__itruediv__, Tensor.copy_,
    Tensor.fill_, Tensor.zero_, Tensor.clamp_, Tensor.relu_, Tensor.masked_fill_, Tensor.addcmul_, Tensor.lerp_,
    Tensor.__setitem__,
)  # fmt: skip
ATTENTION_CALLS = (
    F.scaled_dot_product_attention, F.multi_head_attention_forward,
    F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax,
)  # fmt: skip
PRODUCTS = (
    F.linear, F.conv1d, F.conv2d, torch.conv1d, torch.conv2d,
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.einsum,
)  # fmt: skip
SAME_STREAM = (  # views, casts, and the norm or dropout that a block may put behind the sum
    F.layer_norm, F.rms_norm, F.batch_norm, F.group_norm, F.dropout, torch.clamp, Tensor.clamp,
    Tensor.__getitem__, Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as, Tensor.clone,
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous, Tensor.transpose, Tensor.permute,
    Tensor.squeeze, Tensor.unsqueeze, torch.clone,
    torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
)  # fmt: skip
