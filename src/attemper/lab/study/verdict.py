"""The verdict: what a comparison has shown, in plain words, and what it has not."""

from collections.abc import Sequence
from typing import Any

LEVEL = 0.05
Row = dict[str, Any]


def verdict(rows: Sequence[Row], *, seeds: int, missing: int, failed: int = 0, confidence: float = 0.95) -> str:
    """A few sentences about the rows of a summary. The first says which recipes are better than the baseline."""
    baseline = next(row for row in rows if row["difference"] is None and row["recipe"] == "none")
    others = [row for row in rows if row is not baseline]
    sentences = [
        *_completeness(missing, failed),
        *_comparison(baseline, others, seeds, confidence),
        *_divergence(rows, seeds),
    ]
    return " ".join(sentences)


def _completeness(missing: int, failed: int) -> list[str]:
    if not missing:
        return []
    given_up = f" ({failed} given up after errors)" if failed else ""
    runs, are = ("run", "is") if missing == 1 else ("runs", "are")
    return [f"Not complete: {missing} {runs} {are} missing{given_up}, so what follows is provisional."]


def _comparison(baseline: Row, others: Sequence[Row], seeds: int, confidence: float) -> list[str]:
    # "none", the usual name of the baseline, would read as its opposite by itself: no recipe is better than none.
    first, name = f"the baseline `{baseline['name']}`", "the baseline"
    compared = [row for row in others if row["difference"] is not None]
    if not others:
        return [f"There is nothing to compare {first} with."]
    if not compared:
        return [f"No recipe can be compared with {first} yet."]
    if seeds == 1:
        return _one_seed(first, compared)
    better = [row for row in compared if _significant(row) and row["difference"]["mean"] > 0]
    worse = [row for row in compared if _significant(row) and row["difference"]["mean"] < 0]
    sentences = [
        _better(first, better, len(compared), confidence)
        if better
        else _none_better(first, compared, seeds, confidence)
    ]
    if worse:
        sentences.append(f"{_list(worse)} {'is' if len(worse) == 1 else 'are'} worse than {name}.")
    rest = len(compared) - len(better) - len(worse)
    if rest and (better or worse):
        others_ = "The other recipe" if rest == 1 else f"The other {rest} recipes"
        sentences.append(f"{others_} cannot be distinguished from {name} with {seeds} seeds.")
    sentences += _without_spread(name, compared)
    if seeds == 2:
        sentences.append("Two seeds give very wide intervals; five would show more.")
    return sentences


def _significant(row: Row) -> bool:
    adjusted = row["difference"]["adjusted"]
    return adjusted is not None and adjusted <= LEVEL


def _one_seed(name: str, compared: Sequence[Row]) -> list[str]:
    best = max(compared, key=lambda row: row["difference"]["mean"])
    gain = best["difference"]["mean"]
    found = (
        f"{best['name']} came out highest, {points(gain)} above {name}"
        if gain > 0
        else "no recipe scored higher than the baseline"
    )
    return [f"One seed cannot tell a difference from chance: here {found}. Run at least three seeds, better five."]


def _better(name: str, better: Sequence[Row], compared: int, confidence: float) -> str:
    ordered = sorted(better, key=lambda row: -row["difference"]["mean"])
    first = ordered[0]
    gains = f"{first['name']} is better than {name} by {_interval(first, confidence)}"
    if len(ordered) > 1:
        more = join([f"{row['name']} ({points(row['difference']['mean'])})" for row in ordered[1:]])
        gains += f"; so {'is' if len(ordered) == 2 else 'are'} {more}"
    tests = f"after correction for {compared} comparisons" if compared > 1 else "by a paired t test"
    return f"{gains}: p {_at_most(max(row['difference']['adjusted'] for row in better))} {tests}."


def _none_better(name: str, compared: Sequence[Row], seeds: int, confidence: float) -> str:
    best = max(compared, key=lambda row: row["difference"]["mean"])
    sentence = f"No recipe is better than {name} at this budget, as far as {seeds} seeds can tell"
    if best["difference"]["mean"] <= 0:
        return f"{sentence}; no recipe scored higher than the baseline."
    if best["difference"]["low"] is None:
        return f"{sentence}."
    return f"{sentence}: the highest, {best['name']}, differs by {_interval(best, confidence)}."


def _without_spread(name: str, compared: Sequence[Row]) -> list[str]:
    """Recipes that differ by the same amount on every seed: the test has nothing to measure chance with."""
    flat = [row for row in compared if row["difference"]["p"] is None and row["difference"]["seeds"] > 1]
    same = [row for row in flat if abs(row["difference"]["mean"]) < 1e-12]
    sentences = []
    if same:
        scores = "scores" if len(same) == 1 else "score"
        sentences.append(f"{_list(same)} {scores} exactly as {name} on every seed.")
    for row in flat:
        if row not in same:
            amount = points(row["difference"]["mean"])
            sentences.append(
                f"{row['name']} differs by {amount} on every seed alike, which leaves no spread to judge it by."
            )
    return sentences


def _divergence(rows: Sequence[Row], seeds: int) -> list[str]:
    gone = [f"{row['name']} ({row['diverged']} of {seeds})" for row in rows if row["diverged"]]
    if not gone:
        return []
    return [f"Runs diverged with {join(gone)}; they count with what they had reached before."]


def points(value: float) -> str:
    """A difference of accuracies in percentage points.

    >>> points(0.0123), points(-0.002), points(0.01)
    ('+1.23 points', '−0.20 points', '+1.00 points')
    """
    return f"{_signed(value)} points"


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def _interval(row: Row, confidence: float) -> str:
    found = row["difference"]
    low, high = _signed(found["low"]), _signed(found["high"])
    return f"{points(found['mean'])} ({100 * confidence:g} % interval {low} to {high})"


def _at_most(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"≤ {p:.2g}"


def _list(rows: Sequence[Row]) -> str:
    return join(
        [
            f"{row['name']} ({points(row['difference']['mean'])})" if row["difference"]["mean"] else row["name"]
            for row in rows
        ]
    )


def join(words: Sequence[str]) -> str:
    """A list as one says it.

    >>> join(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
