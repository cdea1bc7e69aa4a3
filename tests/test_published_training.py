"""Every plan of a published table trains: one step of each here, its whole smoke run under `make slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from attemper.lab.report.study import render
from attemper.lab.study.comparison import compare
from attemper.lab.study.in_process import InProcess
from attemper.lab.study.plan import Plan
from attemper.lab.study.published import SCALES, catalogue, find_table
from published_steps import one_step, steps_of

RUN = [table.key for table in catalogue() if table.can_run]
HEAVY = [key for key in RUN if "volo" in key]
"""Their network cannot be made small: of these the full scale alone is stepped where time counts."""


@pytest.mark.parametrize("key", RUN)
def test_every_row_of_every_plan_trains_a_step(key: str) -> None:
    table = find_table(key)
    scales = ["full"] if key in HEAVY else list(SCALES)
    steps = {step for scale in scales for step in steps_of(table, scale)}
    assert len(steps) >= len(table.rows)
    for step in sorted(steps, key=str):
        one_step(step)


@pytest.mark.slow
@pytest.mark.parametrize("key", HEAVY)
def test_heavy_networks_train_a_step_at_every_scale(key: str) -> None:
    for scale in SCALES:
        for step in steps_of(find_table(key), scale):
            one_step(step)


@pytest.mark.slow
@pytest.mark.parametrize("key", RUN)
def test_every_smoke_run_ends_with_its_figures_beside_the_published_ones(key: str, tmp_path: Path) -> None:
    table = find_table(key)
    plan = Plan.from_dict(table.plan("smoke"))
    summary = compare(plan, tmp_path / "study", executor=InProcess(), costs=False)
    assert summary["complete"]
    assert not summary["failed"]
    assert summary["reference"]["apart"]
    for row, published in zip(summary["recipes"], table.rows, strict=True):
        cells = [cell for cell in published.cells if cell.value is not None]
        assert [cell["published"] for cell in row.get("beside", ())] == [cell.value for cell in cells]
        assert all(cell["difference"] is None for cell in row.get("beside", ())), "another task"
        assert row["mean"] is not None or row["diverged"]
    page = render(summary)
    assert 'id="published-figures"' in page
    assert ("No figure was published" in page) == (not any(row.get("beside") for row in summary["recipes"]))
