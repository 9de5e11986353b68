"""The worker process of the explorer: `python -m clearhead.explorer.worker SETTINGS`, started by the pool.

It reads requests as lines of JSON from standard input and writes events to standard output, one request at a time. The
first event is "ready", after the models are loaded. A thread keeps reading while a request runs, so that it can be
cancelled at its next call of `RequestContext.checkpoint`."""

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
from typing import IO, NamedTuple

from clearhead._core.json_types import JSONObject
from clearhead.errors import ClearheadError
from clearhead.explorer.request import Cancelled, ModelRegistry, RequestContext, raise_if_set
from clearhead.explorer.worker_pool import ServerLimits


class ActionCall(NamedTuple):
    """An action to run, and the fields of its request."""

    action: str
    fields: JSONObject


_OUT_OF_MEMORY = "can't allocate memory"  # in the message of torch's CPU allocator
_MAX_MESSAGE_CHARS = 400  # of an error, which may quote the input
# Advice for Python programs, such as ", or use CharTokenizer(…, unknown=True), which reads it as <unk>".
_PYTHON_ADVICE = re.compile(r", or use [A-Z]\w+\(.*")


def main() -> None:
    """Run requests until standard input is closed."""
    settings = json.loads(sys.argv[1])
    # Libraries that print must not write among the events.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(settings.get("threads", 1))
    jobs: queue.SimpleQueue[ActionCall | None] = queue.SimpleQueue()
    stop = threading.Event()
    # A request can be cancelled before every module of a forward pass.
    torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: raise_if_set(stop))
    with contextlib.suppress(KeyboardInterrupt):
        limits = ServerLimits(**settings["limits"])
        registry = ModelRegistry(settings["models"], limits, **settings.get("device_kwargs", {}))
        registry.load_all()
        gc.collect()
        gc.freeze()  # scanning the loaded models again in every collection would delay requests
        limit_memory(limits.memory)
        write_event(out, "ready", {})
        threading.Thread(target=_read_messages, args=(sys.stdin.buffer, jobs, stop), daemon=True).start()
        while (job := jobs.get()) is not None:
            run_job(job, registry, out, stop)


def _read_messages(messages: IO[bytes], jobs: queue.SimpleQueue[ActionCall | None], stop: threading.Event) -> None:
    """Queue requests, and set `stop` when the running one is cancelled."""
    for line in messages:
        message = json.loads(line)
        if "stop" in message:
            stop.set()
        else:
            stop.clear()  # the pool sends a request only after the one before has ended
            jobs.put(ActionCall(message["action"], message["request"]))
    stop.set()
    jobs.put(None)


def limit_memory(n_bytes: int) -> None:
    """Limit further allocations of this process, so that a large request fails instead of the machine."""
    try:
        import resource
    except ImportError:  # not available on this system
        return
    status = Path("/proc/self/status")
    used = re.search(r"VmData:\s+(\d+) kB", status.read_text("ascii")) if status.exists() else None
    if used is not None:
        resource.setrlimit(resource.RLIMIT_DATA, ((int(used[1]) << 10) + n_bytes, resource.RLIM_INFINITY))


def write_event(out: IO[bytes], kind: str, value: object) -> None:
    """Write one event: a line with its kind and length, then its value as JSON."""
    # A lone surrogate, which may be part of a request, becomes an escape sequence of JSON.
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        errors="backslashreplace"
    )
    out.write(f"{kind} {len(text)}\n".encode() + text)
    out.flush()


def run_job(job: ActionCall, registry: ModelRegistry, out: IO[bytes], stop: threading.Event) -> None:
    """Run one request; its last event is always "done" or "error"."""

    def send(kind: str, value: object) -> None:
        write_event(out, kind, value)

    try:
        send("done", registry.run(job.action, job.fields, RequestContext(registry, send, stop)))
    except Cancelled:
        send("error", {"error": "cancelled: the client disconnected"})
    except ClearheadError as error:
        place = {name: value for name in ("field", "column") if (value := getattr(error, name, None))}
        send("error", {"error": _error_message(error), **place})
    except Exception as error:
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY in str(error):
            limit = f"{registry.limits.memory / (1 << 30):g} GiB"
            message = f"the request exceeded the memory limit of {limit}; reduce it"
        else:
            traceback.print_exc()  # the traceback belongs on the server's terminal, not in the browser
            message = f"the request failed ({type(error).__name__}); the server's terminal shows the traceback"
        send("error", {"error": message})


def _error_message(error: ClearheadError) -> str:
    """Return the first line of an error for the page: without advice for Python programs, and not too long."""
    message = _PYTHON_ADVICE.sub("", str(error).partition("\n")[0])
    return message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}…"


if __name__ == "__main__":
    main()
