"""What a method can do besides perturbing attention: each kind is one function that tempering knows how to place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attemper.methods.base import Place
from attemper.ops.perturbation import Perturbation
from attemper.ops.stream import Stream

Position = Literal["mlp_front", "mlp_mid", "mlp_end", "attention_end", "entry"]
"""front: before an MLP's first layer; mid: before its last; end: after it. entry: before the first block."""


@dataclass(frozen=True)
class Tokens:
    """What is known of the tokens that a map gets."""

    real: Tensor | None
    """Boolean (B, N), False for padding; None: no padding. Known to maps that say `needs_padding`."""
    parameter: Tensor | None = None
    """The method's own parameter at this place, if it asked for one."""


PreparedMap = Callable[..., Tensor]
"""What a method does with contiguous tokens x of one shape, dtype and device, none of them padding, in an ordinary
training step (`regions.is_ordinary`): called with x, and if the method draws with (x, seed, site, call) of `Source`."""
PreparedSum = Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
"""The same of a method that maps residual branches, of the stream and a branch: gives their sum."""


class TokenMap:
    """Maps tokens (B, N, C) to tokens of the same shape."""

    needs_class_token: ClassVar[bool] = False
    """Whether the model must be known to have a class token."""

    @property
    def reads_first_token(self) -> bool:
        """Whether the first token has a part of its own, so that it must be among those that are mapped."""
        return self.needs_class_token

    mixes_tokens: ClassVar[bool] = True
    """Whether tokens see each other. A map that mixes them is refused where attention hides some from others, as causal
    attention does. One that treats each token by itself says False."""

    @property
    def needs_padding(self) -> bool:
        """Whether it asks which tokens are padding (`Tokens.real`); what mixes tokens must."""
        return self.mixes_tokens

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where it acts."""
        raise NotImplementedError

    @property
    def always(self) -> bool:
        """Whether it acts in eval mode too, as a part of the architecture."""
        return False

    def parameter(self, channels: int) -> Tensor | None:
        """The first value of a parameter of its own, one per place; None: it has none."""
        return None

    def map_tokens(self, x: Tensor, tokens: Tokens, stream: Stream | None) -> Tensor:
        raise NotImplementedError

    def prepare(self, x: Tensor) -> PreparedMap | None:
        """What is left to do in later calls with tokens like x, (B, …, C) or (N, C); None: `map_tokens` does it all."""
        return None

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """What it draws for tokens of this (B, N, C), broadcastable to them; unless said otherwise, which it keeps."""
        return self.map_tokens(torch.ones(tuple(shape), device=stream.seed.device), Tokens(None), stream) != 0


class PatchMap:
    """Maps the patches of images, (B, N, channels · height · width), before they are embedded; acts in both modes."""

    def map_patches(self, patches: Tensor) -> Tensor:
        raise NotImplementedError


class BlockMap:
    """Maps what went into a block and what came out of it; acts in training."""

    mixes_tokens: ClassVar[bool] = False
    """Whether tokens see each other, as in `TokenMap`."""

    def map_block(self, before: Tensor, after: Tensor, stream: Stream) -> Tensor:
        raise NotImplementedError

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """What it draws for a block whose output has this shape; unless said otherwise, what it keeps of the output."""
        after = torch.ones(tuple(shape), device=stream.seed.device)
        return self.map_block(torch.zeros_like(after), after, stream) != 0


class BranchMap:
    """Maps a residual branch (B, …) before it is added to the stream; acts in training."""

    mixes_tokens: ClassVar[bool] = False
    """Whether tokens see each other, as in `TokenMap`."""
    needs_skip: ClassVar[bool] = True
    """Whether it relies on the skip connection, since a branch may become zero."""

    @property
    def leaves_out(self) -> bool:
        """Whether `kept_samples` tells what need not be computed."""
        return False

    def map_branch(self, branch: Tensor, stream: Stream) -> Tensor:
        raise NotImplementedError

    def add_branch(self, x: Tensor, branch: Tensor, stream: Stream) -> Tensor:
        """The residual stream x with the mapped branch added to it; for methods that can do both at once."""
        return x + self.map_branch(branch, stream)

    def prepare(self, x: Tensor, branch: Tensor) -> PreparedSum | None:
        """What is left to do in later sums of tensors like these; None: `add_branch` does it all."""
        return None

    def kept_samples(self, samples: int, stream: Stream) -> Tensor:
        """Boolean (samples,): whose branch is kept; that of the others comes out as zero, whatever it is.

        The stream is that of `map_branch`, here on the CPU.
        """
        return torch.ones(samples, dtype=torch.bool)

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """What it draws for a branch of this shape, broadcastable to it; unless said otherwise, what it keeps."""
        return self.map_branch(torch.ones(tuple(shape), device=stream.seed.device), stream) != 0


class SkipRemover:
    """Says which skip connections of a block go."""

    def removes(self, place: Place) -> tuple[bool, bool]:
        """(round attention, round the MLP)."""
        raise NotImplementedError


class WeightMap:
    """Maps the weight of a projection or of an MLP layer; acts in training."""

    def map_weight(self, weight: Tensor, stream: Stream) -> Tensor:
        raise NotImplementedError

    def drawn(self, shape: Sequence[int], stream: Stream) -> Tensor:
        """What it draws for a weight of this shape, broadcastable to it; unless said otherwise, what it keeps."""
        return self.map_weight(torch.ones(tuple(shape), device=stream.seed.device), stream) != 0


@dataclass(frozen=True)
class AttentionRecord:
    """One self- or cross-attention as it was computed.

    query, key, value: (B, N, d), the inputs of the three projections.
    w_q, w_k, w_v: (H · e, d).
    out: (B, H, Nq, e), attention times values, before the output projection.
    out_bias: (H, e), what the bias of the values added to all of `out`; None: they had none, or it was taken away.
    weights: (B, H, Nq, Nk), where attention was computed by matmul and softmax; otherwise
    q, k: (B, H, N, e), as they met in a fused call, and the masks between them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    out: Tensor
    weights: Tensor | None
    q: Tensor | None
    k: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool
    scale: float | None
    outputs: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """What the projections "q", "k", "v" gave, (B, N, H · e) with their bias, and that bias, where it was seen."""
    out_bias: Tensor | None = None
    squares: dict[str, Tensor] = field(default_factory=dict)
    """Of those that `Penalty.wants_squares` asked for, what attention took along."""

    def projected(self, name: Literal["q", "k", "v"]) -> Tensor:
        """XWᵀ without its bias, (B, N, H · e), in float32 at least; multiplied again only where it was not seen."""
        if name in self.outputs:
            out, bias = self.outputs[name]
            return without_bias(out, bias)
        x, weight = {"q": (self.query, self.w_q), "k": (self.key, self.w_k), "v": (self.value, self.w_v)}[name]
        return wide(x @ weight.T)


