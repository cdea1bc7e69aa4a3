"""How long it will take is said from the first steps on, first of all, and in logs too."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from attemper.errors import ParameterError
from attemper.lab.cli import main
from attemper.lab.cli.methods import Methods
from attemper.lab.study.live import SILENCE, PlainView, status_table
from attemper.lab.study.status import RecipeStatus, Running, Status, status_of
from attemper.lab.study.study import Study
from attemper.lab.tasks.notifications import listening
from attemper.lab.tasks.registry import open_task
from attemper.lab.training import cost
from attemper.lab.training.spec import Budget
from study_fakes import FakeEngine, make_plan


def running(share: float, seconds: float = 60.0) -> Running:
    return Running("dropkey(0.1), seed 0", "here", 1, seconds, share, None)


def status(recipes: int = 1, **more: Any) -> Status:
    rows = tuple(RecipeStatus(f"recipe {i}", 5, 0, (), 0, 0, None) for i in range(recipes))
    return Status(
        rows, **{"total": 5, "done": 0, "running": (running(0.25),), "failed": 0, "seconds_left": 900.0} | more
    )


def drawn(what: Any, height: int) -> str:
    from rich.live import Live

    out = io.StringIO()
    console = Console(file=out, width=100, height=height, force_terminal=True, color_system=None)
    with Live(what, console=console, auto_refresh=False):
        pass
    return out.getvalue()


def test_a_table_longer_than_the_terminal_still_shows_the_time_left() -> None:
    shown = drawn(status_table(status(recipes=60)), height=12)
    assert "about 15 min left" in shown.splitlines()[0]


def test_a_run_in_hand_says_how_long_it_will_take_once_its_pace_is_known() -> None:
    assert running(0.25).seconds_left == pytest.approx(180)
    assert running(0.001).seconds_left is None
    console = Console(file=(out := io.StringIO()), width=120)
    console.print(status_table(status()))
    assert "25 %, 1 min, about 3 min left" in out.getvalue()


def test_the_first_run_in_hand_tells_how_long_the_study_will_take(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", make_plan(), engine=FakeEngine())
    study.prepare()
    claim = study.claim()
    assert claim is not None
    assert status_of(study).seconds_left is None
    event = {"epoch": 3, "epochs": 4, "step": 0, "steps": 10}
    path = study.store.path(claim.key)
    study.store.write_progress(claim.key, event)
    assert not path.exists()
    holders = study.claims.holders
    study.claims.holders = lambda keys: {  # type: ignore[method-assign]
        key: _older(holder) for key, holder in holders(list(keys)).items()
    }
    found = status_of(study)
    total = found.running[0].seconds / 0.5
    assert found.seconds_left == pytest.approx(total * (len(study.runs) - 0.5), rel=0.01)
    claim.release()


def _older(holder: Any) -> Any:
    import dataclasses

    return dataclasses.replace(holder, since=holder.since - 100)


def test_a_log_says_how_far_it_is_though_no_run_has_finished() -> None:
    now = [0.0]
    out = io.StringIO()
    view = PlainView(Console(file=out, width=200), clock=lambda: now[0])
    for seconds in (1.0, SILENCE / 2, SILENCE + 1, SILENCE + 2, 2 * SILENCE + 3):
        now[0] = seconds
        view.show(status())
    assert out.getvalue().count("0 of 5 runs done, 1 running, about 15 min left") == 2


def test_measuring_costs_shows_how_far_it_is_and_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heard:
        events: list[tuple[str, int, int]] = []

        def progress(self, what: str, done: int, total: int) -> None:
            self.events.append((what, done, total))

        def note(self, text: str) -> None: ...

    monkeypatch.setattr(cost, "PATIENCE", 0.0)
    task = open_task("digits(train=100, test=40)")
    with listening(heard := Heard()):
        found = cost.step_costs(["dropkey(0.1)"], task, "vit-digits(depth=1)", Budget(batch_size=16), device="cpu")
    assert found["none"]["ratio"] == 1
    shares = [done / total for what, done, total in heard.events if what == cost.ACTIVITY]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(shares) == 2 + cost.LEAST_ROUNDS + 1
    json.dumps(found)


@pytest.mark.parametrize("error", [AttributeError("partially initialized module"), ParameterError("unread")])
def test_ctrl_c_that_an_import_swallows_is_one_line_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: Methods, words: Sequence[str] = ()) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error

    monkeypatch.setattr(Methods, "run", run)
    before = signal.getsignal(signal.SIGINT)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "attemper: stopped\n"
    assert signal.getsignal(signal.SIGINT) is before
