"""Attention that a model writes out itself: a product of queries and keys, softmax, a product with values."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import FittedWarning, MeshError, ParameterError, UnmetError, UnsupportedError
from attemper.methods.base import Method
from attemper.ops.call import reachable
from attemper.ops.perturbation import Perturbation, draw
from attemper.ops.softmax import softmax_with
from attemper.ops.stream import Source
from attemper.tempering.axes import (
    RESHAPES,
    Arrangement,
    Axes,
    Factor,
    as_it_was,
    length,
    moved,
    permutation,
    plain_arrangement,
    softmax_axis,
    sorted_by_role,
    whole,
)
from attemper.tempering.calls import MULTIPLICATIONS
from attemper.tempering.draws import note, source
from attemper.tempering.key_grids import SeenMaps, on_grid
from attemper.tempering.known import Known
from attemper.tempering.mesh import is_sharded
from attemper.tempering.offsets import AttentionShape, attention_offsets
from attemper.tempering.origins import ADDITIONS, CASTS
from attemper.tempering.products import ADDED, Product, read_product
from attemper.tempering.projected import ProjectionWatch
from attemper.tempering.readings import Reading, read_logits
from attemper.tempering.shards import Held, refuse_nested
from attemper.tempering.witness import note_padding

if TYPE_CHECKING:
    from attemper.tempering.attention import AttentionAction

FACTORS = (
    *MULTIPLICATIONS,
    *(torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.true_divide),
    *(Tensor.__truediv__, Tensor.__itruediv__),
)
MASKING = (
    *ADDITIONS,
    *(torch.sub, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__isub__),
    *(Tensor.masked_fill, Tensor.masked_fill_, torch.masked_fill, torch.where, Tensor.where),
)
"""What puts biases and masks on logits."""
ATTENDED = ("batch", "heads", "queries", "width")
VALUES = ("batch", "heads", "keys", "width")


class WrittenAttention(ProjectionWatch):
    """Sees softmax and the products before and behind it, in one forward pass of one attention module."""

    def __init__(self, action: AttentionAction, module: nn.Module) -> None:
        super().__init__(action, module)
        self.methods = action.perturbing(action.active) if action.control.on(module.training) else ()
        self.blurs = [m for m in self.methods if "keys" in m.stages]
        self.seen_maps: SeenMaps | None = None
        """Where methods ask for the grid of the keys: what is seen of it."""
        self.met = 0
        """How many attention calls were met."""
        self.passed_by: list[str] = []
        """What looked like attention, and was left as it is."""
        self.products = 0
        """How many products were computed."""
        self.numbers: dict[int, int] = {}
        """Of the products that the origins of axes name: which one of the module's it was."""
        self.blurred: tuple[int, int] | None = None
        """The product of queries and keys since the last softmax, and the operand that has the keys."""
        self.contents = Known(None)
        """The product of queries and keys, and what became of it: it, and the factor that it has by now."""
        self.weights = Known(None)
        """What softmax gave, and what became of it, with the roles of its axes."""
        self.following = False
        """Whether the weights of a softmax are on their way to the values."""
        self.waiting = False
        """Whether penalties wait for them to meet."""

    def source(
        self, methods: tuple[Perturbation, ...], rows: int, shape: AttentionShape, x: Tensor, held: Held | None = None
    ) -> Source | None:
        """Where the streams of one attention call start, on the device of x; None: nothing draws.

        rows: the samples, or windows of them, of the call. held: which part of the queries x is, if a DTensor tells.
        """
        if not methods:
            return None
        self.check_region()
        action = self.action
        place = functools.partial(attention_offsets, action=action, shape=shape, held=held)
        drawn = source(action.control, action.stream_site, x, rows if held is None else held.rows(0), place)
        own, maps = methods[len(self.methods) :], None if self.seen_maps is None else self.seen_maps.copy()
        note(action.control, drawn, (rows, shape.heads, shape.queries, shape.keys), own=own, maps=maps)
        return drawn

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Softmax: logits with all their masks in, weights out. One that is not over keys is left as it is."""
        logits: Tensor = args[0]
        refuse_nested(logits)
        if is_sharded(logits) and self.methods:
            raise MeshError(
                f"{self.action.place.where} computes a softmax of DTensors; attention that is written out can be "
                "tempered on plain tensors only (use_local_output=True), or by scaled_dot_product_attention"
            )
        axis = softmax_axis(*args, **kwargs)
        reading = Reading(None)
        if self.origins is not None and axis is not None:
            reading = read_logits(self.origins.of(logits), axis)
        arrangement = None if axis is None else self.arrangement(logits, axis, reading)
        if arrangement is None:
            shape = ", ".join(map(str, logits.shape))
            self.passed_by.append(f"a softmax over axis {axis} of ({shape})" + reading.remark)
            weights: Tensor = func(*args, **kwargs)
            return weights
        self.met += 1
        self.check_impl()
        chosen = self.check_blurred(reading)
        axes = arrangement.of(logits.shape)
        if self.action.watchers or self.methods:
            sorted_ = sorted_by_role(logits, axes)
            self.settle_grid(sorted_.shape[0], sorted_.shape[3])
            self.action.note_shape(self.methods, sorted_.shape[1], sorted_.shape[3], self.met)
            note_padding(self.action, sorted_, False, sorted_.shape[0], sorted_.shape[3])
        drawn = None
        if self.methods:
            batch, heads, queries, keys = sorted_.shape
            drawn = self.source(self.methods, batch, AttentionShape(heads, queries, keys), logits)
        if self.blurs and chosen:
            assert drawn is not None
            logits = self.blurred_logits(logits, axes, drawn)
            sorted_ = sorted_by_role(logits, axes)
            args = (logits, *args[1:])
        if any(method.stages != ("keys",) for method in self.methods):
            dtype = kwargs.get("dtype") or logits.dtype
            plainly = self.action.impl == "reference"
            given = softmax_with(sorted_, self.fitted(sorted_.shape[3]), drawn, dtype, plainly)
            weights = as_it_was(given, axes)
        else:
            weights = func(*args, **kwargs)
        if self.origins is not None:
            self.origins.carry(logits, weights)
        if self.blurs or self.penalties or self.origins is not None:
            self.weights.note(weights, axes)
            self.following, self.waiting = True, bool(self.penalties)
        return weights

    def arrangement(self, logits: Tensor, axis: int, reading: Reading) -> Arrangement | None:
        """Where samples, heads, queries and keys are in logits; None: softmax is not over keys, as far as is known."""
        facts, key = self.action.facts, ("logits", logits.dim(), axis)
        if reading.over == "channels":
            return None
        if reading.arrangement is not None:
            facts.learn(key, reading.arrangement if reading.lasts else None)
            return reading.arrangement
        if facts.arrangements.get(key) is not None:
            return facts.arrangements[key]
        if axis != logits.dim() - 1 or logits.dim() < 3:
            return None
        self.require_heads(logits.dim() > 3)
        return plain_arrangement(logits.dim())

    def require_heads(self, known: bool) -> None:
        """Raise where samples and heads have to be told apart, and cannot be."""
        asking = [cast(Method, method).name for method in self.methods if method.tells_heads]
        asking += [method.name for method in self.penalties] + list(self.action.watchers)
        if not known and asking:
            raise UnmetError(
                f"{self.action.place.where} computes attention without an axis for heads, and whether its samples "
                f"are samples or samples and heads in one is not known; {' and '.join(asking)} must tell them apart. "
                "Give it four axes (batch, heads, queries, keys), or leave it out with targets=."
            )

    def settle_grid(self, batch: int, keys: int) -> None:
        """Give methods that ask for the grid of a call's keys the one that was found."""
        if self.seen_maps is None:
            return
        control = self.action.control
        try:
            settled = on_grid(self.action.active, control.methods, self.seen_maps, batch, keys)
        except ParameterError as error:
            if control.trial:  # images that are made up may be too small for a window, say
                raise ValueError(str(error)) from error
            raise
        self.methods = self.action.perturbing(settled)

    def fitted(self, keys: int) -> tuple[Perturbation, ...]:
        """The methods as they act on so many keys; where one asks for more, that is said once."""
        fitted = tuple(method.fitted(keys) for method in self.methods)
        control = self.action.control
        if fitted != self.methods and not (torch.compiler.is_compiling() or control.told_fitted or control.trial):
            control.told_fitted = True
            pair = next(pair for pair in zip(self.methods, fitted, strict=True) if pair[0] != pair[1])
            ours, here = (getattr(each, "method", each) for each in pair)  # what has learnt its rate holds the method
            name = next(name for name, value in vars(ours).items() if vars(here)[name] != value)
            warnings.warn(
                f"{self.action.place.where} has {keys} key{'s' if keys > 1 else ''}, fewer than "
                f"{cast(Method, ours).name}'s {name}={vars(ours)[name]}: there it acts with {name}={vars(here)[name]}. "
                "The same holds wherever there are fewer keys, and is said once.",
                FittedWarning,
                stacklevel=2,
            )
        return fitted

    def check_impl(self) -> None:
        action = self.action
        if action.impl not in ("auto", "reference"):
            raise UnsupportedError(
                f"impl='{action.impl}' cannot serve {action.place.where}: it computes attention by matmul and "
                "softmax, not by one fused call. impl='reference' can, and so can 'auto'."
            )

    def product(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """QKᵀ before softmax, which may be blurred there, or AV behind it."""
        self.products += 1
        product = read_product(func, args, kwargs)
        if product is not None and self.following:
            for weights, letters in ((product.left, product.of_left), (product.right, product.of_right)):
                axes = self.weights.of(weights)
                if axes is not None:
                    return self.times_weights(product, weights, dict(zip(letters, axes, strict=True)))
        side = 0 if product is None or not self.blurs else self.side_of_keys(product)
        out: Tensor = func(*args, **kwargs)
        if product is not None and side:
            self.blurred = self.products, side
            added = args[0] if func in ADDED else None  # a position bias, say
            self.contents.note(out, (out if added is None else out - added * kwargs.get("beta", 1), 1.0))
        elif product is not None and self.blurred is not None:
            self.follow_mixed(product, out)
        made = self.origins.product_of(out) if self.origins is not None else 0
        if made:
            self.numbers[made] = self.products
        return out

    def side_of_keys(self, product: Product) -> int:
        """Which operand has the keys, if this is the product of queries and keys: 1 or 2; 0: it is not."""
        facts = self.action.facts
        if self.following or self.blurred is not None:
            return 0
        if facts.settled:
            return facts.contents.get(self.products, 0)
        plain = len(product.summed) == 1 and len(product.own(product.of_right)) == 1
        plain = plain and len(product.own(product.of_left)) <= 1 and min(product.left.dim(), product.right.dim()) > 2
        if not plain or product.own(product.of_right) != product.of_out[-1]:
            return 0
        if isinstance(product.left, nn.Parameter) or isinstance(product.right, nn.Parameter):
            return 0
        return 0 if self.origins is not None and self.origins.is_learnt(product.left, product.right) else 2

    def follow_content(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """What becomes of QKᵀ on its way to softmax: factors, masks and biases, views, heads that are mixed."""
        found = next(
            ((x, what) for x in args if isinstance(x, Tensor) and (what := self.contents.of(x)) is not None), None
        )
        if found is None or not isinstance(out, Tensor):
            return
        x, (content, factor) = found
        if func in (F.linear, F.conv2d, torch.conv2d) and args[0] is x:
            self.contents.note(out, (func(content, args[1]), factor))  # a blur along the keys commutes with it
        elif func in RESHAPES or permutation(func, args, kwargs) is not None:
            self.contents.note(out, (func(content, *args[1:], **kwargs), factor))
        elif func in FACTORS and len(args) == 2 and out.shape == x.shape:
            other = args[1] if args[0] is x else args[0]
            alike = not isinstance(other, Tensor) or other.dim() == 0 or other.shape[-1] == 1
            if alike and (func in MULTIPLICATIONS or args[0] is x):
                self.contents.note(out, (content, factor * other if func in MULTIPLICATIONS else factor / other))
        elif func in MASKING or func in CASTS:
            self.contents.note(out, (content, factor))

    def follow_mixed(self, product: Product, out: Tensor) -> None:
        """QKᵀ whose heads are mixed by a product, with which a blur along the keys, the last axis, commutes."""
        for x, letters, again in (
            (product.left, product.of_left, lambda content: product.again(content, product.right)),
            (product.right, product.of_right, lambda content: product.again(product.left, content)),
        ):
            found = self.contents.of(x)
            if found is not None and letters[-1] not in product.summed:
                self.contents.note(out, (again(found[0]), found[1]))

    def blurred_logits(self, logits: Tensor, axes: Axes, drawn: Source) -> Tensor:
        """Logits whose content is blurred, among the keys that a query may see; position biases and masks are not."""
        content, factor = self.contents.of(logits) or (None, 1.0)
        if content is None:
            raise UnsupportedError(
                f"blur cannot serve {self.action.place.where}: what becomes of the product of its queries and keys "
                "before softmax is more than factors, masks and position biases, and was not followed."
            )
        work = torch.promote_types(logits.dtype, torch.float32)
        plain = sorted_by_role(content.to(work).expand(logits.shape), axes)
        allowed = reachable(sorted_by_role(logits, axes))
        blurred = plain
        for method, stream in draw(self.methods, drawn, logits):
            if "keys" in method.stages:
                blurred = method.perturb_content(blurred, allowed, False, stream)
        change = as_it_was(torch.where(allowed, blurred - plain, 0.0), axes)
        return (logits.to(work) + change * factor).to(logits.dtype)

    def check_blurred(self, reading: Reading) -> bool:
        """At softmax: raise unless the product that gave these logits is the one that was taken for QKᵀ.

        In a trial run that is only found out; False: it was another one.
        """
        if not self.blurs:
            return False
        number, facts = self.numbers.get(reading.product), self.action.facts
        blurred, self.blurred = self.blurred, None
        if number is not None:
            facts.contents[number] = reading.side
            if blurred == (number, reading.side) or self.action.control.trial:
                return blurred == (number, reading.side)
        elif blurred is not None:
            return True
        raise UnsupportedError(
            f"blur cannot serve {self.action.place.where}: the product of its queries and keys was not seen before "
            "softmax, and blurring the logits with their position bias would be another method."
        )

    def times_weights(self, product: Product, weights: Tensor, roles: dict[str, tuple[Factor, ...]]) -> Tensor:
        """Behind softmax: AV, with which penalties are complete; or weights whose heads are mixed."""
        out = product.again(product.left, product.right)
        keys = "".join(letter for letter, axis in roles.items() if any(f.root == "keys" for f in axis))
        if product.summed != keys:
            summed = {factor.root for letter in product.summed for factor in roles[letter]}
            if summed == {"heads"}:
                self.weights.note(out, _with(roles, product.of_out, out, "heads"))
            elif summed == {"queries"}:
                raise UnmetError(
                    f"{self.action.place.where} has a softmax over queries: its weights sum to 1 over another axis "
                    "than the one that values are summed over, as in slot attention. No method is defined for that. "
                    "Leave the module out with targets=."
                )
            return out
        self.following = False
        if self.waiting:
            self.waiting = False
            values, letters = (
                (product.right, product.of_right) if weights is product.left else (product.left, product.of_left)
            )
            self.note_order(values, letters.index(keys))
            shared = {letter: roles[letter] for letter in letters if letter in roles}
            if all(values.shape[letters.index(letter)] == length(axis) for letter, axis in shared.items()):
                self.check_values(sorted_by_role(values, _with(shared, letters, values, "width"), VALUES))
            joined = sorted_by_role(out, _with(roles, product.of_out, out, "width"), ATTENDED)
            of_weights = product.of_left if weights is product.left else product.of_right
            rows = sorted_by_role(weights, tuple(roles[letter] for letter in of_weights))
            self.penalise(joined, weights=rows)
        return out

    def follow_weights(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """What becomes of attention weights on their way to the values: dropout, views, heads that are mixed."""
        for x in (*args, *kwargs.values()):
            axes = self.weights.of(x) if isinstance(x, Tensor) else None
            if axes is None:
                continue
            if func in (F.linear, F.conv2d, torch.conv2d):
                axis = out.dim() - 1 if func is F.linear else 1
                mixed = {f.root for f in axes[axis]} == {"heads"}
                axes = (*axes[:axis], (Factor("heads", 1, out.shape[axis]),), *axes[axis + 1 :]) if mixed else None
            else:
                axes = moved(func, args, kwargs, out, axes)
            if axes is not None:
                self.weights.note(out, axes)
            return


def _with(roles: dict[str, tuple[Factor, ...]], letters: str, x: Tensor, other: str) -> Axes:
    """The axes of a tensor by their letters; those without a role have the role `other`."""
    return tuple(
        roles[letter] if letter in roles else whole(other, size) for letter, size in zip(letters, x.shape, strict=True)
    )
