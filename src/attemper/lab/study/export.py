"""A summary as CSV and as Markdown."""

import csv
import io
from typing import Any, Literal

from attemper.lab.folders import read_object
from attemper.lab.report.scale import operations, probability
from attemper.lab.study.evaluations import STAR, evaluation_rows, figure_names, figures_of
from attemper.lab.study.verdict import answer_text, interval_name, join

Summary = dict[str, Any]
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet takes for a formula."""


CSV_START = ("name", "recipe", "lr", "mean", "deviation")
MARKDOWN_START = ("recipe", "test", "difference to the baseline", "verdict", "P(better)", "could see")
MARKDOWN_REST = ("p", "rank", "step time")
MARKDOWN_MORE = ("FLOPs, step", "published")


def is_table(data: bytes, kind: Literal["csv", "markdown", "json"]) -> bool:
    """Whether a file is a study's table, as it is written here."""
    if kind == "json":
        return {"verdict", "recipes", "plan"} <= set(read_object(data))
    if kind == "csv":
        return data.startswith(",".join(CSV_START).encode())
    return f"\n| {' | '.join(MARKDOWN_START)} |".encode() in data


def to_csv(summary: Summary) -> str:
    """One line per recipe, numbers in full, one column per seed. Accuracies are shares, 0 to 1.

    A text that a spreadsheet would take for a formula has an apostrophe before it.
    """
    seeds = summary["recipes"][0]["seeds"]
    columns = [
        *(*CSV_START, "difference", "low", "high", "p", "p_adjusted"),
        *("low_alone", "high_alone", "verdict", "more_seeds", "p_better", "p_within_margin", "could_see"),
        *("test_items", "test_sample_error", "test_sample_error_of_difference"),
        *("rank", "rank_low", "rank_high", "diverged", "missing", "parameters", "forward_flops", "step_flops"),
        *(
            "cost_ratio",
            "milliseconds",
            "peak_memory",
            "published",
            "versions",
            *(f"test_seed_{seed}" for seed in seeds),
        ),
    ]
    extra = figure_names(summary)
    columns += [name.replace(",", "").replace(" ", "_").lower() for name in extra]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in summary["recipes"]:
        difference, rank = row["difference"] or {}, row["rank"] or {}
        decision, sample = row["decision"] or {}, row["sample"] or {}
        cost, published, flops = row["cost"] or {}, row["published"] or {}, row.get("flops") or {}
        writer.writerow(
            [
                *(harmless(row[name]) for name in ("name", "recipe")),
                *(row[name] for name in CSV_START[2:]),
                *(difference.get(name) for name in ("mean", "low", "high", "p", "adjusted")),
                *(difference.get("alone") or (None, None)),
                *(decision.get(name) for name in ("answer", "more", "better", "within", "smallest")),
                *(sample.get(name) for name in ("items", "error", "difference")),
                *(rank.get(name) for name in ("mean", "low", "high")),
                *(row[name] for name in ("diverged", "missing", "parameters")),
                *(flops.get(name) for name in ("forward", "step")),
                *(cost.get(name) for name in ("ratio", "milliseconds", "peak_memory")),
                published.get("value"),
                row.get("versions", "").replace(",", ""),
                *row["test"],
                *(figure["mean"] for figure in figures_of(row, extra)),
            ]
        )
    return text.getvalue()


def harmless(text: str) -> str:
    """A text that no spreadsheet computes.

    >>> harmless("=1+1"), harmless("cb")
    ("'=1+1", 'cb')
    """
    return f"'{text}" if text.startswith(FORMULA) else text


