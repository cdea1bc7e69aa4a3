"""The page of a diagnosis: heat maps of block × head, curves over blocks, the table, and pictures over images."""

import base64
from collections.abc import Mapping, Sequence

from attemper.lab.report.charts import Curve, legend, lines
from attemper.lab.report.drawing import Axis
from attemper.lab.report.heat import Bounds, heat_map
from attemper.lab.report.markup import Cell, Column, data_block, escape, paragraph, table
from attemper.lab.report.page import Section, page
from attemper.lab.report.scale import finite
from attemper.probes.comparison import Comparison
from attemper.probes.findings import BLOW_UP, GROWTH, SINK, Finding
from attemper.probes.table import (
    HEAD_COLUMNS,
    JACOBIAN_COLUMNS,
    SMOOTHING_COLUMNS,
    HeadRow,
    Table,
    figure,
    jacobian_figures,
    jacobian_reasons,
    smoothing_figures,
)
from attemper.probes.tokens import PLACES

HEATS = {
    "normalised": ("Entropy, as a share of its maximum", "1 is the same weight for every key, 0 a single key."),
    "distance": ("Mean attention distance, in patches", "Small is local."),
    "logit_max": ("Largest |logit|", f"Above {BLOW_UP:g} it is flagged."),
    "q_norm": ("Mean length of queries", ""),
    "k_norm": ("Mean length of keys", ""),
    "sink_share": ("Share of the key that gets most", f"From {SINK:g} on it is a sink."),
    "overlap": ("Overlap with the head that is most alike", "1 is the same attention."),
}
"""Which columns are drawn block by head: title, and how to read it."""

ENDS = {"normalised": 1.0, "logit_max": GROWTH, "sink_share": 1.0, "overlap": 1.0}
"""The number at the strong end of a colour scale, at least; all begin at 0: noise must not look like a pattern."""


def bounds_of(name: str, values: Sequence[Sequence[float | None]]) -> Bounds:
    """The ends of a column's colour scale: the same in every diagnosis, unless numbers are larger."""
    return 0.0, max([ENDS.get(name, 0.0), *(value for row in values for value in row if value is not None)]) or 1.0


WITH = {"none": "without the recipe", "recipe": "with the recipe"}

BRANCH_SERIES = {"block": 0, "attention": 1, "attention + skip": 2, "mlp": 3, "mlp + skip": 4, "block + skip": 5}
"""The colour of each Jacobian; those of places where tokens are looked at, too, are the same there."""


def by_block(rows: Sequence[HeadRow], name: str) -> tuple[list[str], list[list[float | None]]]:
    """Labels of attentions and, for each, one column of its heads."""
    sites = list(dict.fromkeys((row.block, row.site) for row in rows))
    blocks = [block for block, _ in sites]
    labels = [
        str(b) if blocks.count(b) == 1 else f"{b} {'abcdefgh'[blocks[:at].count(b)]}" for at, b in enumerate(blocks)
    ]
    return labels, [[finite(getattr(row, name)) for row in rows if row.site == site] for _, site in sites]


def make_page(
    found: Table,
    *,
    title: str,
    about: Sequence[str] = (),
    pictures: Mapping[str, bytes] | None = None,
    beside: Comparison | None = None,
) -> str:
    """One self-contained HTML page.

    about: lines below the title. pictures: PNGs by caption. beside: the same model with other weights.
    """
    sections = [_findings(found)] if found.heads else []
    if beside is not None and beside.rows:
        sections.append(_beside(beside))
    if found.heads:
        sections.append(_heats(found))
    if found.tokens:
        sections.append(_tokens(found))
    if found.jacobians:
        sections.append(_jacobians(found))
    if found.smoothing:
        sections.append(_smoothing(found))
    if pictures:
        sections.append(_pictures(pictures))
    sections += _tables(found)
    head = "".join(f"<p>{escape(line)}</p>" for line in about)
    head += "".join(paragraph(note, "notice") for note in found.notes)
    return page(title, sections, head=head + data_block("diagnosis", found.to_dict()), kicker="Attemper · diagnosis")


