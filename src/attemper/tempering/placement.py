"""From methods and sites to actions: which module gets what. What can fail fails here, before a model is touched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from attemper.errors import ConflictError, NoSiteError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import (
    BlockMap,
    BranchMap,
    Learnable,
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
from attemper.sites.adapted import FLOATS, inner, is_linear, with_inner
from attemper.tempering.attention import AttentionAction
from attemper.tempering.blocks import BlockAction, EntryAction
from attemper.tempering.branches import Branch, branches_of, is_container
from attemper.tempering.composition import check_composition
from attemper.tempering.coverage import CoverageAction
from attemper.tempering.embedding import PatchAction, ReuseAction
from attemper.tempering.kept_samples import KeptSamples, saving_actions
from attemper.tempering.key_grids import GridPlacement
from attemper.tempering.layers import Parameters, TokenAction, WeightAction
from attemper.tempering.local_networks import LocalTokenAction, NetworkAction, local_network
from attemper.tempering.own_dropout import Own, own_drop_path, own_mlp_dropout
from attemper.tempering.padding import mask_positions
from attemper.tempering.penalised import penalty_actions
from attemper.tempering.penalties import Control
from attemper.tempering.projecting import dense_behind
from attemper.tempering.requirements import Requirements, channels
from attemper.tempering.root import InnerRootAction, RootAction
from attemper.tempering.skips import HolderAction, OutsideAction, SkipAction
from attemper.tempering.subclassing import Action
from attemper.tempering.wrapped import StandingAction, refuse_unknown_weight, slots_of


@dataclass
class Plan:
    """What apply will do: actions on modules, attributes to change, parameters to add."""

    actions: list[tuple[nn.Module, Action]]
    overrides: list[tuple[nn.Module, str, Any]]
    parameters: Parameters


def make_plan(
    model: nn.Module, methods: Sequence[Method], sites: Sites, control: Control, impl: str, outside: bool = False
) -> Plan:
    """Resolve every method at every place where it acts.

    outside: whether the branches of all blocks are looked for in the forward of what runs the blocks.
    """
    check_composition(methods)
    placement = Placement(model, tuple(methods), sites, control, impl, outside)
    for method in methods:
        placement.check(method)
    placement.place_all()
    return Plan(placement.actions, placement.overrides, placement.parameters)


class Placement(Requirements):
    """The plan in the making."""

    def __init__(
        self,
        model: nn.Module,
        methods: tuple[Method, ...],
        sites: Sites,
        control: Control,
        impl: str,
        outside: bool = False,
    ) -> None:
        super().__init__(model, methods, sites)
        self.control, self.impl, self.outside = control, impl, outside
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
                self.actions += penalty_actions(self, method, self.control, self.slots)
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
                    slot = self.slots.get(patch.module)
                    action = PatchAction(self.control, place, method, patch.patch, slot, patch.overlaps, patch.grid)
                    self.actions += [(layer, action) for layer in with_inner(patch.module)]
        if any(isinstance(method, LossTerm) for method in self.methods):
            if not any(isinstance(method, PatchMap) for method in self.methods):  # one of another package may draw
                apart = [patch for patch in self.sites.patches if not patch.overlaps]
                self.actions += [(patch.module, ReuseAction(self.control, patch.name)) for patch in apart]
        if not any(isinstance(method, Penalty) for method in self.methods):  # penalties are over all samples
            self.leave_samples_out()
        if any(self.acts_in_eval(method) for method in self.methods):
            self.switch_off_fast_path()
        if self.methods:
            self.actions.append((self.model, RootAction(self.control)))
            base = getattr(self.model, "get_base_model", lambda: self.model)()
            if base is not self.model:
                self.actions.append((base, InnerRootAction(self.control)))
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
        changed = {inner(layer) for layer, action in self.actions if not isinstance(action, KeptSamples)}
        mlps = [mlp for mlp in self.mlps if changed & {inner(layer) for layer in (*mlp.firsts, mlp.last)}]
        acting = {layer for layer, action in self.actions if isinstance(action, AttentionAction)}
        return CoverageAction(
            self.control,
            tuple(site.name for site in self.sites.attentions),
            tuple((mlp.name, self.names[mlp.last]) for mlp in mlps),
            tuple(site.name for site in self.sites.attentions if site.module in acting),
            tuple(
                dict.fromkeys(self.names[each] for each, _ in self.actions if each in self.names and each not in acting)
            ),
            on_attention and "attention" not in self.sites.reached,
            tuple(
                method.name
                for method in self.methods
                if isinstance(method, TokenMap) and method.mixes_tokens and method.positions
                if "mlp" not in self.sites.reached  # otherwise only what was chosen is meant
            ),
            self.all_convolutions(),
        )

    def place_attention(self) -> None:
        perturbations = [m for m in self.methods if isinstance(m, Perturbation)]
        maps = [m for m in self.methods if isinstance(m, WeightMap)]
        penalties = [m for m in self.methods if isinstance(m, Penalty)]
        seen: set[int] = set()
        grids = GridPlacement(self.model, self.methods, self.control)
        for site in self.sites.attentions:
            place, found = grids.place(site, self.place(site))
            inside, on_weights = tuple(m.at(place) for m in perturbations), tuple(m.at(place) for m in maps)
            added = tuple(m.at(place) for m in penalties if m.wants_attention(place))
            action = AttentionAction(self.control, place, self.impl, site.projections, inside, added, on_weights)
            action.one_of_several, action.grids, action.heads = self.is_one_of_several(site), found, site.heads
            self.add_learnt(action, site)
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

        self.actions += grids.sources.items()

    def add_learnt(self, action: AttentionAction, site: AttentionSite) -> None:
        """Give an attention the parameters that its methods learn."""
        action.parameters = self.parameters
        for method in self.methods:
            if isinstance(method, Learnable) and method.learns:
                name = self.parameter_name(method, site.name, "rate")
                with torch.device("cpu"):  # whatever the default is; meta tensors have no values
                    value = method.first_value(action.place, site.heads)
                weights = (*site.module.parameters(), *self.model.parameters())
                like = next((weight for weight in weights if weight.dtype in FLOATS), value)
                value = value.to(like.device, torch.promote_types(like.dtype, torch.float32))
                self.parameters.register_parameter(name, nn.Parameter(value))
                action.learnt[method.name] = name

    def is_one_of_several(self, site: AttentionSite) -> bool:
        """Whether an attention stands in a list with others of its block: such as a module for each head."""
        above = site.name.rpartition(".")[0]
        beside = [each for each in self.sites.attentions if each.name.rpartition(".")[0] == above]
        listed = isinstance(self.model.get_submodule(above), nn.ModuleList | nn.Sequential | nn.ModuleDict)
        return listed and len(beside) > 1 and len({each.block for each in beside}) == 1

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
                name = self.holder(first) if self.adds_outside(first) else first.name
                module = self.model.get_submodule(name)
                action = cast(EntryAction, self.add_tokens(method, kind, first.index, name, module, "entry"))
                action.masks = mask_positions(type(module).forward) if kind.needs_padding else None
                action.branches = branches_of(self.sites, [first], name, self.model)
                action.held = self.adds_outside(first)
                action.channels = self.channels_of(first.index)
                action.convolves = any(isinstance(layer, nn.Conv2d) for layer in first.module.modules())
            else:
                for mlp in self.mlps:
                    network = local_network(self.model, self.sites, mlp, kind)
                    for layer, side in self.of_mlp(mlp, position, network):
                        added = self.add_tokens(method, kind, mlp.block, mlp.name, layer, side, network is not None)
                        if isinstance(added, LocalTokenAction) and layer is not network:
                            self.actions.append((cast(nn.Module, network), NetworkAction(self.control, added)))

    def add_tokens(
        self, method: Method, kind: TokenMap, block: int, name: str, layer: nn.Module, side: Any, local: bool = False
    ) -> TokenAction:
        place = self.block_place(block, name)
        if kind.needs_class_token and not place.class_token:
            said = "; if the first token is one, say so: prefix=1" if hasattr(method, "prefix") else ""
            raise NoSiteError(f"'{method}' needs a class token, and none is known for '{name}', block {block}{said}")
        told_by = self.told_by(block)
        made: type[TokenAction] = EntryAction if side == "entry" else LocalTokenAction if local else TokenAction
        side = "input" if side == "entry" else side
        action = made(self.control, place, method.at(place), side, self.layout(block, layer), told_by)
        with torch.device("cpu"):
            start = kind.parameter(channels(layer, side) or self.width_of(block, method))
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

    def of_mlp(self, mlp: MlpSite, position: str, network: nn.Module | None) -> Iterator[tuple[nn.Module, str]]:
        if position == "mlp_front" and network is not None:
            yield network, "input"
        elif position == "mlp_front":
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

    def place_blocks(self, method: Method) -> None:
        placed = len(self.actions)
        held: dict[str, list[BlockSite]] = {}
        for block in self.blocks:
            if self.adds_outside(block):
                held.setdefault(self.holder(block), []).append(block)
            else:
                self.place_block(method, block)
        for holder, blocks in held.items():
            self.place_held(method, holder, blocks)
        if len(self.actions) == placed:
            method.at(self.block_place(self.blocks[0].index, self.blocks[0].name))  # which may say more
            raise NoSiteError(self.nothing(method, "blocks that have what it changes"))

    def place_block(self, method: Method, block: BlockSite) -> None:
        """On a block that adds its branches itself."""
        inside = branches_of(self.sites, [block], block.name, self.model)
        place = self.block_place(block.index, block.name)
        if not self.wants(method, place, inside):
            return
        common = (self.control, place, method.at(place), self.layout(block.index, block.module), inside)
        if isinstance(method, BlockMap):
            self.actions.append((block.module, BlockAction(*common, partial=self.control.partial)))
        else:
            self.actions.append((block.module, SkipAction(*common)))

    def place_held(self, method: Method, holder: str, blocks: Sequence[BlockSite]) -> None:
        """On blocks whose branches are added by what runs their parts."""
        module = self.model.get_submodule(holder)
        followed = [block for block in self.sites.blocks if self.adds_outside(block) and self.holder(block) == holder]
        inside = branches_of(self.sites, followed, holder, self.model)
        served = []
        for block in blocks:
            place = self.block_place(block.index, block.name)
            if self.wants(method, place, [branch for branch in inside if branch.block == block.index]):
                layout = self.layout(block.index, block.module)
                served.append(OutsideAction(self.control, place, method.at(place), layout))
        if served:
            self.actions += [(module, action) for action in served]
            self.actions.append((module, HolderAction(self.control, method, tuple(served), inside)))

    def leave_samples_out(self) -> None:
        """Let blocks compute branches for those samples only that keep them."""
        tempered = {module for module, _ in self.actions}
        for module, action in list(self.actions):
            if isinstance(action, SkipAction):
                self.actions[:0] = saving_actions(action, module, tempered)

    @staticmethod
    def wants(method: Method, place: Place, inside: Sequence[Branch]) -> bool:
        """Whether a block has a branch that the method changes."""
        removed = method.removes(place) if isinstance(method, SkipRemover) else (True, True)
        return any(removed[0 if branch.is_attention else 1] for branch in inside)

    def adds_outside(self, block: BlockSite) -> bool:
        """Whether the branches of a block are added by what runs it: it is a list of parts, or a branch itself."""
        if is_container(block.module):
            return True
        own = [site.name for site in self.sites.attentions if site.block == block.index]
        own += [site.name for site in self.sites.mlps if site.block == block.index]
        return block.name != "" and (self.outside or own == [block.name])

    def holder(self, block: BlockSite) -> str:
        """What runs a block: the nearest module above it that has a forward of its own and is no Sequential."""
        name = block.name
        while name:
            name = name.rpartition(".")[0]
            module = self.model.get_submodule(name)
            if not is_container(module) and not isinstance(module, nn.Sequential):
                break
        return name

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