@dataclass(frozen=True)
class LayerRecord:
    """One linear layer as it was computed: x (B, N, in), weight (out, in), output (B, N, out) where it was seen."""

    x: Tensor
    weight: Tensor
    output: Tensor | None = None
    bias: Tensor | None = None

    @property
    def seen(self) -> tuple[Tensor, Tensor | None] | None:
        """The output and its bias, where they were seen."""
        return None if self.output is None else (self.output, self.bias)


@dataclass(frozen=True)
class ConvolutionRecord:
    """One convolution of one to three dimensions, or a transposed one, as it was computed.

    x: (B, C, …), its input, padded already where it was padded with anything but zeros.
    weight: (O, C/groups, …); of a transposed one (C, O/groups, …).
    positions: how many positions its output has, which take the place of tokens.
    output: (B, O, …) with its bias (O), where it was seen.
    """

    x: Tensor
    weight: Tensor
    positions: int
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    output: Tensor | None = None
    bias: Tensor | None = None

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same convolution of another input with another weight, without a bias."""
        if not self.transposed:
            return CONVOLVE[weight.dim()](x, weight, None, self.stride, self.padding, self.dilation, self.groups)
        where = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return CONVOLVE_TRANSPOSED[weight.dim()](x, weight, None, *where)


CONVOLVE: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
CONVOLVE_TRANSPOSED: dict[int, Callable[..., Tensor]] = {
    3: F.conv_transpose1d,
    4: F.conv_transpose2d,
    5: F.conv_transpose3d,
}
"""By the number of axes of a weight."""
Part = Literal["q", "k", "v", "ff1", "ff2"]
"""A layer of attention or of an MLP that a penalty may have a term for."""


class Penalty:
    """Adds to the loss; acts in training."""

    @property
    def sums(self) -> bool:
        """Whether its terms are sums over the samples of a batch; otherwise they are means."""
        return False

    @property
    def normalisation(self) -> str | None:
        """By what its terms are divided, as a recipe writes it behind `reduction=`; penalties beside each other must
        agree. None: it has no such choice."""
        return None

    @property
    def needs_unit_rows(self) -> str | None:
        """The component that needs rows of attention that sum to 1, as a recipe writes it; None: no component does."""
        return None

    @property
    def needs_own_weights(self) -> str | None:
        """The component that needs attention's weights as no method changed them; None: no component does."""
        return None

    def wants_attention(self, place: Place) -> bool:
        """Whether attention here adds anything."""
        raise NotImplementedError

    def wants_mlp(self, place: Place) -> bool:
        """Whether the MLP here adds anything."""
        raise NotImplementedError

    def wants_convolution(self, place: Place) -> bool:
        """Whether a convolution here adds anything."""
        return False

    def takes(self, part: Part, place: Place) -> bool:
        """Whether a term is about the weight of this layer. Where it is a convolution, none of `convolution_terms` is
        then: a layer belongs to one component."""
        return self.wants_mlp(place) if part in ("ff1", "ff2") else self.wants_attention(place)

    def wants_squares(self, place: Place) -> tuple[str, ...]:
        """Sums of squares that it would like attention to take along, which may do it cheaply, or not at all.

        "v": ‖XW_vᵀ‖². "qk": ‖XW_qᵀW_kXᵀ‖² of every head. Both summed over everything.
        """
        return ()

    def attention_terms(self, record: AttentionRecord, place: Place) -> dict[str, Tensor]:
        """Component → what it adds to the loss, its strength included."""
        raise NotImplementedError

    def mlp_terms(self, which: Literal["ff1", "ff2"], record: LayerRecord, place: Place) -> dict[str, Tensor]:
        """The same for one layer of an MLP."""
        raise NotImplementedError

    def layer_factor(self, which: Literal["ff1", "ff2"], samples: int, tokens: int, place: Place) -> float | None:
        """Where the term of a layer is ‖XWᵀ‖² times a factor: this factor. None: it is something else."""
        return None

    def square_factors(self, samples: int, tokens: int, place: Place) -> dict[str, tuple[str, float]] | None:
        """The same for attention: component → one of `wants_squares` and its factor; None: a term is something else."""
        return None

    def convolution_terms(self, record: ConvolutionRecord, place: Place) -> dict[str, Tensor]:
        """The same for one convolution."""
        raise NotImplementedError


