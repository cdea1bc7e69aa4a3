"""What an experiment found, as tables in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from attemper.lab.experiments.gradients import POINTS
from attemper.lab.report.scale import operations, signed
from attemper.lab.study.statistics import Difference, holm, paired_difference

Found = Mapping[str, Any]
MOST_BLOCKS = 6
"""Of a model with more, a table shows the first, the middle and the last."""
PLACES = {
    "same weights": "At the same weights, those of the first arm",
    "own training": "Along each arm's own training",
}


def markdown(found: Found) -> str:
    """A table with one row per arm, and below it what else was measured."""
    return "\n\n".join(sections(found).values())


def sections(found: Found) -> dict[str, str]:
    """The same in parts: arms, differences, branches, same weights, own training, missing; those that there are."""
    parts = {"arms": _arms(found)}
    if compared := differences(found):
        parts["differences"] = _differences(found, compared)
    if "branches" in found["measures"] and any(arm["branches"] for arm in found["arms"]):
        parts["branches"] = _branches(found)
    if "gradients" in found:
        parts |= {place: _gradients(found, place) for place in PLACES}
    if found["missing"]:
        parts["missing"] = f"Not run yet: {'; '.join(found['missing'])}."
    return parts


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("--- |", "---|")


def _arms(found: Found) -> str:
    measures = found["measures"]
    header = ["arm", f"test {found['metric']}, %"]
    header += ["κ, patches"] if "patches" in measures else []
    header += ["κ, going in", "κ, behind the last block"] if "tokens" in measures else []
    header += ["entropy, first block", "entropy, last block"] if "entropy" in measures else []
    header += ["FLOPs, forward", "FLOPs, step", "diverged"]
    rows = []
    for arm in found["arms"]:
        row = [arm["name"], _accuracy(arm)]
        row += [figure(arm["patches_median"])] if "patches" in measures else []
        row += [figure(arm["median"][0]), figure(arm["median"][-1])] if "median" in arm else []
        counted = arm["flops"] or {}
        row += [operations(counted.get("forward")), operations(counted.get("step")), str(arm["diverged"])]
        rows.append(row)
    return _table(header, rows)


def _accuracy(arm: Found) -> str:
    if arm["mean"] is None:
        return "–"
    return f"{100 * arm['mean']:.2f}" + ("" if arm["deviation"] is None else f" ± {100 * arm['deviation']:.2f}")


def figure(value: float | None) -> str:
    """A number in few digits; a dash for one that is not known, or beyond what float64 can tell from infinity."""
    return "–" if value is None else f"{value:.3g}"


# --------------------------------------------------------------------------------------------------------- differences
def differences(found: Found) -> list[tuple[Found, Found, Difference]]:
    """Every arm, the first one of the same model, and how far it is from that one over the seeds that both have."""
    first: dict[str, Found] = {}
    compared = []
    for arm in found["arms"]:
        other = first.setdefault(arm["model"].partition("(")[0], arm)
        if other is not arm:
            ours, theirs = (dict(zip(each["seeds"], each["test"], strict=True)) for each in (arm, other))
            both = [seed for seed in ours if seed in theirs]
            difference = paired_difference([ours[seed] for seed in both], [theirs[seed] for seed in both])
            if difference is not None and difference.seeds > 1:
                compared.append((arm, other, difference))
    return compared


def _differences(found: Found, compared: Sequence[tuple[Found, Found, Difference]]) -> str:
    header = ["arm", "against", "points", "p, corrected"]
    corrected = holm([each.p for _, _, each in compared])
    rows = [
        [arm["name"], other["name"], points(each), "–" if p is None else f"{p:.3f}"]
        for (arm, other, each), p in zip(compared, corrected, strict=True)
    ]
    return (
        f"Differences of test {found['metric']}, paired by seed, with the 95 % t interval of one comparison; p of the "
        f"paired t test, corrected by Holm for all {len(rows)}\n\n{_table(header, rows)}"
    )


def points(difference: Difference) -> str:
    """A difference in percentage points with its interval."""
    text = signed(100 * difference.mean, 2)
    if difference.low is None or difference.high is None:
        return text
    return f"{text} ({signed(100 * difference.low, 2)} to {signed(100 * difference.high, 2)})"


# ------------------------------------------------------------------------------------------------------------ branches
def _branches(found: Found) -> str:
    header = ["arm", "branch", "its skip", "κ(J) by block", "κ(J + skip) by block", "lost", "σ_max/median"]
    rows = []
    for arm in found["arms"]:
        for name in dict.fromkeys(row["branch"] for row in arm["branches"]):
            blocks = shown([row for row in arm["branches"] if row["branch"] == name])
            alone, joined = (
                " · ".join(figure(row[f"{way}_median"]) for row in blocks) for way in ("alone", "with_skip")
            )
            lost, spread = ([row[f"alone_{part}_median"] for row in blocks] for part in ("lost", "to_median"))
            there = "yes" if blocks[0]["has_skip"] else "no"
            rows.append([arm["name"], name, there, alone, joined, _share(lost), _range(spread)])
    return _table(header, rows)


def shown(blocks: Sequence[Any]) -> list[Any]:
    """All blocks of a small model, or the first, the middle and the last."""
    if len(blocks) <= MOST_BLOCKS:
        return list(blocks)
    return [blocks[0], blocks[len(blocks) // 2], blocks[-1]]


def _share(values: Sequence[float | None]) -> str:
    known = [f"{100 * value:.0f}" for value in sorted(value for value in values if value is not None)]
    if not known:
        return "–"
    return f"{known[0]} %" if known[0] == known[-1] else f"{known[0]} – {known[-1]} %"


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{figure(min(known))} – {figure(max(known))}" if known else "–"


# ----------------------------------------------------------------------------------------------------------- gradients
def _gradients(found: Found, place: str) -> str:
    rows = [row for row in found["gradients"] if row["at"] == place]
    header = ["arm", *(f"{name}, {point}" for name in ("variance", "relative") for point in POINTS)]
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_point = {row["point"]: row for row in rows if row["arm"] == arm}
        lines.append([arm, *(change(by_point[point][name]) for name in ("variance", "relative") for point in POINTS)])
    return f"{PLACES[place]}: change against {found['arms'][0]['name']}, %\n\n{_table(header, lines)}"


def change(found: Found) -> str:
    """A relative change in per cent with its interval."""
    if found["mean"] is None:
        return "–"
    text = signed(100 * found["mean"], 1)
    if found["low"] is None:
        return text
    return f"{text} ({signed(100 * found['low'], 1)} to {signed(100 * found['high'], 1)})"
