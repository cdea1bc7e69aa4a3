"""Tokens on their way through a block: at its input, behind attention with and without the skip, behind the MLP.

Where a branch joins the residual stream is found as `skipless` finds it. A block that adds its branches in a way that
is not understood still has an input and an output; what lies between is not known then. Of several attentions in one
block, the last one counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attemper.probes.conditioning import Conditioning, conditioning
from attemper.probes.watching import in_eval, run_model
from attemper.sites import BlockSite, Sites
from attemper.tempering.branches import Branch, branches_of
from attemper.tempering.layers import Layout, to_tokens
from attemper.tempering.residual import Residuals, Sum, tensors
from attemper.tempering.subclassing import Action

PLACES = ("input", "attention", "attention + skip", "mlp", "output")
"""In the order in which tokens pass them. "attention" and "mlp" are the branches before they join the stream."""

TellTokens = Callable[[int, str, Tensor], None]
"""(block, place, tokens (B, N, d))"""


@dataclass
class BlockWatch(Action):
    """Tells the tokens of one block."""

    site: BlockSite
    branches: tuple[Branch, ...]
    layout: Layout
    tell: TellTokens
    sums: list[tuple[Sum, Tensor]] = field(default_factory=list, init=False)
    """Where branches were added to the stream, and what came out."""

    def acts(self, training: bool) -> bool:
        return True

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        given = tensors(args, kwargs)
        out = self.watched(module, forward, args, kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for tokens in given[:1]:
                self.report("input", tokens)
            for added, stream in self.last_of("attention"):
                self.report("attention", added.branch)
                self.report("attention + skip", stream)
            for added, _ in self.last_of("mlp"):
                self.report("mlp", added.branch)
            self.report("output", first_tensor(out))
        self.sums = []
        return out

    def watched(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The block's output; what its branches added is noted."""
        self.sums = []
        with Residuals(module, tensors(args, kwargs), self.branches, self.add):
            return forward(*args, **kwargs)

    def add(self, added: Sum) -> Tensor:
        """What `Residuals` calls where a branch meets the stream: the sum is made as the model makes it."""
        out = added.plain()
        self.sums.append((added, out))
        return out

    def last_of(self, place: str) -> list[tuple[Sum, Tensor]]:
        """The last sum of a kind; nothing where an attention of the block was met in no sum."""
        attentions = sum(branch.is_attention for branch in self.branches)
        met = sum(any(branch.is_attention for branch in added.ended) for added, _ in self.sums)
        if place == "attention" and met != attentions:
            return []
        return [each for each in self.sums if place_of(each[0].ended) == place][-1:]

    def report(self, place: str, x: Tensor) -> None:
        if x.dim() >= 2 and x.is_floating_point():
            self.tell(self.site.index, place, to_tokens(x.detach(), self.layout))


def place_of(ended: Sequence[Branch]) -> str:
    """What is added to the stream: "attention", "mlp", or "block" where both were added to each other before."""
    kinds = {branch.is_attention for branch in ended}
    return "block" if len(kinds) > 1 else "attention" if kinds == {True} else "mlp"


def first_tensor(out: Any) -> Tensor:
    """The tokens in what a block returns."""
    if isinstance(out, Tensor):
        return out
    found: Tensor = next(x for x in (out.values() if isinstance(out, dict) else out) if isinstance(x, Tensor))
    return found


def block_watches(
    model: nn.Module, sites: Sites, kind: type[BlockWatch], tell: TellTokens
) -> list[tuple[nn.Module, BlockWatch]]:
    """A watch for every block that holds attention."""
    watches: list[tuple[nn.Module, BlockWatch]] = []
    for block in sites.blocks:
        own = [site for site in sites.attentions if site.block == block.index]
        if not own:
            continue
        multi = next((site.module for site in own if isinstance(site.module, nn.MultiheadAttention)), None)
        layout: Layout = "sequence_first" if multi is not None and not multi.batch_first else "batch_first"
        inside = branches_of(sites, [block], block.name, model)
        watches.append((block.module, kind(block, inside, layout, tell)))
    return watches


def conditioning_after(model: nn.Module, batch: Any, modules: Sequence[str]) -> dict[str, Conditioning]:
    """Conditioning of what the named modules put out, for models with or without attention, in eval mode.

    modules: names in the model. Feature maps (B, C, H, W) of modules that hold a convolution are taken place by place.
    """
    found: dict[str, Conditioning] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            tokens = first_tensor(out)
            convolves = tokens.dim() == 4 and any(isinstance(part, nn.Conv2d) for part in module.modules())
            found[name] = conditioning(to_tokens(tokens, "channels_first" if convolves else "batch_first"))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name)) for name in modules]
    try:
        with in_eval(model), torch.no_grad():
            run_model(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found
