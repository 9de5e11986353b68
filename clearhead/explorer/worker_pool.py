"""The pool of worker processes that run requests, and the queue in front of it.

A worker runs one request at a time. If the client of a request disconnects, its worker is asked to stop. A worker that
exceeds the time limit or does not stop is killed and replaced. The time limit of a request starts when a ready worker
receives it. Starting a worker, which imports torch and loads the models, has a separate and longer limit. If no worker
has ever started after a few attempts, as with a broken installation, the pool stops trying and every request fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from clearhead._core.json_types import JSONObject
from clearhead.errors import ClearheadError

_STOP_SECONDS = 5.0  # before a worker that was asked to stop is killed
_MAX_EVENT_BYTES = 1 << 27
_FAILED_STARTS = 3  # in a row, after which waiting requests are answered with an error
_NO_WORKER = "no worker could be started; the server's terminal shows the reason"
_READ_ERRORS = (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Resource limits of one server.

    Attributes:
        workers: Number of worker processes, and so of requests that run at the same time.
        queue_size: Number of requests that may wait for a worker.
        timeout: Seconds that a request may run.
        start_timeout: Seconds that a worker may take to start and load its models.
        restart_delay: Seconds before the second attempt to start a worker; it doubles with every failure.
        max_restart_delay: Upper bound of that delay.
        memory: Bytes that a worker may allocate in addition to its models.
        max_body_bytes: Size of a request's body.
        body_timeout: Seconds within which the body must arrive.
        max_tokens: Length of an input in tokens.
    """

    workers: int = 2
    queue_size: int = 64
    timeout: float = 60.0
    start_timeout: float = 600.0
    restart_delay: float = 0.5
    max_restart_delay: float = 30.0
    memory: int = 4 << 30
    max_body_bytes: int = 1 << 18
    body_timeout: float = 10.0
    max_tokens: int = 4096


class BusyError(ClearheadError, RuntimeError):
    """The queue of requests is full."""


