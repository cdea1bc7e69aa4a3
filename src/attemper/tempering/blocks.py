"""What happens round whole blocks."""

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from attemper.errors import ParameterError, UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BlockMap
from attemper.tempering.branches import Branch
from attemper.tempering.draws import calls_so_far, take_back
from attemper.tempering.layers import Layout, TokenAction
from attemper.tempering.parts import block_source, map_block
from attemper.tempering.penalties import Control
from attemper.tempering.residual import Residuals, first_tensor, tensors
from attemper.tempering.skips import IN_FUNCTION, SkipAction, runs_in_function
from attemper.tempering.subclassing import Action, site_of


@dataclass
class BlockAction(Action):
    """Maps what went into a block and what came out of it.

    A block may be skipped only where all of its branches are added to its input inside of it: otherwise its input is
    not what the network would have without the block. That is watched in the first pass, and whenever it is compiled.
    Where a block does more than add branches, as one that halves the resolution, what is skipped is its branches.
    """

    control: Control
    place: Place
    method: Method
    layout: Layout
    branches: tuple[Branch, ...]
    partial: bool = False
    """Whether a block that cannot be skipped is left as it is, instead of an error."""
    stream: int | None = None
    """Which of the tensors that the block gets is the residual stream; None: it was not watched yet."""
    overwrites: bool = False
    """Whether the block adds to its input in place."""
    by_sums: SkipAction | None = None
    """What skips the branches, where the block does more than add them."""
    idle: tuple[str, ...] = ()
    """The attentions of the block that did not run in it when it was watched."""

    def name_site(self) -> None:
        self.stream_site = site_of(self.place.name, self.method.name)

    def sites(self) -> dict[int, str]:
        return {self.stream_site.word: self.place.name}

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)
        if self.by_sums is not None:
            self.by_sums.resolve(methods)

    def acts(self, training: bool) -> bool:
        return self.control.on(training) and not self.method.idle and self.vain is None

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if self.by_sums is not None:
            return self.by_sums.around(module, forward, args, kwargs)
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
        drawn = block_source(self.control, self.stream_site, after, self.layout)
        mapped = map_block(self.control, cast(BlockMap, self.method), before, after, drawn, self.layout)
        if isinstance(out, Tensor):
            return mapped
        if isinstance(out, dict):
            name = next(name for name, value in out.items() if value is after)
            out[name] = mapped
            return out
        parts = [mapped if part is after else part for part in out]
        return type(out)(*parts) if hasattr(out, "_fields") else type(out)(parts)

    def first_time(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The same, watched. A block that does more than add branches runs twice this time."""
        if runs_in_function():
            self.refuse(module, IN_FUNCTION)
        inputs = tensors(args, kwargs)
        copies = [x.clone() for x in inputs]
        watch = Residuals(module, inputs, self.branches)
        before = calls_so_far(self.control)
        with watch.noting_runs(module), watch:
            out = forward(*args, **kwargs)
        reason = watch.problem(out)
        if reason is not None:
            if not self.partial:
                self.refuse(module, reason)
            self.vain = f"{self.place.where} {reason}"
            return out
        self.idle = watch.idle
        number = watch.origin(first_tensor(out))
        if number < 0 or inputs[number].shape != cast(Tensor, first_tensor(out)).shape:
            if watch.overwrites:
                self.refuse(module, "adds to its input in place, and does more than that")
            self.by_sums = self.skip_action()
            take_back(self.control, before)
            return self.by_sums.around(module, forward, args, kwargs)
        self.overwrites = watch.overwrites
        self.stream = number
        return self.map(copies[number], out)

    def compiled(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The same while it is traced, where watching costs nothing later."""
        inputs = tensors(args, kwargs)
        watch = Residuals(module, inputs, self.branches)
        with watch:
            out = forward(*args, **kwargs)
        reason = watch.problem(out)
        if reason is not None:
            if not self.partial:
                self.refuse(module, reason)
            return out
        if watch.overwrites:
            self.refuse(module, "adds to its input in place, which is not followed where it is compiled")
        number = watch.origin(first_tensor(out))
        if number < 0 or inputs[number].shape != cast(Tensor, first_tensor(out)).shape:
            return self.skip_action().around(module, forward, args, kwargs)
        return self.map(inputs[number], out)

    def skip_action(self) -> SkipAction:
        action = SkipAction(self.control, self.place, self.method, self.layout, self.branches)
        action.stream_site = self.stream_site
        return action

    def refuse(self, module: nn.Module, reason: str) -> NoReturn:
        error = UnmetError(
            f"{self.method.name} cannot skip {self.place.where}: this {type(module).__name__} {reason}. Leave it out "
            "with targets=, or write partial=True to apply the method where it can act."
        )
        error.outside = True
        raise error


@dataclass
class EntryAction(TokenAction):
    """Maps the tokens before the first block, which must be those of the residual stream.

    Where the model adds the branches itself, what it calls first gets the input of a branch. That is watched in the
    first training pass.
    """

    branches: tuple[Branch, ...] = ()
    held: bool = False
    """Whether the module holds blocks, and is none."""
    channels: int = 0
    """How many channels tokens have here; 0: nothing tells."""
    convolves: bool = False
    """Whether a convolution of the block reads them."""
    watched: bool = False

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        whole = self.place.name == "" and not self.held  # what a block that is the whole model gets is no branch
        if self.watched or whole or torch.compiler.is_compiling() or not module.training:
            return super().around(module, forward, args, kwargs)

        def on_stream(*args: Any, **kwargs: Any) -> Any:
            watch = Residuals(module, tensors(args, kwargs), self.branches)
            with watch:
                out = forward(*args, **kwargs)
            if not watch.on_input:
                error = UnmetError(
                    f"{self.method.name} acts on the tokens before the first block, and {self.place.where} "
                    f"({type(module).__name__}) adds nothing to them: the residual sum is outside of the module, or "
                    "made in a way that is not understood. Leave the method out."
                )
                error.outside = True
                raise error
            self.watched = True
            return out

        return super().around(module, on_stream, args, kwargs)

    def layout_of(self, x: Tensor) -> Layout:
        """Blocks get tokens (B, N, C), or feature maps with their channels last or first: their width tells which."""
        if self.channels == 0 or x.dim() < 4:
            return self.layout
        axes = [axis for axis in (1, x.dim() - 1) if x.shape[axis] == self.channels]
        if len(axes) == 1:
            return "channels_first" if axes[0] == 1 else "batch_first"
        if len(axes) == 2 and self.convolves:
            return "channels_first"
        kind = ParameterError if self.control.trial else UnmetError  # an input that was made up may be of another kind
        raise kind(
            f"{self.method.name} maps the tokens that {self.place.where} gets, {tuple(x.shape)}, and which axis has "
            f"their {self.channels} channels cannot be told. Leave the method out."
        )
