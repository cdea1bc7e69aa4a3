"""What happens round one attention module: which methods act in its attention calls, and what they need to know."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from attemper.errors import UnmetError
from attemper.methods.base import Method, Place
from attemper.methods.kinds import Learnable, WeightMap
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Site
from attemper.sites import Projections
from attemper.sites.seen import counted
from attemper.tempering.draws import Note
from attemper.tempering.interception import AttentionInterceptor
from attemper.tempering.key_grids import KeyGrids, on_grid, watch_maps
from attemper.tempering.layers import Parameters
from attemper.tempering.ledger import Entry
from attemper.tempering.penalties import Control
from attemper.tempering.readings import Facts
from attemper.tempering.repeated import Decisions, RepeatedAttention, unusual_for
from attemper.tempering.root import run_pass
from attemper.tempering.standing import standing
from attemper.tempering.subclassing import Action, site_of
from attemper.tempering.unmasked import Unmasked


@dataclass
class AttentionAction(Action):
    """Everything that acts inside one attention module."""

    control: Control
    place: Place
    impl: str
    projections: Projections | None
    perturbations: tuple[Method, ...]
    """Those that perturb the attention call, as they act here, rates resolved."""
    penalties: tuple[Method, ...] = ()
    weight_maps: tuple[Method, ...] = ()
    watchers: tuple[str, ...] = ()
    """The methods that ask which tokens are padding, or that mix tokens, which causal attention does not allow."""
    mixers: tuple[str, ...] = ()
    """Those of them that mix tokens."""
    follows_entry: str | None = None
    """A method that asked for padding before this attention, the first one, could tell."""
    looked: set[tuple[int, int]] = field(default_factory=set, compare=False)
    """The queries and keys of masks that were searched for tokens which only some queries may see. A window or a mask
    of its own making may hide nothing in short sequences, and in others does."""
    read: bool = False
    """Whether it is known from a copy that it hides nothing, whatever it is called with."""
    verified: bool = False
    """Whether the values were compared with what their projection gave; once is enough."""
    one_of_several: bool = False
    """Whether other attentions stand beside it in a list, as where each head is a module of its own."""
    heads: int | None = None
    """How many heads it has, where its attributes tell."""
    grids: KeyGrids | None = None
    """Where methods ask for the grid of the keys, and it is found while the model runs."""
    facts: Facts = field(default_factory=Facts)
    parameters: Parameters | None = None
    """Where the parameters are that perturbations learn."""
    learnt: dict[str, str] = field(default_factory=dict)
    """Method → the name of its parameter."""
    decisions: Decisions = field(init=False, default_factory=Decisions, compare=False)
    """What was decided for its calls."""
    unmasked: Unmasked = field(init=False, default_factory=Unmasked, compare=False)
    """Of which calls it is known that nothing is to be seen in them, where nothing acts."""
    plain: bool = False
    """Whether the last pass that was looked at made nothing but fused calls of plain tensors."""
    active: tuple[Perturbation, ...] = field(init=False)
    """The perturbations that do something: a rate of zero costs nothing."""
    unusual: frozenset[Any] = field(init=False)
    """The functions that repeated calls hand over to the full interceptor."""
    weight_site: Site = field(init=False, default_factory=Site)
    """The same as `stream_site` for what is drawn for its projections."""
    packs: bool = field(init=False)
    """Whether one projection gives Q, K and V together."""

    def __post_init__(self) -> None:
        self.packs = self.projections is not None and self.projections.packed
        self._set_active()

    def name_site(self) -> None:
        self.stream_site = site_of(self.place.name)
        self.weight_site = site_of(self.place.name, "weights")

    def sites(self) -> dict[int, str]:
        return {self.stream_site.word: self.place.name, self.weight_site.word: f"{self.place.name}:weights"}

    def drawing(self, note: Note) -> tuple[Any, ...]:
        if note.method:
            return tuple(method for method in self.weight_maps if method.name == note.method)
        batch, keys = note.shape[0], note.shape[3]
        active = self.active
        if note.maps is not None:
            active = on_grid(active, self.control.methods, note.maps, batch, keys)
        return (*(method.fitted(keys) for method in self.perturbing(active)), *note.own)

    def _set_active(self) -> None:
        self.active = tuple(m for m in self.perturbations if isinstance(m, Perturbation) and not m.idle)
        self.unusual = unusual_for(self.active, self.packs and len(self.active) + len(self.penalties) > 0)
        self.maps = tuple(m for m in self.weight_maps if isinstance(m, WeightMap) and not m.idle)

    def resolve(self, methods: dict[str, Method]) -> None:
        self.perturbations = tuple(methods[m.name].at(self.place) for m in self.perturbations)
        self.weight_maps = tuple(methods[m.name].at(self.place) for m in self.weight_maps)
        self._set_active()

    def value_of(self, method: Any) -> Tensor | None:
        """The parameter that a method learns here; None: it learns none."""
        if not (isinstance(method, Learnable) and method.learns):
            return None
        value: Tensor = getattr(self.parameters, self.learnt[cast(Method, method).name])
        return value

    @property
    def packing(self) -> Tensor | None:
        """The weight that gives Q, K and V together, where one does."""
        return None if self.projections is None or self.projections.q is None else self.projections.q.parameter

    def perturbing(self, methods: tuple[Perturbation, ...]) -> tuple[Perturbation, ...]:
        """Methods as they act in a call now, with what they have learnt."""
        values = [(method, self.value_of(method)) for method in methods]
        return tuple(m if value is None else cast(Learnable, m).with_value(value) for m, value in values)

    def add_terms(self) -> None:
        """Enter what learnt rates add to the loss."""
        for method in self.active:
            value = self.value_of(method)
            if value is not None and cast(Learnable, method).adds_to_loss:
                term, name = cast(Learnable, method).value_term(value), cast(Method, method).name
                self.control.enter(Entry(self.place.name, self.place.block, name, "entropy", term))

    def acts(self, training: bool) -> bool:
        on = self.control.on(training)
        if on and (self.active or self.maps):
            return True
        if self.penalties and self.control.penalises(training):
            return True
        return len(self.watchers) > 0 and self.control.when != "never"

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        if not self.control.tracks(module.training):
            return self.intercept(module, forward, args, kwargs)

        if self.control.is_inside():
            return self.intercept(module, forward, args, kwargs)

        def intercepted(*args: Any, **kwargs: Any) -> Any:
            return self.intercept(module, forward, args, kwargs)

        return run_pass(self.control, module, intercepted, args, kwargs)

    def intercept(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the module with its attention calls caught."""
        if not torch.compiler.is_compiling() and self.plain and self.may_repeat():
            watches = not (self.active or self.penalties) and self.impl == "auto"
            if watches and self.unmasked.knows(module, forward, args, kwargs):
                self.control.ledger.padding.pop(self.place.block, None)
                return forward(*args, **kwargs)
            known = RepeatedAttention(self, module, AttentionInterceptor)
            with known:
                out = forward(*args, **kwargs)
            if known.full is None and known.met:
                if watches and known.untouched and known.met == 1:
                    self.unmasked.learn(module, forward, args, kwargs)
                return out
            self.plain = False
            calls = known.hand_over()
        else:
            calls = AttentionInterceptor(self, module)
            out = self.run_watched(calls, module, forward, args, kwargs)
        self.check_met(calls, module)
        if calls.maps:
            self.check_mapped(module, calls.mapped)
        if self.control.tracks(module.training):
            self.add_terms()
        if not torch.compiler.is_compiling():
            self.plain = calls.plain and self.may_repeat()
        return out

    def may_repeat(self) -> bool:
        """Whether nothing but the methods of fused calls acts here, and nobody watches."""
        if torch.compiler.is_compiling() or self.maps or self.learnt or self.grids is not None:
            return False
        if self.penalties and not self.packs:
            return False
        control = self.control
        if control.trial or control.looking or control.ledger.origins is not None:
            return False
        return not torch._C._are_functorch_transforms_active()

    def run_watched(self, calls: AttentionInterceptor, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the module with everything caught that may belong to attention."""
        if self.grids is not None and calls.methods:
            calls.seen_maps = watch_maps(self.grids, module, args, kwargs)
        with calls:
            return forward(*args, **kwargs)

    def check_met(self, calls: AttentionInterceptor, module: nn.Module) -> None:
        """Raise where attention was not met."""
        if calls.waiting:
            raise UnmetError(
                f"{self.place.where} ({type(module).__name__}) did not multiply its attention weights with values "
                "in a way that was seen: its penalties cannot be taken. Leave it out with targets=."
            )
        if calls.met == 0:
            raise UnmetError(
                f"{self.place.where} ({type(module).__name__}) ran in training mode, but computed no attention by "
                "scaled_dot_product_attention, multi_head_attention_forward or a softmax over keys: the recipe would "
                f"have had no effect. Seen: {counted(calls.passed_by)}. A Transformers model may need "
                "attn_implementation='sdpa'; otherwise leave the module out with targets=."
            )

    def check_mapped(self, module: nn.Module, mapped: list[Tensor]) -> None:
        """Raise where a projection's weight should have been mapped, and was not."""
        assert self.projections is not None
        parts = {name: getattr(self.projections, name) for name in ("q", "k", "v", "out")}
        weights = {name: part.parameter for name, part in parts.items() if part is not None}
        missing = [name for name, weight in weights.items() if not any(weight is each for each in mapped)]
        if len(missing) > 0:
            names = " and ".join(method.name for method in self.weight_maps)
            raise UnmetError(
                f"{self.place.where} ({type(module).__name__}) computed its {', '.join(missing)} projection in "
                f"another way than by F.linear with its weight: {names} would not have acted on it. Leave the module "
                "out with targets=."
            )

    def note_shape(self, methods: tuple[Perturbation, ...], heads: int, keys: int, calls: int) -> None:
        """Whether there are heads and keys enough for what acts. calls: of the module so far, with this one."""
        if len(methods) == 0 or torch.compiler.is_compiling():
            return
        self.vain = None
        apart = heads == 1 and calls > 1 and self.heads != 1
        apart = apart or (heads < (self.heads or 0) and not standing(self.control).has("tensor", "context"))
        heads = max(heads, self.heads or 0)  # a process may have a part of them
        asking = [cast(Method, m).name for m in methods if m.tells_heads and (apart or not m.needs_heads)]
        if heads == 1 and self.one_of_several and asking:
            raise UnmetError(
                f"{' and '.join(asking)} treats the heads of a sample together, and each head is a module of its own "
                f"here: {self.place.where} knows nothing of the others."
            )
        if apart and asking:
            raise UnmetError(
                f"{' and '.join(asking)} treats the heads of a sample together, and {self.place.where} computes the "
                "attention of some heads in one call and of others in another. Compute them in one, or leave it out "
                "with targets=."
            )
        if heads == 1 and all(method.needs_heads for method in methods):
            self.vain = "each head is a module of its own" if self.one_of_several else "attention has a single head"
        elif keys == 1 and all("heads" not in method.stages for method in methods):
            self.vain = "attention has a single key"
