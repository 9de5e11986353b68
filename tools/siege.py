"""A siege of the live page: a hundred clients at once, honest and hostile, for two minutes.

    python tools/siege.py --clients 100 --seconds 120 --seed 1

Honest clients ask what only they ask and check the answer against what they compute themselves: an answer of another
client's would be seen. Hostile ones come with a wrong host, origin, secret, method or type, with bodies that are huge,
slow, cut off or no HTTP at all. At the end it says how many of each there were, what was answered, and how far the
memory of the server and of its processes grew; it fails if an answer was wrong, or if memory grew beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import re
import signal
import string
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from clearhead import masks

GROWTH = 64 << 20  # bytes that the server and its processes may grow together, once warm
WARM = 0.25  # of the time, after which growth counts


@dataclass
class Siege:
    host: str
    port: int
    root: str
    chance: random.Random
    told: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    async def send(self, head: str, body: bytes = b"", *, wait: bool = True) -> tuple[int, bytes]:
        """One request on a connection of its own: status and body; 0 where the server cut the connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(head.encode() + body)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            if not wait:
                return 0, b""
            with contextlib.suppress(ConnectionError):
                return _parsed(await reader.read())
            return 0, b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def head(self, method: str, path: str, length: int | None = None, /, **headers: str) -> str:
        names = {"Host": f"{self.host}:{self.port}", "Connection": "close", **headers}
        if length is not None:
            names |= {"Content-Type": names.get("Content-Type", "application/json"), "Content-Length": str(length)}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in names.items() if value)]
        return "\r\n".join(lines) + "\r\n\r\n"

    async def ask(self, action: str, ask: object) -> tuple[int, dict[str, Any]]:
        body = json.dumps(ask).encode()
        status, text = await self.send(self.head("POST", f"{self.root}api/{action}", len(body)), body)
        lines = text.splitlines()
        return status, json.loads(lines[-1]) if lines and status == 200 else {}

    def expect(self, kind: str, status: int, allowed: tuple[int, ...], note: str = "") -> None:
        self.told[f"{kind}: {status}"] += 1
        if status not in allowed:
            self.wrong.append(f"{kind} got {status}, expected {allowed} {note}")

    # ------------------------------------------------------------------ honest clients

    async def honest_mask(self) -> None:
        before, n = self.chance.randrange(0, 40), self.chance.randrange(3, 90)
        status, event = await self.ask("mask", {"expression": f"causal() & window({before}, 0)", "n": n})
        self.expect("honest mask", status, (200, 503))
        if status == 200:
            found = event.get("done", {})
            right = (masks.causal() & masks.window(before, 0)).count(n, n)
            if not isinstance(found, dict) or (found.get("allowed"), found.get("queries")) != (right, n):
                self.wrong.append(f"a mask of window {before} and {n} tokens got {str(event)[:200]}")

    async def honest_letters(self) -> None:
        letters = self.chance.choices(string.ascii_uppercase, k=self.chance.randrange(2, 12))
        status, event = await self.ask("step", {"model": "sort-dedup", "text": " ".join(letters), "temperature": 0})
        self.expect("honest letters", status, (200, 503))
        if status == 200:
            found = event.get("done", {})
            tokens = found.get("tokens") if isinstance(found, dict) else None
            if tokens != [*letters, "<START>"]:
                self.wrong.append(f"letters {letters} got {str(event)[:200]}")
            elif found["taken"]["token"] != min(letters):  # what this model was trained for
                self.told["letters whose first answer was not the least"] += 1

    async def honest_page(self) -> None:
        status, body = await self.send(self.head("GET", self.root))
        self.expect("honest page", status, (200,))
        if b"<title>clearhead</title>" not in body:
            self.wrong.append(f"the page came as {body[:80]!r}")

    async def impatient(self) -> None:
        """Asks for something long and leaves."""
        body = json.dumps({"model": "sort-dedup", "text": "A " * 60, "width": 8, "max_new": 48}).encode()
        await self.send(self.head("POST", f"{self.root}api/beams", len(body)), body, wait=False)
        self.told["impatient: left"] += 1

    # ------------------------------------------------------------------ hostile ones

    async def wrong_names(self) -> None:
        which = self.chance.choice(["Host", "Origin", "Sec-Fetch-Site", "secret"])
        if which == "secret":
            status, _ = await self.send(
                self.head("GET", f"/{''.join(self.chance.choices(string.ascii_letters, k=24))}/")
            )
            self.expect("wrong secret", status, (403,))
        elif which == "Host":
            status, _ = await self.send(
                self.head("GET", self.root, Host=self.chance.choice(["evil.example", "", "a:1"]))
            )
            self.expect("wrong host", status, (400, 421))
        else:
            status, _ = await self.send(self.head("GET", self.root, **{which: "http://evil.example"}))
            self.expect("wrong origin", status, (403,))

    async def huge_body(self) -> None:
        body = b'{"expression": "' + b"x" * self.chance.randrange(1 << 19, 1 << 22)
        status, _ = await self.send(self.head("POST", f"{self.root}api/mask", len(body)), body)
        self.expect("huge body", status, (413, 0))  # 0: it was cut off while it still wrote

    async def slow_body(self) -> None:
        _, writer = await asyncio.open_connection(self.host, self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(self.head("POST", f"{self.root}api/mask", 4000).encode())
            for _ in range(self.chance.randrange(1, 30)):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(self.chance.random())
        writer.close()
        self.told["slow body: left"] += 1

    async def cut_off(self) -> None:
        whole = self.head("POST", f"{self.root}api/mask", 500).encode() + b'{"expression": "causal()"'
        _, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(whole[: self.chance.randrange(1, len(whole))])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort()
        self.told["cut off: left"] += 1

    async def wrong_types(self) -> None:
        odd: list[object] = [None, True, -1, 1e300, "", [], {}, [[[]]], {"a": {}}, "\x00", "𝕏" * 50, 10**30]
        action = self.chance.choice(
            ["mask", "step", "hand", "cost", "change", "digit", "sheet", "claim", "beams", "walk"]
        )
        names = ["expression", "n", "model", "text", "written", "vectors", "edits", "pixels", "name", "seed", "type"]
        ask = {name: self.chance.choice(odd) for name in self.chance.sample(names, k=4)}
        status, event = await self.ask(action, ask)
        self.expect("wrong types", status, (200, 503))
        if status == 200 and "this run failed" in str(event):
            self.wrong.append(f"{action} {ask} got {event}")

    async def no_http(self) -> None:
        text = bytes(self.chance.randrange(256) for _ in range(self.chance.randrange(1, 300)))
        status, _ = await self.send("", text + b"\r\n\r\n")
        self.expect("no HTTP", status, (400, 0))

    async def wrong_method(self) -> None:
        method = self.chance.choice(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
        status, _ = await self.send(self.head(method, f"{self.root}api/mask"))
        self.expect("wrong method", status, (405,))


def _parsed(answer: bytes) -> tuple[int, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return 0, b""
    if b"transfer-encoding: chunked" in head.lower():
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            whole, body = whole + body[:length], body[length + 2 :]
        body = whole
    return int(head.split()[1]), body


async def client(siege: Siege, until: float) -> None:
    honest: list[Callable[[], Awaitable[None]]] = [siege.honest_mask, siege.honest_letters, siege.honest_page]
    hostile = [siege.impatient, siege.wrong_names, siege.huge_body, siege.slow_body, siege.cut_off, siege.wrong_types]
    hostile += [siege.no_http, siege.wrong_method]
    while time.monotonic() < until:
        act = siege.chance.choice(honest if siege.chance.random() < 0.5 else hostile)
        try:
            await act()
        except OSError as error:
            siege.told[f"refused by the system: {type(error).__name__}"] += 1
        await asyncio.sleep(siege.chance.random() * 0.2)


def memory(pid: int) -> int:
    """Bytes that a process and its children hold."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    total = 0
    for one in (pid, *map(int, children)):
        with contextlib.suppress(OSError):
            found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text())
            total += int(found[1]) << 10 if found else 0
    return total


async def watch(pid: int, until: float, seen: list[tuple[float, int]]) -> None:
    begun = time.monotonic()
    while time.monotonic() < until:
        seen.append((time.monotonic() - begun, memory(pid)))
        await asyncio.sleep(2)


async def besiege(
    address: str, pid: int, clients: int, seconds: float, seed: int
) -> tuple[Siege, list[tuple[float, int]]]:
    parts = urlsplit(address)
    siege = Siege(parts.hostname or "", parts.port or 0, parts.path, random.Random(seed))
    seen: list[tuple[float, int]] = []
    while (await siege.ask("models", {}))[0] != 200:
        await asyncio.sleep(0.2)
    until = time.monotonic() + seconds
    await asyncio.gather(watch(pid, until, seen), *(client(siege, until) for _ in range(clients)))
    await siege.honest_mask()  # and it is still there
    seen.append((seconds, memory(pid)))
    return siege, seen


def main() -> None:
    parser = argparse.ArgumentParser(description="A hundred clients, honest and hostile, against the live page.")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    command = (sys.executable, "-m", "clearhead.cli", "explore", "sort-dedup", "--no-open", "--port", "0")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = next(line.strip() for line in server.stdout if line.startswith("http"))
        found, seen = asyncio.run(besiege(address, server.pid, options.clients, options.seconds, options.seed))
        is_up = server.poll() is None
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait()
    for kind, times in sorted(found.told.items()):
        print(f"{times:7,}  {kind}")
    warm = max(size for at, size in seen if at <= WARM * options.seconds)
    growth = max(size for at, size in seen if at > WARM * options.seconds) - warm
    print(f"memory: {warm >> 20} MiB when warm, grew by {growth / (1 << 20):.1f} MiB at most (bound {GROWTH >> 20})")
    how = "stayed up" if is_up else "WENT DOWN"
    print(f"wrong answers: {len(found.wrong)}; the server {how}, ended with status {code}")
    for line in found.wrong[:20]:
        print("  ", line)
    sys.exit(bool(found.wrong) or growth > GROWTH or not is_up or code != 0)


if __name__ == "__main__":
    main()
