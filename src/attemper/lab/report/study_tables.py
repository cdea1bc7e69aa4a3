"""The parts of a study's page that are tables or text."""

from collections.abc import Mapping
from typing import Any

from attemper.lab.report.charts import key
from attemper.lab.report.entries import ANSWER_LABELS, Entry, percent
from attemper.lab.report.markup import Cell, Column, code_block, escape, facts, table
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, memory, more_seeds, number, operations, probability, signed, spread_of


def results(ranked: list[Entry], metric: str, confidence: float, reading: str = "") -> Section:
    """Every recipe with its figures; sortable. reading: how differences, intervals and verdicts are to be read."""
    sure = f"{100 * confidence:g} %"
    rates = len({entry.raw.get("lr") for entry in ranked} - {None}) > 1
    wide = any(abs((entry.difference or {}).get("level") or 0.05) < 0.0499 for entry in ranked)
    interval = "adjusted interval" if wide else f"{sure} interval"
    columns = [
        Column("recipe"),
        Column(
            f"test {metric}, %", numeric=True, hint="mean over seeds ± standard deviation; below, of the test sample"
        ),
        Column("against the baseline", numeric=True, hint=f"paired difference in points, with its {interval}"),
        Column("verdict", hint="better, worse, equivalent or undecided; below, how many seeds more would decide"),
        Column("P(better)", numeric=True, hint="the probability of any gain, by these seeds alone"),
        Column("could see", numeric=True, rising=True, hint="difference in points that 80 of 100 such studies find"),
        Column("adjusted p", numeric=True, rising=True, hint="corrected for the number of comparisons and looks"),
        Column("rank", numeric=True, rising=True, hint=f"1 is best; with its {sure} interval"),
        Column("gap", numeric=True, rising=True, hint="train less test, in points"),
        Column("step time", numeric=True, rising=True, hint="ratio to the baseline"),
        Column("FLOPs", numeric=True, rising=True, hint="of a training step; below, of one sample's forward pass"),
        Column("memory", numeric=True, rising=True, hint="peak memory of a training step"),
        Column("seeds", numeric=True, hint="with a result; diverged and missing runs are named, of all configurations"),
    ]
    rows = [
        [
            _name(entry, rates),
            Cell(spread_of(entry.mean, entry.deviation) + _sample(entry), entry.mean),
            _difference(entry),
            _verdict(entry),
            _probability(entry),
            Cell(number(percent(entry.decision.get("smallest")), 2), percent(entry.decision.get("smallest"))),
            _p_value(entry),
            _interval(entry.rank, "mean", 1),
            Cell(number(entry.gap, 2), entry.gap),
            _interval(entry.cost, "ratio", 2),
            _operations(entry),
            Cell(memory(entry.cost.get("peak_memory")), finite(entry.cost.get("peak_memory"))),
            _runs(entry),
        ]
        for entry in ranked
    ]
    # A column in which no row has anything, such as the cost before it is measured, only takes room.
    kept = [at for at in range(len(columns)) if at < 2 or any(row[at].key is not None for row in rows)]
    columns, rows = [columns[at] for at in kept], [[row[at] for at in kept] for row in rows]
    body = table(columns, rows, caption="Recipes and their results", sortable=True, sorted_by=1)
    return Section(
        heading="Results",
        lead=(
            f"Test {metric} at the epoch that was best on validation. Same split, initial weights and batch order "
            "under "
            f"one seed. {reading} Small figures: the adjusted interval; ± of the test sample alone, which is the "
            "same for "
            "every seed and not in the intervals. Press a heading to sort."
        ),
        body=body if ranked else "<p>Nothing to show yet.</p>",
    )


def _name(entry: Entry, rates: bool) -> Cell:
    """rates: recipes have learning rates of their own."""
    lr = finite(entry.raw.get("lr"))
    shown = rates or len(entry.raw.get("configurations") or ()) > 1
    chosen = f"lr {number(lr)}" if lr is not None and shown else ""
    recipe = entry.recipe if entry.recipe != entry.name else ""
    small = " · ".join(part for part in (recipe, chosen) if part)
    below = f"<small>{escape(small)}</small>" if small else ""
    return Cell(f"{key(entry.series)}{escape(entry.name)}{below}", entry.name)


def _sample(entry: Entry) -> str:
    """The uncertainty that the test sample brings, whatever the seeds: of a share of so many items."""
    error, items = percent(entry.sample.get("error")), entry.sample.get("items")
    return "" if error is None else f"<small>± {number(1.96 * error, 2)}, {items:,} items</small>"


def _difference(entry: Entry) -> Cell:
    difference = entry.difference
    if difference is None or difference["mean"] is None:
        return Cell("–")
    text = signed(difference["mean"])
    if difference["low"] is not None and difference["high"] is not None:
        text += f"<small>{signed(difference['low'])} to {signed(difference['high'])}</small>"
    if (error := percent(entry.sample.get("difference"))) is not None:
        text += f"<small>± {number(1.96 * error, 2)}, sample</small>"
    return Cell(text, difference["mean"], ANSWER_LABELS.get(str(entry.decision.get("answer")), ""))


