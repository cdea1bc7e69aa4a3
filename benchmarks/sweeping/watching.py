"""What runs in a training pass: which modules, which attention; and what kind of refusal a message is.

Attention is looked for here without Attemper's own code, so that one can be held against the other.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

FUSED = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, torch.einsum)


class AttentionCalls(TorchFunctionMode):
    """Notes every attention call of a pass: a fused one, or a softmax over the last axis that a product follows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.seen: list[tuple[str, ...]] = []
        """For every call the names of the modules that were running, the innermost first."""
        self.weights: dict[int, tuple[Tensor, list[tuple[str, ...]]]] = {}
        """Tensors that came from a softmax and met no product yet; kept, so that no other takes their place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in FUSED:
            self.seen.append(self.chain())
        elif func in SOFTMAX and out.dim() >= 3 and self.axis(*args, **kwargs) in (-1, out.dim() - 1):
            self.weights[id(out)] = (out, [self.chain()])
        else:
            self.follow(func, args, out)
        return out

    @staticmethod
    def axis(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> int | None:
        return dim

    def follow(self, func: Any, args: Any, out: Any) -> None:
        for part in pytree.tree_leaves(args):  # einsum may take its operands as a list
            held = self.weights.get(id(part))
            if held is None:
                continue
            if func in PRODUCTS:
                self.seen += held[1]
                held[1].clear()  # a product met it: whatever else is done with it is the same attention
            elif isinstance(out, Tensor) and out.numel() == part.numel():
                self.weights[id(out)] = (out, held[1])

    def chain(self) -> tuple[str, ...]:
        found = []
        frame = sys._getframe(1)
        while frame is not None:
            name = self.names.get(id(frame.f_locals.get("self")))
            if name is not None and name not in found:
                found.append(name)
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found)


class Ran:
    """Context manager: notes which modules of a model are called inside it."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.lists = [name for name, module in model.named_modules() if isinstance(module, LISTS)]
        self.kinds: set[str] = set()

    def __enter__(self) -> Self:
        self.hook = register_module_forward_pre_hook(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.hook.remove()

    def note(self, module: nn.Module, inputs: Any) -> None:
        name = self.names.get(id(module))
        if name is not None:
            self.kinds.add(kind_of(name))
            self.kinds.update(kind_of(each) for each in self.lists if name.startswith(f"{each}."))


LISTS = (nn.ModuleList, nn.ModuleDict)
"""What never runs itself: a block that is a list of parts runs when one of them does."""


def kind_of(name: str) -> str:
    """What the layers of one kind share: of the experts of a mixture a pass may run only some."""
    return re.sub(r"\d+", "#", name)


NOT_RECOGNISED, NO_ATTENTION = "no attention recognised", "the model has no softmax attention"
REASONS = (
    (NO_ATTENTION, r"(?!)"),  # told by watching the plain model, not by the message
    (NOT_RECOGNISED, r"acts on attention; "),
    ("no feed-forward network recognised", r"acts on .*feed-forward networks; "),
    ("no block of one module", r"run as one module"),
    ("no blocks recognised", r"acts on blocks"),
    ("no patch embedding", r"acts on a patch embedding"),
    ("attention and feed-forward networks wanted, one missing", r"acts on .*; \w+ has none that is recognised"),
    ("squeeze-and-excite taken for a feed-forward network", r"taken for a feed-forward network"),
    ("attention ran outside of the recognised modules", r"ran outside of the modules that were recognised"),
    ("a recognised module did not run", r"would act on what this training pass did not run"),
    ("single head", r"attention has a single head"),
    ("had no effect", r"had no effect in this training pass"),
    ("no attention met in a recognised module", r"computed no attention"),
    ("attention times values not seen", r"did not multiply its attention weights with values"),
    ("projection not computed by F.linear", r"computed its .* projection in another way"),
    ("projections not seen", r"computed its .* in a way that was not seen"),
    ("queries, keys, values in another order", r"has its queries, keys and values in another order"),
    ("projections not found", r"were not found among its linear layers"),
    ("output projection not found", r"output projection of .* was not found"),
    ("weight behind a wrapper", r"needs the weight"),
    ("another number of skips than expected", r"skip connections in .* were expected"),
    ("attention and MLP in one sum", r"adds attention and the MLP in one sum"),
    ("sum outside of the block", r"gives something else than the sum|the residual sum is outside"),
    ("block is a list of parts", r"cannot act on block .*its parts are run"),
    ("block gives another shape", r"gives another shape"),
    ("block gives no tensor", r"gives no tensor"),
    ("block does not add its attention", r"does not add its attention"),
    ("block does not add its feed-forward network", r"does not add its feed-forward"),
    ("product of queries and keys not seen", r"product of its queries and keys was not seen"),
    ("modules replaced by the model while it ran", r"were replaced since"),
    ("branches of several blocks in one sum", r"adds the branches of several blocks"),
    ("other values than those of the projection", r"with other values than those of its projectio"),
    ("run by an autograd function of the model", r"by an autograd function"),
    ("windows cut behind the projections", r"tokens and computes attention over"),
    ("no axis for heads", r"computes attention without an axis for heads"),
    ("channels of a feature map not told", r"maps the tokens that .*which axis has"),
    ("block gets no tensor first", r"its first argument is no tensor"),
    ("logits changed in a way that is not followed", r"what becomes of the product of its queries and keys"),
    ("reentrant checkpoint", r"checkpointed with use_reentrant=True"),
    ("fewer keys than k", r"k=\d+ is more than the number of keys"),
    ("causal", r"causal|hides tokens from each other|hides some|hide tokens from each other"),
    ("padding not known", r"padding"),
    ("own dropout", r"the model has its own|dropout of its own"),
    ("forward replaced on the instance", r"was replaced on the instance"),
    ("scripted", r"is scripted"),
    ("nothing stochastic", r"compares two stochastic passes"),
)  # fmt: skip
"""The kinds of refusals, by what their messages say; the first that fits counts."""


def reason_of(message: str) -> str:
    """The kind of a refusal; one that is not known is its message without names and numbers."""
    for reason, pattern in REASONS:
        if re.search(pattern, message):
            return reason
    return re.sub(r"\d+", "#", re.sub(r"'[^']*'( \([^)]*\))?", "…", message))[:80]
