"""The server over real sockets: access control, rejected requests, and connections of slow clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest
import uvicorn

from clearhead.errors import StorageError
from clearhead.explorer.server import (
    AUTHORIZED,
    ConnectionLimits,
    GuardedProtocol,
    ServerAddress,
    create_app,
    read_or_create_token,
)
from clearhead.explorer.worker_pool import Job, WorkerPool

MASK = {"expression": "causal() & window(2, 0)", "queries": 5}


def test_page_is_served_with_security_headers(page):
    status, headers, body = page.get()
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["referrer-policy"] == "no-referrer"
    # No inline code, no inline style, no external addresses.
    text = body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|https?:", text)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', text):
        assert page.get(name)[0] == 200


def test_scripts_contain_no_external_addresses():
    folder = Path(__file__).parents[2] / "clearhead" / "explorer" / "page"
    for path in folder.iterdir():
        addresses = re.findall(r"https?://[^\s\"'`]+", path.read_text(encoding="utf-8"))
        assert {address.rstrip(")") for address in addresses} <= {"http://www.w3.org/2000/svg"}, path.name


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),  # without the port
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://{host}"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Origin": "http://{host}", "Sec_Fetch_Site": "same-origin"}, 200),
        ({"Host": "localhost:{port}"}, 200),
    ],
)
def test_only_same_origin_requests_are_accepted(page, headers, status):
    filled = {k: v.format(host=page.parts.netloc, port=page.parts.port) for k, v in headers.items()}
    actual, response_headers, body = page.get(**filled)
    assert actual == status
    if status != 200:
        assert "content-security-policy" in response_headers
        assert json.loads(body)["error"]
        assert page.parts.path.strip("/").encode() not in body  # the token is not revealed


@pytest.mark.parametrize("path", ["/", "/wrong/", "/../", "//", "/%2e%2e/etc/passwd", "/wrong/api/mask", "/%c3%a9/"])
def test_requests_without_the_token_are_rejected(page, path):
    status, _, body = page.send("GET", path)
    assert status == 403
    assert page.parts.path.strip("/").encode() not in body


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "nothing.js", "main.js%00", "api/mask", "%2e%2e/x"])
def test_only_files_of_the_page_are_served(page, name):
    assert page.get(name)[0] in (404, 405)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"not json", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"queries": NaN}', "application/json", 400),
        (b'{"queries": ' + b"1" * 5000 + b"}", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"expression": "' + b"x" * 300_000 + b'"}', "application/json", 413),
        (b" " * 3_000_000, "application/json", 413),
    ],
)
def test_invalid_bodies_are_rejected(page, body, kind, status):
    actual, _, text = page.send("POST", page.parts.path + "api/mask", body, content_type=kind)
    assert actual == status
    assert json.loads(text)["error"]


def test_unknown_action_is_rejected(page):
    status, _, text = page.send("POST", page.parts.path + "api/__class__", b"{}", content_type="application/json")
    assert (status, json.loads(text)["error"]) == (404, "unknown action '__class__'")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({}, "lacks the field 'expression'"),
        ({"expression": 5}, "expected text"),
        ({"expression": "causal()", "queries": 0}, "at least 1"),
        ({"expression": "causal()", "queries": 1 << 20}, "at most"),
        ({"expression": "causal()", "queries": True}, "expected a whole number"),
        ({"expression": "causal()", "path": "/etc/passwd"}, "has no field 'path'"),
        ({"expression": "causal()", "type": "Run", "queries": "x"}, "expected a whole number"),
        ({"expression": "causal(", "queries": 5}, "causal"),
    ],
)
def test_fields_of_a_request_are_validated(page, request_, message):
    assert message in page.post("mask", request_)["error"]


def test_server_answers_after_truncated_requests(page):
    """The head announces more than is sent before the connection is closed; the next request is answered."""
    head = f"POST {page.parts.path}api/mask HTTP/1.1\r\nHost: {page.parts.netloc}\r\nContent-Type: application/json\r\n"
    for end in ("Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{", "Content-Le"):
        with socket.create_connection((page.parts.hostname, page.parts.port)) as raw:
            raw.sendall((head + end).encode())
    assert page.post("mask", MASK)["allowed"] == 12


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def respond(scope, receive, send):
    """An application that answers at once without reading the body; /slow is authorized and never ends."""
    if scope["path"] == "/slow":
        scope[AUTHORIZED] = True
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"o", "more_body": True})
    if scope["path"] == "/slow":
        await asyncio.Event().wait()
    await send({"type": "http.response.body", "body": b"k"})


def run_with_server(monkeypatch, scenario, **limits):
    """Run `scenario(connect)` with a server whose connections have these limits."""
    monkeypatch.setattr(GuardedProtocol, "limits", ConnectionLimits(**limits))

    async def run():
        config = uvicorn.Config(
            respond, port=0, log_level="error", lifespan="off", http=GuardedProtocol, timeout_keep_alive=3600
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        where = server.servers[0].sockets[0].getsockname()
        writers = []

        async def connect(data):
            reader, writer = await asyncio.open_connection(*where)
            writers.append(writer)
            writer.write(data)
            return reader, writer

        result = await scenario(connect)
        for writer in writers:
            writer.close()
        server.should_exit = server.force_exit = True
        await serving
        return result

    return asyncio.run(run())


async def read_all(reader):
    """Everything until the server closes the connection, which may be a reset."""
    data = b""
    try:
        while part := await reader.read(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


async def send_slowly(writer):
    """Send one byte at a time until the server closes the connection."""
    try:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)
    except ConnectionError:
        pass


@pytest.mark.parametrize("data", [b"", b"GET / HT"])
def test_incomplete_first_head_is_disconnected(monkeypatch, data):
    async def scenario(connect):
        reader, _ = await connect(data)
        return await read_all(reader)

    assert run_with_server(monkeypatch, scenario, head_timeout=0.05) == b""


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"\r\n" + b"GET / HT",  # a second head that never ends
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n",  # a rejected body that never ends
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5f5e100\r\n",
    ],
    ids=["second head", "body", "chunked body"],
)
def test_slow_client_after_a_rejected_request_is_disconnected(monkeypatch, data):
    async def scenario(connect):
        reader, writer = await connect(data)
        sending = asyncio.create_task(send_slowly(writer))
        answer = await read_all(reader)
        await sending
        return answer

    answer = run_with_server(monkeypatch, scenario, head_timeout=0.2)
    assert answer.startswith(b"HTTP/1.1 403")
    assert answer.count(b"HTTP/1.1") == 1


def test_client_that_does_not_read_is_disconnected(monkeypatch):
    ended = asyncio.Event()

    async def respond_forever(scope, receive, send):
        async def wait_for_disconnect():
            while (await receive())["type"] != "http.disconnect":
                pass

        disconnected = asyncio.create_task(wait_for_disconnect())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not disconnected.done():
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await asyncio.sleep(0)
        ended.set()

    async def scenario(connect):
        reader, _ = await connect(HEAD + b"\r\n")
        reader._transport.pause_reading()
        await ended.wait()
        return True

    monkeypatch.setitem(globals(), "respond", respond_forever)
    assert run_with_server(monkeypatch, scenario, write_timeout=0.05)


def test_connection_limit_closes_the_longest_waiting_connection(monkeypatch):
    """Half-open connections of one client never lock out a request, and an authorized request is never closed."""

    async def scenario(connect):
        slow, _ = await connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await slow.readuntil(b"\r\n\r\no")
        waiting = []
        for _ in range(3):
            reader, _ = await connect(b"GET / HT")
            waiting.append(reader)
        answers = []
        for _ in range(6):
            reader, _ = await connect(HEAD + b"\r\n")
            answers.append(await reader.readuntil(b"ok"))
        closed = [await read_all(reader) for reader in waiting]
        return closed, len(answers), slow.at_eof()

    assert run_with_server(monkeypatch, scenario, per_client=4, head_timeout=3600.0) == ([b"", b"", b""], 6, False)


def test_connection_limit_closes_the_new_connection_if_all_others_are_authorized(monkeypatch):
    async def scenario(connect):
        for _ in range(2):
            slow, _ = await connect(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            await slow.readuntil(b"\r\n\r\no")
        reader, _ = await connect(HEAD + b"\r\n")
        return await read_all(reader)

    assert run_with_server(monkeypatch, scenario, per_client=2, head_timeout=3600.0) == b""


@pytest.mark.parametrize("events", [[], [("progress", b"1")]])
def test_disconnected_client_cancels_its_job(events, monkeypatch):
    job, sent = Job("mask", {}), []
    pool, address = WorkerPool([]), ServerAddress(port=80)
    monkeypatch.setattr(pool, "submit", lambda action, request: job)
    scope = {"type": "http", "method": "POST", "path": f"/{address.token}/", "asgi": {"spec_version": "2.3"}}
    scope["path"] += "api/mask"
    scope |= {"headers": [(b"host", b"127.0.0.1:80"), (b"content-type", b"application/json")]}

    async def run():
        for event in events:
            job.events.put_nowait(event)
        body = iter([{"type": "http.request", "body": b"{}"}])

        async def receive():
            message = next(body, None)
            while message is None and events and not any(message.get("body") for message in sent):
                await asyncio.sleep(0)
            return message or {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await create_app(address, pool)(scope, receive, send)
        return job.cancelled.is_set()

    assert asyncio.run(run())
    assert b"".join(message.get("body", b"") for message in sent) == b"".join(b'{"progress":1}\n' for _ in events)


def test_token_file_is_created_private_and_read_again(tmp_path):
    path = tmp_path / "token"
    token = read_or_create_token(path)
    assert len(token) >= 16
    assert read_or_create_token(path) == token
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("short")
    with pytest.raises(StorageError, match="does not contain a token"):
        read_or_create_token(path)
    with pytest.raises(StorageError, match="cannot store the token"):
        read_or_create_token(tmp_path / "none" / "token")