@dataclass(eq=False)
class Job:
    """A request in the pool. `events` are pairs of a kind and a JSON text; the last kind is "done" or "error"."""

    action: str
    request: JSONObject
    events: asyncio.Queue[tuple[str, bytes]] = field(default_factory=asyncio.Queue)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerPool:
    """Queues requests and passes each to the next free worker process.

    Args:
        models: Names of the models that every worker loads.
        limits: Resource limits; by default `ServerLimits()`.
        **settings: Further settings of the workers, such as `threads`.

    Example:
        >>> pool = WorkerPool(["sort-dedup"])
        >>> pool.open()  # inside a running event loop
        >>> job = pool.submit("mask", {"expression": "causal()"})
        >>> kind, payload = await job.events.get()
    """

    command: Sequence[str] = (sys.executable, "-P", "-m", "clearhead.explorer.worker")

    def __init__(self, models: Sequence[str], limits: ServerLimits | None = None, **settings: object) -> None:
        self.limits = limits or ServerLimits()
        self._settings = json.dumps({"models": list(models), "limits": asdict(self.limits), **settings})
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: set[Process] = set()
        self._n_ready = 0
        self._n_failures = 0  # failed starts in a row, of all workers
        self._n_trying = 0  # workers that run or that are started again after a failure
        self._has_started = False  # whether any worker was ever ready

    def open(self) -> None:
        """Start the workers; they load their models while the browser loads the page."""
        self._n_trying = self.limits.workers
        self._tasks = [asyncio.create_task(self._worker()) for _ in range(self.limits.workers)]

    async def close(self) -> None:
        """Stop all workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in list(self._processes):
            await self._kill(process)

    def submit(self, action: str, request: JSONObject) -> Job:
        """Queue a request.

        Args:
            action: Name of the action.
            request: Its JSON object.

        Returns:
            The job, whose events arrive while it runs.

        Raises:
            BusyError: The queue is full.
        """
        n_waiting = self._queue.qsize()
        if n_waiting >= self.limits.queue_size:
            raise BusyError(f"the queue is full: {n_waiting} requests are waiting; retry later or raise --workers")
        job = Job(action, request)
        self._queue.put_nowait(job)
        if self.has_failed:
            self._fail_waiting(None)
        return job

    @property
    def has_failed(self) -> bool:
        """Whether no worker was ever started and the pool has stopped trying."""
        return bool(self._tasks) and self._n_trying == 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [process.pid for process in self._processes if process.returncode is None]

    # ------------------------------------------------------------------ one worker

    async def _worker(self) -> None:
        """Keep one worker process running and pass it jobs."""
        job: Job | None = None
        while True:
            process = await self._spawn()
            if not await self._is_started(process):
                await self._kill(process)
                self._n_failures += 1
                if self._n_failures >= _FAILED_STARTS and self._n_ready == 0:
                    self._fail_waiting(job)
                    job = None
                    if not self._has_started:
                        return self._give_up()
                delay = self.limits.restart_delay * 2.0 ** min(self._n_failures - 1, 30)
                await asyncio.sleep(min(delay, self.limits.max_restart_delay))
                continue
            self._n_failures = 0
            self._has_started = True
            self._n_ready += 1
            try:
                job = await self._run_jobs(process, job)
            finally:
                self._n_ready -= 1
            await self._kill(process)

    def _give_up(self) -> None:
        """End one worker's attempts to start; the last worker that gives up reports it in the terminal."""
        self._n_trying -= 1
        if self.has_failed:
            self._fail_waiting(None)
            message = f"no worker could be started in {self._n_failures} attempts, for the reason above"
            print(f"{message}; press Ctrl-C, correct it, and start again", file=sys.stderr, flush=True)

    async def _spawn(self) -> Process:
        """Start a worker process."""
        process = await asyncio.create_subprocess_exec(*self.command, self._settings, stdin=PIPE, stdout=PIPE)
        self._processes.add(process)
        return process

    async def _kill(self, process: Process) -> None:
        """Kill a worker process and wait for its end."""
        if process.returncode is None:
            # Not process.kill(): it polls the child, and asyncio's watcher would then miss its exit status.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        self._processes.discard(process)

    async def _is_started(self, process: Process) -> bool:
        """Wait for the event "ready"; return whether it arrived in time."""
        try:
            async with asyncio.timeout(self.limits.start_timeout):
                kind, _ = await _read_event(process)
        except (*_READ_ERRORS, TimeoutError):
            return False
        return kind == "ready"

    def _fail_waiting(self, job: Job | None) -> None:
        """Answer all waiting jobs with an error, because no worker starts."""
        jobs = [] if job is None else [job]
        while not self._queue.empty():
            jobs.append(self._queue.get_nowait())
        for waiting in jobs:
            waiting.events.put_nowait(_error(_NO_WORKER))

    async def _run_jobs(self, process: Process, job: Job | None) -> Job | None:
        """Run `job` and then those of the queue until the worker has to be replaced; return a job not yet started."""
        ended = asyncio.create_task(process.wait())
        try:
            while True:
                if job is None:
                    job = await self._next_job(ended)
                if job is None or ended.done():
                    return job
                if not job.cancelled.is_set():
                    try:
                        is_reusable = await self._run(process, job)
                    except _READ_ERRORS:
                        is_reusable = False
                        message = "the worker process died and is being replaced; retry, or reduce the request"
                        job.events.put_nowait(_error(message))
                    if not is_reusable:
                        return None
                job = None
        finally:
            ended.cancel()

    async def _next_job(self, ended: asyncio.Task[int]) -> Job | None:
        """Wait for a job; return None if the worker ends first."""
        getting = asyncio.create_task(self._queue.get())
        try:
            await asyncio.wait({getting, ended}, return_when=asyncio.FIRST_COMPLETED)
            return getting.result() if getting.done() else None
        finally:
            getting.cancel()

    async def _run(self, process: Process, job: Job) -> bool:
        """Run one job, forward its events, and return whether the worker can run another."""
        await _send(process, {"action": job.action, "request": job.request})
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.limits.timeout
        is_stopping = False
        cancelled = asyncio.create_task(job.cancelled.wait())
        reading = asyncio.create_task(_read_event(process))
        try:
            while True:
                pending = {reading} if is_stopping else {reading, cancelled}
                timeout = max(0.0, deadline - clock())
                done, _ = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                if reading in done:
                    event = reading.result()
                    job.events.put_nowait(event)
                    if event[0] in ("done", "error"):
                        return True
                    reading = asyncio.create_task(_read_event(process))
                elif cancelled in done:
                    is_stopping = True
                    deadline = min(deadline, clock() + _STOP_SECONDS)
                    await _send(process, {"stop": True})
                else:
                    message = f"the request exceeded the limit of {self.limits.timeout:g} seconds; reduce it"
                    job.events.put_nowait(_error(message))
                    return False
        finally:
            cancelled.cancel()
            reading.cancel()


def _error(message: str) -> tuple[str, bytes]:
    return "error", json.dumps({"error": message}).encode()


async def _send(process: Process, message: JSONObject) -> None:
    """Write one message, a line of JSON."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    await process.stdin.drain()


async def _read_event(process: Process) -> tuple[str, bytes]:
    """Read one event: a line with its kind and its length in bytes, then the JSON text."""
    assert process.stdout is not None
    kind, length = (await process.stdout.readuntil(b"\n")).decode("ascii").split()
    if int(length) > _MAX_EVENT_BYTES:
        raise ValueError(f"an event of {int(length):,} bytes; expected at most {_MAX_EVENT_BYTES:,}")
    return kind, await process.stdout.readexactly(int(length))
