"""What the axes of logits and queries say: which of them are samples, heads, queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from attemper.tempering.axes import Arrangement, Factor, Role, length
from attemper.tempering.origins import Origin
from attemper.tempering.roots import Kind, kind_of_axis


@dataclass(frozen=True)
class Reading:
    """What the axes of logits say about a softmax over one of them."""

    arrangement: Arrangement | None
    """None: they cannot be brought into (B, H, Nq, Nk), or are not known."""
    lasts: bool = True
    """Whether the arrangement holds for other inputs, too; not where a batch of one sample hides where samples are."""
    over: Kind = "unknown"
    product: int = 0
    side: int = 0

    @property
    def remark(self) -> str:
        """What is known of the axis that softmax is over, for messages."""
        return ", which are channels and no keys" if self.over == "channels" else ""


def read_logits(origin: Origin | None, dim: int) -> Reading:
    """Which axes of logits are samples, heads, queries and keys, where softmax is over the axis `dim`."""
    if origin is None:
        return Reading(None)
    keys = origin.axes[dim]
    over = kind_of_axis(keys)
    made = {(factor.root.product, factor.root.side) for factor in keys}
    product, side = made.pop() if len(made) == 1 else (0, 0)
    parts = [_parts(axis, i == dim, product, side) for i, axis in enumerate(origin.axes)]
    if product == 0 or any(axis is None for axis in parts):
        return Reading(None, over=over, product=product, side=side)
    arrangement = Arrangement(tuple(axis for axis in parts if axis is not None))
    samples = [f for i, axis in enumerate(origin.axes) if i != dim for f in axis if _role(f, product, side) == "batch"]
    return Reading(arrangement, length(tuple(samples)) > 1, over, product, side)


def read_heads(origin: Origin | None) -> Arrangement | None:
    """Which of the leading axes of queries (…, Nq, e) are samples and which are heads; None: not known."""
    if origin is None or len(origin.axes) < 3:
        return None
    parts = [_parts(axis, False, 0, 0) for axis in origin.axes[:-2]]
    samples = [f for axis in origin.axes[:-2] for f in axis if _role(f, 0, 0) == "batch"]
    if any(axis is None for axis in parts) or length(tuple(samples)) == 1:
        return None
    return Arrangement((*(axis for axis in parts if axis is not None), (("queries", -1),), (("keys", -1),)))


def has_tokens_first(of_projection: Origin | None, of_values: Origin | None, tokens: int) -> bool:
    """Whether a projection gave (N, B, d): its first axis became that of tokens in the values, its second did not."""
    if of_projection is None or of_values is None or len(of_projection.axes) != 3:
        return False
    roots = {factor.root for factor in of_values.axes[tokens]}
    first, second = ({factor.root for factor in axis} for axis in of_projection.axes[:2])
    return bool(first) and first <= roots and not second & roots


@dataclass
class Facts:
    """What a watched pass found out about an attention module, for passes that are not watched."""

    arrangements: dict[tuple[str, int, int], Arrangement | None] = field(default_factory=dict)
    """Of logits, and of queries of a fused call, by the number of axes and the axis of softmax."""
    contents: dict[int, int] = field(default_factory=dict)
    """Which of the module's products are those of queries and keys, and which of their operands the keys are."""
    tokens_first: bool = False
    """Whether its projections give (N, B, d)."""
    settled: bool = False
    """Whether a trial run found out."""

    def learn(self, key: tuple[str, int, int], arrangement: Arrangement | None) -> None:
        """Remember an arrangement; one that differs from pass to pass is none."""
        if arrangement is not None:
            known = self.arrangements.setdefault(key, arrangement)
            if known != arrangement:
                self.arrangements[key] = None


def _role(factor: Factor, product: int, side: int) -> Role | None:
    root = factor.root
    if product and root.product == product and root.side:
        return "queries" if root.side != side else None  # keys in more than one axis
    if root.kind == "unknown":
        return None
    return "heads" if root.kind == "channels" else "batch"


def _parts(axis: tuple[Factor, ...], softmax: bool, product: int, side: int) -> tuple[tuple[Role, int], ...] | None:
    """The parts of one axis; None: not known, or more than one of them could change its size."""
    if softmax:
        return (("keys", -1),)
    parts: list[tuple[Role, int]] = []
    for factor in axis:
        role = _role(factor, product, side)
        if role is None and factor.size == 1:
            continue
        if role is None:
            return None
        if parts and parts[-1][0] == role:
            parts[-1] = (role, parts[-1][1] * factor.size)
        else:
            parts.append((role, factor.size))
    if not parts:
        return (("batch", -1),)
    if len(parts) == 1:
        return ((parts[0][0], -1),)
    free = [i for i, (role, _) in enumerate(parts) if role != "heads"]
    if len(free) != 1:
        return None
    return tuple((role, -1 if i == free[0] else size) for i, (role, size) in enumerate(parts))
