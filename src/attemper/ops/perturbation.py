"""What a method may do to one attention call, and the rule that no row loses all of its keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from attemper.ops.seeds import draw_seed
from attemper.ops.stream import Source, Stream

Stage = Literal["keys", "logits", "weights", "heads"]


@dataclass(frozen=True)
class DrawnKeys:
    """A set of keys that all queries share, drawn without replacement.

    order: (B, H or 1, Nk) indices of all keys, in the order in which they would be drawn.
    count: how many of them are drawn.
    kept: boolean (B, H or 1, count), which of these are kept: all but, sometimes, the last; None where all are.
    rank: the inverse of `order`, where it is known.
    """

    order: Tensor
    count: int
    kept: Tensor | None = None
    rank: Tensor | None = None


@dataclass(frozen=True)
class LargestDrop:
    """Each of the `count` largest allowed logits of a row is dropped at rate `p`, by `Stream.keep`.

    fill: what becomes of it, 0 ("zero") or −inf ("neg_inf").
    shared: whether the heads of a sample share one draw, as if there were one head; which logits are the largest is
        each head's own matter all the same.
    """

    p: float
    count: int
    fill: Literal["zero", "neg_inf"]
    shared: bool = False


@dataclass(frozen=True)
class WordDrop:
    """What is dropped at rate `p` where the product of a row's and a key's word of the stream says so (`Stream.keep`).

    what: "keys", before softmax (`drop_logits`); "weights", behind it, the others divided by 1 − p
        (`inverted_weights`); "detached": weights, the others divided by their sum, through which no gradient flows.
    by_key: whether a key is dropped for all queries of a head, by `Stream.for_all_queries`.
    """

    p: float
    what: Literal["keys", "weights", "detached"]
    by_key: bool = False


@dataclass(frozen=True)
class SeedDrop:
    """Keys are dropped round seeds that every row of logits has on the image grid of its keys.

    rate: with which probability a place is a seed, by `Stream.keep`. A row numbers its places from 0 on, line by line.
    shape: "block": seeds drop the w × w window of which they are the first corner, and stand where it fits into the
        grid; "cross": any place may be one, and drops the lines and the columns that are at most w // 2 away.
    grid, prefix: (lines, columns) of the grid, and how many keys stand before it. Those are never dropped.
    for_all_queries, for_all_heads: whether they all share the seeds (`Stream.for_all_queries`, `for_all_heads`).
    """

    rate: float
    shape: Literal["block", "cross"]
    w: int
    grid: tuple[int, int]
    prefix: int
    for_all_queries: bool = False
    for_all_heads: bool = False


class Perturbation:
    """A change to attention. Subclasses name their stages and override them; the others stay the identity.

    logits, weights: (B, H, Nq, Nk); logits are −inf where a key is masked out or dropped already.
    allowed: boolean, broadcastable to the logits, or None where every key is allowed. A key that a mask pushes out of
        reach is not allowed; neither is one that an earlier method dropped.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("logits",)
    """Where it acts. Fused kernels can serve what stays outside of softmax: "keys" and "heads"."""
    needs_heads: ClassVar[bool] = False
    """Whether it does nothing to attention with a single head."""
    order: ClassVar[int] = 0
    """Methods of one call act in this order, and in the order given where it is equal."""

    @property
    def tells_heads(self) -> bool:
        """Whether it treats the heads of a sample together, so that samples and heads have to be told apart."""
        return True

    @property
    def per_block(self) -> tuple[str, ...]:
        """The parameters that still have a value for every block, which one call of attention cannot choose from."""
        return ()

    @property
    def is_timed(self) -> bool:
        """Whether its rate depends on how far training is, which one call of attention cannot tell."""
        return False

    @property
    def uneven_rows(self) -> str | None:
        """What makes rows of weights sum to something else than 1, and what to do about it; None: they sum to 1."""
        return None

    @property
    def independent_drop(self) -> float | None:
        """The rate, if all that this does is to drop every (sample, head, query, key) by `Stream.keep` before softmax.

        It is what fused implementations look for; None is anything else.
        """
        return None

    def kept_keys(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor | None:
        """Which keys are kept in a call of this (B, H, Nq, Nk), boolean and broadcastable to it, rows that lose all of
        theirs included; if all that this does is to drop keys before softmax by `drop_logits`. None is anything else.
        """
        return None

    @property
    def drops_keys(self) -> bool:
        """Whether `kept_keys` gives what it keeps."""
        return False

    @property
    def inverted_drop(self) -> float | None:
        """The rate, if all that this does is `inverted_weights` with what `Stream.keep` keeps of the weights.

        None is anything else.
        """
        return None

    @property
    def word_drop(self) -> WordDrop | None:
        """What is dropped by words of the stream, if that is all that this does; None is anything else.

        It is what the Triton kernels look for. Unless said otherwise, `independent_drop` or `inverted_drop`.
        """
        if (p := self.independent_drop) is not None:
            return WordDrop(p, "keys")
        return None if (p := self.inverted_drop) is None else WordDrop(p, "weights")

    def seed_drop(self, keys: int) -> SeedDrop | None:
        """How seeds drop keys, if that is all that this does to a row of `keys`; None is anything else.

        It is what the Triton kernels look for.
        """
        return None

    @property
    def acts_on_single_keys(self) -> bool:
        """Whether what it does in a call with a part of the keys is a part of what it does in the call with all."""
        return self.independent_drop is not None or set(self.stages) <= {"heads"}

    @property
    def seeks_grid(self) -> bool:
        """Whether it acts on the image grid of the keys, and the recipe leaves it to the model to tell."""
        return False

    @property
    def given_prefix(self) -> int | None:
        """How many keys stand before the grid, where the recipe says so."""
        return None

    def on_grid(self, grid: tuple[int, int], prefix: int) -> Self:
        """The same on a grid of (rows, columns) behind `prefix` keys; only asked where it seeks one."""
        return self

    def fitted(self, keys: int) -> Self:
        """The same for a row of `keys`, where its parameters ask for more keys than there are; else itself."""
        return self

    def largest_drop(self, keys: int) -> LargestDrop | None:
        """What is done to the largest of `keys` logits, if that is all that this does; None is anything else."""
        return None

    def shared_count(self, keys: int) -> int | None:
        """How many of `keys` are drawn, if all that this does is to keep one drawn set of keys for all queries.

        `draw_keys` then says which. Fused implementations may gather them; None is anything else.
        """
        return None

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        """What it draws in a call of this (B, H, Nq, Nk), broadcastable to it.

        Unless said otherwise, which weights it keeps where all logits are equal: boolean, True = kept.
        """
        logits, allowed = self.perturb_logits(torch.zeros(shape, device=stream.seed.device), None, stream)
        return self.perturb_heads(self.perturb_weights(logits.softmax(-1), allowed, stream), stream) != 0

    def draw_keys(self, batch: int, heads: int, keys: int, stream: Stream) -> DrawnKeys:
        """The keys that all queries of a head share; only asked where `shared_count` gives a number."""
        raise NotImplementedError

    def perturb_keys(self, k: Tensor, real: Tensor | None, causal: bool, stream: Stream) -> Tensor:
        """Change the keys, (B, H, Nk, e), before they meet the queries.

        real: boolean (B or 1, H or 1, 1, Nk), the keys that are no padding; None: all.
        """
        return k

    def perturb_content(self, content: Tensor, allowed: Tensor, causal: bool, stream: Stream) -> Tensor:
        """The same as `perturb_keys`, on scale · QKᵀ, where each query may see other keys."""
        return content

    def perturb_logits(self, logits: Tensor, allowed: Tensor | None, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Change what softmax will see. Returns the new logits and what is allowed from here on."""
        return logits, allowed

    def perturb_weights(self, weights: Tensor, allowed: Tensor | None, stream: Stream) -> Tensor:
        """Change what softmax gave; rows sum to one."""
        return weights

    def perturb_heads(self, out: Tensor, stream: Stream) -> Tensor:
        """Scale whole heads of the output (B, H, Nq, e), or of the weights, which comes to the same."""
        return out


Drawn = list[tuple[Perturbation, Stream]]


def draw(methods: Sequence[Perturbation], source: Source | None, like: Tensor) -> Drawn:
    """Each method with its lane of the call's stream, in the order in which they act."""
    if not methods:
        return []
    source = Source(draw_seed(like)) if source is None else source
    if len(methods) == 1:
        return [(methods[0], source.stream())]
    drawn = [(method, source.stream(lane)) for lane, method in enumerate(methods)]
    return sorted(drawn, key=lambda pair: pair[0].order)


@dataclass(frozen=True)
class WeightDropout(Perturbation):
    """Ordinary dropout of attention weights: what a model's own `dropout_p` does."""

    p: float
    name: ClassVar[str] = "dropout"
    order: ClassVar[int] = 1
    stages: ClassVar[tuple[Stage, ...]] = ("weights",)

    @property
    def tells_heads(self) -> bool:
        return False

    @property
    def inverted_drop(self) -> float | None:
        return self.p

    def drawn(self, shape: tuple[int, int, int, int], stream: Stream) -> Tensor:
        return stream.keep(shape, self.p)

    def perturb_weights(self, weights: Tensor, allowed: Tensor | None, stream: Stream) -> Tensor:
        batch, heads, queries, keys = weights.shape
        return inverted_weights(weights, self.drawn((batch, heads, queries, keys), stream), self.p, allowed)


def inverted_weights(weights: Tensor, keep: Tensor, p: float, allowed: Tensor | None = None) -> Tensor:
    """Weights with some set to zero and the others divided by 1 − p; rows that would lose everything stay as they are.

    keep: boolean, broadcastable to the weights (B, H, Nq, Nk), True = kept.
    """
    intact = ~(keep if allowed is None else keep & allowed).any(-1, keepdim=True)
    return torch.where(intact, weights, weights * keep / (1 - p))


def rescue(keep: Tensor, allowed: Tensor | None) -> Tensor:
    """`keep`, but True throughout in every row that would lose all of its allowed keys."""
    kept = keep if allowed is None else keep & allowed
    return keep | ~kept.any(-1, keepdim=True)


def drop_logits(logits: Tensor, keep: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Drop keys before softmax; a row that would lose all of its allowed keys is left as it is.

    keep: boolean, broadcastable to the logits, True = kept.
    Returns the logits with −inf at dropped keys, and the keys that are still allowed.
    """
    # A keep mask shared by all queries still loses rows one by one where `allowed` differs between queries.
    keep = rescue(keep, allowed)
    return logits.masked_fill(~keep, -torch.inf), keep if allowed is None else keep & allowed
