"""What happens where a block adds its branches to the residual stream."""

import re
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import BranchMap, SkipRemover
from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Stream
from attemper.tempering.layers import Layout
from attemper.tempering.penalties import Control
from attemper.tempering.residual import ATTENTION, IN_PLACE, MLP, Residuals, first_tensor, tensors
from attemper.tempering.subclassing import Action


@dataclass
class SkipAction(Action):
    """Acts where a block adds its branches to the residual stream: removes the skip, or changes the branch."""

    control: Control
    place: Place
    method: Method
    attentions: int
    """How many attentions the block has; each of them has a skip."""
    mlps: tuple[str, ...]
    """The last layers of its MLPs, by their names in the block; each has a skip, or numbered ones share one."""
    layout: Layout
    mapped: bool = False
    """Whether a method maps the whole block inside of this action; it then checks what the block gives."""

    def resolve(self, methods: dict[str, Method]) -> None:
        self.method = methods[self.method.name].at(self.place)

    def acts(self, training: bool) -> bool:
        if isinstance(self.method, SkipRemover):
            return self.control.when != "never"
        return self.control.on(training) and not self.method.idle

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        skips = Residuals(tensors(args, kwargs), [module.get_submodule(name) for name in self.mlps], self.add)
        with skips:
            out = forward(*args, **kwargs)
        self.check(module, skips, out)
        return out

    def check(self, module: nn.Module, skips: Residuals, out: Any) -> None:
        """Raise unless every branch was met once, each by itself, and nothing else became of the stream."""
        attentions = sum(made_of == ATTENTION for made_of in skips.sums)
        mlps = sum(made_of == MLP for made_of in skips.sums)
        shared = len({re.sub(r"\d+", "#", name) for name in self.mlps})
        expected = self.attentions + len(self.mlps)
        if attentions + mlps < len(skips.sums):
            self.refuse(module, "adds attention and the MLP in one sum, where neither is by itself")
        if attentions != self.attentions or mlps not in (len(self.mlps), shared):
            raise UnmetError(
                f"{self.method.name} found {len(skips.sums)} skip connections in '{self.place.name}' "
                f"({type(module).__name__}), where {expected} were expected: the block adds its branches in a way that "
                "is not understood. Leave it out with targets=."
            )
        if not self.mapped and skips.origin(first_tensor(out)) < 0:
            self.refuse(module, "gives something else than the sum of its input and its branches")

    def refuse(self, module: nn.Module, reason: str) -> NoReturn:
        raise UnmetError(
            f"{self.method.name} cannot act in '{self.place.name}': this {type(module).__name__} {reason}. Leave it "
            "out with targets=."
        )

    def add(self, func: Any, terms: tuple[Tensor, Tensor], branch: Tensor, made_of: int) -> Tensor:
        """The sum of stream and branch, or what the method makes of it."""
        out: Tensor
        if isinstance(self.method, SkipRemover):
            if not self.method.removes(self.place)[0 if made_of == ATTENTION else 1]:
                out = func(*terms)
                return out
            # An addition in place must change the tensor itself: its result may not be looked at.
            return terms[0].copy_(branch) if func in IN_PLACE and branch is terms[1] else branch
        swap = self.layout == "sequence_first" and branch.dim() == 3
        mapped = cast(BranchMap, self.method).map_branch(
            branch.transpose(0, 1) if swap else branch, Stream(draw_seed(branch))
        )
        mapped = mapped.transpose(0, 1) if swap else mapped
        if func in IN_PLACE and branch is terms[0]:
            return branch.copy_(mapped + terms[1])
        out = func(*(mapped if term is branch else term for term in terms))
        return out
