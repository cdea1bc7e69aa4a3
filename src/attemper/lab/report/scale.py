"""From numbers to places on an axis, and to text: scales, round ticks, figures with a real minus sign."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """One axis: the numbers at its two ends, and where its ticks are."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """How far along the axis a number lies: 0 at its low end, 1 at its high end, and beyond them what is beyond.

        On a logarithmic axis, numbers that are not above 0 lie at its low end.

        >>> Scale(0.0, 10.0, ()).at(2.5)
        0.25
        """
        if not self.log:
            return (value - self.low) / (self.high - self.low)
        return math.log(value / self.low) / math.log(self.high / self.low) if value > 0 else 0.0

    def label(self, tick: float) -> str:
        """A tick's text: as many digits as the distance between ticks needs."""
        if self.log or len(self.ticks) < 2:
            return number(tick, significant=3)
        step = min(b - a for a, b in itertools.pairwise(self.ticks))
        return number(tick, max(0, -math.floor(math.log10(step) + 1e-9)))


def make_scale(values: Iterable[float | None], *, log: bool = False, count: int = 5, margin: float = 0.04) -> Scale:
    """A scale on which all these numbers can be seen, apart from its ends by this share of their spread.

    None and numbers that are not finite are left out; on a logarithmic scale so is whatever is not above 0.

    >>> make_scale([0.0, 1.0]).ticks
    (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """
    known = [value for value in map(finite, values) if value is not None and (value > 0 or not log)]
    if not known:
        return Scale(0.1, 1.0, (0.1, 1.0), log=True) if log else Scale(0.0, 1.0, (0.0, 0.5, 1.0))
    low, high = min(known), max(known)
    if log:
        factor = (high / low) ** margin if high > low * 1.001 else 1.5
        low, high = low / factor, high * factor
        ticks = _log_ticks(low, high)
        return Scale(low, high, ticks if len(ticks) > 1 else _ticks(low, high, count), log=True)
    spread = high - low
    # Equal numbers still get an axis with two ends; so do numbers that differ only by rounding.
    apart = spread * margin if spread > 1e-9 * max(abs(low), abs(high)) else abs(high) * 0.05 or 0.5
    return Scale(low - apart, high + apart, _ticks(low - apart, high + apart, count))


def _ticks(low: float, high: float, count: int) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten, about this many."""
    rough = (high - low) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = min((power, 2 * power, 5 * power, 10 * power), key=lambda step: abs(math.log(step / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(round(step * k, 12) for k in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = tuple(f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high)
        if len(ticks) > 2:
            break
    return ticks[:: max(1, math.ceil(len(ticks) / 6))]


def finite(value: object) -> float | None:
    """The value as a float where it is a finite number, else None.

    >>> finite(float("nan")), finite(3), finite(None)
    (None, 3.0, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def number(value: object, digits: int | None = None, *, significant: int = 4, missing: str = "–") -> str:
    """A number as text, to so many digits after the point, or else to so many significant ones.

    >>> number(-0.125, 2), number(0.00012), number(None)
    ('−0.12', '0.00012', '–')
    """
    known = finite(value)
    if known is None:
        return missing
    text = f"{known:.{significant}g}" if digits is None else f"{known:.{digits}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", "−")


def signed(value: object, digits: int = 2) -> str:
    """A difference: with its sign, plus included.

    >>> signed(1.5), signed(-0.001)
    ('+1.50', '0.00')
    """
    text = number(value, digits)
    known = finite(value)
    return f"+{text}" if known is not None and known > 0 and float(text) > 0 else text


def spread_of(mean: float | None, deviation: float | None) -> str:
    """A mean with the deviation round it, where that is known.

    >>> spread_of(1.5, 0.25), spread_of(1.5, None), spread_of(None, None)
    ('1.50 ± 0.25', '1.50', '–')
    """
    return number(mean, 2) if mean is None or deviation is None else f"{number(mean, 2)} ± {number(deviation, 2)}"


def probability(value: float) -> str:
    """Never quite 0 or 1: a few seeds cannot say so much.

    >>> probability(0.9997), probability(0.5)
    ('> 99.9 %', '50.0 %')
    """
    if 0.001 <= value <= 0.999:
        return f"{100 * value:.1f} %"
    return "> 99.9 %" if value > 0.5 else "< 0.1 %"


def more_seeds(more: object) -> str:
    """How many seeds would decide.

    >>> more_seeds(1), more_seeds(12), more_seeds(None)
    ('about 1 seed more would decide', 'about 12 seeds more would decide', 'thousands of seeds would be needed')
    """
    known = finite(more)
    if known is None:
        return "thousands of seeds would be needed"
    return f"about {known:,.0f} seed{'s' if known > 1 else ''} more would decide"


def memory(value: object) -> str:
    """Bytes, in the unit that suits them.

    >>> memory(3 * 2**30), memory(None)
    ('3.00 GiB', '–')
    """
    known = finite(value)
    if known is None:
        return "–"
    return f"{known / 2**30:.2f} GiB" if known >= 2**30 else f"{known / 2**20:.0f} MiB"


def operations(value: object) -> str:
    """A number of floating-point operations, in thousands, millions and so on.

    >>> operations(1_266_816), operations(460), operations(None)
    ('1.27 M', '460', '–')
    """
    known = finite(value)
    if known is None:
        return "–"
    power = 0
    while float(f"{known:.3g}") >= 1000 and power < len(THOUSANDS) - 1:
        known, power = known / 1000, power + 1
    return f"{known:.3g} {THOUSANDS[power]}".rstrip()


THOUSANDS = ("", "k", "M", "G", "T", "P", "E")


def shorten(text: str, length: int) -> str:
    """The text if it is no longer than this; otherwise its two ends, since recipes differ at either of them.

    >>> shorten("explicit(v=0.0005, reduction=authors)", 20)
    'explicit(v=0…uthors)'
    """
    if len(text) <= length:
        return text
    tail = (length - 1) * 2 // 5
    return f"{text[: length - 1 - tail]}…{text[-tail:]}"
