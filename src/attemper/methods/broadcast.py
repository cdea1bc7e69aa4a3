"""Context broadcasting: add uniform attention, the mean of all tokens, inside the MLP. ICCV 2023."""

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attemper.errors import ParameterError
from attemper.methods.base import Method, Paper, check_choice, check_prefix
from attemper.methods.kinds import Position, PreparedMap, TokenMap, Tokens, tokens_mean
from attemper.ops import fused
from attemper.ops.stream import Stream

VARIANTS = ("cb", "cb_s", "gate", "hybrid")


def context_broadcast(
    x: Tensor, variant: str = "cb", *, scale: Tensor | None = None, real: Tensor | None = None
) -> Tensor:
    """Tokens (B, N, C) with the context of all of them mixed in.

    variant: "cb" (x_i + mean)/2; "cb_s" (x_i + scale ⊙ mean)/2; "gate" x_i (x_0 + 1); "hybrid" x_i x_0 + cb(x_i), where
        x_0 is the class token.
    scale: (C,), for "cb_s".
    real: boolean (B, N); the mean leaves padding out, and x_0 is the first token that is real.

    >>> context_broadcast(torch.tensor([[[0.0], [2.0]]])).flatten().tolist()
    [0.5, 1.5]
    """
    if variant == "gate":
        return x * (first_token(x, real) + 1)
    mean = tokens_mean(x, real)
    if variant == "cb_s":
        return (x + (mean if scale is None else scale * mean)) / 2
    broadcast = (x + mean) / 2
    return broadcast if variant == "cb" else x * first_token(x, real) + broadcast


def first_token(x: Tensor, real: Tensor | None) -> Tensor:
    """(B, 1, C): the first token of x (B, N, C), or where some are padding the first real one."""
    if real is None:
        return x[:, :1]
    return x.take_along_dim(real.to(torch.int8).argmax(1)[:, None, None], 1)


@dataclasses.dataclass(frozen=True)
class ContextBroadcast(Method, TokenMap):
    """Mix the mean of all tokens into each of them, inside the residual branch. Acts in eval mode too.

    variant: "cb"; "cb_s" with a learned scale per channel, ones at the start; "gate" and "hybrid", which need a class
        token.
    branch: in which branch of every block: "mlp", "attention" or "both".
    position: in the MLP, after its second layer ("end"), before it ("mid") or before its first ("front").
    prefix: for "gate" and "hybrid", how many tokens stand before the patches, the class token first, where the model
        does not tell; x_0 is then the first token.
    """

    name: ClassVar[str] = "cb"
    summary: ClassVar[str] = "mix the mean of all tokens into each of them, in the MLP"
    paper: ClassVar[Paper] = Paper("Scratching Visual Transformer's Back with Uniform Attention", "ICCV 2023")

    variant: Literal["cb", "cb_s", "gate", "hybrid"] = "cb"
    branch: Literal["mlp", "attention", "both"] = "mlp"
    position: Literal["front", "mid", "end"] = "end"
    prefix: int | None = None

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        check_choice("branch", self.branch, ("mlp", "attention", "both"))
        check_choice("position", self.position, ("front", "mid", "end"))
        if self.prefix is not None:
            self._check_prefix()

    def _check_prefix(self) -> None:
        check_prefix(self.prefix)
        if self.variant not in ("gate", "hybrid"):
            raise ParameterError(
                f"prefix belongs to variant=gate or hybrid, and variant is {self.variant}: its mean is over all "
                "tokens, the class token among them"
            )
        if self.prefix == 0:
            raise ParameterError(f"variant={self.variant} needs a class token: prefix must be at least 1, got 0")

    @property
    def needs_class_token(self) -> bool:  # type: ignore[override]
        return self.variant in ("gate", "hybrid") and self.prefix is None

    @property
    def reads_first_token(self) -> bool:
        return self.variant in ("gate", "hybrid")

    @property
    def always(self) -> bool:
        return True

    @property
    def positions(self) -> tuple[Position, ...]:
        mlp: dict[str, Position] = {"front": "mlp_front", "mid": "mlp_mid", "end": "mlp_end"}
        if self.branch == "attention":
            return ("attention_end",)
        return (mlp[self.position],) if self.branch == "mlp" else (mlp[self.position], "attention_end")

    def parameter(self, channels: int) -> Tensor | None:
        return torch.ones(channels) if self.variant == "cb_s" else None

    def map_tokens(self, x: Tensor, tokens: Tokens, stream: Stream | None) -> Tensor:
        if self.variant == "cb" and tokens.real is None and fused.tokens.mixes(x):
            return fused.tokens.mixed(x)
        return context_broadcast(x, self.variant, scale=tokens.parameter, real=tokens.real)

    def prepare(self, x: Tensor) -> PreparedMap | None:
        return fused.tokens.MeanMix(x) if self.variant == "cb" and fused.tokens.mixes(x) else None
