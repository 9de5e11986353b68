"""Load test of the explorer: many clients at once, honest and malicious, on a busy machine whose workers are killed.

    python tools/load_test.py --clients 100 --seconds 120 --seed 1

Honest clients send requests that only they send and compare the result with their own computation, so that a result of
another client would be noticed. Malicious clients send a wrong host, origin, token, method or type, integers beyond 64
bits, bodies that are huge, slow or truncated, requests after rejected requests that never end, and bytes that are not
HTTP; or they open connections and never write or never read. Meanwhile workers are killed, and other processes keep all
processors busy. At the end the tool prints the number of outcomes by kind, the slowest honest request and the growth
of memory. It fails if a result was wrong, if an honest request exceeded its time budget or failed for another reason
than the death of its worker, or if memory grew beyond its budget.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clearhead import masks
from clearhead.explorer.request import ACTIONS

MAX_GROWTH = 64 << 20  # bytes that the server and its workers may grow together, once warm
WARM_SHARE = 0.25  # of the time, after which growth counts
TIME_BUDGET = 90.0  # seconds for an honest request: waiting for a worker and running, beyond those killed meanwhile
WORKER_DIED = "is being replaced"
HUGE = 10**40


@dataclass
class LoadTest:
    """The address under test, and the outcomes so far."""

    host: str
    port: int
    root: str
    rng: random.Random
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)
    kills: int = 0
    slowest: float = 0.0

    async def send(self, head: str, body: bytes = b"", *, wait: bool = True) -> tuple[int, bytes]:
        """Send a request on a new connection; return status and body, status 0 if the server closed the connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(head.encode() + body)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if not wait:
                return 0, b""
            with contextlib.suppress(ConnectionError):
                return _parse_response(await reader.read())
            return 0, b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def head(self, method: str, path: str, length: int | None = None, /, **headers: str) -> str:
        """Return the head of a request with these headers."""
        names = {"Host": f"{self.host}:{self.port}", "Connection": "close", **headers}
        if length is not None:
            names |= {"Content-Type": names.get("Content-Type", "application/json"), "Content-Length": str(length)}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items() if value)]
        return "\r\n".join(lines) + "\r\n\r\n"

    async def post(self, action: str, request: object) -> tuple[int, dict[str, Any]]:
        """Send a request to an action; return status and last event."""
        body = json.dumps(request).encode()
        status, text = await self.send(self.head("POST", f"{self.root}api/{action}", len(body)), body)
        lines = text.splitlines()
        return status, json.loads(lines[-1]) if lines and status == 200 else {}

    def expect(self, kind: str, status: int, allowed: tuple[int, ...], note: str = "") -> None:
        """Count an outcome, and record a failure if its status is not allowed."""
        self.outcomes[f"{kind}: {status}"] += 1
        if status not in allowed:
            self.failures.append(f"{kind} got {status}, expected {allowed} {note}")

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Record a failure if the block exceeds the time budget of an honest request."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.slowest = max(self.slowest, seconds)
        if seconds > TIME_BUDGET:
            self.failures.append(f"{kind} took {seconds:.1f} s, budget {TIME_BUDGET:g} s")

    def result(self, kind: str, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return the result of an honest request, or None if its worker was killed."""
        error = str(event.get("error", ""))
        if WORKER_DIED in error:
            self.outcomes[f"{kind}: worker died"] += 1
            return None
        result = event.get("done")
        if not isinstance(result, dict):
            self.failures.append(f"{kind} got {str(event)[:200]}")
            return None
        return result

    # ------------------------------------------------------------------ honest clients

    async def honest_mask(self) -> None:
        """Compare the count of a mask."""
        before, n = self.rng.randrange(0, 40), self.rng.randrange(3, 90)
        with self.timed("honest mask"):
            status, event = await self.post("mask", {"expression": f"causal() & window({before}, 0)", "queries": n})
        self.expect("honest mask", status, (200, 503))
        if status == 200 and (result := self.result("honest mask", event)) is not None:
            allowed = (masks.causal() & masks.window(before, 0)).count(n, n)
            if (result.get("allowed"), result.get("queries")) != (allowed, n):
                self.failures.append(f"a mask of window {before} and {n} tokens got {str(event)[:200]}")

    async def honest_letters(self) -> None:
        """Compare the tokens of a text."""
        letters = self.rng.choices(string.ascii_uppercase, k=self.rng.randrange(2, 12))
        with self.timed("honest letters"):
            status, event = await self.post("run", {"model": "sort-dedup", "text": " ".join(letters), "temperature": 0})
        self.expect("honest letters", status, (200, 503))
        result = self.result("honest letters", event) if status == 200 else None
        if result is not None and result.get("tokens") != [*letters, "<START>"]:
            self.failures.append(f"letters {letters} got {str(event)[:200]}")

    async def honest_analysis(self) -> None:
        """Explain a run in one of the ways of the panels, and check the shape of the answer."""
        letters = self.rng.choices(string.ascii_uppercase, k=self.rng.randrange(2, 6))
        request = {"model": "sort-dedup", "text": " ".join(letters)}
        other = {"model": "sort-dedup", "text": " ".join(reversed(letters))}
        action, body, field, length = self.rng.choice(
            [
                ("tour", request, "steps", 7),
                ("causal_map", {**request, "step": 0, "layers": ["blocks.1.attention"]}, "rows", 1),
                ("explain_token", {**request, "step": 0}, "parts", 8),
                ("logit_lens", request, "rows", 4),
                ("neurons", {**request, "block": 2}, "paths", 3),
                ("induction", {"model": "sort-dedup"}, "induction", 3),
                ("patching_grid", {**request, "step": 0, "other_text": other["text"]}, "grids", 1),
                ("compare_attention", {"first": request, "second": other}, "rows", 3),
                ("compare_streams", {"first": request, "second": other}, "stacks", 1),
            ]
        )
        kind = f"honest {action}"
        with self.timed(kind):
            status, event = await self.post(action, body)
        self.expect(kind, status, (200, 503))
        result = self.result(kind, event) if status == 200 else None
        if result is not None and len(result.get(field, ())) != length:
            self.failures.append(f"{kind} of {letters} got {str(event)[:200]}")

    async def honest_page(self) -> None:
        """Load the page, which must never be rejected."""
        with self.timed("honest page"):
            status, body = await self.send(self.head("GET", self.root))
        self.expect("honest page", status, (200,))
        if b"<title>clearhead</title>" not in body:
            self.failures.append(f"the page was {body[:80]!r}")

    async def impatient(self) -> None:
        """Disconnect while a long request runs."""
        body = json.dumps({"model": "sort-dedup", "text": "A " * 60, "width": 8, "max_new_tokens": 48}).encode()
        await self.send(self.head("POST", f"{self.root}api/beam_search", len(body)), body, wait=False)
        self.outcomes["impatient: disconnected"] += 1

    # ------------------------------------------------------------------ malicious clients

    async def wrong_names(self) -> None:
        """Send a wrong token, host or origin."""
        header = self.rng.choice(["Host", "Origin", "Sec-Fetch-Site", "token"])
        if header == "token":
            token = "".join(self.rng.choices(string.ascii_letters, k=24))
            status, _ = await self.send(self.head("GET", f"/{token}/"))
            self.expect("wrong token", status, (403,))
        elif header == "Host":
            status, _ = await self.send(self.head("GET", self.root, Host=self.rng.choice(["evil.example", "", "a:1"])))
            self.expect("wrong host", status, (400, 421))
        else:
            status, _ = await self.send(self.head("GET", self.root, **{header: "http://evil.example"}))
            self.expect("wrong origin", status, (403,))

    async def huge_body(self) -> None:
        """Send a body beyond the limit."""
        body = b'{"expression": "' + b"x" * self.rng.randrange(1 << 19, 1 << 22)
        status, _ = await self.send(self.head("POST", f"{self.root}api/mask", len(body)), body)
        self.expect("huge body", status, (413, 0))  # 0: disconnected while it was still writing

    async def send_slowly(self, kind: str, data: bytes) -> None:
        """Send this, and then a few bytes, slowly, until the server or this client closes the connection."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            for _ in range(self.rng.randrange(1, 30)):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(self.rng.random())
        writer.close()
        self.outcomes[f"{kind}: disconnected"] += 1

    async def slow_body(self) -> None:
        """Send a body slowly."""
        await self.send_slowly("slow body", self.head("POST", f"{self.root}api/mask", 4000).encode())

    async def slow_after_rejection(self) -> None:
        """Send a rejected request and then a second head, or the rest of its body, slowly."""
        host = self.rng.choice(["evil.example", f"{self.host}:{self.port}"])
        if self.rng.random() < 0.5:
            first = self.head("GET", "/wrong/", Host=host, Connection="keep-alive") + "GET /wrong/ HTTP/1.1\r\nX:"
        else:
            first = self.head("POST", "/wrong/", 99_999_999, Host=host, Connection="keep-alive")
        await self.send_slowly("slow after rejection", first.encode())

    async def half_open(self) -> None:
        """Open many connections at once that send nothing, or half a head, and never close them early."""
        writers = []
        for _ in range(self.rng.randrange(10, 60)):
            _, writer = await asyncio.open_connection(self.host, self.port)
            writer.write(self.rng.choice([b"", b"GET / HT"]))
            writers.append(writer)
        await asyncio.sleep(15 * self.rng.random())
        for writer in writers:
            writer.transport.abort()
        self.outcomes["half-open connections"] += len(writers)

    async def never_reads(self) -> None:
        """Request files without reading the answers."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1)
        head = self.head("GET", f"{self.root}report.js", Connection="keep-alive").encode()
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(head)
            await asyncio.sleep(5 * self.rng.random())
        writer.transport.abort()
        del reader
        self.outcomes["never reads: disconnected"] += 1

    async def truncated(self) -> None:
        """Close the connection in the middle of a request."""
        data = self.head("POST", f"{self.root}api/mask", 500).encode() + b'{"expression": "causal()"'
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(data[: self.rng.randrange(1, len(data))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort()
        self.outcomes["truncated: disconnected"] += 1

    async def wrong_types(self) -> None:
        """Send fields of wrong types and integers beyond 64 bits."""
        values: list[object] = [None, True, -1, 1e300, "", [], {}, [[[]]], {"a": {}}, "\x00", "𝕏" * 50]
        values += [HUGE, -HUGE, [HUGE]]
        action = self.rng.choice(sorted(ACTIONS))
        names = ["expression", "queries", "model", "text", "generated_ids", "vectors", "interventions", "pixels"]
        names += ["name", "seed", "type", "tokens", "memory", "temperature", "top_k", "width", "max_new_tokens"]
        names += ["query_offset", "perturbed_key", "target_position", "head", "step"]
        names += ["layers", "measure", "to", "other_text", "block", "first", "second", "samples", "source_ids", "ids"]
        request: dict[str, object] = (
            {"model": "sort-dedup", "text": "A B"} if action in ("run", "beam_search", "intervene") else {}
        )
        request |= {name: self.rng.choice(values) for name in self.rng.sample(names, k=self.rng.randrange(1, 5))}
        status, event = await self.post(action, request)
        self.expect("wrong types", status, (200, 503))
        if status == 200 and "the request failed" in str(event):
            self.failures.append(f"{action} {request} got {event}")

    async def not_http(self) -> None:
        """Send random bytes."""
        data = bytes(self.rng.randrange(256) for _ in range(self.rng.randrange(1, 300)))
        status, _ = await self.send("", data + b"\r\n\r\n")
        self.expect("not HTTP", status, (400, 0))

    async def wrong_method(self) -> None:
        """Send a method that the address does not allow."""
        method = self.rng.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
        status, _ = await self.send(self.head(method, f"{self.root}api/mask"))
        self.expect("wrong method", status, (405,))


def _parse_response(data: bytes) -> tuple[int, bytes]:
    """Return status and body of an HTTP response; status 0 if it is not complete."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return 0, b""
    if b"transfer-encoding: chunked" in head.lower():
        content = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            content, body = content + body[:length], body[length + 2 :]
        body = content
    return int(head.split()[1]), body


async def run_client(test: LoadTest, until: float) -> None:
    """Send honest and malicious requests until a time."""
    honest: list[Callable[[], Awaitable[None]]] = [
        test.honest_mask,
        test.honest_letters,
        test.honest_analysis,
        test.honest_page,
    ]
    malicious = [test.impatient, test.wrong_names, test.huge_body, test.slow_body, test.truncated, test.wrong_types]
    malicious += [test.not_http, test.wrong_method, test.slow_after_rejection, test.half_open, test.never_reads]
    while time.monotonic() < until:
        action = test.rng.choice(honest if test.rng.random() < 0.5 else malicious)
        try:
            await action()
        except OSError as error:
            test.outcomes[f"rejected by the system: {type(error).__name__}"] += 1
        await asyncio.sleep(test.rng.random() * 0.2)


def children_of(pid: int) -> list[int]:
    """Return the process ids of the workers of a server."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def memory_of(pid: int) -> int:
    """Return the resident bytes of a process and its children."""
    total = 0
    for process in (pid, *children_of(pid)):
        with contextlib.suppress(OSError):
            match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
            total += int(match[1]) << 10 if match else 0
    return total


async def measure_memory(pid: int, until: float, samples: list[tuple[float, int]]) -> None:
    """Append (seconds, bytes) every two seconds."""
    start = time.monotonic()
    while time.monotonic() < until:
        samples.append((time.monotonic() - start, memory_of(pid)))
        await asyncio.sleep(2)


async def kill_workers(test: LoadTest, pid: int, until: float, seconds_between: float) -> None:
    """Kill a worker now and then."""
    while seconds_between and time.monotonic() + seconds_between < until:
        await asyncio.sleep(seconds_between)
        workers = children_of(pid)
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(test.rng.choice(workers), signal.SIGKILL)
                test.kills += 1


async def run_test(address: str, pid: int, options: argparse.Namespace) -> tuple[LoadTest, list[tuple[float, int]]]:
    """Run all clients against a server."""
    parts = urlsplit(address)
    test = LoadTest(parts.hostname or "", parts.port or 0, parts.path, random.Random(options.seed))
    samples: list[tuple[float, int]] = []
    while (await test.post("models", {}))[0] != 200:
        await asyncio.sleep(0.2)
    until = time.monotonic() + options.seconds
    clients = (run_client(test, until) for _ in range(options.clients))
    killing = kill_workers(test, pid, until, options.kill_every)
    await asyncio.gather(measure_memory(pid, until, samples), killing, *clients)
    await test.honest_mask()  # the server still answers
    died = sum(n for kind, n in test.outcomes.items() if kind.endswith("worker died"))
    if died > test.kills:
        test.failures.append(f"{died} requests lost their worker, but only {test.kills} workers were killed")
    samples.append((options.seconds, memory_of(pid)))
    return test, samples


@contextlib.contextmanager
def busy_processors(n_processes: int) -> Iterator[None]:
    """Keep this many processes computing until the block ends."""
    command = (sys.executable, "-S", "-c", "while True: pass")
    processes = [subprocess.Popen(command) for _ in range(n_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Start a server, run the test, print the outcomes, and exit with status 1 if anything failed."""
    parser = argparse.ArgumentParser(description="Load test of the explorer with honest and malicious clients.")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="other processes that compute meanwhile")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between killed workers; 0 for none")
    options = parser.parse_args()
    command = (sys.executable, "-m", "clearhead.cli", "explore", "sort-dedup", "--no-open", "--port", "0")
    with busy_processors(options.busy):
        server = subprocess.Popen((*command, "--timeout", "20"), stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            address = next(line.strip() for line in server.stdout if line.startswith("http"))
            test, samples = asyncio.run(run_test(address, server.pid, options))
            is_up = server.poll() is None
        finally:
            server.send_signal(signal.SIGINT)
            code = server.wait()
    for kind, count in sorted(test.outcomes.items()):
        print(f"{count:7,}  {kind}")
    warm = max(size for at, size in samples if at <= WARM_SHARE * options.seconds)
    growth = max(size for at, size in samples if at > WARM_SHARE * options.seconds) - warm
    print(f"slowest honest request: {test.slowest:.1f} s (budget {TIME_BUDGET:g} s); workers killed: {test.kills}")
    print(f"memory: {warm >> 20} MiB when warm, grew by {growth / (1 << 20):.1f} MiB (budget {MAX_GROWTH >> 20} MiB)")
    state = "stayed up" if is_up else "WENT DOWN"
    print(f"failures: {len(test.failures)}; the server {state}, ended with status {code}")
    for failure in test.failures[:20]:
        print("  ", failure)
    sys.exit(bool(test.failures) or growth > MAX_GROWTH or not is_up or code != 0)


if __name__ == "__main__":
    main()