def _findings(found: Table, lead: str = "") -> Section:
    if not found.findings:
        body = f"<p>{escape(found.conclusion()[0])}</p>"
    else:
        body = f"<ul>{''.join(map(_finding, found.findings))}</ul>"
    return Section(heading="Findings", lead=lead, body=body)


def _finding(each: Finding) -> str:
    link = f'<a href="{escape(each.link)}">more about it</a>'
    return f"<li>{escape(each.text)} May help: {escape(each.advice)} ({link}).</li>"


def _beside(beside: Comparison) -> Section:
    columns = [Column("block"), Column("weights"), *(Column(title, numeric=True) for title in beside.columns.values())]
    rows = [
        [
            Cell(str(row.block), row.block),
            Cell(escape(row.label)),
            *(Cell(figure(value), finite(value)) for value in row.values),
        ]
        for row in beside.rows
    ]
    items = "".join(f"<li>{escape(line)}</li>" for line in beside.lines())
    body = (f"<ul>{items}</ul>" if items else "") + table(columns, rows, caption="Beside each other", sortable=True)
    return Section(
        heading="Beside each other", lead="Means over the heads of a block; of logits the largest.", body=body
    )


def _heats(found: Table) -> Section:
    drawn = []
    for name, (title, note) in HEATS.items():
        labels, values = by_block(found.heads, name)
        if any(value is not None for row in values for value in row):
            drawn.append(heat_map(values, title=title, rows=labels, note=note, bounds=bounds_of(name, values)))
    lead = "One cell per head; block 0 is nearest to the input. Point at a cell to read its number."
    return Section(heading="Heads", lead=lead, body=f'<div class="pair">{"".join(drawn)}</div>')


def _tokens(found: Table) -> Section:
    panels = []
    for name, title, label, log in (
        ("condition", "Condition number of the tokens", "κ", True),
        ("effective_rank", "Effective rank", "rank", False),
        ("similarity", "Similarity of two tokens", "mean cosine", False),
    ):
        curves = [
            Curve(
                label=place,
                series=at,
                x=[row.block for row in found.tokens if row.place == place],
                y=[finite(getattr(row, name)) for row in found.tokens if row.place == place],
            )
            for at, place in enumerate(PLACES)
        ]
        panels.append(lines(curves, title=title, x=Axis(label="block"), y=Axis(label=label, log=log), digits=4))
    names = legend([(place, at) for at, place in enumerate(PLACES)], switches=True)
    return Section(
        heading="Tokens through the blocks",
        lead=(
            "At the input of every block, behind attention before and after the skip is added, behind the feed-forward "
            "network before its skip, and at the block's end. "
            "Tokens that grow alike have a high similarity and a low rank."
        ),
        body=f'<div data-group>{names}<div class="panels">{"".join(panels)}</div></div>',
    )


def _jacobians(found: Table) -> Section:
    places = list(dict.fromkeys(row.place for row in found.jacobians))
    panels = []
    for name, title, label in (
        ("condition", "Condition number of the Jacobian", "κ"),
        ("largest", "Largest singular value", "σ max"),
        ("smallest", "Smallest singular value that counts", "σ min"),
    ):
        curves = [
            Curve(
                label=place,
                series=BRANCH_SERIES[place],
                x=[row.block for row in found.jacobians if row.place == place],
                y=[finite(getattr(row, name)) for row in found.jacobians if row.place == place],
            )
            for place in places
        ]
        if any(value is not None for curve in curves for value in curve.y):
            panels.append(lines(curves, title=title, x=Axis(label="block"), y=Axis(label=label, log=True), digits=4))
    names = legend([(place, BRANCH_SERIES[place]) for place in places], switches=True)
    why = "".join(f"<li>{escape(line)}</li>" for line in jacobian_reasons(found.jacobians))
    return Section(
        heading="Jacobians of the branches",
        lead=(
            "Of one image: how each branch of a block, and the stream behind it, change with the branch's own input. "
            "Directions that the norm before the branch loses do not count in κ of the branch alone."
        ),
        body=f'<div data-group>{names}<div class="panels">{"".join(panels)}</div></div><ul>{why}</ul>',
    )


