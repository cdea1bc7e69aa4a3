"""What probes found, as rows: readable when printed, plain when saved."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attemper.probes import findings as limits
from attemper.probes.findings import Finding, findings


@dataclass(frozen=True)
class HeadRow:
    """One head of one attention. None: not probed, or not defined for this attention."""

    block: int
    site: str
    """The attention's name in the model."""
    head: int
    entropy: float | None = None
    """Mean over queries and samples, in nats."""
    normalised: float | None = None
    """Entropy over the log of the allowed keys: 0 is one key, 1 is all alike."""
    to_uniform: float | None = None
    """KL divergence from the uniform distribution over the allowed keys, in nats."""
    distance: float | None = None
    """Mean distance between a patch and what it attends to, in patches."""
    logit_max: float | None = None
    """Largest |logit| of an allowed key."""
    q_norm: float | None = None
    k_norm: float | None = None

    sink_share: float | None = None
    """The share of all weights that goes to the key that gets most, the mean over samples."""
    sink_key: int | None = None
    """Which key that is, in most samples."""
    sink_value: float | None = None
    """Length of its value over the mean length of values."""
    output_rank: float | None = None
    """Effective rank of what the head gives to the tokens, the median over samples."""
    keys: int | None = None
    """How many keys there are."""
    twin: int | None = None
    """The head of this attention that attends most alike."""
    overlap: float | None = None
    """How much: 1 is the same."""

    @property
    def flags(self) -> tuple[str, ...]:
        """What stands out about this head: names of `attemper.probes.findings.KINDS`."""
        found = []
        if self.normalised is not None and self.normalised < limits.COLLAPSE:
            found.append("entropy collapse")
        uniform = self.normalised is not None and self.normalised > limits.UNIFORM
        if uniform:
            found.append("uniform")
        if self.logit_max is not None and self.logit_max > limits.GROWTH:
            found.append("logit blow-up" if self.logit_max > limits.BLOW_UP else "logit growth")
        if any(isinstance(v, float) and not math.isfinite(v) for v in (self.entropy, self.logit_max, self.q_norm)):
            found.append("not finite")
        if self.overlap is not None and self.overlap > limits.SAME and not uniform:
            found.append("duplicate")
        if self.is_sink:
            found.append(self._sink)
        return tuple(found)

    @property
    def is_sink(self) -> bool:
        """Whether one key gets so much weight that it is an attention sink."""
        least = max(limits.SINK, limits.SINK_KEYS / self.keys if self.keys else 0.0)
        return self.sink_share is not None and self.sink_share >= min(least, 1.0)

    @property
    def _sink(self) -> str:
        if self.sink_value is not None and self.sink_value < limits.NO_OP:
            return "sink, no-op"
        if self.output_rank is not None and self.output_rank < limits.BROADCAST:
            return "sink, broadcast"
        return "sink"


@dataclass(frozen=True)
class TokenRow:
    """The tokens at one place of a block."""

    block: int
    place: str
    """One of `attemper.probes.PLACES`."""
    condition: float
    """κ of the token matrix, the median over samples."""
    effective_rank: float
    """exp of the entropy of its normalised singular values, the median over samples."""
    similarity: float
    """Mean cosine between two tokens."""


@dataclass(frozen=True)
class JacobianRow:
    """The Jacobian of one branch of a block by its own input, at one sample. None: not known, and `reason` says why."""

    block: int
    site: str
    """The block's name in the model."""
    place: str
    """"attention", "mlp", or "block" where both are one sum; or one of them with " + skip"."""
    condition: float | None
    """κ, without the directions that the norm before the branch loses."""
    largest: float | None
    """σ_max."""
    smallest: float | None
    """σ_min of those that count in κ."""
    left_out: int
    """Directions that do not count in κ."""
    coordinates: int
    """Tokens × channels of the sample."""
    whole: bool
    """Whether all singular values were computed."""
    reason: str = ""


@dataclass(frozen=True)
class SmoothingRow:
    """How the gradient of the loss pushes the logits of one attention; push = −gradient, the direction of descent."""

    block: int
    site: str
    """The attention's name in the model."""
    recipe: str
    """"none": with the model's methods off; "recipe": with them, in training mode."""
    slope: float | None
    """Of the push over the weight, within rows: below 0, large weights are pushed down and attention is flattened."""
    on_largest: float | None
    """The push on the largest weight of each row over all that is pushed up: −1 takes it all from there, 1 adds it."""
    penalty: float | None
    """Σ push · A/(1 − A) with methods off: what DropKey adds to the expected loss, per unit of its rate, at first."""
    bins: tuple[float | None, ...]
    """Mean push on keys of less than ½, 1, 2, 4, 8 times the uniform weight, and of more."""


