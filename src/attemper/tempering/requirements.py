"""What a recipe needs of a model, checked before a model is touched."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import nn

from attemper.errors import ConflictError, NoSiteError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import (
    BlockMap,
    BranchMap,
    LossTerm,
    Part,
    PatchMap,
    Penalty,
    SkipRemover,
    TokenMap,
    WeightMap,
)
from attemper.ops.perturbation import Perturbation
from attemper.recipe import describe
from attemper.sites import AttentionSite, ConvolutionSite, Sites
from attemper.sites.adapted import inner, is_linear, widths
from attemper.tempering.layers import Layout
from attemper.tempering.own_dropout import active_dropout
from attemper.tempering.projecting import missing_projections
from attemper.tempering.wrapped import refuse_unknown_weight


class Requirements:
    """A model's sites as a recipe sees them, and whether each method finds what it acts on."""

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], sites: Sites) -> None:
        self.model, self.methods, self.sites = model, methods, sites
        self.mlps = [mlp for mlp in sites.mlps if sites.reaches(mlp.name, "mlp")]
        self.blocks = [block for block in sites.blocks if sites.reaches(block.name, "blocks")]
        self.patches = [patch for patch in sites.patches if sites.reaches(patch.name, "patches")]
        self.convolutions = [each for each in sites.convolutions if sites.reaches(each.name, "convolutions")]
        self.names = {module: name for name, module in model.named_modules()}

    def check(self, method: Method) -> None:
        """Refuse a method that would find nothing to act on."""
        positions = method.positions if isinstance(method, TokenMap) else ()
        needs_attention = isinstance(method, Perturbation | WeightMap) or "attention_end" in positions
        if needs_attention and not self.sites.attentions:
            raise NoSiteError(self.nothing(method, "attention"))
        if any(position.startswith("mlp") for position in positions) and not self.mlps:
            raise NoSiteError(self.nothing(method, "feed-forward networks"))
        if isinstance(method, Penalty):
            self.check_components(method)
        if isinstance(method, PatchMap) and not positions and not self.patches:
            raise NoSiteError(
                self.nothing(method, "a patch embedding, a layer that makes tokens of the pixels of an image")
            )
        if (isinstance(method, BlockMap | BranchMap | SkipRemover) or "entry" in positions) and not self.blocks:
            raise NoSiteError(self.nothing(method, "blocks"))
        if isinstance(method, SkipRemover) and not self.mlps:
            if not any(method.removes(self.block_place(block.index, block.name))[0] for block in self.blocks):
                raise NoSiteError(self.nothing(method, "feed-forward networks"))
        if isinstance(method, LossTerm):
            self.check_stochastic(method)
        if isinstance(method, Penalty | WeightMap):
            self.check_projections(method)

    def check_components(self, method: Method) -> None:
        """Refuse a penalty on what the model does not have; where targets choose, one part that acts is enough."""
        penalty, blocks = cast(Penalty, method), len(self.sites.blocks)
        places = [Place(block, blocks) for block in range(max(blocks, 1))]
        parts = (
            ("attention", any(map(penalty.wants_attention, places)), self.sites.attentions),
            ("feed-forward networks", any(map(penalty.wants_mlp, places)), self.mlps),
            ("convolutions", self.wants_convolutions(penalty), self.penalised_convolutions(penalty)),
        )
        missing = [what for what, wanted, found in parts if wanted and not found]
        acts = any(wanted and found for _, wanted, found in parts)
        if missing == ["convolutions"] and self.convolutions:
            raise NoSiteError(
                f"'{method}' would act on none of the {len(self.convolutions)} convolutions of "
                f"{type(self.model).__name__}: each is a layer that the recipe has another strength for, as a "
                "projection of attention or as a part of a feed-forward network, or its own strength is 0"
            )
        if missing and (not self.sites.reached or not acts):
            raise NoSiteError(self.nothing(method, " and ".join(missing)))

    def nothing(self, method: Method, what: str) -> str:
        kinds = sorted({type(module).__name__ for module in self.model.modules()})
        seen = ", ".join(kinds[:40]) + (", …" if len(kinds) > 40 else "")
        reasons: dict[str, list[str]] = {}
        for name, why in self.sites.left_alone.items():
            reasons.setdefault(why, []).append(name)
        looked = f" {self.sites.seen}" if self.sites.seen and "attention" in what else ""
        left = "".join(f" {_first_of(names)} left alone: {why}." for why, names in reasons.items())
        chosen = " among the modules that targets= chooses" if self.sites.reached else ""
        return (
            f"'{method}' acts on {what}; {type(self.model).__name__} has none that is recognised{chosen}.{left}{looked}"
            f" Module types seen: {seen}. Attention in modules of your own can be named: targets=['blocks.*.attn']."
        )

    def check_stochastic(self, method: Method) -> None:
        if any(m.stochastic and not m.idle for m in self.methods) or active_dropout(self.model):
            return
        raise ConflictError(
            f"{method.name} compares stochastic passes, and nothing in '{describe(self.methods)}' or in the model "
            f"is stochastic: all would be equal. Add a method, such as 'dropkey(0.1) + {method.name}'."
        )

    def check_projections(self, method: Method) -> None:
        for site in self.sites.attentions:
            if isinstance(method, Penalty) and not method.wants_attention(self.place(site)):
                continue
            what = missing_projections(self.model, site, isinstance(method, WeightMap))
            if what is not None:
                raise NoSiteError(
                    f"{method.name} needs the {what} of '{site.name}' ({type(site.module).__name__}), and they "
                    "were not found among its linear layers; leave it out with targets="
                )
            for name in "qkv" if isinstance(method, Penalty) else ("q", "k", "v", "out"):
                if (part := getattr(site.projections, name)) is not None:
                    refuse_unknown_weight(method.name, site.name, part.slot, part.module, part.weight)

    # -------------------------------------------------------------------------------------------------------- places
    def place(self, site: AttentionSite) -> Place:
        where = Place(site.block, len(self.sites.blocks), name=site.name)
        if site.geometry is None:
            return where
        return replace(
            where, grid=site.geometry.grid, prefix=site.geometry.prefix, class_token=site.geometry.class_token
        )

    def block_place(self, block: int, name: str) -> Place:
        """A place in a block, with what its first attention tells of the tokens."""
        first = next((site for site in self.sites.attentions if site.block == block), None)
        if first is None:
            return Place(block, len(self.sites.blocks), name=name)
        return replace(self.place(first), name=name)

    def convolution_place(self, site: ConvolutionSite) -> Place:
        """A convolution's place among the blocks; in a model without any, among the convolutions."""
        if self.sites.blocks:
            return self.block_place(site.block, site.name)
        return Place(site.block, len(self.sites.convolutions), name=site.name, unit="convolution")

    def wants_convolutions(self, penalty: Penalty) -> bool:
        """Whether a penalty has a strength for any convolution, should there be one."""
        blocks, convolutions = len(self.sites.blocks), len(self.sites.convolutions)
        places = [Place(block, blocks) for block in range(blocks)]
        alone = [Place(index, convolutions, unit="convolution") for index in range(max(convolutions, 1))]
        return any(map(penalty.wants_convolution, places or alone))

    def all_convolutions(self) -> frozenset[str] | None:
        """The names of all convolutions, where penalties are meant for every one."""
        penalties = [method for method in self.methods if isinstance(method, Penalty)]
        if "convolutions" in self.sites.reached or not any(map(self.wants_convolutions, penalties)):
            return None
        return frozenset(site.name for site in self.sites.convolutions)

    def penalised_convolutions(self, penalty: Penalty) -> list[ConvolutionSite]:
        """Those that a penalty wants, and that none of the recipe takes as a part of attention or of an MLP."""
        penalties = [method for method in self.methods if isinstance(method, Penalty)]
        taken = {layer for layer, part, place in self.parts() if any(each.takes(part, place) for each in penalties)}
        free = [site for site in self.convolutions if inner(site.module) not in taken]
        return [site for site in free if penalty.wants_convolution(self.convolution_place(site))]

    def parts(self) -> Iterator[tuple[nn.Module, Part, Place]]:
        """Every projection of attention and every layer of an MLP that a penalty may take."""
        names: tuple[Part, ...] = ("q", "k", "v")
        for site in self.sites.attentions:
            if site.projections is not None:
                yield from ((getattr(site.projections, name).module, name, self.place(site)) for name in names)
        for mlp in self.mlps:
            place = self.block_place(mlp.block, mlp.name)
            yield from ((inner(layer), "ff1", place) for layer in mlp.firsts)
            yield inner(mlp.last), "ff2", place

    def told_by(self, block: int) -> int:
        """The block whose attention tells of a block's tokens: itself, else the last one before it that has any."""
        known = sorted({site.block for site in self.sites.attentions})
        before = [index for index in known if index <= block]
        return before[-1] if before else known[0] if known else block

    def layout(self, block: int, layer: nn.Module) -> Layout:
        if isinstance(inner(layer), nn.Conv2d) or self.is_convolutional(layer):
            return "channels_first"
        for site in self.sites.attentions:
            if site.block == block and isinstance(site.module, nn.MultiheadAttention):
                return "batch_first" if site.module.batch_first else "sequence_first"
        return "batch_first"

    def channels_of(self, block: int) -> int:
        """How many channels the tokens of a block have, by the layers that read them; 0: none tells."""
        for site in self.sites.attentions:
            if site.block == block and isinstance(site.module, nn.MultiheadAttention):
                return int(site.module.embed_dim)
            if site.block == block and site.projections is not None:
                return widths(site.projections.q.module)[0]
        return next((channels(mlp.firsts[0], "input") for mlp in self.sites.mlps if mlp.block == block), 0)

    def width_of(self, block: int, method: Method) -> int:
        """The same for a parameter of a method, which needs to know; a block itself does not say."""
        if known := self.channels_of(block):
            return known
        if cast(TokenMap, method).parameter(1) is None:
            return 0
        raise NoSiteError(
            f"'{method}' has a parameter, and how many channels tokens have in block {block} is not known"
        )

    def is_convolutional(self, network: nn.Module) -> bool:
        """Whether this is a whole feed-forward network whose first layers are convolutions."""
        name = self.names.get(network)
        return any(mlp.name == name and isinstance(inner(mlp.firsts[0]), nn.Conv2d) for mlp in self.mlps)


def _first_of(names: list[str]) -> str:
    """One name, and how many more there are, as the subject of a sentence.

    >>> _first_of(["a.attn"]), _first_of(["a.attn", "b.attn", "c.attn"])
    ("'a.attn' was", "'a.attn' and 2 more were")
    """
    return f"'{names[0]}' was" if len(names) == 1 else f"'{names[0]}' and {len(names) - 1} more were"


def channels(layer: nn.Module, side: str) -> int:
    """How many channels the tokens have that go into a layer, or that come out of it."""
    if isinstance(layer, nn.MultiheadAttention):
        return int(layer.embed_dim)
    plain = inner(layer)
    if isinstance(plain, nn.Conv2d):  # all of them, where each group sees some
        return plain.out_channels if side == "output" else plain.in_channels
    return widths(layer)[1 if side == "output" else 0] if is_linear(layer) else 0
