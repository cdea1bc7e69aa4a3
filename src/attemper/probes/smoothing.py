"""Which way training pushes attention: does the gradient of the logits flatten it, and does DropKey add to that?

DropKey's authors argue with a Lagrange function that dropping keys before softmax smooths attention adaptively. Of the
paper only its project page was read, which has no formula, so what follows is ours. With logits S, weights A =
softmax(S) and the loss L, descent changes the logits of a row by

    push_j = −∂L/∂S_j = A_j (c̄ − c_j),    c_j = ∂L/∂A_j,  c̄ = Σ_j A_j c_j,

which sums to zero: what is pushed up is pushed up at the cost of the others. A row is flattened where large weights are
pushed down. Dropping key k alone turns the loss of a row, taken linear in its output, into c̄ + A_k (c̄ − c_k)/(1 − A_k),
so that DropKey of rate p expects

    E[L] − L = p Σ_k push_k / (1 − A_k) + O(p²) = p Σ_k push_k A_k / (1 − A_k) + O(p²):

a penalty on what descent pushes up, weighted by its odds. It is small for spread attention and grows without bound
as a row looks at a single key: the coefficient adapts to the weight.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attemper.errors import NoSiteError, ParameterError, UnmetError
from attemper.ops.call import reachable
from attemper.probes.attention import Seen
from attemper.probes.gradients import untouched
from attemper.probes.table import SmoothingRow
from attemper.probes.tokens import first_tensor
from attemper.probes.watching import (
    AttentionPoints,
    find_attention,
    in_eval,
    looking,
    run_model,
    seen_fused,
    seen_multihead,
)
from attemper.sites import AttentionSite
from attemper.sites.targets import Targets
from attemper.tempering import Tempered
from attemper.tempering.attention import AttentionAction
from attemper.tempering.multihead import MultiheadArguments
from attemper.tempering.subclassing import Action, state_of

EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
"""Keys are binned by their weight as a multiple of the uniform one."""


@dataclass(frozen=True)
class Push:
    """The sums behind a row, over queries, heads and samples of one or more passes."""

    along: Tensor
    """Σ A · push, which is Σ (A − 1/n) · push: a row's push sums to zero."""
    spread: Tensor
    """Σ (A − 1/n)², n the number of allowed keys."""
    on_largest: Tensor
    """Σ of the push on the largest weight of each row."""
    moved: Tensor
    """Σ |push| / 2: all that is pushed up."""
    penalty: Tensor
    """Σ push · A / (1 − A)."""
    binned: Tensor
    """Σ push of each bin."""
    counted: Tensor
    """Keys in each bin."""

    def __add__(self, other: "Push") -> "Push":
        return Push(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def push_of(weights: Tensor, allowed: Tensor, gradient: Tensor) -> Push:
    """weights: A (…, Nq, Nk). allowed: which keys may be attended to. gradient: ∂L/∂S. All of the same shape."""
    a, push = torch.where(allowed, weights.double(), 0.0), torch.where(allowed, -gradient.double(), 0.0)
    n = allowed.sum(-1, keepdim=True).clamp_min(1)
    above = torch.where(allowed, a - 1 / n, 0.0)
    largest = push.gather(-1, a.argmax(-1, keepdim=True))
    odds = a / (1 - a).clamp_min(torch.finfo(torch.float64).eps)
    edges = torch.tensor(EDGES[1:-1], dtype=torch.float64, device=a.device)
    which = torch.bucketize(a * n, edges, right=True)[allowed]
    bins = torch.zeros(2, len(EDGES) - 1, dtype=torch.float64, device=a.device)
    bins[0].index_add_(0, which, push[allowed])
    bins[1].index_add_(0, which, torch.ones_like(push[allowed]))
    return Push(
        along=(a * push).sum(),
        spread=above.square().sum(),
        on_largest=largest.sum(),
        moved=push.abs().sum() / 2,
        penalty=(push * odds).sum(),
        binned=bins[0],
        counted=bins[1],
    )


# ------------------------------------------------------------------------------------------------------------ in a pass
@dataclass
class LogitWatch(Action):
    """Adds a zero to the logits of one attention, so that its gradient is theirs, whoever computes attention."""

    site: AttentionSite
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list, init=False)
    """Of every call: weights before any method acted, keys that may be attended to, and the zero."""

    def acts(self, training: bool) -> bool:
        return True

    def around(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        with Zeros(self, is_perturbed(module)):
            return forward(*args, **kwargs)

    def zero(self, call: Seen, like: Tensor) -> Tensor:
        """A zero of (B, H, Nq, Nk) that wants a gradient."""
        with torch.no_grad(), torch._C.DisableTorchFunction():
            logits = call.some_rows(0, call.shape[2])
            allowed = reachable(logits) if call.biased else logits > -math.inf
            weights = logits.softmax(-1).nan_to_num(0.0)
        zero = torch.zeros(call.shape, dtype=like.dtype, device=like.device, requires_grad=True)
        self.seen.append((weights, allowed, zero))
        return zero


def is_perturbed(module: nn.Module) -> bool:
    """Whether methods of a recipe act in the attention calls of a module now."""
    actions = [each for each in state_of(module).actions if isinstance(each, AttentionAction)]
    return any(len(each.active) > 0 and each.control.on(module.training) for each in actions)


class Zeros(AttentionPoints):
    """Adds the zeros of a watch to logits, behind whatever a recipe does to keys.

    perturbed: whether methods act in the calls. They must learn that these are causal, as blur asks; torch's own
        function takes no such word beside a mask.
    """

    def __init__(self, watch: LogitWatch, perturbed: bool) -> None:
        super().__init__()
        self.watch = watch
        self.perturbed = perturbed

    def softmax(self, func: Any, args: Any, kwargs: Any) -> Any:
        logits = args[0]
        zero = self.watch.zero(Seen(None, None, logits=logits.detach()), logits)
        return func(logits + zero, *args[1:], **kwargs)

    def fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = inspect.signature(seen_fused).bind(*args, **kwargs)
        given = call.arguments
        query, mask, causal = given["query"], given.get("attn_mask"), given.get("is_causal", False)
        with torch._C.DisableTorchFunction():
            zero = self.watch.zero(seen_fused(*args, **kwargs), query)
            bias = zero.view(*query.shape[:-1], given["key"].shape[-2])
            if causal and not self.perturbed:
                bias = bias.masked_fill(~torch.ones_like(bias, dtype=torch.bool).tril(), -math.inf)
            if mask is not None:
                bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
        given |= {"attn_mask": bias, "is_causal": causal and self.perturbed}
        return func(**given)

    def multihead(self, func: Any, args: Any, kwargs: Any) -> Any:
        call = MultiheadArguments(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            with torch.no_grad():
                seen = seen_multihead(*args, **kwargs)
            zero = self.watch.zero(seen, call.query)
            bias = zero.flatten(0, 1)[..., : _own_keys(call)]
            if call.attn_mask is not None:
                own = call.attn_mask
                bias = bias.masked_fill(own, -math.inf) if own.dtype == torch.bool else bias + own
            padding = call.key_padding_mask
            if padding is None and call.is_causal:  # beside padding, the word that a mask is causal replaces no mask
                padding = bias.new_zeros((len(zero), bias.shape[-1]) if call.batched else bias.shape[-1:])
            elif padding is not None and padding.dtype == torch.bool:  # both masks must be of one type
                padding = torch.zeros_like(padding, dtype=bias.dtype).masked_fill(padding, -math.inf)
        return func(**vars(call) | {"attn_mask": bias, "key_padding_mask": padding})


def _own_keys(call: MultiheadArguments) -> int:
    """Keys that a mask of the module speaks of: those of the input, without learned or zero ones behind them."""
    return int(call.key.shape[0]) if call.static_k is None else int(call.static_k.shape[1])


# -------------------------------------------------------------------------------------------------------------- results
def logit_push(
    model: nn.Module, loss: Callable[[], Tensor], *, passes: int = 8, targets: Targets | None = None
) -> tuple[SmoothingRow, ...]:
    """How the gradient of the loss pushes the logits of every attention: a row without the model's recipe, one with it.

    The model runs in training mode: once with its methods off, and `passes` times with them, which are averaged. A
    model that is not tempered has the first row alone. Nothing is left behind: `.grad`, batch norms, modes and random
    generators stay as they are. It takes the memory of one N × N map per attention and pass.

    loss: runs the model and gives the loss, such as `lambda: F.cross_entropy(model(x), y)`.
    targets: as in `attemper.diagnose`.
    """
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ParameterError(f"passes must be a number of passes, at least 1; got {passes!r}")
    sites = find_attention(model, targets).attentions
    tempered = _handle(model)
    with _training(model), untouched(model):
        with tempered.disabled() if tempered is not None else nullcontext():
            rows = _rows("none", sites, [_one_pass(sites, loss)])
        if tempered is not None:
            rows += _rows("recipe", sites, [_one_pass(sites, loss) for _ in range(passes)])
    if not rows:
        raise UnmetError(f"{type(model).__name__} computed no attention whose logits have a gradient from this loss")
    return tuple(sorted(rows, key=lambda row: row.block))


def _one_pass(sites: Sequence[AttentionSite], loss: Callable[[], Tensor]) -> dict[str, Push]:
    """What one forward and backward pass says about each attention, by its name."""
    watches = [LogitWatch(site) for site in sites]
    with looking([(watch.site.module, watch) for watch in watches]):
        value = loss()
    zeros = [zero for watch in watches for _, _, zero in watch.seen]
    if not zeros:
        return {}
    gradients = iter(torch.autograd.grad(value, zeros, allow_unused=True))
    found: dict[str, Push] = {}
    for watch in watches:
        for weights, allowed, _ in watch.seen:
            gradient = next(gradients)
            if gradient is not None:
                push = push_of(weights, allowed, gradient)
                found[watch.site.name] = found[watch.site.name] + push if watch.site.name in found else push
    return found


def _rows(recipe: str, sites: Sequence[AttentionSite], found: Sequence[dict[str, Push]]) -> list[SmoothingRow]:
    rows = []
    for site in sites:
        pushes = [each[site.name] for each in found if site.name in each]
        if pushes:
            total = pushes[0]
            for push in pushes[1:]:
                total = total + push
            rows.append(_row(recipe, site, total))
    return rows


def _row(recipe: str, site: AttentionSite, total: Push) -> SmoothingRow:
    def ratio(above: Tensor, below: Tensor) -> float | None:
        return float(above / below) if float(below) > 0 else None

    return SmoothingRow(
        block=site.block,
        site=site.name,
        recipe=recipe,
        slope=ratio(total.along, total.spread),
        on_largest=ratio(total.on_largest, total.moved),
        penalty=float(total.penalty) if recipe == "none" else None,
        bins=tuple(ratio(push, count) for push, count in zip(total.binned, total.counted, strict=True)),
    )


def own_prediction(model: nn.Module, batch: Any) -> Callable[[], Tensor]:
    """A loss where there are no labels: cross-entropy against the classes that the model holds most probable itself.

    What the recipe adds to the loss is added.
    """
    with in_eval(model), torch.no_grad():
        logits = first_tensor(run_model(model, batch))
    if logits.dim() < 2 or logits.shape[-1] < 2:
        raise ParameterError(
            f"{type(model).__name__} gives {tuple(logits.shape)}, from which no class can be taken; give loss="
        )
    target = logits.argmax(-1)

    def criterion(out: Any) -> Tensor:
        return F.cross_entropy(first_tensor(out).flatten(0, -2).float(), target.flatten())

    tempered = _handle(model)
    if tempered is None:
        return lambda: criterion(run_model(model, batch))
    return lambda: tempered.loss(lambda: run_model(model, batch), criterion)


def _handle(model: nn.Module) -> Tempered | None:
    try:
        return Tempered.of(model)
    except NoSiteError:
        return None


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Context manager: training mode inside; every module has its own mode again afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
