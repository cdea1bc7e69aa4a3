"""Attention during training, recipe against recipe: what `probe_every` recorded."""

import statistics
from collections.abc import Sequence

from attemper.lab.report.charts import Curve, legend, lines
from attemper.lab.report.drawing import Axis
from attemper.lab.report.entries import Entry
from attemper.lab.report.page import Section
from attemper.lab.report.scale import finite


def attention(ranked: Sequence[Entry]) -> Section | None:
    """Entropy of the first, the last and all blocks over the steps, and the largest logit."""
    known = [entry for entry in ranked if any(entry.raw.get("probes") or ())]
    if not known:
        return None
    last = max(int(at["block"]) for entry in known for run in entry.raw["probes"] for at in run)
    panels = [
        ("Entropy, all blocks", "entropy", None, "share of maximum"),
        ("Entropy, first block", "entropy", 0, "share of maximum"),
        ("Entropy, last block", "entropy", last, "share of maximum"),
        ("Largest logit, all blocks", "logit_max", None, "|logit|"),
    ]
    drawn = [
        lines(
            [_curve(entry, quantity, block) for entry in known],
            title=title,
            x=Axis(label="step"),
            y=Axis(label=label),
            digits=4,
        )
        for title, quantity, block, label in panels
    ]
    switches = legend([(entry.name, entry.series) for entry in known], switches=True)
    return Section(
        heading="Attention during training",
        lead=(
            "Entropy of attention over the log of the allowed keys: 1 is the same weight for every key, 0 is a single "
            "key. Mean over heads, images and seeds, in eval mode. The band goes from the lowest to the highest seed."
        ),
        body=f'<div data-group>{switches}<div class="panels">{"".join(drawn)}</div></div>',
    )


def _curve(entry: Entry, quantity: str, block: int | None) -> Curve:
    """One recipe: the mean of blocks (of logits: their largest), then mean, lowest and highest over seeds."""
    by_step: dict[int, list[float]] = {}
    for run in entry.raw["probes"]:
        here: dict[int, list[float]] = {}
        for at in run:
            value = finite(at.get(quantity))
            if value is not None and block in (None, at["block"]):
                here.setdefault(int(at["step"]), []).append(value)
        for step, values in here.items():
            by_step.setdefault(step, []).append(max(values) if quantity == "logit_max" else statistics.fmean(values))
    steps = sorted(by_step)
    several = sum(bool(run) for run in entry.raw["probes"]) > 1
    return Curve(
        label=entry.name,
        series=entry.series,
        x=steps,
        y=[statistics.fmean(by_step[step]) for step in steps],
        low=[min(by_step[step]) for step in steps] if several else (),
        high=[max(by_step[step]) for step in steps] if several else (),
    )
