"""What happens where branches are added to the residual stream: in a block, or in the loop that runs its parts."""

import contextlib
import functools
import operator
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BlockMap, BranchMap, PreparedSum, SkipRemover
from attemper.ops.regions import is_ordinary
from attemper.ops.stream import Source
from attemper.tempering.branches import Branch
from attemper.tempering.draws import calls_so_far, draw_again, take_back
from attemper.tempering.functions import IN_PLACE
from attemper.tempering.kept_samples import Saver, Unexpected
from attemper.tempering.known import Known
from attemper.tempering.layers import MOST, Layout
from attemper.tempering.parts import add_branch, block_source, map_block, map_branch
from attemper.tempering.penalties import Control
from attemper.tempering.repeated_sums import KnownSums, RepeatedSums, SumLog
from attemper.tempering.residual import Add, Residuals, Sum, tensors
from attemper.tempering.straight import OwnSum, OwnSums, Reading, straight
from attemper.tempering.subclassing import Action, site_of


class Following(Action):
    """Follows the sums while a module runs."""

    usual: int = 0
    """How many sums there were when they were checked last."""
    idle: tuple[str, ...] = ()
    """The attentions of the block that did not run in it then."""
    known: KnownSums | None = None
    """What the module did then, if it can be seen to do the same again."""
    own: OwnSums | None = None
    """The same, where the module's own code adds its branches in a straight line."""
    tries: int = 8
    """How often it may still do something else before nobody expects it any more."""
    branches: tuple[Branch, ...]

    def followed(
        self, module: nn.Module, forward: Any, args: Any, kwargs: Any, add: Add
    ) -> tuple[Any, Residuals | None]:
        """Run the module and follow its sums; None: they were those of a pass that was checked."""
        inputs, compiling = tensors(args, kwargs), torch.compiler.is_compiling()

        def start() -> Residuals:
            log = None if compiling or self.tries == 0 else SumLog(inputs)
            return Residuals(module, inputs, self.branches, add, log)

        if compiling or self.known is None or not self.known.steps or self.usual == 0:
            code = None if compiling or self.tries == 0 else straight(forward)
            reading = None if code is None else Reading(code, module)
            add = add if reading is None else reading.noting(add)
            watch = start()
            with self.noting(watch, module), watch:
                out = forward(*args, **kwargs) if reading is None else reading.run(args, kwargs)
            self.own = None if reading is None else reading.found(len(watch.sums))
            return out, watch
        repeated = RepeatedSums(self.known, inputs, add, start)
        with repeated:
            out = forward(*args, **kwargs)
        return out, repeated.end(out)

    def learn(self, watch: Residuals, out: Any) -> None:
        """Take down what the module did in a pass in which nothing was wrong. out: what it gave."""
        if torch.compiler.is_compiling():
            return
        if self.known is not None:
            self.tries -= 1
            self.own = self.own if self.tries > 0 else None
        self.known = None if watch.log is None or self.tries == 0 else watch.log.known(out)

    def noting(self, watch: Residuals, module: nn.Module) -> AbstractContextManager[None]:
        """Context manager: in passes that are checked in full, it notes which branches run."""
        if torch.compiler.is_compiling() or self.usual > 0:
            return contextlib.nullcontext()
        return watch.noting_runs(module)


class Bare(NamedTuple):
    """What is in a sum beside what was there before."""

    branches: tuple[Tensor, ...]
    bare: bool
    """Whether the skip round them was removed."""


