"""The desk: processes that die, hang or garble are replaced, and work that nobody waits for is stopped."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from clearhead.explore.desk import BusyError, Desk, Limits

STUB = (sys.executable, "-S", str(Path(__file__).parent / "stub.py"))


def desk_of(**limits):
    desk = Desk([], Limits(**{"runs": 1, "seconds": 3600.0, **limits}))
    desk.command = STUB
    return desk


async def events(job):
    found = []
    while not found or found[-1][0] not in ("done", "error"):
        kind, payload = await job.events.get()
        found.append((kind, json.loads(payload)))
    return found


def working(limits, act):
    async def run():
        desk = desk_of(**limits)
        desk.open()
        try:
            return await act(desk)
        finally:
            await desk.close()
            assert desk.pids == []

    return asyncio.run(run())


def test_a_job_and_its_events():
    async def act(desk):
        return await events(desk.put("x", {"a": 1}))

    found = working({}, act)
    assert [kind for kind, _ in found] == ["part", "done"]
    assert found[-1][1]["got"] == {"a": 1}


@pytest.mark.parametrize("how", ["die", "garble"])
def test_a_process_that_breaks_is_replaced(how):
    async def act(desk):
        ((_, before),) = [e for e in await events(desk.put("x", {"a": 1})) if e[0] == "done"]
        broken = await events(desk.put("x", {"do": how}))
        ((_, after),) = [e for e in await events(desk.put("x", {"a": 2})) if e[0] == "done"]
        return before, broken, after

    before, broken, after = working({}, act)
    assert "another takes its place" in broken[-1][1]["error"]
    assert after["got"] == {"a": 2}
    assert after["pid"] != before["pid"]


def test_a_process_that_hangs_is_stopped_at_its_limit():
    async def act(desk):
        hung = await events(desk.put("x", {"do": "hang"}))
        return hung, await events(desk.put("x", {"a": 2}))

    hung, after = working({"seconds": 0.05}, lambda desk: act(desk))
    assert "took longer than 0.05 seconds" in hung[-1][1]["error"]
    assert after[-1][0] in ("done", "error")  # its own time may be up before the new process has begun


def test_work_that_nobody_waits_for_is_stopped_or_never_begun():
    async def act(desk):
        first, second, third = (desk.put("x", ask) for ask in ({"do": "wait"}, {"do": "hang"}, {"a": 3}))
        kind, _ = await first.events.get()
        assert kind == "progress"
        second.given_up.set()  # it has not begun
        first.given_up.set()  # it is told to stop
        ended = await first.events.get()
        return ended, await events(third), second.events.empty()

    ended, third, untouched = working({}, act)
    assert ended == ("error", b'{"error": "stopped"}')
    assert third[-1][1]["got"] == {"a": 3}
    assert untouched


def test_only_so_many_wait():
    async def act(desk):
        jobs = [desk.put("x", {"a": i}) for i in range(3)]
        with pytest.raises(BusyError, match="3 requests are waiting"):
            desk.put("x", {"a": 4})
        return [await events(job) for job in jobs]

    assert [found[-1][1]["got"]["a"] for found in working({"waiting": 3}, act)] == [0, 1, 2]
