"""Looking at attention calls while a model runs, without changing anything about them.

For the length of a `with` block every attention module has one more action, the innermost: it sees the calls as the
model makes them, before any method of a recipe gets them. What it computes about them is hidden from every other mode,
draws no random numbers, and its results go nowhere near the model's.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import NoSiteError, ParameterError, WrappedModelError
from attemper.probes.attention import Seen, see
from attemper.sites import AttentionSite, Sites, find_sites
from attemper.sites.targets import Targets
from attemper.tempering.axes import SOFTMAX, softmax_axis
from attemper.tempering.multihead import MultiheadArguments, project, split_heads
from attemper.tempering.operands import in_order
from attemper.tempering.products import MATMUL
from attemper.tempering.subclassing import Action, add_action, is_tempered, restore, state_of

Tell = Callable[[AttentionSite, Seen], None]


@dataclass
class AttentionWatch(Action):
    """Tells what an attention module computes."""

    site: AttentionSite
    tell: Tell
    met: int = field(default=0, init=False)

    def acts(self, training: bool) -> bool:
        return True

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with Calls(self):
            return forward(*args, **kwargs)


class AttentionPoints(TorchFunctionMode):
    """Meets attention at the same three points as interception does. What it does there, subclasses say."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_order(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            return self.fused(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self.multihead(func, args, kwargs)
        if func in SOFTMAX and softmax_axis(*args, **kwargs) == 3:
            return self.softmax(func, args, kwargs)
        return self.other(func, args, kwargs)

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`scaled_dot_product_attention`."""
        return func(*args, **kwargs)

    def multihead(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`multi_head_attention_forward`."""
        return func(*args, **kwargs)

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A softmax over the keys of (B, H, Nq, Nk)."""
        return func(*args, **kwargs)

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Any other function."""
        return func(*args, **kwargs)


class Calls(AttentionPoints):
    """Tells of attention calls, and changes nothing."""

    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()
        self.watch = watch
        self.product: tuple[Tensor, Tensor] | None = None
        """Q and Kᵀ of the last product before a softmax."""

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.told(seen_fused, func, args, kwargs)

    def multihead(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.told(seen_multihead, func, args, kwargs)

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.told(self.seen_softmax, func, args, kwargs)

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in MATMUL and args[0].dim() == args[1].dim() == 4:
            self.product = (args[0], args[1])
        return func(*args, **kwargs)

    def told(self, read: Callable[..., Seen], func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        self.watch.met += 1
        # No mode may see what is computed here: that of a recipe would take it for attention of the model's.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            self.watch.tell(self.watch.site, read(*args, **kwargs))
        return out

    def seen_softmax(self, input: Tensor, *_: Any, **__: Any) -> Seen:
        logits = input.detach()
        product, self.product = self.product, None
        if product is None or (product[0].shape[2], product[1].shape[3]) != logits.shape[2:]:
            return Seen(None, None, logits=logits)
        q, k = product[0].detach(), product[1].detach().transpose(-2, -1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return Seen(q.to(dtype), k.to(dtype), logits=logits)


def seen_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Seen:
    """A call of `scaled_dot_product_attention`."""
    return see(query.detach(), key.detach(), attn_mask, is_causal, scale, value.detach())


def seen_multihead(*args: Any, **kwargs: Any) -> Seen:
    """A call of `multi_head_attention_forward`."""
    call = MultiheadArguments(*args, **kwargs)
    q, k, v, mask = split_heads(call, *project(call))
    hinted = call.is_causal and call.key_padding_mask is None  # the hint says that the mask is the causal one
    return see(q, k, None if hinted else mask, hinted, v=v)


# ---------------------------------------------------------------------------------------------------- for a stretch
@contextlib.contextmanager
def looking(actions: Sequence[tuple[nn.Module, Action]]) -> Iterator[None]:
    """Context manager: inside it, these actions are the innermost ones round their modules."""
    plain = [module for module in dict.fromkeys(module for module, _ in actions) if not is_tempered(module)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would pass by the modules
    try:
        for module, action in actions:
            add_action(module, action)
            every = state_of(module).actions
            every.insert(0, every.pop())
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, action in actions:
            if is_tempered(module):
                kept = [each for each in state_of(module).actions if each is not action]
                state_of(module).actions[:] = kept
        for module in plain:
            restore(module)


@contextlib.contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Context manager: eval mode inside; afterwards every module, and every random generator, is as it was."""
    before = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        model.eval()
        try:
            yield
        finally:
            for module, training in before:
                module.training = training


def refuse_wrapped(model: Any) -> None:
    """Refuse what cannot be looked into."""
    if not isinstance(model, nn.Module):
        raise WrappedModelError(f"probes need a torch.nn.Module, got {type(model).__name__}")
    kind = type(model).__name__
    if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise WrappedModelError(f"this {kind} is compiled, and nothing inside can be seen; probe the model inside it")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or kind.startswith("FSDP"):
        raise WrappedModelError(f"this model is wrapped in {kind}; probe the model inside it (model.module)")


def find_attention(model: nn.Module, targets: Targets | None = None) -> Sites:
    """The sites of a model, which must have attention."""
    refuse_wrapped(model)
    sites = find_sites(model, targets)
    if sites.attentions:
        return sites
    left = "".join(f" '{name}' was left alone: {why}." for name, why in sites.left_alone.items())
    kinds = sorted({type(module).__name__ for module in model.modules()})
    raise NoSiteError(
        f"{type(model).__name__} has no attention that is recognised, so there is nothing to probe.{left} Module types "
        f"seen: {', '.join(kinds[:40])}. Attention in modules of your own can be named: targets=['blocks.*.attn']."
    )


def run_model(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a tensor, a sequence of arguments, or a dict of named ones."""
    try:
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, dict):
            return model(**batch)
        if isinstance(batch, list | tuple):
            return model(*batch)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError) as error:
        if type(error).__module__.startswith("attemper."):
            raise
        told = str(error).strip().splitlines()
        raise ParameterError(
            f"{type(model).__name__} could not take the batch ({_shapes(batch)}): {told[0] if told else repr(error)}"
        ) from error
    raise ParameterError(
        f"a batch must be a tensor, a tuple of arguments or a dict of named ones; got {type(batch).__name__}"
    )


def _shapes(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, dict):
        return ", ".join(f"{name}: {_shapes(part)}" for name, part in batch.items())
    if isinstance(batch, list | tuple):
        return ", ".join(_shapes(part) for part in batch)
    return type(batch).__name__


def first_sample(batch: Any, axis: int = 0) -> Any:
    """The batch of its first sample alone: every tensor that is as long as the first one along an axis is cut there."""
    size = samples_in(batch, axis)

    def cut(part: Any) -> Any:
        fits = isinstance(part, Tensor) and part.dim() > axis and part.shape[axis] == size
        return part.narrow(axis, 0, 1) if fits else part

    if isinstance(batch, Tensor):
        return cut(batch)
    if isinstance(batch, dict):
        return {name: cut(part) for name, part in batch.items()}
    return tuple(cut(part) for part in batch)


def samples_in(batch: Any, axis: int = 0) -> int:
    """How many samples a batch has, by its first tensor."""
    parts = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, Tensor) else batch
    return next((int(part.shape[axis]) for part in parts if isinstance(part, Tensor) and part.dim() > axis), 0)