@dataclass(frozen=True)
class Table:
    """All that `attemper.diagnose` found. `str()` gives it in words, `to_dict()` for files."""

    model: str
    samples: int
    heads: tuple[HeadRow, ...] = ()
    tokens: tuple[TokenRow, ...] = ()
    jacobians: tuple[JacobianRow, ...] = ()
    smoothing: tuple[SmoothingRow, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be seen, and why."""
    weights: str = ""
    """Where the model's weights come from, if anybody said it."""
    untrained: bool = False
    """Whether the weights are as they were made: said, or seen by norms that have learnt nothing."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What stands out, the most serious first, with what might help."""
        return findings(self.heads)

    @property
    def flags(self) -> tuple[str, ...]:
        """Everything that is wrong, with block and head."""
        return tuple(
            f"block {row.block}, head {row.head} ({row.site}): {flag}" for row in self.heads for flag in row.flags
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data without NaN or infinity, which JSON does not have: they become None."""
        whole = dataclasses.asdict(self)
        whole["heads"] = [row | {"flags": list(of.flags)} for row, of in zip(whole["heads"], self.heads, strict=True)]
        whole["flags"] = list(self.flags)
        whole["findings"] = [
            {"kind": each.kind, "heads": each.heads, "text": each.text, "advice": each.advice, "link": each.link}
            for each in self.findings
        ]
        plain: dict[str, Any] = _plain(whole)
        return plain

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.samples} {'sample' if self.samples == 1 else 'samples'}"]
        if self.weights:
            lines.append(f"weights: {self.weights}")
        elif self.untrained:
            lines.append("weights: not trained, it seems: no norm has learnt anything")
        if self.heads:
            lines += ["", *aligned(_head_cells(self.heads))]
        if self.tokens:
            lines += ["", *aligned(_token_cells(self.tokens))]
        if self.jacobians:
            lines += ["", *aligned(_jacobian_cells(self.jacobians))]
        if self.smoothing:
            lines += ["", *aligned(_smoothing_cells(self.smoothing))]
        lines += ["", *self.conclusion()] if self.heads else []
        return "\n".join([*lines, *(f"note: {note}" for note in (*jacobian_reasons(self.jacobians), *self.notes))])

    def conclusion(self) -> list[str]:
        """What stands out, in lines."""
        lines = ["! The weights are not trained: what follows tells of how they were made."] if self.untrained else []
        if not self.findings:
            return [
                *lines,
                "Nothing stands out: no head is uniform, collapsed, a duplicate or a sink; logits are small.",
            ]
        for each in self.findings:
            lines += [f"! {each.text}", f"  may help: {each.advice}. {each.link}"]
        return lines


HEAD_COLUMNS = {
    "entropy": "entropy",
    "normalised": "of max.",
    "to_uniform": "KL to uniform",
    "distance": "distance",
    "logit_max": "|logit| max",
    "q_norm": "|q|",
    "k_norm": "|k|",
    "sink_share": "sink",
    "sink_value": "|v| there",
    "output_rank": "out rank",
    "overlap": "overlap",
}
"""Field of a row → its title."""


def _head_cells(rows: Sequence[HeadRow]) -> list[list[str]]:
    shown = [name for name in HEAD_COLUMNS if any(getattr(row, name) is not None for row in rows)]
    several = len({row.site for row in rows}) > len({row.block for row in rows})
    table = [["block", *(["site"] if several else []), "head", *(HEAD_COLUMNS[name] for name in shown)]]
    for row in rows:
        cells = [figure(getattr(row, name)) for name in shown]
        table.append([str(row.block), *([row.site] if several else []), str(row.head), *cells])
    return table


def _token_cells(rows: Sequence[TokenRow]) -> list[list[str]]:
    table = [["block", "tokens", "κ", "eff. rank", "similarity"]]
    for row in rows:
        table.append([str(row.block), row.place, *map(figure, (row.condition, row.effective_rank, row.similarity))])
    return table


JACOBIAN_COLUMNS = {
    "condition": "κ(Jacobian)",
    "largest": "σ max",
    "smallest": "σ min",
    "left_out": "left out",
    "coordinates": "coordinates",
}
"""Field of a row → its title."""


def _jacobian_cells(rows: Sequence[JacobianRow]) -> list[list[str]]:
    table = [["block", "branch", *JACOBIAN_COLUMNS.values()]]
    return table + [[str(row.block), row.place, *jacobian_figures(row)] for row in rows]


def jacobian_figures(row: JacobianRow) -> list[str]:
    """The columns of a row in words."""
    return [*map(figure, (row.condition, row.largest, row.smallest)), str(row.left_out), f"{row.coordinates:,}"]


def jacobian_reasons(rows: Sequence[JacobianRow]) -> tuple[str, ...]:
    """What was left out of κ, or is not known, and why: one line for all the rows of which the same is true."""
    found: dict[str, list[JacobianRow]] = {}
    for row in rows:
        if row.reason:
            found.setdefault(row.reason, []).append(row)
    lines = []
    for reason, same in found.items():
        blocks = list(dict.fromkeys(str(row.block) for row in same))
        places = ", ".join(dict.fromkeys(row.place for row in same))
        lines.append(f"{places} of block{'s' if len(blocks) > 1 else ''} {', '.join(blocks)}: {reason}")
    return tuple(lines)


SMOOTHING_COLUMNS = ("slope", "on largest", "penalty", "< ½", "½–1", "1–2", "2–4", "4–8", "≥ 8")
"""Titles; the bins are multiples of the uniform weight."""


def smoothing_figures(row: SmoothingRow) -> tuple[float | None, ...]:
    """The columns of a row."""
    return row.slope, row.on_largest, row.penalty, *row.bins


def _smoothing_cells(rows: Sequence[SmoothingRow]) -> list[list[str]]:
    several = len({row.site for row in rows}) > len({row.block for row in rows})
    table = [["block", *(["site"] if several else []), "with", *SMOOTHING_COLUMNS]]
    for row in rows:
        cells = map(figure, smoothing_figures(row))
        table.append([str(row.block), *([row.site] if several else []), row.recipe, *cells])
    return table


def figure(value: float | None) -> str:
    """A number in three or four characters that matter; a dash where there is none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "∞" if value > 0 else str(value)
    return f"{value:.2e}" if abs(value) >= 1e4 or 0 < abs(value) < 1e-3 else f"{value:.4g}"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns under their titles: words to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    words = {at for at, title in enumerate(table[0]) if title in ("site", "tokens", "branch", "with")}

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if at in words else c.rjust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    return [line(table[0]), "  ".join("-" * width for width in widths), *map(line, table[1:])]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
