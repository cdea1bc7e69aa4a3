"""What happens round whole blocks."""

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BlockMap
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.sites import BlockSite, Sites
from attemper.tempering.layers import TokenAction
from attemper.tempering.penalties import Control
from attemper.tempering.residual import ATTENTION, MLP, Residuals, first_tensor, tensors
from attemper.tempering.subclassing import Action


class Branches(NamedTuple):
    """What a block adds to the residual stream."""

    attentions: int
    """How many attentions it has, those that are left alone included."""
    mlps: tuple[str, ...]
    """The last layers of its MLPs, by their names in the block."""


def branches(sites: Sites, block: BlockSite, names: dict[nn.Module, str]) -> Branches:
    """What a block holds. names: those of all modules of the model."""
    attentions = sum(site.block == block.index for site in sites.attentions)
    attentions += sum(name.startswith(block.name + ".") for name in sites.left_alone)
    lasts = [names[mlp.last] for mlp in sites.mlps if mlp.block == block.index]
    start = block.name + "." if block.name else ""
    return Branches(attentions, tuple(name.removeprefix(start) for name in lasts if name.startswith(start)))


def is_container(module: nn.Module) -> bool:
    """Whether a module has no forward of its own, as a ModuleList: its parts are run by what holds it."""
    return type(module).forward is nn.Module.forward


def without_forward(method: Method, block: BlockSite) -> str:
    """Why a method cannot act on a block that is only a list of parts."""
    return (
        f"{method.name} cannot act on block '{block.name}', a {type(block.module).__name__}: its parts are run, and "
        "added to the residual stream, outside of any module of the block. Leave it out with targets=, or write "
        "partial=True to apply the method where it can act."
    )


@dataclass
class BlockAction(Action):
    """Maps what went into a block and what came out of it.

    A block may be skipped only where all of its branches are added to its input inside of it: otherwise its input is
    not what the network would have without the block. That is watched in the first pass, and whenever it is compiled.
    """

    control: Control
    place: Place
    method: Method
    attentions: int
    mlps: tuple[str, ...]
    """The last layers of its MLPs, by their names in the block."""
    partial: bool = False
    """Whether a block that cannot be skipped is left as it is, instead of an error."""
    stream: int | None = None
    """Which of the tensors that the block gets is the residual stream; None: it was not watched yet."""
    overwrites: bool = False
    """Whether the block adds to its input in place."""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        return self.control.on(training) and not self.method.idle and self.vain is None

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.compiled(module, forward, args, kwargs)
        if self.stream is None:
            return self.first_time(module, forward, args, kwargs)
        before = tensors(args, kwargs)[self.stream]
        before = before.clone() if self.overwrites else before
        return self.map(before, forward(*args, **kwargs))

    def map(self, before: Tensor, out: Any) -> Any:
        """The block's output, its first tensor mapped."""
        after = cast(Tensor, first_tensor(out))
        mapped = cast(BlockMap, self.method).map_block(before, after, Stream(draw_seed(after)))
        if isinstance(out, Tensor):
            return mapped
        if isinstance(out, dict):
            name = next(name for name, value in out.items() if value is after)
            out[name] = mapped
            return out
        return type(out)([mapped if part is after else part for part in out])

    def first_time(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The same, watched."""
        inputs = tensors(args, kwargs)
        copies = [x.clone() for x in inputs]
        watch = self.watch(module, inputs)
        with watch:
            out = forward(*args, **kwargs)
        number = watch.origin(first_tensor(out))
        reason = self.why_not(watch, inputs, out)
        if reason is not None:
            if not self.partial:
                self.refuse(module, reason)
            self.vain = f"'{self.place.name}' {reason}"
            return out
        self.overwrites = watch.overwrites
        self.stream = number
        return self.map(copies[number], out)

    def compiled(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The same while it is traced, where watching costs nothing later."""
        inputs = tensors(args, kwargs)
        watch = self.watch(module, inputs)
        with watch:
            out = forward(*args, **kwargs)
        reason = self.why_not(watch, inputs, out)
        if reason is not None:
            if not self.partial:
                self.refuse(module, reason)
            return out
        number = watch.origin(first_tensor(out))
        if watch.overwrites:
            self.refuse(module, "adds to its input in place, which is not followed where it is compiled")
        return self.map(inputs[number], out)

    def watch(self, module: nn.Module, inputs: list[Tensor]) -> Residuals:
        return Residuals(inputs, [module.get_submodule(name) for name in self.mlps])

    def why_not(self, watch: Residuals, inputs: list[Tensor], out: Any) -> str | None:
        """Why the block cannot be skipped, or None."""
        after = first_tensor(out)
        if after is None:
            return "gives no tensor"
        if all(x.shape != after.shape for x in inputs):
            return f"gives another shape, {tuple(after.shape)}, than it takes"
        number = watch.origin(after)
        if len(watch.sums) == 0 or number < 0 or inputs[number].shape != after.shape:
            return (
                "gives something else than the sum of its input and its branches: the residual sum is outside of the "
                "module, or made in a way that is not understood"
            )
        if self.attentions > 0 and not watch.covered & ATTENTION:
            return "does not add its attention to its input"
        if len(self.mlps) > 0 and not watch.covered & MLP:
            return "does not add its feed-forward network to its input"
        return None

    def refuse(self, module: nn.Module, reason: str) -> NoReturn:
        raise UnmetError(
            f"{self.method.name} cannot skip '{self.place.name}': this {type(module).__name__} {reason}. Leave it out "
            "with targets=, or write partial=True to apply the method where it can act."
        )


@dataclass
class EntryAction(TokenAction):
    """Maps the tokens before the first block, which must be those of the residual stream.

    Where the model adds the branches itself, what it calls first gets the input of a branch. That is watched in the
    first training pass.
    """

    mlps: tuple[str, ...] = ()
    """The last layers of the block's MLPs, by their names in the block."""
    watched: bool = False

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        whole = self.place.name == ""  # what the whole model gets is no branch
        if self.watched or whole or torch.compiler.is_compiling() or not module.training:
            return super().around(module, forward, args, kwargs)

        def on_stream(*args: Any, **kwargs: Any) -> Any:
            watch = Residuals(tensors(args, kwargs), [module.get_submodule(name) for name in self.mlps])
            with watch:
                out = forward(*args, **kwargs)
            if len(watch.sums) == 0:
                raise UnmetError(
                    f"{self.method.name} acts on the tokens before the first block, and '{self.place.name}' "
                    f"({type(module).__name__}) adds nothing to them: the residual sum is outside of the module, or "
                    "made in a way that is not understood. Leave the method out."
                )
            self.watched = True
            return out

        return super().around(module, on_stream, args, kwargs)