@dataclass
class SumAction(Following):
    """What a method makes of the residual sums of one block."""

    control: Control
    place: Place
    method: Method
    layout: Layout
    prepared: dict[Any, PreparedSum] = field(init=False, default_factory=dict, compare=False)
    """Shapes, dtypes and device of a stream and a branch → what is left to do where they are added."""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method, self.prepared = methods[self.method.name].at(self.place), {}

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model prepares for itself, and a file holds no kernels
        return {**self.__dict__, "prepared": {}}

    def acts(self, training: bool) -> bool:
        if isinstance(self.method, SkipRemover):
            return self.control.when != "never"
        return self.control.on(training) and not self.method.idle

    def name_site(self) -> None:
        self.stream_site = site_of(self.place.name, self.method.name)

    def sites(self) -> dict[int, str]:
        return {self.stream_site.word: self.place.name}

    def source(self, x: Tensor) -> Source:
        """Where the stream of the next draw starts."""
        return block_source(self.control, self.stream_site, x, self.layout)

    def sum(self, added: Sum, drawn: Source | None, shared: Known) -> Tensor:
        """The sum of stream and branch, or what the method makes of it.

        drawn: for the whole block; None: every branch draws for itself.
        shared: of the sums of this pass, the branches in them that share a skip.
        """
        if isinstance(self.method, SkipRemover):
            return self.without_skip(added, shared)
        func, terms, branch = added.func, added.terms, added.branch
        drawn = self.source(branch) if drawn is None else drawn
        self.check(added, drawn)
        out: Tensor
        if isinstance(self.method, BlockMap):
            out = map_block(self.control, self.method, added.stream, terms[0] + terms[1], drawn, self.layout)
            return terms[0].copy_(out) if func in IN_PLACE else out
        kind = cast(BranchMap, self.method)
        if func not in IN_PLACE:
            together = add_branch(self.control, kind, added.stream, branch, drawn, self.layout)
            if together is not None:
                self.prepare(added.stream, branch)
                return together
        mapped = map_branch(self.control, kind, branch, drawn, self.layout)
        if func in IN_PLACE and added.at == 0:
            return branch.copy_(mapped + terms[1])
        out = func(*(mapped if term is branch else term for term in terms))
        return out

    def prepare(self, x: Tensor, branch: Tensor) -> None:
        """Let the method prepare for more sums of such a stream and such a branch."""
        known = cast(BranchMap, self.method).prepare(x, branch)
        if known is not None:
            if len(self.prepared) >= MOST:
                self.prepared.clear()
            self.prepared[x.shape, x.dtype, branch.shape, branch.dtype, x.device] = known

    def add_again(self, x: Tensor, branch: Tensor) -> Tensor | None:
        """A sum for which the method has prepared; None: there is more to do."""
        known = self.prepared.get((x.shape, x.dtype, branch.shape, branch.dtype, x.device))
        if known is None or not (x.is_contiguous() and branch.is_contiguous() and is_ordinary()):
            return None
        drawn = draw_again(self.control, self.stream_site.word, branch, tuple(branch.shape))
        return None if drawn is None else known(x, branch, *drawn)

    def check(self, added: Sum, drawn: Source) -> None:
        """See that a sum is the one that was expected, where something was left out before it."""

    def without_skip(self, added: Sum, shared: Known) -> Tensor:
        """The sum, or the branch alone. Parallel branches share one skip, which goes for all of them."""
        attention, mlp = cast(SkipRemover, self.method).removes(self.place)
        wanted = any(attention if branch.is_attention else mlp for branch in added.ended)
        before: Bare | None = shared.of(added.stream) if added.parallel else None
        if not wanted or (before is not None and before.bare):
            out = added.plain()
        elif not added.parallel:
            out = self.put(added, added.branch)
        elif before is not None:
            out = self.put(added, functools.reduce(torch.add, (*before.branches, added.branch)))
        else:
            self.refuse("block", "adds parallel branches one after the other in a way that is not understood", False)
        bare = wanted if before is None else wanted or before.bare
        shared.note(out, Bare((*(before.branches if before is not None else ()), added.branch), bare))
        return out

    @staticmethod
    def put(added: Sum, out: Tensor) -> Tensor:
        """Something else in the place of a sum; one that is made in place must change the tensor itself."""
        return added.terms[0].copy_(out) if added.func in IN_PLACE and out is not added.terms[0] else out

    def refuse(self, kind: str, reason: str, outside: bool) -> NoReturn:
        error = UnmetError(
            f"{self.method.name} cannot act in {self.place.where}: this {kind} {reason}. Leave it out with targets=."
        )
        error.outside = outside
        raise error


@dataclass
class SkipAction(SumAction):
    """Acts where a block itself adds its branches to the residual stream."""

    branches: tuple[Branch, ...] = ()
    saver: Saver | None = None
    """Leaves samples out of branches that are dropped for them; None: all are computed."""

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        turn = None
        if self.saver is not None and not torch.compiler.is_compiling() and self.usual > 0:
            x = tensors(args, kwargs)[0]
            if self.layout == "batch_first":
                self.saver.try_out(module, forward, args, kwargs, x)
                turn = self.saver.plan(cast(BranchMap, self.method), self.stream_site.word, x)
        if self.saver is None or turn is None:
            return self.follow(module, forward, args, kwargs)
        before = calls_so_far(self.control)
        try:
            with self.saver.running(turn):
                return self.follow(module, forward, args, kwargs)
        except Unexpected:
            self.saver.works = False
            take_back(self.control, before)
            return self.follow(module, forward, args, kwargs)

    def follow(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the block and change its sums."""
        own = self.own
        if own is not None and not torch.compiler.is_compiling() and own.reads(forward):
            if own.holds:
                return self.run_again(own, module, args, kwargs)
            self.own, self.known, self.tries = None, None, max(self.tries - 1, 0)
        if self.usual == 0 and not torch.compiler.is_compiling() and runs_in_function():
            self.refuse(type(module).__name__, IN_FUNCTION, False)
        graph = saves_graph()
        drawn: Source | None = None
        if isinstance(self.method, BlockMap):
            drawn = self.source(tensors(args, kwargs)[0])
        shared = Known(None)

        def add(added: Sum) -> Tensor:
            if in_checkpoint_since(graph):
                self.refuse(type(module).__name__, IN_CHECKPOINT, False)
            return self.sum(added, drawn, shared)

        out, watch = self.followed(module, forward, args, kwargs, add)
        if watch is None:
            return out
        if torch.compiler.is_compiling() or not watch.looks_as_usual(out, self.usual):
            reason = watch.problem(out)
            if reason is not None:
                self.refuse(type(module).__name__, reason, True)
            if not torch.compiler.is_compiling():
                self.usual, self.idle = len(watch.sums), watch.idle
                if self.saver is not None:
                    self.saver.learn(watch.sums, watch.overwrites, module)
        self.learn(watch, out)
        return out

    def run_again(self, own: OwnSums, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The same for a block of which it is known which sums of its own code are residual ones."""
        drawn, shared = None, Known(None)
        if isinstance(self.method, BlockMap):
            drawn = self.source(tensors(args, kwargs)[0])
        may_prepare = self.saver is None and len(self.prepared) > 0

        def add(known: OwnSum, a: Any, b: Any) -> Any:
            x, branch = (b, a) if known.at == 0 else (a, b)
            if may_prepare and type(x) is Tensor and type(branch) is Tensor:
                out = self.add_again(x, branch)
                if out is not None:
                    return out
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape):
                self.refuse(type(module).__name__, "adds something else than before to its input", True)
            return self.sum(Sum(operator.add, (a, b), known.at, known.ended, known.parallel), drawn, shared)

        return own.run(add, module, args, kwargs)

    def check(self, added: Sum, drawn: Source) -> None:
        if self.saver is not None and not torch.compiler.is_compiling():
            self.saver.check(added.ended, drawn.call)


