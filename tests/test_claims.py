"""Claims: one owner per run, whoever is killed, suspended or on another machine."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from attemper.lab.errors import LostClaimError
from attemper.lab.study.claims import Claim, Claims


def silence(claims: Claims, key: str, scope: str = "another machine") -> None:
    """Make a claim look like one of another machine that has not been heard of for an hour."""
    generation = claims.highest(key)
    assert generation is not None
    path = claims.path(key, generation)
    path.write_text(json.dumps({**json.loads(path.read_text()), "scope": scope}))
    os.utime(path, (time.time() - 3600,) * 2)


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
    path = claims.path("run", 0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "scope": "another machine", "pid": 2**22}))
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
    os.utime(claims.path("run", 0), (time.time() - 3600,) * 2)
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