class Learnable:
    """A perturbation of attention that may learn a rate of its own, one parameter in every attention."""

    @property
    def learns(self) -> bool:
        """Whether it does, as its parameters say."""
        raise NotImplementedError

    @property
    def adds_to_loss(self) -> bool:
        """Whether its parameter adds a term to the loss."""
        return False

    def first_value(self, place: Place, heads: int | None) -> Tensor:
        """Where the parameter begins; heads: how many the attention has, where that is known."""
        raise NotImplementedError

    def value_shown(self, value: Tensor) -> Tensor:
        """The parameter as people read it: a rate, or a width."""
        raise NotImplementedError

    def with_value(self, value: Tensor) -> Perturbation:
        """What acts in a call while the parameter has this value; a gradient reaches it."""
        raise NotImplementedError

    def value_term(self, value: Tensor) -> Tensor:
        """What the parameter adds to the loss: a scalar."""
        raise NotImplementedError


def mixes_tokens(method: object) -> bool:
    """Whether tokens see each other through a method, other than by attention."""
    if isinstance(method, TokenMap):
        return method.mixes_tokens and bool(method.positions)
    return isinstance(method, BlockMap | BranchMap) and method.mixes_tokens


class LossTerm:
    """Compares stochastic passes of the same batch: two, or as many as `passes` says."""

    strength: float
    passes: int = 2
    """How often a batch runs. More than two need `compare_all`."""

    def compare(self, first: Tensor, second: Tensor, counted: Tensor | None = None) -> Tensor:
        """A scalar from the logits (…, classes) of two passes.

        counted: boolean (…), False where there is nothing to predict, such as padding; None: everything counts.
        """
        raise NotImplementedError

    def compare_all(self, logits: Sequence[Tensor], counted: Tensor | None = None) -> Tensor:
        """The same from the logits of all passes."""
        first, second = logits
        return self.compare(first, second) if counted is None else self.compare(first, second, counted)


def wide(t: Tensor) -> Tensor:
    """At least float32: sums of squares need it."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def without_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer's product from its output, in float32 at least; a copy, since the model may overwrite its own."""
    return out.to(torch.promote_types(out.dtype, torch.float32), copy=True) if bias is None else wide(out) - bias


def tokens_mean(x: Tensor, real: Tensor | None) -> Tensor:
    """(B, 1, C): the mean over the real tokens of x (B, N, C)."""
    if real is None:
        return x.mean(1, keepdim=True)
    weight = real.to(x.dtype)[..., None]
    return (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)


def elementwise_keep(shape: Sequence[int], p: float, stream: Stream) -> Tensor:
    """Boolean of this shape (B, N, C), each drawn by itself; tokens are numbered as queries, channels as keys."""
    batch, tokens, channels = shape
    return stream.for_all_heads().keep((batch, 1, tokens, channels), p).squeeze(1)


def inverted(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Dropout as frameworks do it: zero what is not kept, divide the rest by 1 − p."""
    return torch.where(keep, x / (1 - p), 0.0)