def to_markdown(summary: Summary) -> str:
    """The verdict and a table, accuracies in per cent."""
    header = shown([*MARKDOWN_START, *MARKDOWN_REST, *MARKDOWN_MORE], summary)
    lines = [f"# {_cell(summary['title'])}", ""]
    for caution in summary.get("cautions", ()):
        lines += [f"**{_cell(caution)}**", ""]
    lines += [_cell(summary["verdict"]), ""]
    lines += [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(map(_cell, shown(cells(row), summary)))} |" for row in summary["recipes"]]
    plan = summary["plan"]
    seeds, epochs = max(len(row["test"]) for row in summary["recipes"]), plan["budget"]["epochs"]
    lines += [
        "",
        f"Test {summary['metric']} in per cent, mean ± deviation over {seeds} seed{'s' if seeds > 1 else ''}; {epochs} "
        f"epochs on {_cell(plan['task'])} with {_cell(plan['model'])}. {_cell(how(summary))} Configurations and epochs "
        "are chosen on validation.",
    ]
    if any(row.get("flops") for row in summary["recipes"]):
        lines[-1] += " FLOPs are those of a training step; elementwise work is not counted."
    if found := evaluation_rows(summary):
        header, *rows = ([_cell(text) for text in row] for row in found)
        lines += ["", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
        rows = list(rows)
        lines += [f"| {' | '.join(row)} |" for row in rows]
        if any(cell.endswith(" *") for row in rows for cell in row):
            lines += ["", f"\\{STAR}"]
    if summary["notes"]:
        lines += ["", *(f"- {_cell(note)}" for note in summary["notes"])]
    return "\n".join(lines) + "\n"


def how(summary: Summary) -> str:
    """How differences, intervals and verdicts are to be read."""
    names = {interval_name(row["difference"]) for row in summary["recipes"] if row["difference"]}
    kind = "adjusted interval, as wide as the correction of p asks" if "adjusted interval" in names else "95 % interval"
    looks = summary["plan"].get("until") == "decided"
    correction = "for the comparisons and for every look that was taken" if looks else "by Holm's method"
    margin = (summary.get("margin") or {}).get("value")
    within = "" if margin is None else f" Equivalent: the whole interval is within ±{100 * margin:.2f} points."
    return (
        f"Differences are paired by seed, with their {kind}; p is corrected {correction}.{within} P(better): the "
        "probability of any gain, by these seeds alone. Could see: the smallest difference that so many seeds find "
        "in 80 "
        "of 100 studies."
    )


def shown(columns: list[str], summary: Summary) -> list[str]:
    """Of a header or of a line of `cells`, what is shown: the last two columns only where a recipe has a value."""
    *first, flops, published = columns
    rows = summary["recipes"]
    first += [flops] if any(row.get("flops") for row in rows) else []
    return [*first, published] if any(row["published"] for row in rows) else first


def cells(row: dict[str, Any]) -> list[str]:
    """One recipe as a line of a table for people, in the order of the columns of the Markdown table."""
    difference, rank, cost, published = row["difference"], row["rank"], row["cost"], row["published"]
    flops, decision = row.get("flops"), row["decision"] or {}
    return [
        row["name"] + _flaws(row),
        _spread(row["mean"], row["deviation"]),
        "" if difference is None else _interval(difference),
        answer_text(row["decision"]),
        "" if decision.get("better") is None else probability(decision["better"]),
        "" if decision.get("smallest") is None else f"{100 * decision['smallest']:.2f}",
        "" if difference is None else _p(difference["adjusted"]),
        "" if rank is None else _range(rank),
        "" if cost is None else f"× {cost['ratio']:.2f}",
        "" if not flops else operations(flops["step"]),
        "" if published is None else _published(published),
    ]


def _flaws(row: dict[str, Any]) -> str:
    words = [f"{row[name]} {name}" for name in ("missing", "diverged") if row[name]]
    return f" ({join(words)})" if words else ""


def _spread(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "–"
    return f"{100 * mean:.2f}" if deviation is None else f"{100 * mean:.2f} ± {100 * deviation:.2f}"


def _interval(difference: dict[str, Any]) -> str:
    text = f"{100 * difference['mean']:+.2f}"
    if difference["low"] is not None:
        text += f" [{100 * difference['low']:+.2f}, {100 * difference['high']:+.2f}]"
    return text.replace("-", "−")


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _range(rank: dict[str, Any]) -> str:
    if rank["low"] is None:
        return f"{rank['mean']:g}"
    return f"{rank['mean']:.1f} [{rank['low']:g}–{rank['high']:g}]"


def _published(row: dict[str, Any]) -> str:
    return f"{row['value']:.2f}" if row["deviation"] is None else f"{row['value']:.2f} ± {row['deviation']:.2f}"


def _cell(text: str) -> str:
    """Text that cannot break out of a cell."""
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split())