@dataclass
class OutsideAction(SumAction):
    """Stands for a block whose branches are added outside of it; `HolderAction` lets it act."""

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


@dataclass
class HolderAction(Following):
    """Acts where a module adds the branches of several blocks: in a loop over their parts."""

    control: Control
    method: Method
    blocks: tuple[OutsideAction, ...]
    branches: tuple[Branch, ...]

    def name_site(self) -> None:
        for block in self.blocks:
            block.name_site()

    def acts(self, training: bool) -> bool:
        return any(block.acts(training) for block in self.blocks)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        drawn: dict[int, Source] = {}
        graph = saves_graph()
        add = functools.partial(self.add, module, drawn, Known(None), graph)
        out, watch = self.followed(module, forward, args, kwargs, add)
        if watch is None:
            return out
        if torch.compiler.is_compiling() or not watch.looks_as_usual(out, self.usual):
            reason = watch.problem(out)
            if reason is None and watch.guessed:
                reason = "computes attention without weights that tell which block it belongs to"
            if reason is not None:
                self.blocks[0].refuse(type(module).__name__, reason, False)
            if not torch.compiler.is_compiling():
                self.usual = len(watch.sums)
        self.learn(watch, out)
        return out

    def add(self, module: nn.Module, drawn: dict[int, Source], shared: Known, graph: Any, added: Sum) -> Tensor:
        numbers = {each.block for each in added.ended}
        here = [block for block in self.blocks if block.place.block in numbers]
        if len(here) == 0 or not here[0].acts(module.training):
            return added.plain()
        if len(numbers) > 1:
            here[0].refuse(type(module).__name__, "adds the branches of several blocks in one sum", False)
        if in_checkpoint_since(graph):
            here[0].refuse(type(module).__name__, IN_CHECKPOINT, False)
        number = here[0].place.block
        if isinstance(here[0].method, BlockMap) and number not in drawn:
            drawn[number] = here[0].source(added.branch)
        return here[0].sum(added, drawn.get(number), shared)


def runs_in_function() -> bool:
    """Whether this runs inside of an autograd function of the model's own, as reversible layers do.

    Its backward computes the sums in its own way, and knows nothing of what is done to them here. Checkpoints that are
    such functions run the same modules again.
    """
    found: bool = torch.compiler.disable(_search_frames)()
    return found


def _search_frames() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and isinstance(frame.f_locals.get(first[0]), torch._C._FunctionBase):
            if frame.f_globals.get("__name__") != "torch.utils.checkpoint":
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


IN_FUNCTION = "is run by an autograd function of the model's own, whose backward pass would not know of the change"


IN_CHECKPOINT = (
    "adds its branches inside of an activation checkpoint that it begins itself, which would add them again without "
    "the method (checkpoint the whole block from outside, and apply before it is wrapped)"
)


def saves_graph() -> Any:
    """How the graph of what runs now is saved, which activation checkpoints change for what is inside of them."""
    if torch.compiler.is_compiling():
        return None
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_checkpoint_since(graph: Any) -> bool:
    """Whether an activation checkpoint was begun since then. Gradients that were off and are on are somebody else's,
    such as a probe's that differentiates one branch."""
    now = saves_graph()
    return graph is not None and now != graph and (graph[0] or not now[0])
