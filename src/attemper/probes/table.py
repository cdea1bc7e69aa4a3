"""What probes found, as rows: readable when printed, plain when saved."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLLAPSE = 0.05
"""Normalised entropy below which a head has collapsed: at 197 keys, it looks at 1.3 of them on average."""
BLOW_UP = 100.0
"""|logit| above which logits have blown up: a difference of that size is out of reach for any gradient."""


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

    @property
    def flags(self) -> tuple[str, ...]:
        """What is wrong with this head: "entropy collapse", "logit blow-up", "not finite"."""
        found = []
        if self.normalised is not None and self.normalised < COLLAPSE:
            found.append("entropy collapse")
        if self.logit_max is not None and self.logit_max > BLOW_UP:
            found.append("logit blow-up")
        if any(isinstance(v, float) and not math.isfinite(v) for v in (self.entropy, self.logit_max, self.q_norm)):
            found.append("not finite")
        return tuple(found)


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
        plain: dict[str, Any] = _plain(whole)
        return plain

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.samples} {'sample' if self.samples == 1 else 'samples'}"]
        if self.heads:
            lines += ["", *aligned(_head_cells(self.heads))]
        if self.tokens:
            lines += ["", *aligned(_token_cells(self.tokens))]
        if self.jacobians:
            lines += ["", *aligned(_jacobian_cells(self.jacobians))]
        if self.smoothing:
            lines += ["", *aligned(_smoothing_cells(self.smoothing))]
        lines += [f"! {flag}" for flag in self.flags]
        return "\n".join([*lines, *(f"note: {note}" for note in (*jacobian_reasons(self.jacobians), *self.notes))])


HEAD_COLUMNS = {
    "entropy": "entropy",
    "normalised": "of max.",
    "to_uniform": "KL to uniform",
    "distance": "distance",
    "logit_max": "|logit| max",
    "q_norm": "|q|",
    "k_norm": "|k|",
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
