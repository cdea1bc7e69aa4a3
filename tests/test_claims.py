"""Claims: one owner per run, whoever is killed, suspended or on another machine."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attemper.lab.errors import LostClaimError
from attemper.lab.study import owners
from attemper.lab.study.claims import STALE_AFTER, Claim, Claims
from attemper.lab.study.owners import identity, life_of, start_of


def silence(claims: Claims, key: str, scope: str = "another machine") -> None:
    """Make a claim look like one of another machine, and these claims like ones that watched it in vain for an hour."""
    generation = claims.highest(key)
    assert generation is not None
    rewrite(claims, key, scope=scope)
    claims.holder(key)
    pass_time(claims, 3600)


def rewrite(claims: Claims, key: str, **changes: Any) -> None:
    """Change what the valid claim of a run says of its owner."""
    path = claims.path(key, claims.highest(key) or 0)
    stamps = path.stat()
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    os.utime(path, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))


def pass_time(claims: Claims, seconds: float) -> None:
    """Let time go by, by the clock of one observer."""
    before = claims.clock
    claims.clock = lambda: before() + seconds


def beat(claims: Claims, key: str, at: float) -> None:
    """A heartbeat by a clock that says what it likes."""
    os.utime(claims.path(key, claims.highest(key) or 0), (at, at))


def test_a_run_has_one_owner_until_it_is_finished(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims")
    claim = claims.take("run")
    assert claim is not None
    assert claims.take("run") is None
    assert Claims(tmp_path / "claims").take("run") is None
    holder = claims.holder("run")
    assert holder is not None
    assert (holder.pid, holder.alive) == (os.getpid(), True)
    claim.finish()
    assert list(claims.folder.iterdir()) == []


def test_a_run_that_is_given_back_can_be_claimed_again(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    for _ in range(3):
        claim = claims.take("run", on_takeover=lambda holder: pytest.fail("nobody died"))
        assert claim is not None
        claim.release()
        assert claims.holders(["run"]) == {}


def test_the_claim_of_a_dead_process_is_taken_over_at_once_and_told(tmp_path: Path) -> None:
    claims, told = Claims(tmp_path), []
    child = os.fork()
    if child == 0:
        claims.take("run")
        os._exit(0)
    os.waitpid(child, 0)
    claim = claims.take("run", on_takeover=told.append)
    assert claim is not None
    assert [holder.pid for holder in told] == [child]
    claim.finish()


def test_a_living_process_of_another_machine_is_believed_until_it_falls_silent(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claim = claims.take("run")
    assert claim is not None
    rewrite(claims, "run", scope="another machine", pid=2**22)
    assert claims.take("run") is None
    silence(claims, "run")
    assert claims.take("run") is not None


def test_an_owner_that_wakes_up_too_late_finds_that_it_has_lost(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    sleeper = claims.take("run")
    assert sleeper is not None
    silence(claims, "run")
    heir = claims.take("run")
    assert heir is not None
    with pytest.raises(LostClaimError):
        sleeper.check()
    sleeper.release()
    sleeper.finish()
    heir.check()
    assert claims.take("run") is None


def test_a_heartbeat_keeps_a_claim_and_notices_when_it_is_lost(tmp_path: Path) -> None:
    claims = Claims(tmp_path, stale_after=0.3)
    claim = claims.take("run")
    assert claim is not None
    first = claims.path("run", 0).stat().st_mtime_ns
    wait_until(lambda: claims.path("run", 0).stat().st_mtime_ns > first)
    claims.path("run", 1).touch()
    wait_until(lambda: claim.lost)


def wait_until(true: object, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_claim_that_was_never_written_grows_old(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.path("run", 0).touch()
    assert claims.take("run") is None
    pass_time(claims, 3600)
    assert claims.take("run") is not None


@pytest.mark.parametrize("garbage", [b"\xff\xfe\x00", b"[" * 100_000, b"[]", b"null", b'{"pid": {}}'], ids=repr)
def test_a_claim_of_garbage_is_held_by_nobody_known_and_grows_old(tmp_path: Path, garbage: bytes) -> None:
    claims = Claims(tmp_path)
    claims.path("run", 0).write_bytes(garbage)
    assert claims.take("run") is None
    pass_time(claims, 3600)
    assert claims.take("run") is not None


@pytest.mark.parametrize("dead", [False, True], ids=["fresh", "taken over"])
def test_of_many_who_try_at_once_one_succeeds(tmp_path: Path, dead: bool) -> None:
    for number in range(10):
        claims, key = Claims(tmp_path), f"run{number}"
        if dead:
            assert claims.take(key) is not None
            silence(claims, key)
        barrier, taken = threading.Barrier(8), list[Claim]()

        def attempt(key: str = key, barrier: threading.Barrier = barrier, taken: list[Claim] = taken) -> None:
            mine = Claims(tmp_path)
            if mine.holder(key) is not None:
                pass_time(mine, 3600)
            barrier.wait()
            claim = mine.take(key)
            if claim is not None:
                taken.append(claim)

        threads = [threading.Thread(target=attempt) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        taken[0].check()
        taken[0].finish()


# ----------------------------------------------------------------------------------------------------- clocks that step
@pytest.mark.parametrize("hours", [-24 * 365, -1, 1, 24 * 365], ids=lambda hours: f"{hours:+} h")
def test_a_live_process_keeps_its_run_whatever_the_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    claims, step = Claims(tmp_path), 3600 * hours
    claim = claims.take("run")
    assert claim is not None
    beat(claims, "run", time.time() - step)  # to whoever has the new time, the last heartbeat is as old as the step
    created, now = psutil.Process.create_time, time.time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + step)
    monkeypatch.setattr(time, "time", lambda: now() + step)
    other = Claims(tmp_path)
    for _ in range(3):
        assert other.take("run") is None
        pass_time(other, 3600)
    claim.check()
    holder = other.holder("run")
    assert holder is not None
    assert (holder.alive, holder.certain, holder.fresh) == (True, True, True)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.floats(-1e8, 1e8), min_size=1, max_size=6), pause=st.floats(1, 0.9 * STALE_AFTER))
def test_a_heart_that_beats_on_another_machine_is_alive_whatever_time_it_beats_at(
    tmp_path_factory: pytest.TempPathFactory, steps: list[float], pause: float
) -> None:
    claims = Claims(tmp_path_factory.mktemp("claims"))
    claims.path("run", 0).write_text(json.dumps({**identity(), "scope": "elsewhere", "token": "t", "since": 0.0}))
    clock = 1.7e9
    for number, step in enumerate(steps):
        clock = max(1.0, round(clock + step))
        beat(claims, "run", clock + number / 1000)  # forth or back, and never twice the same
        assert claims.take("run") is None
        pass_time(claims, pause)
    holder = claims.holder("run")
    assert holder is not None
    assert holder.certain == (len(steps) > 1)
    pass_time(claims, 2 * STALE_AFTER)
    heir = claims.take("run")
    assert heir is not None
    heir.finish()


def test_an_old_heartbeat_says_nothing_to_whoever_looks_for_the_first_time(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.take("run") is not None
    rewrite(claims, "run", scope="another machine")
    beat(claims, "run", time.time() - 3600)
    holder = claims.holder("run")
    assert holder is not None
    assert (holder.alive, holder.certain, holder.fresh) == (True, False, False)


def test_a_number_that_was_given_out_again_belongs_to_another_process(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    assert claims.take("run") is not None
    rewrite(claims, "run", start="1 ticks after boot")
    assert claims.take("run") is not None


@pytest.mark.parametrize(
    "changes",
    [{"scope": "the same name, another boot"}, {"start": None, "born": 1.0}, {"start": 5}, {"pid": -1}, {"pid": 2**70}],
    ids=repr,
)
def test_of_other_boots_and_of_claims_in_the_old_form_nothing_is_known(changes: dict[str, Any]) -> None:
    assert life_of({**identity(), **changes}) == "unknown"


def test_a_process_that_has_ended_is_dead_before_its_parent_has_noticed() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    card = {**identity(), "pid": child, "start": "whenever"}
    wait_until(lambda: start_of(child) is None)
    assert life_of(card) == "dead"
    os.waitpid(child, 0)
    assert life_of(card) == "dead"


def test_a_process_that_is_stopped_is_alive(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    child = os.fork()
    if child == 0:
        claims.take("run")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    claims.holder("run")
    pass_time(claims, 3600)
    assert claims.take("run") is None
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert claims.take("run") is not None


def test_a_process_that_may_not_be_looked_at_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = identity()
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").touch()
    monkeypatch.setattr(owners, "PROC", tmp_path)  # as where /proc is mounted with hidepid=2
    assert life_of(card) == "unknown"
    assert life_of({**card, "pid": 2**22 + 1}) == "dead", "there is no such number at all"


def test_without_proc_the_start_of_a_process_is_what_the_system_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "PROC", tmp_path / "none")
    started = start_of(os.getpid())
    assert started is not None
    assert started.startswith("at ")
    assert start_of(2**22 + 1) is None
    card = {**identity(), "start": started}
    assert life_of(card) == "alive"
    assert life_of({**card, "start": "at 1.0"}) == "dead"


def test_names_of_processes_do_not_confuse_their_start() -> None:
    stat = b"7 (a) S 1) b) R 1 " + b"0 " * 17 + b"4711 0"
    fields = owners._fields(stat)
    assert (fields[0], fields[owners.START_FIELD - owners.STATE_FIELD]) == ("R", "4711")