def _smoothing(found: Table) -> Section:
    sites = list(dict.fromkeys(row.site for row in found.smoothing))
    recipes = list(dict.fromkeys(row.recipe for row in found.smoothing))
    panels = []
    for name, title, label in (
        ("slope", "Slope of the push over the weight", "below 0: flattens"),
        ("on_largest", "Share of the push on the largest weight of a row", "−1 takes, 1 adds"),
    ):
        curves = [
            Curve(
                label=WITH[recipe],
                series=at,
                x=[sites.index(row.site) for row in found.smoothing if row.recipe == recipe],
                y=[finite(getattr(row, name)) for row in found.smoothing if row.recipe == recipe],
            )
            for at, recipe in enumerate(recipes)
        ]
        panels.append(lines(curves, title=title, x=Axis(label="attention"), y=Axis(label=label), digits=4))
    names = legend([(WITH[recipe], at) for at, recipe in enumerate(recipes)], switches=True)
    return Section(
        heading="Which way the gradient pushes attention",
        lead=(
            "The push on a logit is minus its gradient, in training mode. Where large weights are pushed down, "
            "attention is flattened. The penalty is what DropKey would add to the expected loss, to first order, per "
            "unit of its rate."
        ),
        body=f'<div data-group>{names}<div class="panels">{"".join(panels)}</div></div>',
    )


def _pictures(pictures: Mapping[str, bytes]) -> Section:
    shown = "".join(
        f'<figure class="chart"><figcaption>{escape(caption)}</figcaption><div class="scroll">'
        f'<img alt="{escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}"></div></figure>'
        for caption, png in pictures.items()
    )
    return Section(heading="Where attention looks", lead="Brighter patches get more weight.", body=shown)


def _tables(found: Table) -> list[Section]:
    sections = []
    if found.heads:
        shown = [name for name in HEAD_COLUMNS if any(getattr(row, name) is not None for row in found.heads)]
        columns = [Column("attention"), Column("head", numeric=True, rising=True)]
        columns += [Column(HEAD_COLUMNS[name], numeric=True) for name in shown]
        rows = [
            [
                Cell(f"{row.block} · {escape(row.site)}", row.block),
                Cell(str(row.head), row.head),
                *(Cell(figure(getattr(row, name)), finite(getattr(row, name))) for name in shown),
            ]
            for row in found.heads
        ]
        sections.append(Section(heading="Every head", body=table(columns, rows, caption="Every head", sortable=True)))
    if found.tokens:
        columns = [Column("block and place"), *(Column(t, numeric=True) for t in ("κ", "effective rank", "similarity"))]
        rows = [
            [
                Cell(f"{row.block} · {escape(row.place)}", row.block),
                *(Cell(figure(v), finite(v)) for v in (row.condition, row.effective_rank, row.similarity)),
            ]
            for row in found.tokens
        ]
        sections.append(Section(heading="Every place", body=table(columns, rows, caption="Every place", sortable=True)))
    if found.jacobians:
        columns = [Column("block and branch"), *(Column(t, numeric=True) for t in JACOBIAN_COLUMNS.values())]
        rows = [
            [
                Cell(f"{row.block} · {escape(row.place)}", row.block),
                *(
                    Cell(text, finite(getattr(row, name)))
                    for name, text in zip(JACOBIAN_COLUMNS, jacobian_figures(row), strict=True)
                ),
            ]
            for row in found.jacobians
        ]
        body = table(columns, rows, caption="Every Jacobian", sortable=True)
        sections.append(Section(heading="Every Jacobian", body=body))
    if found.smoothing:
        columns = [Column("attention"), Column("with"), *(Column(t, numeric=True) for t in SMOOTHING_COLUMNS)]
        rows = [
            [
                Cell(f"{row.block} · {escape(row.site)}", row.block),
                Cell(row.recipe),
                *(Cell(figure(v), finite(v)) for v in smoothing_figures(row)),
            ]
            for row in found.smoothing
        ]
        body = table(columns, rows, caption="Every push", sortable=True)
        lead = "The last six columns: mean push on keys by their weight, as a multiple of the uniform weight."
        sections.append(Section(heading="Every push", lead=lead, body=body))
    return sections
