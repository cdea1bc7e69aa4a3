"""What the attention operator is measured against: torch's kernels, FlexAttention, the paper's listing, and our own."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attemper
from attemper.errors import ParameterError, suggestion
from attemper.ops.perturbation import Perturbation
from attemper.ops.seeds import draw_seed
from attemper.recipe import as_methods

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

RATE = 0.1
"""Of everything here that drops and is not a recipe."""
SEED = 7

STOCK = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = (*STOCK, "flex", "listing", "listing-compiled")
"""What we compare with: torch's SDPA backends, FlexAttention, and DropKey as its paper prints it."""


@dataclass(frozen=True)
class Candidate:
    """One way to compute attention."""

    family: str
    name: str
    recipe: str
    make: Callable[[], Attention] | None = None
    """Builds it, which may compile. None: it cannot serve, and `refusal` says why."""
    seeded: Attention | None = None
    """The same with the seed `SEED`, where its result can be checked."""
    methods: tuple[Perturbation, ...] = ()
    """What the reference must apply to give the same."""
    chosen: bool = False
    refusal: str | None = None

    def __str__(self) -> str:
        return f"{self.family} {self.name}, {self.recipe}"


def check_backends(names: Sequence[str]) -> tuple[str, ...]:
    """The backends by these names, or all of them; one of torch's own must be there, for the ratios."""
    for name in names:
        if name not in BACKENDS:
            raise ParameterError(f"unknown backend '{name}'.{suggestion(name, BACKENDS)} Use: {', '.join(BACKENDS)}")
    if names and not set(names) & set(STOCK):
        raise ParameterError(
            f"backends {', '.join(names)}: name at least one of {', '.join(STOCK)}, since ratios are to the fastest of "
            "them"
        )
    return tuple(dict.fromkeys(names)) or BACKENDS


def candidates(q: Tensor, k: Tensor, v: Tensor, backends: Sequence[str], recipes: Sequence[str]) -> list[Candidate]:
    """Everything to be measured on these tensors, (B, H, N, e), in the order in which it is prepared.

    What may fail hardest, compilers, comes last.
    """
    found = [stock(name, p, q.device) for name in backends if name in STOCK for p in (0.0, RATE)]
    for recipe in recipes:
        found += ours(q, k, v, recipe)
    if "listing" in backends:
        found.append(Candidate("listing", "eager", f"dropkey({RATE})", lambda: listing))
    if "listing-compiled" in backends:
        found.append(
            Candidate(
                "listing", "compiled", f"dropkey({RATE})", functools.partial(torch.compile, listing, dynamic=False)
            )
        )
    if "flex" in backends:
        found += flexible(q.device)
    return found


def stock(name: str, p: float, device: torch.device) -> Candidate:
    """One of torch's SDPA backends, without dropout or with dropout of the weights."""
    recipe = f"dropout({p})" if p else "none"
    if device.type == "cpu" and name in ("cudnn", "efficient"):
        return Candidate("stock", name, recipe, refusal="has no kernels for a CPU")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(STOCK[name]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p)

    return Candidate("stock", name, recipe, lambda: attend, seeded=None if p else attend)


def ours(q: Tensor, k: Tensor, v: Tensor, recipe: str) -> list[Candidate]:
    """Each implementation that Attemper has, whether it can serve this recipe or not."""
    methods = tuple(method for method in as_methods(recipe) if isinstance(method, Perturbation))
    found = []
    for verdict in attemper.implementations(q, k, v, methods=methods):
        if not verdict.serves:
            found.append(Candidate("attemper", verdict.name, recipe, refusal=verdict.reason))
            continue
        attend, seeded = _implementation(verdict.name, methods, None), _implementation(verdict.name, methods, SEED)
        found.append(
            Candidate(
                "attemper",
                verdict.name,
                recipe,
                lambda attend=attend: attend,  # type: ignore[misc]
                seeded=seeded,
                methods=methods,
                chosen=verdict.chosen,
            )
        )
    return found


def _implementation(name: str, methods: tuple[Perturbation, ...], seed: int | None) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attemper.attention(q, k, v, methods=methods, seed=seed, impl=name)  # type: ignore[call-overload]
        return out

    return attend


def listing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """DropKey the way its paper prints it: logits in memory, −1e12 added to those that a Bernoulli mask names."""
    logits = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    dropped = torch.bernoulli(torch.full_like(logits, RATE))
    return (logits + dropped * -1e12).softmax(dim=-1) @ v


def flexible(device: torch.device) -> list[Candidate]:
    """FlexAttention without anything, and with DropKey."""
    found = []
    for recipe, attend in (("none", flex), (f"dropkey({RATE})", flex_dropkey)):
        if device.type == "cpu":
            found.append(Candidate("flex", "compiled", recipe, refusal="has no backward pass on a CPU"))
        else:
            make = functools.partial(torch.compile, attend, dynamic=False)
            found.append(Candidate("flex", "compiled", recipe, make))
    return found


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention without anything."""
    from torch.nn.attention.flex_attention import flex_attention

    out: Tensor = flex_attention(q, k, v)
    return out


def flex_dropkey(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention with DropKey as its score_mod."""
    from torch.nn.attention.flex_attention import flex_attention

    drop = attemper.flex.score_mod(attemper.methods.DropKey(RATE), draw_seed(q), (*q.shape[:3], k.shape[2]))
    out: Tensor = flex_attention(q, k, v, score_mod=drop)
    return out
