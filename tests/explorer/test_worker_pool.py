"""The worker pool: workers that die, hang or write garbage are replaced, and cancelled requests are stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from clearhead.explorer.worker_pool import BusyError, ServerLimits, WorkerPool

STUB = (sys.executable, "-S", str(Path(__file__).parent / "stub.py"))


def make_pool(limits, settings):
    pool = WorkerPool([], ServerLimits(**{"workers": 1, "timeout": 3600.0, **limits}), **settings)
    pool.command = STUB
    return pool


async def read_events(job):
    events = []
    while not events or events[-1][0] not in ("done", "error"):
        kind, payload = await job.events.get()
        events.append((kind, json.loads(payload)))
    return events


def run_with_pool(scenario, limits=None, **settings):
    """Run `scenario(pool)` with an open pool, and check that no process outlives it."""

    async def run():
        pool = make_pool(limits or {}, settings)
        pool.open()
        try:
            return await scenario(pool)
        finally:
            await pool.close()
            assert pool.pids == []

    return asyncio.run(run())


def test_submit_returns_the_events_of_a_job():
    async def scenario(pool):
        return await read_events(pool.submit("x", {"a": 1}))

    events = run_with_pool(scenario)
    assert [kind for kind, _ in events] == ["part", "done"]
    assert events[-1][1]["request"] == {"a": 1}


@pytest.mark.parametrize("failure", ["die", "garble"])
def test_pool_replaces_a_worker_that_breaks(failure):
    async def scenario(pool):
        ((_, before),) = [e for e in await read_events(pool.submit("x", {"a": 1})) if e[0] == "done"]
        broken = await read_events(pool.submit("x", {"do": failure}))
        ((_, after),) = [e for e in await read_events(pool.submit("x", {"a": 2})) if e[0] == "done"]
        return before, broken, after

    before, broken, after = run_with_pool(scenario)
    assert "is being replaced" in broken[-1][1]["error"]
    assert after["request"] == {"a": 2}
    assert after["pid"] != before["pid"]


def test_time_limit_excludes_the_start_of_a_worker():
    """A worker that takes longer to start than the time limit answers every request, also after it was replaced."""

    async def scenario(pool):
        before = [await read_events(pool.submit("x", {"a": i})) for i in range(2)]
        hung = await read_events(pool.submit("x", {"do": "hang"}))
        after = [await read_events(pool.submit("x", {"a": i})) for i in range(3)]
        return before, hung, after

    before, hung, after = run_with_pool(scenario, {"timeout": 1.0}, start_seconds=1.5)
    assert [events[-1][0] for events in before] == ["done"] * 2
    assert "exceeded the limit of 1 seconds" in hung[-1][1]["error"]
    assert [events[-1][0] for events in after] == ["done"] * 3


def test_pool_replaces_an_idle_worker_that_was_killed():
    async def scenario(pool):
        first = await read_events(pool.submit("x", {"a": 1}))
        os.kill(first[-1][1]["pid"], signal.SIGKILL)
        while first[-1][1]["pid"] in pool.pids:
            await asyncio.sleep(0)
        return first, await read_events(pool.submit("x", {"a": 2}))

    first, second = run_with_pool(scenario)
    assert second[-1][0] == "done"
    assert second[-1][1]["pid"] != first[-1][1]["pid"]


def test_requests_fail_if_no_worker_starts(tmp_path):
    log = tmp_path / "starts"

    async def scenario(pool):
        return await read_events(pool.submit("x", {"a": 1}))

    limits = {"restart_delay": 0.001}
    events = run_with_pool(scenario, limits, fails_to_start=True, start_log=str(log))
    assert "no worker could be started" in events[-1][1]["error"]
    assert len(log.read_text().splitlines()) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_pool_whose_workers_never_start_stops_trying_and_reports_it_once(tmp_path, capsys, workers):
    log = tmp_path / "starts"

    async def scenario(pool):
        first = await read_events(pool.submit("x", {"a": 1}))
        async with asyncio.timeout(60):  # reached only if the pool keeps trying
            while not pool.has_failed:
                await asyncio.sleep(0.001)
        return first, await read_events(pool.submit("x", {"a": 2}))  # fails at once

    limits = {"restart_delay": 0.001, "workers": workers}
    answers = run_with_pool(scenario, limits, fails_to_start=True, start_log=str(log))
    assert ["no worker could be started" in events[-1][1]["error"] for events in answers] == [True, True]
    assert 3 <= len(log.read_text().splitlines()) <= 2 + workers
    assert capsys.readouterr().err.count("no worker could be started") == 1


def test_pool_that_once_started_keeps_trying(tmp_path):
    """A worker that is replaced may fail to start for a while, for example without memory."""
    log, blocked = tmp_path / "starts", tmp_path / "blocked"

    async def scenario(pool):
        first = await read_events(pool.submit("x", {"a": 1}))
        blocked.touch()
        await read_events(pool.submit("x", {"do": "die"}))
        refused = await read_events(pool.submit("x", {"a": 2}))
        blocked.unlink()
        return first, refused, await read_events(pool.submit("x", {"a": 3}))

    settings = {"start_log": str(log), "fails_while": str(blocked)}
    first, refused, last = run_with_pool(scenario, {"restart_delay": 0.001, "max_restart_delay": 0.05}, **settings)
    assert "no worker could be started" in refused[-1][1]["error"]
    assert [events[-1][0] for events in (first, last)] == ["done", "done"]


def test_start_timeout_replaces_a_worker_that_does_not_start():
    async def scenario(pool):
        return await read_events(pool.submit("x", {"a": 1}))

    limits = {"restart_delay": 0.001, "start_timeout": 0.05}
    assert "no worker could be started" in run_with_pool(scenario, limits, start_seconds=3600.0)[-1][1]["error"]


def test_cancelled_requests_are_stopped_or_never_started():
    async def scenario(pool):
        first, second, third = (pool.submit("x", request) for request in ({"do": "wait"}, {"do": "hang"}, {"a": 3}))
        kind, _ = await first.events.get()
        assert kind == "progress"
        second.cancelled.set()  # not started yet
        first.cancelled.set()  # running
        last = await first.events.get()
        return last, await read_events(third), second.events.empty()

    last, third, is_untouched = run_with_pool(scenario)
    assert last == ("error", b'{"error": "stopped"}')
    assert third[-1][1]["request"] == {"a": 3}
    assert is_untouched


def test_submit_raises_when_the_queue_is_full():
    async def scenario(pool):
        jobs = [pool.submit("x", {"a": i}) for i in range(3)]
        with pytest.raises(BusyError, match="3 requests are waiting"):
            pool.submit("x", {"a": 4})
        return [await read_events(job) for job in jobs]

    events = run_with_pool(scenario, {"queue_size": 3})
    assert [job[-1][1]["request"]["a"] for job in events] == [0, 1, 2]
