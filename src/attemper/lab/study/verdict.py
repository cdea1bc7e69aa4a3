"""The verdict: what a comparison has shown, in plain words, and what it could not have shown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.report.scale import more_seeds
from attemper.lab.study.statistics import NO_SPREAD

Row = dict[str, Any]


def verdict(
    rows: Sequence[Row],
    *,
    seeds: int,
    missing: int = 0,
    failed: int = 0,
    margin: float | None = None,
    same: Mapping[str, str] | None = None,
    looks: bool = False,
) -> str:
    """A few sentences about the rows of a summary. The first says what is better than the baseline, or why that is not
    known.

    margin: what is meant by equivalent. same: rows that are the same thing as another one.
    looks: whether the study was looked at while it went on.
    """
    baseline = next(row for row in rows if row["difference"] is None and row["recipe"] == "none")
    counted = [row for row in rows if row is not baseline and row["name"] not in (same or {})]
    return " ".join(
        [
            *_completeness(missing, failed),
            *_comparison(baseline, counted, seeds, margin, looks),
            *_sameness(same or {}, baseline["name"]),
        ]
    )


def _completeness(missing: int, failed: int) -> list[str]:
    if not missing:
        return []
    given_up = f" ({failed} given up after errors)" if failed else ""
    runs, are = ("run", "is") if missing == 1 else ("runs", "are")
    return [f"Not complete: {missing} {runs} {are} missing{given_up}, so what follows is provisional."]


def _comparison(baseline: Row, others: Sequence[Row], seeds: int, margin: float | None, looks: bool) -> list[str]:
    # "none", the usual name of the baseline, would read as its opposite by itself: no recipe is better than none.
    first = f"the baseline `{baseline['name']}`"
    compared = [row for row in others if row["difference"] is not None]
    if not others:
        return [f"There is nothing to compare {first} with."]
    if not compared:
        return [f"No recipe can be compared with {first} yet."]
    if seeds == 1:
        return _one_seed(first, compared)
    by = {
        answer: [row for row in compared if row["decision"]["answer"] == answer]
        for answer in ("better", "worse", "equivalent", "undecided")
    }
    sentences = []
    if by["better"]:
        sentences.append(_better(first, by["better"], len(compared), looks))
    sentences += _rest(by, first if not by["better"] else "the baseline", margin, seeds)
    if not by["better"] and not by["undecided"]:
        sentences.insert(0, f"No recipe is better than {first}, and that is no lack of seeds.")
    return [*sentences, *_sight(compared)]


def _rest(by: Mapping[str, list[Row]], name: str, margin: float | None, seeds: int) -> list[str]:
    found = []
    if by["undecided"] and not by["better"]:
        found += _undecided(by["undecided"], name, seeds)
    if by["worse"]:
        found.append(f"{_list(by['worse'])} {_is(by['worse'])} worse than the baseline.")
    if by["equivalent"]:
        found.append(
            f"{_list(by['equivalent'])} {_is(by['equivalent'])} equivalent to the baseline: any difference is smaller "
            f"than {points(margin or 0.0).lstrip('+')}."
        )
    if by["undecided"] and by["better"]:
        found += _undecided(by["undecided"], name, seeds)
    return found


def _one_seed(name: str, compared: Sequence[Row]) -> list[str]:
    best = max(compared, key=lambda row: row["difference"]["mean"])
    gain = best["difference"]["mean"]
    found = (
        f"{best['name']} came out highest, {points(gain)} above {name}"
        if gain > 0
        else "no recipe scored higher than the baseline"
    )
    return [
        f"Undecided: one seed cannot tell a difference from chance; here {found}. Run at least three seeds, better "
        "five."
    ]


def _better(name: str, better: Sequence[Row], compared: int, looks: bool) -> str:
    ordered = sorted(better, key=lambda row: -row["difference"]["mean"])
    first = ordered[0]
    gains = f"{first['name']} is better than {name} by {_interval(first)}"
    if len(ordered) > 1:
        more = join([f"{row['name']} ({points(row['difference']['mean'])})" for row in ordered[1:]])
        gains += f"; so {'is' if len(ordered) == 2 else 'are'} {more}"
    reasons = [f"{compared} comparisons"] if compared > 1 else []
    reasons += ["looking while it went on"] if looks else []
    tests = f"after correction for {join(reasons)}" if reasons else "by a paired t test"
    return f"{gains}: p {_at_most(max(row['difference']['adjusted'] for row in better))} {tests}."


def _undecided(rows: Sequence[Row], name: str, seeds: int) -> list[str]:
    """Each with how many seeds would decide; those whose differences have no spread say why."""
    flat = [row for row in rows if row["difference"]["p"] is None]
    open_ = [row for row in rows if row not in flat]
    found = []
    if open_:
        each = [
            f"{row['name']} "
            f"({_interval(row) if row['difference']['low'] is not None else points(row['difference']['mean'])}; "
            f"{more_seeds(row['decision']['more'])})"
            for row in open_
        ]
        found.append(f"Undecided after {seeds} seeds, compared with {name}: {join(each)}.")
    for row in flat:
        if abs(row["difference"]["mean"]) < NO_SPREAD and row["difference"]["seeds"] > 1:
            more = row["decision"]["more"]
            seeds_more = "" if more is None else f"; {more_seeds(more)}"
            found.append(
                f"{row['name']} is undecided: it scored what the baseline did on every seed, and with so few test "
                f"items a difference may hide behind that{seeds_more}."
            )
            continue
        amount = points(row["difference"]["mean"])
        found.append(
            f"{row['name']} is undecided: it differs by {amount} on every seed alike, which leaves no spread to "
            "judge it by."
        )
    return found


def _sight(compared: Sequence[Row]) -> list[str]:
    """How small a difference the study could see at all."""
    known = [row["decision"]["smallest"] for row in compared if row["decision"]["smallest"] is not None]
    if not known:
        return []
    typical = statistics.median(known)
    among = "" if len(known) == 1 else ", the median over recipes"
    return [
        f"Differences of {points(typical).lstrip('+')} or more could be seen here (in 80 of 100 such studies{among})."
    ]


def _sameness(same: Mapping[str, str], baseline: str) -> list[str]:
    found = []
    for name, first in same.items():
        if first == baseline:
            found.append(f"{name} did nothing: every run went exactly as the baseline's.")
        else:
            found.append(f"{name} is the same thing as {first} and counted once.")
    return found


def points(value: float) -> str:
    """A difference of accuracies in percentage points.

    >>> points(0.0123), points(-0.002), points(0.01)
    ('+1.23 points', '−0.20 points', '+1.00 points')
    """
    return f"{_signed(value)} points"


def answer_text(decision: Mapping[str, Any] | None) -> str:
    """A decision in a table's cell.

    >>> answer_text({"answer": "undecided", "real": False, "more": 6})
    'undecided, +6 seeds'
    """
    if decision is None:
        return ""
    answer: str = decision["answer"]
    if answer == "undecided" and decision["more"] is not None:
        return f"{answer}, +{decision['more']:,} seed{'s' if decision['more'] > 1 else ''}"
    return answer


def _signed(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def _interval(row: Row) -> str:
    found = row["difference"]
    low, high = _signed(found["low"]), _signed(found["high"])
    return f"{points(found['mean'])}, {interval_name(found)} {low} to {high}"


def interval_name(found: Mapping[str, Any]) -> str:
    """What to call the interval: adjusted where the correction has widened it.

    >>> interval_name({"level": 0.0125}), interval_name({"level": 0.05})
    ('adjusted interval', '95 % interval')
    """
    return "95 % interval" if abs(found["level"] - 0.05) < 1e-9 else "adjusted interval"


def _at_most(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"≤ {p:.2g}"


def _is(rows: Sequence[Row]) -> str:
    return "is" if len(rows) == 1 else "are"


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
