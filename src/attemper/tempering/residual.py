"""Following the residual stream: where branches are added to it, and what each of them computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from attemper.sites.adapted import inner
from attemper.tempering.branches import Branch
from attemper.tempering.functions import IN_PLACE, kind_of, kind_of_traced
from attemper.tempering.known import Known
from attemper.tempering.operands import in_order

if TYPE_CHECKING:
    from attemper.tempering.repeated_sums import SumLog

STREAM, LOOSE, FIRST = 1, 2, 4
"""The marks of a tensor: it comes from the inputs; it is the sum of a branch and of something that was only computed
from the inputs. From FIRST on, every branch has two bits: computed by its layers; and its attention, or its last layer,
has been computed. Behind them, every residual sum has one: computed from that sum."""


class Mark(NamedTuple):
    """What is known of a tensor."""

    bits: int
    origin: int = -1
    """The number of the input that it still is, but for branches, norms, factors and views; -1: it is none."""


NOTHING = Mark(0)


class Sum(NamedTuple):
    """A residual sum that is about to be made."""

    func: Any
    """The addition."""
    terms: tuple[Tensor, Tensor]
    at: int
    """Which of the terms is the branch."""
    ended: tuple[Branch, ...]
    """The branches that end in it: several, where they were added to each other before."""
    parallel: bool
    """Whether the branch was computed from the stream as it was before another branch was added to it."""

    @property
    def branch(self) -> Tensor:
        return self.terms[self.at]

    @property
    def stream(self) -> Tensor:
        return self.terms[1 - self.at]

    def plain(self) -> Tensor:
        """The sum as it is."""
        out: Tensor = self.func(*self.terms)
        return out


Add = Callable[[Sum], Tensor]
"""Makes a residual sum, or something else in its place."""


class Residuals(TorchFunctionMode):
    """Follows the residual stream while a module runs, and hands over each sum of the stream and a branch.

    Every tensor inherits the marks of what it is computed from. Products with the weights of an attention or of an MLP
    mark what comes out as theirs. So a branch is known by what computes it, not by its turn; and the stream is whatever
    comes from the inputs without any of that: the input itself, or a shortcut that pools or projects it. A sum of the
    stream and of a branch is a residual sum, and its result is the stream again.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        branches: Sequence[Branch],
        add: Add = Sum.plain,
        log: SumLog | None = None,
    ) -> None:
        super().__init__()
        self.log = log
        """Takes down what is done, so that a later pass may do it again."""
        self.branches = branches
        self.add = add
        self.inputs = inputs
        self.marks = Known(NOTHING)
        self.weights = Known(0)
        """The bit of the branch that a weight belongs to."""
        self.parametrised: list[tuple[nn.Module, int]] = []
        """Layers whose weight is a new tensor whenever it is asked for."""
        self.ends: list[tuple[nn.Module, int]] = []
        """The last layers of MLPs."""
        self.pending = 0
        """Which attentions and last layers were computed, and are part of no sum yet."""
        self.met = 0
        """Which of them were added to the stream."""
        self.ran = 0
        """Which branches have run at all: their forward was called, or a weight of theirs was multiplied with."""
        self.latest = 0
        """The attention whose weight was multiplied with last, and that was not computed since."""
        self.latest_input = 0
        """The marks of what it was multiplied with."""
        self.sums: list[tuple[Branch, ...]] = []
        """What the branches were that were added to the stream, in order."""
        self.on_input = False
        """Whether a branch was added to an input itself."""
        self.overwrites = False
        """Whether an input was changed in place."""
        self.doubtful = False
        """Whether a sum was taken for a residual one that may be a part of a branch."""
        self.guessed = False
        """Whether an attention was computed without any weight that tells which one it is."""
        self.first_sum = 2 * len(branches) + FIRST.bit_length() - 1
        """The place of the first bit that tells of a sum."""
        self.all_inside = sum(FIRST << 2 * number for number in range(len(branches)))
        for number, branch in enumerate(branches):
            for name in branch.layers:
                self.own(inner(module.get_submodule(name)), FIRST << 2 * number)
            if not branch.is_attention:
                self.ends.append((inner(module.get_submodule(branch.home)), FIRST << 2 * number))
        for number, x in enumerate(inputs):
            self.marks.note(x, Mark(STREAM, number))

    def own(self, layer: nn.Module, bit: int) -> None:
        """Let a layer's weights tell of a branch."""
        if parametrize.is_parametrized(layer):
            self.parametrised.append((layer, bit))
        for weight in layer._parameters.values():
            if weight is not None:
                self.weights.note(weight, bit | self.weights.of(weight))

    @contextlib.contextmanager
    def noting_runs(self, module: nn.Module) -> Iterator[None]:
        """Context manager: notes whose forward is called, which a weight that is used out of sight does not tell."""
        hooks = []
        for number, branch in enumerate(self.branches):

            def note(part: nn.Module, args: Any, bit: int = FIRST << 2 * number) -> None:
                self.ran |= bit

            hooks.append(module.get_submodule(branch.home).register_forward_pre_hook(note))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_order(func, args, kwargs)
        kind = kind_of_traced(func) if torch.compiler.is_compiling() else kind_of(func)
        if is_sum(kind, args, kwargs):
            return self.addition(func, args)
        out = func(*args, **kwargs)
        self.follow(func, kind, args, kwargs, out)
        return out

    def follow_again(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of a function that ran before this watch began, and of what came out."""
        kind = kind_of(func)
        if is_sum(kind, args, kwargs):
            self.addition(func, args, out)
        else:
            self.follow(func, kind, args, kwargs, out)

    def follow(self, func: Any, kind: str, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of what a function made."""
        if self.log is not None:
            self.log.note(func, kind, args, out)
        if kind == "same" and len(args) > 0:
            self.note(out, self.marks.of(args[0]))
            return
        bits, origin = self.bits_of(args) | self.bits_of(kwargs.values()), -1
        if kind == "factor" or kind == "change":
            origin = self.origin_of_only(args)
        if kind == "attention" or kind == "product":
            bits |= self.product(args, kwargs, bits)
        if kind == "attention" and args[0].dim() > 2:  # that of a router is over experts
            bits |= self.attention(bits)
        if bits == 0:
            return
        if kind == "change" or kind == "add_":
            self.overwrites = self.overwrites or any(args[0] is x for x in self.inputs)
            self.marks.note(args[0], Mark(bits, origin))
        self.note(out, Mark(bits, origin))

    # --------------------------------------------------------------------------------------------------------- branches
    def attention(self, bits: int) -> int:
        """An attention was computed from tensors with these marks: the bits of the one that it is."""
        found = 0
        for number, branch in enumerate(self.branches):
            if branch.is_attention and bits & FIRST << 2 * number:
                found |= FIRST << 2 * number
        seen = 0
        if found == 0 and self.latest:  # its queries came on a way that the compiler does not show
            found, seen = self.latest, self.latest_input
        elif found == 0:
            numbers = [number for number, branch in enumerate(self.branches) if branch.is_attention]
            if len(numbers) == 0:
                return 0
            self.guessed = self.guessed or len({self.branches[number].block for number in numbers}) > 1
            left = [number for number in numbers if not (self.pending | self.met) & END << 2 * number]
            found = FIRST << 2 * (left or numbers)[0]
        self.latest = 0
        self.ran |= found
        self.pending |= found * 2
        return found | found * 2 | seen

    def product(self, args: Any, kwargs: Any, bits: int) -> int:
        """A product was computed of tensors with these marks: the bits of the branch that its weight belongs to."""
        found = 0
        for x in (*args, *kwargs.values()):
            for part in x if isinstance(x, tuple | list) else (x,):
                if isinstance(part, Tensor):
                    found |= self.weight_bit(part)
        self.ran |= found
        for number, branch in enumerate(self.branches):
            if branch.is_attention and found & FIRST << 2 * number:
                self.latest, self.latest_input = FIRST << 2 * number, bits
        for layer, bit in self.ends if found else ():
            if found & bit and uses_weight(layer, args):
                self.pending |= bit * 2
                found |= bit * 2
        return found

    def weight_bit(self, x: Tensor) -> int:
        """The bit of the branch that a tensor is a weight of, or a view of a weight."""
        bit: int = self.weights.of(x)
        if bit == 0 and not torch.compiler.is_compiling() and x._base is not None:
            bit = self.weights.of(x._base)
        for layer, own in self.parametrised if bit == 0 else ():
            if uses_weight(layer, (x,)):
                return own
        return bit

    # ------------------------------------------------------------------------------------------------------------- sums
    def addition(self, func: Any, terms: tuple[Tensor, Tensor], made: Tensor | None = None) -> Tensor:
        """The sum of two tensors. made: what it was, if it is there already."""
        marks = self.marks.of(terms[0]), self.marks.of(terms[1])
        clean = self.is_clean(marks[0]), self.is_clean(marks[1])
        if clean[0] != clean[1]:
            stream, branch = (0, 1) if clean[0] else (1, 0)
            done = self.ended_in(marks[branch].bits, terms[branch])
            if len(done) > 0 and terms[0].shape == terms[1].shape:
                parallel = self.is_parallel(marks[stream], marks[branch])
                which = tuple([self.branches[number] for number in done])
                return self.residual_sum(Sum(func, terms, branch, which, parallel), marks[stream], done, made)
        if func in IN_PLACE:
            self.overwrites = self.overwrites or any(terms[0] is x for x in self.inputs)
        out: Tensor = func(*terms) if made is None else made
        if self.log is not None:
            self.log.note(func, "", terms, out)
        if clean[0] and clean[1]:
            loose = marks[0].bits & LOOSE, marks[1].bits & LOOSE
            if loose[0] != loose[1] and marks[1 if loose[0] else 0].origin >= 0:
                self.doubtful = True
        origin = -1
        for x, mark in zip(terms, marks, strict=True):  # a position, or a branch that no method knows of
            if origin < 0 and x.shape == out.shape:
                origin = mark.origin
        if (clean[0] or clean[1]) and (clean[0] or marks[0].bits == 0) and (clean[1] or marks[1].bits == 0):
            self.note(out, Mark(STREAM | self.sums_in(marks[0].bits | marks[1].bits), origin))
        else:
            self.note(out, Mark((marks[0].bits | marks[1].bits) & ~LOOSE))
        return out

    def residual_sum(self, added: Sum, stream: Mark, ended: list[int], made: Tensor | None) -> Tensor:
        """The sum of the stream and of a branch, which is the stream again."""
        if added.func in IN_PLACE and any(added.terms[0] is x for x in self.inputs):
            self.overwrites = True
        if self.log is not None:
            self.log.note_sum(added)
        out = self.add(added) if made is None else made
        if self.log is not None:
            self.log.note_made(out)
        number = 1 << self.first_sum + len(self.sums)
        self.sums.append(added.ended)
        self.on_input = self.on_input or stream.origin >= 0
        for each in ended:
            self.pending &= ~(END << 2 * each)
            self.met |= END << 2 * each
        loose = LOOSE if stream.origin < 0 and stream.bits & LOOSE == 0 else 0
        self.note(out, Mark(STREAM | loose | self.sums_in(stream.bits) | number, stream.origin))
        return out

    def sums_in(self, bits: int) -> int:
        """The bits that tell from which sums something was computed."""
        return bits >> self.first_sum << self.first_sum

    def is_parallel(self, stream: Mark, branch: Mark) -> bool:
        """Whether the stream has a branch in it that the other branch was computed beside, and not behind."""
        return branch.bits & STREAM != 0 and self.sums_in(stream.bits) & ~branch.bits != 0

    def is_clean(self, mark: Mark) -> bool:
        """Whether a tensor is the stream, or a shortcut from it: no branch has a part in it."""
        return mark.bits & STREAM != 0 and mark.bits & 3 * self.all_inside == 0

    def ended_in(self, bits: int, x: Tensor) -> list[int]:
        """The numbers of the branches that end in a tensor which is added to the stream."""
        if bits == 0 and not isinstance(x, nn.Parameter):
            bits = self.pending  # computed where it could not be followed, as in an autograd function
        return [number for number in range(len(self.branches)) if bits & END << 2 * number]

    # ------------------------------------------------------------------------------------------------------------ marks
    def note(self, out: Any, mark: Mark) -> None:
        if mark.bits == 0:
            return
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor):
                self.marks.note(part, mark)

    def bits_of(self, operands: Any) -> int:
        """What any of the operands was computed from."""
        bits = 0
        for x in operands:
            for part in x if isinstance(x, tuple | list) else (x,):
                if isinstance(part, Tensor):
                    bits |= self.marks.of(part).bits
        return bits & ~LOOSE

    def origin_of_only(self, args: Any) -> int:
        """The origin of the one operand that has marks, in a product by a factor; -1: there are several."""
        marked = [mark for mark in map(self.marks.of, tensors(args, {})) if mark.bits]
        return marked[0].origin if len(marked) == 1 else -1

    def origin(self, x: Any) -> int:
        """The number of the input that x still is, but for what was added to it; -1: of none."""
        number: int = self.marks.of(x).origin if isinstance(x, Tensor) else -1
        return number

    def looks_as_usual(self, out: Any, sums: int) -> bool:
        """Whether a pass had as many sums as one that was checked, and nothing is left over."""
        if sums == 0 or len(self.sums) != sums or self.pending or self.doubtful or self.guessed:
            return False
        return self.is_clean(self.marks.of(first_tensor(out)))

    def problem(self, out: Any) -> str | None:
        """Why the sums cannot be those of all branches, as the end of a sentence about the module; None: they can."""
        if self.doubtful:
            return "adds attention or the MLP to something else than its input, and that to its input"
        left = [branch for number, branch in enumerate(self.branches) if self.pending & END << 2 * number]
        if len(left) > 0:
            return f"does not add its {left[0].kind} ('{left[0].name}') to its input in a way that is understood"
        met = {branch.group for ended in self.sums for branch in ended}
        for number, branch in enumerate(self.branches):
            if branch.group not in met and not self.is_skipped(number):
                return f"does not add its {branch.kind} ('{branch.name}') to its input"
        after = first_tensor(out)
        if len(self.sums) == 0 or after is None or not self.is_clean(self.marks.of(after)):
            return "gives something else than the sum of its input and its branches"
        return None

    def is_skipped(self, number: int) -> bool:
        """Whether a branch did not run: cross-attention without an encoder, or a whole block among several."""
        branch = self.branches[number]
        if branch.is_attention and self.ran & FIRST << 2 * number == 0:
            return True
        several = len({each.block for each in self.branches}) > 1
        return several and all(each.block != branch.block for ended in self.sums for each in ended)

    @property
    def idle(self) -> tuple[str, ...]:
        """The names of attentions that did not run while the module did."""
        return tuple(b.name for number, b in enumerate(self.branches) if b.is_attention and self.is_skipped(number))


END = 2 * FIRST


def is_sum(kind: str, args: Any, kwargs: Any) -> bool:
    """Whether a function of this kind adds two tensors."""
    if (kind == "add" or kind == "add_") and len(args) == 2 and len(kwargs) == 0:
        return isinstance(args[0], Tensor) and isinstance(args[1], Tensor)
    return False


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