def _verdict(entry: Entry) -> Cell:
    answer = entry.decision.get("answer")
    if answer is None:
        return Cell("baseline" if entry.baseline else "–")
    more = entry.decision.get("more")
    decides = f"+{number(more)} {'seed' if more == 1 else 'seeds'} would decide" if more else more_seeds(None)
    below = f"<small>{escape(decides)}</small>" if answer == "undecided" and entry.difference["p"] else ""  # type: ignore[index]
    if answer == "equivalent" and entry.decision.get("real"):
        below = "<small>differs, by less than matters</small>"
    return Cell(f"{escape(answer)}{below}", str(answer), ANSWER_LABELS.get(str(answer), ""))


def _probability(entry: Entry) -> Cell:
    value = finite(entry.decision.get("better"))
    return Cell("–") if value is None else Cell(escape(probability(value)), value)


def _p_value(entry: Entry) -> Cell:
    adjusted = (entry.difference or {}).get("adjusted")
    if adjusted is None:
        return Cell("–")
    return Cell("&lt; 0.001" if adjusted < 0.001 else number(adjusted, 3), adjusted)


def _interval(given: Mapping[str, Any], name: str, digits: int) -> Cell:
    value, low, high = (finite(given.get(part)) for part in (name, "low", "high"))
    if value is None:
        return Cell("–")
    below = (
        f"<small>{number(low, digits)} to {number(high, digits)}</small>"
        if low is not None and high is not None
        else ""
    )
    return Cell(number(value, digits) + below, value)


def _operations(entry: Entry) -> Cell:
    step, forward = entry.flops.get("step"), entry.flops.get("forward")
    below = "" if forward is None else f"<small>{operations(forward)} forward</small>"
    return Cell(operations(step) + below, finite(step))


def _runs(entry: Entry) -> Cell:
    done = len(entry.test)
    parts = [f"{entry.diverged} diverged"] if entry.diverged else []
    parts += [f"{entry.missing} missing"] if entry.missing else []
    below = f"<small>{', '.join(parts)}</small>" if parts else ""
    return Cell(f"{done}{below}", done, "bad" if parts else "")


def configurations(ranked: list[Entry], metric: str) -> Section | None:
    """What was tried for each recipe, and what was chosen."""
    columns = [
        Column("configuration"),
        Column("learning rate", numeric=True),
        Column(f"validation {metric}, %", numeric=True),
        Column("runs", numeric=True),
        Column("chosen"),
    ]
    parts = []
    for entry in ranked:
        tried = list(entry.raw.get("configurations") or ())
        if len(tried) < 2:
            continue
        rows = []
        for one in sorted(tried, key=lambda one: finite(one.get("validation")) or -1.0, reverse=True):
            label = "chosen" if one.get("chosen") else ""
            rows.append(
                [
                    Cell(escape(one.get("recipe", "")), label=label),
                    Cell(number(one.get("lr")), label=label),
                    Cell(number(percent(one.get("validation")), 2), label=label),
                    Cell(number(one.get("runs")), label=label),
                    Cell("chosen" if one.get("chosen") else "", label=label),
                ]
            )
        inner = table(columns, rows, caption=f"Configurations of {entry.name}")
        title = f"{key(entry.series)}{escape(entry.name)} <small>{len(rows)} configurations</small>"
        parts.append(f"<details><summary>{title}</summary>{inner}</details>")
    if not parts:
        return None
    return Section(
        heading="Configurations tried",
        lead=(
            "Each recipe's grid and learning rates, by the mean over seeds on validation. The choice was made there, "
            "never on test."
        ),
        body="".join(parts),
    )


def reproduce(summary: Mapping[str, Any]) -> Section:
    """The command, the plan and the versions."""
    parts = []
    if summary.get("command"):
        parts.append(f"<h3>Command</h3>{code_block(summary['command'])}")
    if summary.get("plan"):
        parts.append(f"<h3>Plan</h3>{code_block(_yaml(summary['plan']), wrapped=True)}")
    versions = summary.get("versions") or {}
    if versions:
        parts.append(f"<h3>Versions</h3>{facts(versions)}")
    return Section(
        heading="Get it again",
        lead="Write the plan into a file and give it to the command. Runs that are there already are not run again.",
        body="".join(parts) or "<p>The study does not record how it was made.</p>",
    )


def _yaml(plan: Mapping[str, Any]) -> str:
    """The plan as people write it: one key per line, recipes below each other."""
    lines = []
    for name, value in plan.items():
        if isinstance(value, list) and any(isinstance(item, str | Mapping) for item in value):
            lines += [f"{name}:", *(f"  - {_flow(item)}" for item in value)]
        else:
            lines.append(f"{name}: {_flow(value)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """A value of YAML on one line."""
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
