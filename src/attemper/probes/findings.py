"""What the numbers of a diagnosis come to: which heads stand out, what that may mean, and what might help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

DOCS = "https://github.com/attemper/attemper/blob/main/docs/"
"""Where the pages of the documentation can be read."""

COLLAPSE = 0.05
"""Normalised entropy below which a head has collapsed: at 197 keys, it looks at 1.3 of them on average."""
UNIFORM = 0.99
"""Normalised entropy above which a head weights all keys alike: at 197 keys, 0.05 nats from uniform."""
BLOW_UP = 100.0
"""|logit| above which logits have blown up: a difference of that size is out of reach for any gradient."""
GROWTH = 50.0
"""|logit| above which logits are growing: softmax is a maximum there, up to rounding in half precision."""
GREW = 2.0
"""The largest logit of one checkpoint over that of another from which on logits grew from one to the other."""
SINK = 0.3
"""Share of all weights from which on a single key is a sink."""
SINK_KEYS = 3
"""A sink gets at least so many times what it would get if all keys were alike."""
NO_OP = 0.3
"""Length of a sink's value, over the mean, below which looking there is doing nothing."""
BROADCAST = 2.0
"""Effective rank of a head's output below which it gives the same to all tokens."""
SAME = 0.9
"""Overlap from which on two heads do the same (`attemper.probes.patterns.twins`)."""


@dataclass(frozen=True)
class Kind:
    """One kind of finding."""

    meaning: str
    advice: str
    anchor: str
    """Its section of docs/probes.md."""


KINDS: dict[str, Kind] = {
    "not finite": Kind(
        "numbers are not finite", "look for an overflow: bfloat16, a smaller learning rate", "collapsed-heads"
    ),
    "logit blow-up": Kind(
        f"|logits| are above {BLOW_UP:g}: softmax has no gradient there",
        "normalised queries and keys, a smaller learning rate or longer warm-up, explicit(q=…, k=…)",
        "growing-logits",
    ),
    "logit growth": Kind(
        f"|logits| are above {GROWTH:g} and close to where softmax has no gradient",
        "normalised queries and keys, a smaller learning rate or longer warm-up, explicit(q=…, k=…)",
        "growing-logits",
    ),
    "entropy collapse": Kind(
        f"entropy is below {COLLAPSE:g} of its maximum: every query looks at one key",
        "dropkey, hardmask or blur, which take weight from the largest keys; a smaller learning rate",
        "collapsed-heads",
    ),
    "uniform": Kind(
        f"entropy is above {UNIFORM:g} of its maximum: all keys weigh the same, the head is a mean of the values",
        "cb, which gives the mean of the tokens without attention; fewer heads",
        "uniform-heads",
    ),
    "duplicate": Kind(
        f"attention is that of another head of the same layer (overlap above {SAME:g})",
        "drophead, which keeps heads from leaning on each other; fewer heads",
        "duplicate-heads",
    ),
    "sink, no-op": Kind(
        "most weight goes to one key whose value is short: the head is switched off for most tokens",
        "nothing needs to, unless most heads do it: register tokens, fewer heads",
        "attention-sinks",
    ),
    "sink, broadcast": Kind(
        "most weight goes to one key, and all tokens get the same vector",
        "cb, which gives all tokens the same vector without attention; register tokens",
        "attention-sinks",
    ),
    "sink": Kind(
        "most weight goes to one key",
        "register tokens; dropkey, which takes that key away now and then",
        "attention-sinks",
    ),
}
"""By the flag of a head, the most serious first."""


class Head(Protocol):
    """What is asked of a row."""

    @property
    def block(self) -> int: ...
    @property
    def head(self) -> int: ...
    @property
    def flags(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Finding:
    """Heads of which the same is true."""

    kind: str
    """A name of `KINDS`."""
    heads: tuple[tuple[int, int], ...]
    """Block and head of each."""
    of: int
    """How many heads there are in all."""

    @property
    def text(self) -> str:
        """What was found, in one sentence."""
        return f"{self.kind}, {len(self.heads)} of {self.of} heads ({places(self.heads)}): {KINDS[self.kind].meaning}."

    @property
    def advice(self) -> str:
        """What might help."""
        return KINDS[self.kind].advice

    @property
    def link(self) -> str:
        """Where there is more about it."""
        return f"{DOCS}probes.md#{KINDS[self.kind].anchor}"


def findings(rows: Sequence[Head]) -> tuple[Finding, ...]:
    """What the flags of heads come to, the most serious first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        for flag in row.flags:
            found.setdefault(flag, []).append((row.block, row.head))
    return tuple(Finding(kind, tuple(found[kind]), len(rows)) for kind in KINDS if kind in found)


SHOWN = 4
"""So many blocks are named."""


def places(heads: Sequence[tuple[int, int]]) -> str:
    """Heads by block, in words.

    >>> places([(0, 0), (0, 1), (0, 2), (3, 1)])
    'block 0: 0–2; block 3: 1'
    """
    by_block: dict[int, list[int]] = {}
    for block, head in heads:
        by_block.setdefault(block, []).append(head)
    named = [f"block {block}: {_ranges(each)}" for block, each in by_block.items()]
    more = len(named) - SHOWN
    return "; ".join(named if more <= 1 else [*named[:SHOWN], f"and {more} more blocks"])


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def grown(before: Mapping[int, float], after: Mapping[int, float]) -> list[str]:
    """Where the largest logit of one checkpoint is far above that of another, in words. By block.

    >>> grown({0: 5.0, 1: 4.0}, {0: 12.0, 1: 5.0})
    ['logit growth, block 0: the largest |logit| went from 5 to 12.']
    """
    return [
        f"logit growth, block {block}: the largest |logit| went from {before[block]:.4g} to {value:.4g}."
        for block, value in after.items()
        if block in before and value > GREW * before[block] > 0
    ]


def looks_untrained(model: nn.Module) -> bool:
    """Whether every norm of a model is as it was made: ones and zeros, which no training leaves."""
    found = []
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if "Norm" not in type(module).__name__ or not isinstance(weight, Tensor) or weight.is_meta:
            continue
        found.append(bool((weight == 1).all()) and not (isinstance(bias, Tensor) and bool(bias.any())))
    return len(found) > 0 and all(found)
