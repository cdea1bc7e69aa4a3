"""Feed-forward networks with convolutions inside, which tokens that have no place on the image pass by."""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.kinds import TokenMap
from attemper.sites import MlpSite, Sites
from attemper.tempering.layers import Layout, TokenAction, to_tokens
from attemper.tempering.penalties import Control
from attemper.tempering.subclassing import Action


@dataclass
class Running:
    """What is known of such a network while it runs."""

    tokens: int
    """How many it got."""
    deferred: bool = False
    """Whether its output is to be mapped in place of a layer's."""


@dataclass
class LocalTokenAction(TokenAction):
    """Maps tokens in such a network: all that it gets or gives, where some of them pass by its layers.

    At the front it stands at the network, at the end at its last layer. If the network gets more tokens than that layer
    gives, the others are put back behind it, and the network's own output is what is mapped.
    """

    def layout_of(self, x: Tensor) -> Layout:
        return self.layout if x.dim() == 4 else "batch_first"

    def map(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        running = self.control.ledger.networks.get(id(self))
        passing = running is not None and running.tokens > to_tokens(x, self.layout_of(x)).shape[1]
        if running is not None and passing and self.side == "output":
            running.deferred = True
            return x
        if cast(TokenMap, self.method).reads_first_token and (passing or self.layout_of(x) == "channels_first"):
            raise UnmetError(
                f"'{self.method}' needs the class token, and it passes by the convolutions of {self.place.where}: what "
                "is mapped there are patches alone. Use another variant or position, or leave it out with targets=."
            )
        return super().map(x, layer)

    def map_whole(self, out: Any) -> Any:
        """Map all tokens that the network gives."""
        if isinstance(out, tuple):
            return (super().map(out[0]), *out[1:])
        return super().map(out)


@dataclass
class NetworkAction(Action):
    """Stands round such a network, and tells how many tokens it got."""

    control: Control
    action: LocalTokenAction

    def acts(self, training: bool) -> bool:
        return self.action.acts(training)

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        action = self.action
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        running = Running(to_tokens(x, action.layout_of(x)).shape[1])
        networks = self.control.ledger.networks  # this thread's own
        networks[id(action)] = running
        try:
            out = forward(*args, **kwargs)
        finally:
            del networks[id(action)]
        return action.map_whole(out) if running.deferred else out


def local_network(model: nn.Module, sites: Sites, mlp: MlpSite, kind: TokenMap) -> nn.Module | None:
    """The feed-forward network as one module, where convolutions are in it and a method looks at all tokens at once."""
    if mlp.name in {block.name for block in sites.blocks} or not (kind.mixes_tokens or kind.reads_first_token):
        return None
    network = model.get_submodule(mlp.name)
    inside = set(network.modules())
    if any(site.module in inside for site in sites.attentions):
        return None
    return network if any(isinstance(module, nn.Conv2d) for module in inside) else None
