"""From methods and sites to actions: which module gets what. What can fail fails here, before a model is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from attemper.errors import ConflictError, NoSiteError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import (
    BlockMap,
    BranchMap,
    LossTerm,
    PatchMap,
    Penalty,
    SkipRemover,
    TokenMap,
    WeightMap,
    mixes_tokens,
)
from attemper.ops.perturbation import Perturbation
from attemper.sites import AttentionSite, BlockSite, MlpSite, Sites
from attemper.sites.adapted import FLOATS, inner, is_linear, widths, with_inner
from attemper.tempering.attention import AttentionAction
from attemper.tempering.blocks import BlockAction, EntryAction, branches, is_container, without_forward
from attemper.tempering.composition import check_composition
from attemper.tempering.coverage import CoverageAction
from attemper.tempering.embedding import PatchAction, ReuseAction
from attemper.tempering.layers import MlpPenaltyAction, Parameters, TokenAction, WeightAction
from attemper.tempering.own_dropout import Own, own_drop_path, own_mlp_dropout
from attemper.tempering.padding import mask_positions
from attemper.tempering.penalties import Control
from attemper.tempering.projecting import dense_behind
from attemper.tempering.requirements import Requirements
from attemper.tempering.root import RootAction
from attemper.tempering.skips import SkipAction
from attemper.tempering.subclassing import Action
from attemper.tempering.wrapped import StandingAction, refuse_unknown_weight, slots_of


@dataclass
class Plan:
    """What apply will do: actions on modules, attributes to change, parameters to add."""

    actions: list[tuple[nn.Module, Action]]
    overrides: list[tuple[nn.Module, str, Any]]
    parameters: Parameters


def make_plan(model: nn.Module, methods: Sequence[Method], sites: Sites, control: Control, impl: str) -> Plan:
    """Resolve every method at every place where it acts."""
    check_composition(methods)
    placement = Placement(model, tuple(methods), sites, control, impl)
    for method in methods:
        placement.check(method)
    placement.place_all()
    return Plan(placement.actions, placement.overrides, placement.parameters)


class Placement(Requirements):
    """The plan in the making."""

    def __init__(
        self, model: nn.Module, methods: tuple[Method, ...], sites: Sites, control: Control, impl: str
    ) -> None:
        super().__init__(model, methods, sites)
        self.control, self.impl = control, impl
        self.actions: list[tuple[nn.Module, Action]] = []
        self.overrides: list[tuple[nn.Module, str, Any]] = []
        self.parameters = Parameters()
        self.slots = slots_of(model)
        self.named: dict[str, str] = {}

    # ---------------------------------------------------------------------------------------------------- actions
    def place_all(self) -> None:
        """Innermost first: attention, then penalties, which look at what a layer itself gets and gives."""
        self.place_attention()
        for method in self.methods:
            if isinstance(method, Penalty):
                self.place_penalty(method)
        # Each sees the sums of a block before the next one changes them.
        for method in sorted(self.methods, key=lambda m: (isinstance(m, SkipRemover), isinstance(m, BranchMap))):
            if isinstance(method, BlockMap | BranchMap | SkipRemover):
                self.place_blocks(method)
        for method in self.methods:
            self.refuse_or_replace(method)
            if isinstance(method, TokenMap):
                self.place_tokens(method, method)
            if isinstance(method, PatchMap) and not cast(TokenMap, method).positions:
                for patch in self.patches:
                    place = Place(0, len(self.sites.blocks), name=patch.name)
                    action = PatchAction(self.control, place, method, patch.patch, self.slots.get(patch.module))
                    self.actions += [(layer, action) for layer in with_inner(patch.module)]
        if any(isinstance(method, LossTerm) for method in self.methods):
            if not any(isinstance(method, PatchMap) for method in self.methods):  # one of another package may draw
                self.actions += [(patch.module, ReuseAction(self.control, patch.name)) for patch in self.sites.patches]
        if any(self.acts_in_eval(method) for method in self.methods):
            self.switch_off_fast_path()
        if self.methods:
            self.actions.append((self.model, RootAction(self.control)))
            on_layers = {id(action): action for _, action in self.actions if getattr(action, "slot", None) is not None}
            if on_layers:
                watched = [(action, cast(Any, action).slot.layer) for action in on_layers.values()]
                self.actions.append((self.model, StandingAction(self.control, watched)))
            self.actions.append((self.model, self.coverage()))

    def coverage(self) -> CoverageAction:
        """What checks the first training pass."""
        places = [self.place(site) for site in self.sites.attentions]
        on_attention = any(
            isinstance(method, Perturbation | WeightMap)
            or (isinstance(method, TokenMap) and "attention_end" in method.positions)
            or (isinstance(method, Penalty) and any(map(method.wants_attention, places)))
            for method in self.methods
        )
        changed = {inner(layer) for layer, _ in self.actions}
        mlps = [mlp for mlp in self.mlps if changed & {inner(layer) for layer in (*mlp.firsts, mlp.last)}]
        return CoverageAction(
            self.control,
            tuple(site.name for site in self.sites.attentions),
            tuple((mlp.name, self.names[mlp.last]) for mlp in mlps),
            on_attention and self.sites.targeted is None,
        )

    def place_attention(self) -> None:
        perturbations = [m for m in self.methods if isinstance(m, Perturbation)]
        maps = [m for m in self.methods if isinstance(m, WeightMap)]
        penalties = [m for m in self.methods if isinstance(m, Penalty)]
        seen: set[int] = set()
        for site in self.sites.attentions:
            place = self.place(site)
            inside, on_weights = tuple(m.at(place) for m in perturbations), tuple(m.at(place) for m in maps)
            added = tuple(m.at(place) for m in penalties if m.wants_attention(place))
            action = AttentionAction(self.control, place, self.impl, site.projections, inside, added, on_weights)
            if site.block not in seen:
                self.watch(action)
            seen.add(site.block)
            if action.perturbations or action.penalties or action.weight_maps or action.watchers:
                self.actions.append((site.module, action))
            dense = dense_behind(self.model, site)
            if site.projections is not None and site.projections.out is None and dense is not None:
                for method in on_weights:
                    slot, plain = self.slots.get(dense), inner(dense)
                    refuse_unknown_weight(method.name, site.name, slot, plain)
                    self.actions.append((plain, WeightAction(self.control, place, method, slot)))

    def watch(self, action: AttentionAction) -> None:
        """Let the first attention of a block tell of padding, and of causal masks, to methods that act in the block.

        It tells the blocks without attention behind it, too.
        """
        told = [block.index for block in self.sites.blocks if self.told_by(block.index) == action.place.block]
        here = [method for method in self.methods if any(self.acts_in(method, block) for block in told)]
        asking = [method for method in here if isinstance(method, TokenMap) and method.needs_padding]
        action.mixers = tuple(method.name for method in here if mixes_tokens(method))
        action.watchers = tuple(dict.fromkeys((*(cast(Method, method).name for method in asking), *action.mixers)))
        early = [cast(Method, method).name for method in asking if "entry" in method.positions]
        first = early and action.place.block == self.told_by(self.blocks[0].index)
        action.follows_entry = early[0] if first else None

    def acts_in(self, method: Method, block: int) -> bool:
        """Whether a method acts on the tokens of a block; at the entry of the network, those of the first one."""
        if isinstance(method, BlockMap | BranchMap):
            return any(each.index == block for each in self.blocks)
        if not isinstance(method, TokenMap):
            return False
        reached = {
            "entry": bool(self.blocks) and self.blocks[0].index == block,
            "attention_end": any(site.block == block for site in self.sites.attentions),
        }
        in_mlp = any(mlp.block == block for mlp in self.mlps)
        return any(reached.get(position, in_mlp) for position in method.positions)

    def place_tokens(self, method: Method, kind: TokenMap) -> None:
        for position in kind.positions:
            if position == "attention_end":
                for site in self.sites.attentions:
                    self.add_tokens(method, kind, site.block, *self.end_of_attention(site))
            elif position == "entry":
                first = self.blocks[0]
                if is_container(first.module):
                    raise NoSiteError(without_forward(method, first))
                action = cast(
                    EntryAction, self.add_tokens(method, kind, first.index, first.name, first.module, "entry")
                )
                action.masks = mask_positions(type(first.module).forward) if kind.needs_padding else None
                action.mlps = branches(self.sites, first, self.names).mlps
            else:
                for mlp in self.mlps:
                    for layer, side in self.of_mlp(mlp, position):
                        self.add_tokens(method, kind, mlp.block, mlp.name, layer, side)

    def add_tokens(
        self, method: Method, kind: TokenMap, block: int, name: str, layer: nn.Module, side: Any
    ) -> TokenAction:
        place = self.block_place(block, name)
        if kind.needs_class_token and not place.class_token:
            raise NoSiteError(f"'{method}' needs a class token, and none is known before '{name}' in block {block}")
        told_by = self.told_by(block)
        made: type[TokenAction] = EntryAction if side == "entry" else TokenAction
        side = "input" if side == "entry" else side
        action = made(self.control, place, method.at(place), side, self.layout(block, layer), told_by)
        start = kind.parameter(_channels(layer, side) or self.width_of(block, method))
        if start is not None:
            weights = (*layer.parameters(), *self.model.parameters())  # those of quantised layers are no floats
            reference = next((weight for weight in weights if weight.dtype in FLOATS), start)
            action.parameters, action.parameter = self.parameters, self.parameter_name(method, name, side)
            self.parameters.register_parameter(action.parameter, nn.Parameter(start.to(reference)))
        action.slot = self.slots.get(layer) if is_linear(layer) or isinstance(inner(layer), nn.Conv2d) else None
        self.actions += [(each, action) for each in (with_inner(layer) if action.slot else [layer])]
        return action

    def parameter_name(self, method: Method, name: str, side: str) -> str:
        """What a parameter is called: in capitals, since Transformers renames what reads like a module in its files."""
        key = f"{method.name}_{name}_{side}".replace(".", "_").upper()
        while self.named.setdefault(key, name) != name:  # another module's, as of 'a.b' beside 'a_b'
            key += "_"
        return key

    def width_of(self, block: int, method: Method) -> int:
        """How many channels the tokens of a block have, by the layers that read them; a block itself does not say."""
        for site in self.sites.attentions:
            if site.block == block and isinstance(site.module, nn.MultiheadAttention):
                return int(site.module.embed_dim)
            if site.block == block and site.projections is not None:
                return widths(site.projections.q.module)[0]
        for mlp in self.mlps:
            if mlp.block == block:
                return _channels(mlp.firsts[0], "input")
        if cast(TokenMap, method).parameter(1) is None:
            return 0
        raise NoSiteError(
            f"'{method}' has a parameter, and how many channels tokens have in block {block} is not known"
        )

    def of_mlp(self, mlp: MlpSite, position: str) -> Iterator[tuple[nn.Module, str]]:
        if position == "mlp_front":
            yield from ((layer, "input") for layer in mlp.firsts)
        else:
            yield mlp.last, "input" if position == "mlp_mid" else "output"

    def end_of_attention(self, site: AttentionSite) -> tuple[str, nn.Module, str]:
        """The layer behind attention, after which its branch ends."""
        if isinstance(site.module, nn.MultiheadAttention):
            return site.name, site.module, "output"
        if site.projections is not None and site.projections.out is not None:
            out = site.projections.out
            return site.name, out.module if out.slot is None else out.slot.layer, "output"
        dense = dense_behind(self.model, site)
        if dense is not None:
            return site.name, dense, "output"
        raise NoSiteError(
            f"the output projection of '{site.name}' ({type(site.module).__name__}) was not found among its layers, so "
            "the end of its branch is not known; leave it out with targets="
        )

    def place_penalty(self, method: Method) -> None:
        for mlp in self.mlps:
            place = self.block_place(mlp.block, mlp.name)
            if not cast(Penalty, method).wants_mlp(place):
                continue
            layers: list[tuple[nn.Module, Literal["ff1", "ff2"]]] = [(layer, "ff1") for layer in mlp.firsts]
            for layer, which in (*layers, (mlp.last, "ff2")):
                slot, plain, layout = self.slots.get(layer), inner(layer), self.layout(mlp.block, layer)
                refuse_unknown_weight(method.name, mlp.name, slot, plain)
                action = MlpPenaltyAction(self.control, place, method.at(place), which, layout, slot)
                self.actions.append((plain, action))

    def place_blocks(self, method: Method) -> None:
        placed = len(self.actions)
        for block in self.blocks:
            place = self.block_place(block.index, block.name)
            here = method.at(place)
            inside = branches(self.sites, block, self.names)
            removed = method.removes(place) if isinstance(method, SkipRemover) else (True, True)
            wanted = (removed[0] and inside.attentions > 0) or (removed[1] and len(inside.mlps) > 0)
            if not wanted or not self.runs(method, block):
                continue
            if isinstance(method, BlockMap):
                self.actions.append(
                    (block.module, BlockAction(self.control, place, here, *inside, partial=self.control.partial))
                )
            if isinstance(method, BranchMap | SkipRemover):
                layout = self.layout(block.index, block.module)
                within = any(module is block.module and isinstance(a, BlockAction) for module, a in self.actions)
                self.actions.append((block.module, SkipAction(self.control, place, here, *inside, layout, within)))
        if len(self.actions) == placed:
            raise NoSiteError(self.nothing(method, "blocks that have what it changes and run as one module"))

    def runs(self, method: Method, block: BlockSite) -> bool:
        """Whether a block has a forward of its own; if it has none, the method is refused unless it may act in part."""
        if not is_container(block.module):
            return True
        if self.control.partial:
            return False
        raise NoSiteError(without_forward(method, block))

    # ------------------------------------------------------------------------------------------- the model's own things
    def refuse_or_replace(self, method: Method) -> None:
        """Where the model's own dropout does the same as a method: set it to 0 under replace=true, else refuse."""
        own: list[Own] = []
        if method.replaces_own == "drop_path":
            own = own_drop_path(self.model)
        elif method.replaces_own == "mlp_dropout":
            own = own_mlp_dropout(self.model, self.sites)
        for name, module, attribute, rate in own:
            if not getattr(method, "replace", False):
                raise ConflictError(
                    f"'{method}': the model has its own, '{name}' with {attribute}={rate}. Build the model without it, "
                    "or write replace=true to set it to 0."
                )
            self.overrides.append((module, attribute, 0.0))

    @staticmethod
    def acts_in_eval(method: Method) -> bool:
        return isinstance(method, SkipRemover | PatchMap) or (isinstance(method, TokenMap) and method.always)

    def switch_off_fast_path(self) -> None:
        """In eval mode nn.TransformerEncoder may compute whole layers at once, past everything inside them."""
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                self.overrides.append((module, "activation_relu_or_gelu", 0))
            if isinstance(module, nn.TransformerEncoder):
                self.overrides.append((module, "use_nested_tensor", False))


def _channels(layer: nn.Module, side: str) -> int:
    """How many channels the tokens have that go into a layer, or that come out of it."""
    if isinstance(layer, nn.MultiheadAttention):
        return int(layer.embed_dim)
    if is_linear(layer) or isinstance(inner(layer), nn.Conv2d):
        return widths(layer)[1 if side == "output" else 0]
    return 0
