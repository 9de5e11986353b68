"""The processes that compute, and the queue before them.

A process runs one request at a time. It is told when the client has gone, and stops at the next good moment; it is
killed, and another started, when it takes too long or does not stop. The server itself never computes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from clearhead.errors import ClearheadError

_GRACE = 5.0  # seconds that a process has to stop after it was told to
_MOST_BYTES = 1 << 27  # of one answer


@dataclass(frozen=True)
class Limits:
    """What one server gives at most. Each has its own answer when it is reached."""

    runs: int = 2  # at the same time
    waiting: int = 64  # requests that may wait for a process
    seconds: float = 60.0  # of one run
    memory: int = 4 << 30  # bytes that a process may take beyond its models
    body: int = 1 << 18  # bytes of a request
    body_seconds: float = 10.0  # in which they have to come
    tokens: int = 4096


class BusyError(ClearheadError, RuntimeError):
    """As many requests wait as may."""


@dataclass(eq=False)
class Job:
    """One request on its way: `events` are pairs of a kind and a JSON text, the last of kind "done" or "error"."""

    action: str
    ask: dict[str, Any]
    events: asyncio.Queue[tuple[str, bytes]] = field(default_factory=asyncio.Queue)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class Desk:
    """Takes jobs, and gives each to the next process that is free."""

    command: Sequence[str] = (sys.executable, "-P", "-m", "clearhead.explore.process")

    def __init__(self, models: Sequence[str], limits: Limits | None = None, **settings: Any) -> None:
        self.limits = limits or Limits()
        self._settings = json.dumps({"models": list(models), "limits": asdict(self.limits), **settings})
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._clerks: list[asyncio.Task[None]] = []
        self._processes: set[Process] = set()

    def open(self) -> None:
        """Start the processes; they load their models while the first page is being read."""
        self._clerks = [asyncio.create_task(self._clerk()) for _ in range(self.limits.runs)]

    async def close(self) -> None:
        for clerk in self._clerks:
            clerk.cancel()
        await asyncio.gather(*self._clerks, return_exceptions=True)
        for process in list(self._processes):
            await self._end(process)

    def put(self, action: str, ask: dict[str, Any]) -> Job:
        """Queue a request; a `BusyError` where too many wait already."""
        if self._queue.qsize() >= self.limits.waiting:
            raise BusyError(
                f"{self._queue.qsize()} requests are waiting, and no more may; try again in a moment, or raise --runs"
            )
        job = Job(action, ask)
        self._queue.put_nowait(job)
        return job

    @property
    def pids(self) -> list[int]:
        """Of the processes that are alive."""
        return [process.pid for process in self._processes if process.returncode is None]

    # ------------------------------------------------------------------ one process

    async def _clerk(self) -> None:
        process = await self._begin()
        while True:
            job = await self._queue.get()
            if job.given_up.is_set():
                continue
            if process.returncode is not None:  # it died while nobody asked anything of it
                process = await self._anew(process)
            try:
                is_well = await self._serve(process, job)
            except (OSError, ValueError, asyncio.IncompleteReadError):
                is_well = False
                why = "the process that computed this died, and another takes its place: try again, or ask for less"
                job.events.put_nowait(_error(why))
            if not is_well:
                process = await self._anew(process)

    async def _begin(self) -> Process:
        process = await asyncio.create_subprocess_exec(*self.command, self._settings, stdin=PIPE, stdout=PIPE)
        self._processes.add(process)
        return process

    async def _end(self, process: Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        self._processes.discard(process)

    async def _anew(self, process: Process) -> Process:
        await self._end(process)
        return await self._begin()

    async def _serve(self, process: Process, job: Job) -> bool:
        """Run one job, pass on its events, and say whether the process can take another."""
        await _tell(process, {"action": job.action, "ask": job.ask})
        clock = asyncio.get_running_loop().time
        deadline, is_told = clock() + self.limits.seconds, False
        gone = asyncio.create_task(job.given_up.wait())
        read = asyncio.create_task(_frame(process))
        try:
            while True:
                waited, left = {read} if is_told else {read, gone}, max(0.0, deadline - clock())
                done, _ = await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if read in done:
                    job.events.put_nowait(read.result())
                    if read.result()[0] in ("done", "error"):
                        return True
                    read = asyncio.create_task(_frame(process))
                elif gone in done:
                    is_told, deadline = True, min(deadline, clock() + _GRACE)
                    await _tell(process, {"stop": True})
                else:
                    why = f"this took longer than {self.limits.seconds:g} seconds and was stopped: ask for less"
                    job.events.put_nowait(_error(why))
                    return False
        finally:
            gone.cancel()
            read.cancel()


def _error(why: str) -> tuple[str, bytes]:
    return "error", json.dumps({"error": why}).encode()


async def _tell(process: Process, what: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    await process.stdin.drain()


async def _frame(process: Process) -> tuple[str, bytes]:
    """One event: a line with its kind and its length, then so many bytes."""
    assert process.stdout is not None
    kind, length = (await process.stdout.readuntil(b"\n")).decode("ascii").split()
    if int(length) > _MOST_BYTES:
        raise ValueError(f"an answer of {int(length):,} bytes")
    return kind, await process.stdout.readexactly(int(length))
