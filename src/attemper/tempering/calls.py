"""Watching a whole pass: which modules compute attention, and which layers make gates."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.ops.tracing import all_true, has_numbers
from attemper.sites.base import SeenCall
from attemper.tempering.axes import SOFTMAX, softmax_axis
from attemper.tempering.convolutions import PLAIN, TRANSPOSED
from attemper.tempering.known import Known
from attemper.tempering.operands import in_order
from attemper.tempering.origins import Origins
from attemper.tempering.padding import allowed_keys, hides_some_from_others
from attemper.tempering.products import PRODUCTS, Product, read_product
from attemper.tempering.readings import Reading, read_logits
from attemper.tempering.residual import uses_weight


class Softmaxed(NamedTuple):
    """What a softmax gave: who was running, how it was written, and as far as is known, over what."""

    modules: tuple[str, ...]
    what: str
    reading: Reading
    hides: bool = False


class CallWatch(TorchFunctionMode):
    """Notes attention that runs outside of the given modules, and MLPs whose output becomes a factor.

    inside: names of modules whose attention is known. mlps: names of MLPs, and of their last layers. masks: whether to
    look which of the calls hide tokens from each other. convolutions: names of all modules that are convolutions, where
    those that run elsewhere are to be noted.
    """

    def __init__(
        self,
        model: nn.Module,
        inside: set[str],
        mlps: Sequence[tuple[str, str]],
        masks: bool = False,
        convolutions: frozenset[str] | None = None,
    ) -> None:
        super().__init__()
        self.masks = masks
        self.convolutions = None if convolutions is None else frozenset(map(plain_name, convolutions))
        self.convolved: list[str] = []
        """Modules that are no convolutions, and computed one with a weight that is trained."""
        self.names = {id(module): plain_name(name) for name, module in model.named_modules()}
        self.inside = set(map(plain_name, inside))
        self.lasts = [(name, model.get_submodule(last)) for name, last in mlps]
        self.known: set[str] = set()
        """The modules among those inside that made attention calls."""
        self.origins = Origins({id(buffer) for buffer in model.buffers()})
        self.calls: list[SeenCall] = []
        self.written: list[str] = []
        """Modules that write softmax out."""
        self.gates: list[str] = []
        self.weights = Known(None)
        """What softmax gave, and the module that called it."""
        self.pooled = Known(None)
        """What MLPs made of a single position: the MLP, and how many numbers they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_order(func, args, kwargs)
        out = func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return out
        self.origins.after(func, args, kwargs, out)
        if self.convolutions is not None and func in CONVOLUTIONS:
            self.find_convolution(self.convolutions, *args, **kwargs)
        if func in FUSED:
            modules = self.running()
            hides = self.masks and fused_hides(func, args, kwargs, self.knows(modules))
            self.calls.append(SeenCall(modules, "keys", func.__name__, hides))
        elif func in SOFTMAX:
            self.find_softmax(args, kwargs, out)
        elif func in EXPONENTIALS and isinstance(out, Tensor) and self.origins.product_of(out):
            self.weights.note(out, Softmaxed(self.running(), WRITTEN, Reading(None)))
        elif func in LAYERS:
            self.find_pooled(args, out)
            self.follow_mixed(args, out)
        elif func in PRODUCTS:
            self.find_product(func, args, kwargs)
            self.find_pooled(args, out)
        else:
            self.pass_on(func, args, out)
        return out

    @property
    def outside(self) -> dict[str, list[SeenCall]]:
        """Modules in which no attention is known, and the attention calls that they made."""
        found: dict[str, list[SeenCall]] = {}
        for call in self.calls:
            if call.over == "keys" and call.modules and not self.knows(call.modules):
                found.setdefault(call.modules[0], []).append(call)
        return found

    def find_convolution(self, known: frozenset[str], input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        """Note where a convolution runs that is in no module of its own; fixed filters are no layers."""
        modules = self.running()
        if weight.requires_grad and modules and not known & set(modules):
            self.convolved.append(modules[0])

    def find_softmax(self, args: Any, kwargs: Any, out: Tensor) -> None:
        """Remember the weights of a softmax that may be attention: not of one over channels or experts."""
        axis = softmax_axis(*args, **kwargs)
        if axis is None or out.dim() < 2:
            return
        reading = read_logits(self.origins.of(out), axis)
        what = f"a softmax over axis {axis} of ({', '.join(map(str, out.shape))})"
        if reading.over == "channels":
            self.calls.append(SeenCall(self.running(), "channels", what + reading.remark))
        elif reading.product or (axis == out.dim() - 1 and out.dim() > 2):
            modules = self.running()
            hides = self.masks and hides_tokens(args[0].movedim(axis, -1), self.knows(modules))
            self.weights.note(out, Softmaxed(modules, what, reading, hides))

    def find_product(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count a softmax as attention as soon as values are multiplied with its weights."""
        product = read_product(func, args, kwargs)
        found = None if product is None else self.weights.first((product.left, product.right))
        if product is None or found is None or not self.sums_over_keys(product, found):
            return
        if found.what == WRITTEN:
            if found.modules and not self.inside & set(found.modules):
                self.written.append(found.modules[0])
            return
        scores = found.reading.over == "positions" and found.reading.product == 0
        self.calls.append(SeenCall(found.modules, "scores" if scores else "keys", found.what, found.hides))

    def sums_over_keys(self, product: Product, found: Softmaxed) -> bool:
        """Whether a product of weights sums over the axis that softmax was over, as far as is known."""
        if found.reading.product == 0:
            return True
        for x, letters in ((product.left, product.of_left), (product.right, product.of_right)):
            origin = self.origins.of(x)
            if origin is not None and self.weights.of(x) is not None:
                return all(
                    letter in product.summed
                    for letter, axis in zip(letters, origin.axes, strict=True)
                    if any((f.root.product, f.root.side) == (found.reading.product, found.reading.side) for f in axis)
                )
        return True

    def follow_mixed(self, args: Any, out: Tensor) -> None:
        """Weights whose heads a layer mixes, as talking heads do, are still weights over the same keys."""
        found = self.weights.of(args[0]) if args else None
        origin = self.origins.of(out)
        if found is None or origin is None or found.reading.product == 0:
            return
        keys = found.reading.product, found.reading.side
        if any((factor.root.product, factor.root.side) == keys for axis in origin.axes for factor in axis):
            self.weights.note(out, found)

    def knows(self, modules: tuple[str, ...]) -> bool:
        """Whether the attention of one of these modules is known, which then tells of padding by itself."""
        return not self.inside.isdisjoint(modules)

    def running(self) -> tuple[str, ...]:
        """The names of the modules that are running, the innermost first."""
        names = dict.fromkeys(
            self.names[id(module)]
            for module in running_modules()
            if id(module) in self.names and not isinstance(module, nn.Softmax)
        )
        self.known |= self.inside & set(names)
        return tuple(names)

    def find_pooled(self, args: Any, out: Any) -> None:
        for name, last in self.lasts:
            if isinstance(out, Tensor) and is_one_position(out, isinstance(last, nn.Conv2d)):
                if uses_weight(last, args):
                    self.pooled.note(out, (name, out.numel()))

    def pass_on(self, func: Any, args: Any, out: Any) -> None:
        """Follow attention weights and pooled features through what leaves them what they are."""
        if func in MULTIPLICATIONS and len(args) == 2:
            pooled = self.pooled.first(args)
            others = [x for x in args if isinstance(x, Tensor) and self.pooled.of(x) is None]
            if pooled is not None and any(x.numel() > pooled[1] for x in others):
                if pooled[0] not in self.gates:
                    self.gates.append(pooled[0])
                return
        if isinstance(out, Tensor):
            for x in args:
                weights = self.weights.of(x)
                if weights is not None and (func in VIEWS or x.shape == out.shape):
                    self.weights.note(out, weights)
        pooled = self.pooled.first(args)
        if pooled is not None and isinstance(out, Tensor) and (out.numel() == pooled[1] or func in VIEWS):
            self.pooled.note(out, pooled)


def fused_hides(func: Any, args: Any, kwargs: Any, padding: bool) -> bool:
    """Whether a fused call hides tokens, as far as it can be seen. padding: see `hides_tokens`."""
    if func is F.scaled_dot_product_attention:
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        mask = named.get("attn_mask")
        return bool(named.get("is_causal")) or (mask is not None and hides_tokens(mask, padding))
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask  # True is "hidden" there
    if not padding and kwargs.get("key_padding_mask") is not None:
        return True
    return bool(kwargs.get("is_causal")) or (mask is not None and hides_tokens(mask, padding))


def hides_tokens(mask: Tensor, padding: bool) -> bool:
    """Whether a mask, or logits that hold one, (…, Nq, Nk), hides tokens; not on meta.

    padding: whether tokens that are hidden from all others may be.
    """
    if mask.dim() < 2 or not has_numbers(mask):
        return False
    allowed = allowed_keys(mask if mask.dim() <= 4 else mask.flatten(0, -4))
    return hides_some_from_others(allowed) if padding else not all_true(allowed)


def running_modules() -> Iterator[nn.Module]:
    """The modules whose methods are running, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            yield holder
        frame = frame.f_back  # type: ignore[assignment]


def plain_name(name: str) -> str:
    """The name of a module without torch's wrappers for activation checkpointing.

    >>> plain_name("blocks.0._checkpoint_wrapped_module.attn")
    'blocks.0.attn'
    """
    return name.replace("._checkpoint_wrapped_module", "")


def is_one_position(x: Tensor, channels_first: bool) -> bool:
    """Whether every sample has a single position: (B, C), (B, 1, C), or (B, C, 1, 1)."""
    if x.dim() < 2:
        return False
    positions = x.shape[2:] if channels_first else x.shape[1:-1]
    return all(size == 1 for size in positions)


WRITTEN = "a softmax written out by exp"
FUSED = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
EXPONENTIALS = (torch.exp, Tensor.exp, Tensor.exp_, torch.exp2, Tensor.exp2)
LAYERS = (F.linear, F.conv2d, torch.conv2d)
CONVOLUTIONS = (*PLAIN, *TRANSPOSED)
MULTIPLICATIONS = (torch.mul, Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)
VIEWS = (
    Tensor.view, Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.contiguous, Tensor.transpose, Tensor.permute,
    Tensor.squeeze, Tensor.unsqueeze, Tensor.expand, Tensor.expand_as, Tensor.__getitem__, Tensor.to, Tensor.type_as,
    Tensor.float, Tensor.half, Tensor.bfloat16,
    torch.reshape, torch.flatten, torch.transpose, torch.permute, torch.squeeze, torch.unsqueeze,
)  # fmt: skip
