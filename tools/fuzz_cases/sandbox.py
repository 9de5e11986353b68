"""Run a function in a forked child process with a budget of CPU time and memory.

A case that hangs or allocates without bound must not stop the fuzzer. CPU time is limited instead of elapsed time so
that a busy machine changes no verdict; elapsed time only ends a child that sleeps forever.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Budget:
    """CPU seconds and bytes of memory, in addition to those of the parent process, that one case may use."""

    cpu_seconds: int = 20
    memory: int = 1 << 30

    @property
    def wall_seconds(self) -> float:
        """Elapsed time after which a child is killed: many times the CPU time, because other processes compete."""
        return 20.0 * self.cpu_seconds


class OverBudgetError(Exception):
    """A case used more CPU time or memory than its budget."""


def run_limited(function: Callable[[], Any], budget: Budget) -> Any:
    """Return the JSON-serializable result of `function()`, computed in a child process.

    Raises:
        OverBudgetError: The child exceeded the budget or was killed.
    """
    _release_free_memory()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _run_child(function, budget, write_end)  # does not return
    os.close(write_end)
    try:
        output, timed_out = _read_all(read_end, budget.wall_seconds)
    finally:
        os.close(read_end)
        if not _has_exited(pid):
            _kill(pid)
    _, status, usage = os.wait4(pid, 0)
    if timed_out:
        raise OverBudgetError(f"ran for more than {budget.wall_seconds:.0f} s without using its CPU time")
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number in (signal.SIGXCPU, signal.SIGKILL):
            raise OverBudgetError(f"used more than {budget.cpu_seconds} s of CPU time")
        raise OverBudgetError(f"was killed by {signal.Signals(number).name}")
    if usage.ru_utime + usage.ru_stime > budget.cpu_seconds:
        raise OverBudgetError(f"used more than {budget.cpu_seconds} s of CPU time")
    document: dict[str, Any] = json.loads(output) if output else {"growth": 0, "error": "the process exited early"}
    if document["growth"] > budget.memory:
        raise OverBudgetError(f"used more than {budget.memory >> 20} MiB of memory")
    if "error" in document:
        raise OverBudgetError(document["error"])
    return document["result"]


def _run_child(function: Callable[[], Any], budget: Budget, write_end: int) -> None:
    """Set the limits, compute, write one JSON document and exit without cleaning up the parent's resources."""
    faulthandler.disable()  # a crash is reported by its signal
    before = _status("VmRSS")
    # Address space is more than memory: leave room for files that are mapped and for stacks of threads.
    address_space = _status("VmSize") + 2 * budget.memory
    resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CPU, (budget.cpu_seconds, budget.cpu_seconds + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    document: dict[str, Any]
    try:
        document = {"result": function()}
    except BaseException as error:
        document = {"error": f"ended with {type(error).__name__}: {error}"[:1000]}
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    document["growth"] = max(0, _status("VmHWM") - before)
    content = json.dumps(document).encode()
    while content:
        content = content[os.write(write_end, content) :]
    os._exit(0)


def _release_free_memory() -> None:
    """Return freed memory of this process to the system, because a child would reuse it without growth."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # a function of glibc
    if malloc_trim is not None:
        malloc_trim(0)


def _status(field: str) -> int:
    """Return a memory field of this process in bytes; VmHWM is the peak of VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _read_all(read_end: int, seconds: float) -> tuple[bytes, bool]:
    """Read until the other end closes or the time is over; return the content and whether time ran out."""
    chunks: list[bytes] = []
    end = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([read_end], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return b"".join(chunks), True
        chunk = os.read(read_end, 1 << 16)
        if not chunk:
            return b"".join(chunks), False
        chunks.append(chunk)


def _has_exited(pid: int) -> bool:
    """Return whether a child has ended, leaving its status for `wait4`."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(pid: int) -> None:
    """Give a child that closed its pipe a moment to exit, then kill it."""
    for _ in range(50):
        if _has_exited(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
