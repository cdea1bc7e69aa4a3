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

from attemper.probes.conditioning import Conditioning, condition_number, conditioning
from attemper.probes.watching import in_eval, run_model
from attemper.sites import BlockSite, Sites
from attemper.tempering.branches import Branch, branches_of
from attemper.tempering.layers import Layout, to_tokens
from attemper.tempering.residual import Residuals, Sum, tensors
from attemper.tempering.subclassing import Action

PLACES = ("input", "attention", "attention + skip", "output")
"""In the order in which tokens pass them. "attention" is the branch before it joins the stream."""

TellTokens = Callable[[int, str, Tensor], None]
"""(block, place, tokens (B, N, d))"""


@dataclass
class BlockWatch(Action):
    """Tells the tokens of one block."""

    site: BlockSite
    branches: tuple[Branch, ...]
    layout: Layout
    tell: TellTokens
    joined: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)
    """The branch of every attention, and the stream behind it."""

    @property
    def attentions(self) -> int:
        """How many attentions the block has."""
        return sum(branch.is_attention for branch in self.branches)

    def acts(self, training: bool) -> bool:
        return True

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        given = tensors(args, kwargs)
        out = self.watched(module, forward, args, kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for tokens in given[:1]:
                self.report("input", tokens)
            if len(self.joined) == self.attentions:
                branch, stream = self.joined[-1]
                self.report("attention", branch)
                self.report("attention + skip", stream)
            self.report("output", first_tensor(out))
        self.joined = []
        return out

    def watched(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """The block's output; what its attentions added is noted."""
        self.joined = []
        with Residuals(module, tensors(args, kwargs), self.branches, self.add):
            return forward(*args, **kwargs)

    def add(self, added: Sum) -> Tensor:
        """What `Residuals` calls where a branch meets the stream: the sum is made as the model makes it."""
        out = added.plain()
        if any(each.is_attention for each in added.ended):
            self.joined.append((added.branch, out))
        return out

    def report(self, place: str, x: Tensor) -> None:
        if x.dim() >= 2 and x.is_floating_point():
            self.tell(self.site.index, place, to_tokens(x.detach(), self.layout))


@dataclass
class JacobianWatch(BlockWatch):
    """Tells κ of the Jacobian of one block's attention, without and with its skip, on a sub-sample of coordinates.

    The full Jacobian is (N·d)². Of it, the rows and columns of `size` coordinates are taken, the same for both: the
    skip's identity then adds an identity.
    """

    size: int = 64
    found: dict[str, float] = field(default_factory=dict, init=False)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with torch.enable_grad():
            at = next((i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()), None)
            if at is None:  # given by name: a block of Transformers may be called so, and is left out
                return forward(*args, **kwargs)
            leaf = args[at].detach().requires_grad_()
            args = (*args[:at], leaf.clone(), *args[at + 1 :])  # a block may change its input in place
            out = self.watched(module, forward, args, kwargs)
            with torch._C.DisableTorchFunction():
                self.differentiate(leaf)
        self.joined = []
        return out

    def differentiate(self, leaf: Tensor) -> None:
        if len(self.joined) != self.attentions or self.attentions == 0:
            return
        branch, stream = self.joined[-1]
        if branch.numel() != leaf.numel():
            return
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randperm(leaf.numel(), generator=generator)[: self.size].to(leaf.device)
        for place, out in (("attention", branch), ("attention + skip", stream)):
            self.found[place] = float(condition_number(_submatrix(out, leaf, chosen)))


def _submatrix(out: Tensor, leaf: Tensor, chosen: Tensor) -> Tensor:
    """∂out/∂leaf at some coordinates, the same of both."""
    flat = out.reshape(-1)
    rows = [torch.autograd.grad(flat[i], leaf, retain_graph=True, allow_unused=True)[0] for i in chosen.tolist()]
    return torch.stack(
        [torch.zeros_like(chosen, dtype=leaf.dtype) if r is None else r.reshape(-1)[chosen] for r in rows]
    )


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
