"""The projections of an attention while it runs: what penalties need of them, and what DropConnect drops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attemper.errors import ConflictError, UnmetError, UnsupportedError
from attemper.methods.kinds import AttentionRecord, Penalty
from attemper.ops.regions import innermost
from attemper.ops.tracing import all_true, has_numbers
from attemper.sites import Projection
from attemper.sites.adapted import Added
from attemper.tempering.axes import three_axes
from attemper.tempering.ledger import Entry
from attemper.tempering.multihead import MultiheadArguments
from attemper.tempering.parts import map_weight, refuse_parts
from attemper.tempering.products import MATMUL
from attemper.tempering.readings import has_tokens_first
from attemper.tempering.wrapped import Multiply, additions, effective_bias, mapped_product, matrix

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction


class ProjectionWatch(TorchFunctionMode):
    """Sees the projections of one forward pass of one attention module."""

    def __init__(self, action: AttentionAction, module: nn.Module) -> None:
        super().__init__()
        control, training = action.control, module.training
        self.action = action
        self.training = training
        self.maps = action.maps if control.on(training) else ()
        self.penalties = action.penalties if control.penalises(training) else ()
        self.seen: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        """Of each projection: its input, its output, its bias."""
        self.counted: Tensor | None = None
        """What the projection of V gave for the call whose penalties were taken last."""
        self.runs = 0
        """How often that projection ran."""
        self.region = None if torch.compiler.is_compiling() else innermost()
        """The activation checkpoint that the module runs in."""
        self.added: dict[str, Added] = self.added_by_adapters() if self.penalties or self.maps else {}
        """Of each projection that has adapters: what they add to its weight, to that of all rows."""
        self.packed: Tensor | None = None
        """What one projection gave for Q, K and V together, (B, N, 3 · H · e)."""
        self.packed_bias: Tensor | None = None
        self.mapped: list[Tensor] = []
        """The weights that weight maps have changed."""
        self.origins = None if torch.compiler.is_compiling() else control.ledger.origins
        """Where the axes of tensors come from; None: this pass is not watched."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer inside the module."""
        ours = self.projections_of(weight)
        out = self.project(ours, input, weight, bias, F.linear)
        if self.action.packs and "q" in ours and "q" not in self.added:
            self.packed, self.packed_bias = three_axes(out), bias
        return out

    def note_packed(self, input: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """A layer that ran before this watch began, and gave Q, K and V together."""
        if self.penalties:
            for name in "qkv":
                rows = slice(*getattr(self.action.projections, name).rows)
                self.seen[name] = (input, out[..., rows], None if bias is None else bias[rows])
        if out.dim() == 3:
            self.packed, self.packed_bias = out, bias

    def convolution(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """A convolution inside the module; the same to every pixel where it is a projection."""

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = func(x, weight, bias, *args, **kwargs)
            return out

        return self.project(self.projections_of(weight), input, weight, bias, multiply)

    def product_with_weight(self, func: Any, args: Any) -> Tensor | None:
        """A product that is a layer written out: `x @ weight.T`, or one of Transformers' Conv1D; None: it is none."""
        if func is torch.addmm and len(args) == 3:
            bias, x, weight = args
            ours = self.projections_of(weight)
            return self.project(ours, x, weight, bias, _add_product) if ours else None
        if func not in MATMUL or len(args) != 2:
            return None
        x, turned = args
        weight = turned if isinstance(turned, nn.Parameter) or torch.compiler.is_compiling() else turned._base
        ours = {} if weight is None else self.projections_of(weight)
        if not ours:
            return None
        upright = all(part.transposed for part in ours.values())
        if turned.shape != (weight.shape if upright else weight.shape[::-1]):
            return None

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = func(x, weight if upright else weight.t())
            return out

        return self.project(ours, x, weight, None, multiply)

    def projections_of(self, weight: Tensor) -> dict[str, Projection]:
        """The projections that a weight makes."""
        projections = self.action.projections
        if projections is None:
            return {}
        parts = {name: getattr(projections, name) for name in ("q", "k", "v", "out")}
        return {name: part for name, part in parts.items() if part is not None and part.parameter is weight}

    def project(
        self, ours: dict[str, Projection], input: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply
    ) -> Tensor:
        """What a layer gives: note what a penalty needs, drop what DropConnect drops."""
        added = next((self.added[name] for name in ours if name in self.added), None)
        layer = next((part.module for part in ours.values() if not part.transposed), None)
        if self.maps and added is not None:
            self.mapped.append(weight)
            out = mapped_product(input, weight, bias, added, lambda whole: self.map_weight(whole, layer), multiply)
        else:
            out = multiply(input, self.map_weight(weight, layer) if ours else weight, bias)
        if self.penalties and ours:
            self.runs += "v" in ours
            whole = bias if added is None else effective_bias(bias, added)
            x, y = (t.flatten(2).mT if weight.dim() == 4 else t for t in (input, out))
            for name, projection in ours.items():
                rows = slice(None) if projection.rows is None else slice(*projection.rows)
                self.seen[name] = (x, y[..., rows], None if whole is None else whole[rows])
        return out

    def plainly_seen(self, name: str) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """What was seen of a projection to which no adapter adds, which is all that it gives."""
        return None if name in self.added else self.seen.get(name)

    def added_by_adapters(self) -> dict[str, Added]:
        """What adapters add to the projections whose weights are needed now."""
        action, names = self.action, ("q", "k", "v", "out") if self.maps else ("q", "k", "v")
        if action.projections is None:
            return {}
        method = (*self.penalties, *action.weight_maps)[0].name
        found = additions(method, action.place.name, {name: getattr(action.projections, name) for name in names})
        if self.maps and self.training and any(added.drops for added in found.values()):
            raise ConflictError(
                f"{action.weight_maps[0].name} maps weights of {action.place.where} to which an adapter adds with "
                "dropout of its own, and dropped inputs are part of no weight; set lora_dropout=0"
            )
        return found

    def check_region(self) -> None:
        """Raise in a checkpoint that the module begins itself: what is computed again there is not seen."""
        refuse_inner_checkpoint(self.action, self.region)

    def map_weight(self, weight: Tensor, layer: nn.Module | None = None) -> Tensor:
        if self.maps:
            self.check_region()
            self.mapped.append(weight)
        for method in self.maps:
            weight = map_weight(self.action.control, self.action.weight_site, method, weight, layer)
        return weight

    def map_multihead_weights(self, call: MultiheadArguments) -> None:
        if not self.maps:
            return
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"):
            weight = getattr(call, name)
            if weight is not None and weight.numel() > 0:  # some hand over an empty one beside separate ones
                setattr(call, name, self.map_weight(weight))

    def note_multihead(self, call: MultiheadArguments, projected: tuple[Tensor, ...]) -> None:
        biases = (None, None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        for name, x, out, bias in zip("qkv", (call.query, call.key, call.value), projected, biases, strict=True):
            self.seen[name] = (x.transpose(0, 1) if call.batched else x[None], out.transpose(0, 1), bias)

    # ------------------------------------------------------------------------------------------------------- penalties
    def check_penalised(self, out: Tensor, heads: int) -> None:
        """Raise where penalties cannot be taken. out: what attention gave, or its values; heads: of the queries."""
        action = self.action
        refuse_parts(action.control, self.penalties[0], action.place)
        missing = [name for name in "qkv" if name not in self.seen]
        if missing or action.projections is None:
            raise UnmetError(
                f"{action.place.where} computed its {', '.join(missing) or 'projections'} in a way that was not seen: "
                "its penalties cannot be taken. Leave it out with targets=."
            )
        width, values = out.shape[-1], action.projections.v.matrix().shape[0]
        if values % width or heads % (values // width or heads + 1):
            raise UnmetError(
                f"{action.place.where} multiplies its attention weights with other values than those of its "
                "projection: its penalties cannot be taken. Leave it out with targets=."
            )
        if self.counted is self.seen["v"][1]:
            raise UnmetError(
                f"{action.place.where} computes attention more than once from the same values, as in chunks of "
                "queries: its penalties would count as often. Compute it in one call, or leave it out with targets=."
            )
        self.counted = self.seen["v"][1]

    def penalise(
        self,
        out: Tensor,
        q: Tensor | None = None,
        k: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        weights: Tensor | None = None,
        squares: dict[str, Tensor] | None = None,
    ) -> None:
        """Enter this attention's penalties into the ledger. out: (B, H, Nq, e)."""
        if not self.penalties:
            return
        action = self.action
        self.check_region()
        self.check_penalised(out, out.shape[1])
        assert action.projections is not None
        p = action.projections
        query, key, value = (self.by_sample(self.seen[name][0], out.shape[0]) for name in "qkv")
        keys = k.shape[2] if k is not None else weights.shape[-1] if weights is not None else 0
        if self.runs > 1 and keys > value.shape[1]:
            raise UnmetError(
                f"{action.place.where} attends to keys that several runs of its projections made, as with a cache: its "
                "penalties cannot be taken. Project all tokens at once, or leave it out with targets=."
            )
        b_v = self.seen["v"][2]
        if b_v is not None:
            b_v = b_v.view(-1, out.shape[-1])
            b_v = b_v.repeat_interleave(out.shape[1] // b_v.shape[0], 0)  # (H, e)
            if weights is not None:  # rows of A sum to 1 in a fused call, so the bias comes through it as it is
                out, b_v = out - weights.sum(-1, keepdim=True) * b_v[:, None], None
        added = self.added
        matrices = matrix(p.q, added.get("q")), matrix(p.k, added.get("k")), matrix(p.v, added.get("v"))
        # DropConnect's projections are not those of the weights that are penalised, nor are those without adapters.
        whole = [] if self.maps else [name for name in "qkv" if name not in added]
        outputs = {n: (self.by_sample(self.seen[n][1], out.shape[0]), self.seen[n][2]) for n in whole}
        record = AttentionRecord(
            query, key, value, *matrices, out, weights, q, k, attn_mask, is_causal, scale, outputs, b_v, squares or {}
        )
        for method in self.penalties:
            sums = cast(Penalty, method).sums
            for component, term in cast(Penalty, method).attention_terms(record, action.place).items():
                action.control.enter(Entry(action.place.name, action.place.block, method.name, component, term, sums))

    def note_order(self, values: Tensor, tokens: int) -> None:
        """Whether projections give tokens before samples, by what became of V. tokens: their axis in `values`."""
        if self.origins is not None and "v" in self.seen:
            of_projection = self.origins.of(self.seen["v"][1])
            self.action.facts.tokens_first = has_tokens_first(of_projection, self.origins.of(values), tokens)

    def check_values(self, value: Tensor) -> None:
        """Once: raise where the values of attention are not what the rows of the weight gave that are taken for V.

        value: (B, H, N, e).
        """
        projected = self.plainly_seen("v")
        if self.action.verified or projected is None or not has_numbers(value):
            return
        # What is computed once may save nothing for backward: a checkpoint that computes it again would miss that.
        given, joined = self.by_sample(projected[1].detach(), value.shape[0]), value.detach().transpose(1, 2).flatten(2)
        if given.shape != joined.shape:
            return
        if not all_true(torch.isclose(given.float(), joined.float(), rtol=1e-2, atol=1e-3)):
            raise UnmetError(
                f"{self.action.place.where} has its queries, keys and values in another order than one behind the "
                "other in one weight, or changes its values: its penalties cannot be taken. Leave it out with targets=."
            )
        self.action.verified = True

    def by_sample(self, x: Tensor, batch: int) -> Tensor:
        """(B, N, d) from what went into a projection, where attention sees `batch` samples.

        Windows that attention is computed in are samples; some models put tokens in front of samples.
        """
        if x.dim() == 3 and x.shape[1] == batch and (x.shape[0] != batch or self.action.facts.tokens_first):
            return x.transpose(0, 1)
        if x.dim() == 2:
            x = x[None] if batch == 1 else x.unflatten(0, (batch, -1)) if x.shape[0] % batch == 0 else x
        samples = 1
        for size in x.shape[:-1]:
            samples *= size
            if samples == batch:
                return x.reshape(batch, -1, x.shape[-1])
        raise UnmetError(
            f"{self.action.place.where} projects {tuple(x.shape[:-1])} tokens and computes attention over {batch} "
            "samples or windows; which belong together is not known, so its penalties cannot be taken. Leave it out "
            "with targets=."
        )


def refuse_inner_checkpoint(action: AttentionAction, outside: Any) -> None:
    """Raise where a module computes its attention inside of a checkpoint of its own. outside: of what it runs in."""
    if not torch.compiler.is_compiling() and innermost() is not outside:
        raise UnsupportedError(
            f"{action.place.where} computes its attention inside of an activation checkpoint (or an autograd function) "
            "that it begins itself, which computes it again without the recipe: gradients would be wrong. Checkpoint "
            "the whole module, or its block, from outside."
        )


def _add_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)
