"""A process that computes what the page asks: `python -m clearhead.explore.process SETTINGS`, started by the desk.

It reads requests as lines on standard input and writes events on standard output, one request at a time. A thread goes
on reading, so that a request that nobody waits for any more can be stopped: `Run.step` is where that happens."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import re
import sys
import threading
import traceback
from pathlib import Path
from typing import IO, Any

from clearhead.errors import ClearheadError, ParseError
from clearhead.explore.run import GivenUp, Run, Shelf, check

_NO_MEMORY = "can't allocate memory"  # torch's words for it on a CPU


def main() -> None:
    settings = json.loads(sys.argv[1])
    # What a library prints must not end up among the events.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(settings.get("threads", 1))
    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    stop = threading.Event()
    # Between any two modules of a model is a good moment to stop.
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: check(stop))
    threading.Thread(target=_listen, args=(sys.stdin.buffer, jobs, stop), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        shelf = Shelf(settings["models"], settings["limits"], **settings.get("placed", {}))
        shelf.warm()
        gc.collect()
        gc.freeze()  # what was loaded stays: looking through it again and again would cost a keystroke its time
        bound_memory(settings["limits"]["memory"])
        while (job := jobs.get()) is not None:
            answer(job, shelf, out, stop)


def _listen(given: IO[bytes], jobs: queue.SimpleQueue[dict[str, Any] | None], stop: threading.Event) -> None:
    for line in given:
        told = json.loads(line)
        if "stop" in told:
            stop.set()
        else:
            stop.clear()  # the desk sends the next only when this one is over
            jobs.put(told)
    stop.set()
    jobs.put(None)


def bound_memory(more: int) -> None:
    """At most so many bytes beyond what is taken now, so that a run fails instead of the machine."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    status = Path("/proc/self/status")
    taken = re.search(r"VmData:\s+(\d+) kB", status.read_text("ascii")) if status.exists() else None
    if taken is not None:
        resource.setrlimit(resource.RLIMIT_DATA, ((int(taken[1]) << 10) + more, resource.RLIM_INFINITY))


def answer(job: dict[str, Any], shelf: Shelf, out: IO[bytes], stop: threading.Event) -> None:
    """Run one request; whatever happens, its last event is "done" or "error"."""

    def send(kind: str, value: Any) -> None:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        out.write(f"{kind} {len(text)}\n".encode() + text)
        out.flush()

    try:
        send("done", shelf.action(job["action"])(job["ask"], Run(shelf, send, stop)))
    except GivenUp:
        send("error", {"error": "stopped: nobody waits for it any more"})
    except ClearheadError as error:
        column = {"column": error.column} if isinstance(error, ParseError) else {}
        send("error", {"error": str(error).partition("\n")[0], **column})
    except Exception as error:
        if isinstance(error, MemoryError) or _NO_MEMORY in str(error):
            room = f"{shelf.limits.memory / (1 << 30):g} GiB"
            why = f"this needs more than the {room} that a run may take: ask for less"
        else:
            traceback.print_exc()  # on the server's own terminal, for whoever runs it
            why = f"this run failed ({type(error).__name__}); the terminal of the server says where"
        send("error", {"error": why})


if __name__ == "__main__":
    main()
