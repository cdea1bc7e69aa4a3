"""The rates of a study's recipes: in every block, and over the course of training where they move."""

import statistics
from collections.abc import Sequence

from attemper.lab.report.charts import Bar, Curve, bars, legend, lines
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry
from attemper.lab.report.markup import escape
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite, number

LEAD = (
    "The probability of dropping, of blur its width sigma; block 0 is nearest to the input. Rates that depend on "
    "time are shown at the highest that an epoch ended with, learnt ones as they were in the epoch that was chosen."
)
MOST_BLOCKS = 6
"""Lines in a panel: of a deeper network, blocks that lie evenly apart."""


def rates(ranked: Sequence[Entry]) -> Section | None:
    """At which rate each method acts, block by block."""
    panels, plain = [], set()
    for entry in ranked:
        given = [rate for rate in entry.raw.get("rates") or () if finite(rate.get("block")) is not None]
        for method in dict.fromkeys(str(rate.get("method")) for rate in given):
            here = {int(rate["block"]): finite(rate.get("rate")) for rate in given if str(rate.get("method")) == method}
            if all(value is None for value in here.values()):
                plain.add(method)
                continue
            items = [
                Bar(label=str(block), value=here[block], hint=f"block {block}: {number(here[block])}")
                for block in sorted(here)
            ]
            title = entry.name if entry.name.split("(")[0] == method else f"{entry.name}: {method}"
            panels.append(bars(items, title=title, x="block", y=Axis(label="rate"), series=entry.series))
    if not panels and not plain:
        return None
    rest = f'<p class="lead">Methods that have no rate: {escape(", ".join(sorted(plain)))}.</p>' if plain else ""
    return Section(
        heading="Rates by block", lead=LEAD if panels else "", body=f'<div class="small">{"".join(panels)}</div>{rest}'
    )


def over_time(ranked: Sequence[Entry]) -> Section | None:
    """Rates that depend on time or are learnt, block by block, epoch after epoch."""
    panels, shown = [], 0
    for entry in ranked:
        for method, blocks in _moving(entry).items():
            chosen = sorted(blocks)
            step = max(1.0, (len(chosen) - 1) / (MOST_BLOCKS - 1))
            chosen = [chosen[round(step * at)] for at in range(min(len(chosen), MOST_BLOCKS))]
            found = [_line(f"block {block}", at, blocks[block]) for at, block in enumerate(chosen)]
            title = entry.name if entry.name.split("(")[0] == method else f"{entry.name}: {method}"
            names = legend([(curve.label, curve.series) for curve in found])
            y = Axis(label="rate", include=(0.0,))
            panels.append(f"<div>{lines(found, title=title, x=Axis(label='epoch'), y=y, digits=4)}{names}</div>")
            shown = max(shown, len(blocks))
    if not panels:
        return None
    some = f" At most {MOST_BLOCKS} blocks are drawn." if shown > MOST_BLOCKS else ""
    return Section(
        heading="Rates over time",
        lead=(
            "Where a rate depends on the progress of training or is learnt: its value at the end of every epoch, the "
            "mean over seeds; the band reaches from the lowest seed to the highest. Of a learnt blur, the width sigma."
            + some
        ),
        body=f'<div class="panels">{"".join(panels)}</div>',
    )


def _moving(entry: Entry) -> dict[str, dict[int, dict[float, list[float]]]]:
    """Method → block → epoch → a value for each seed, of rates that were written down in every epoch."""
    found: dict[str, dict[int, dict[float, list[float]]]] = {}
    for curve in entry.raw.get("curves") or ():
        for at in curve or ():
            epoch, here = finite(at.get("epoch")), at.get("rates")
            if epoch is None or not isinstance(here, list):
                continue
            sums: dict[tuple[str, int], list[float]] = {}
            for row in here:
                rate, block = finite(row.get("rate")), finite(row.get("block"))
                if rate is not None and block is not None:
                    sums.setdefault((str(row.get("method")), int(block)), []).append(rate)
            for (method, block), rates_here in sums.items():  # of several attentions in a block, the mean
                by_epoch = found.setdefault(method, {}).setdefault(block, {})
                by_epoch.setdefault(epoch, []).append(statistics.fmean(rates_here))
    return {method: blocks for method, blocks in found.items() if _changes(blocks)}


def _changes(blocks: dict[int, dict[float, list[float]]]) -> bool:
    return any(len({value for values in by_epoch.values() for value in values}) > 1 for by_epoch in blocks.values())


def _line(label: str, series: int, by_epoch: dict[float, list[float]]) -> Curve:
    epochs = sorted(by_epoch)
    several = max(map(len, by_epoch.values())) > 1
    return Curve(
        label=label,
        series=series,
        x=epochs,
        y=[statistics.fmean(by_epoch[epoch]) for epoch in epochs],
        low=[min(by_epoch[epoch]) for epoch in epochs] if several else (),
        high=[max(by_epoch[epoch]) for epoch in epochs] if several else (),
    )
