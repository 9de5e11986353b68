"""The server over real sockets: who is let in, what is refused and how, and that it outlives what goes wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest
import uvicorn

from clearhead.errors import StorageError
from clearhead.explore.desk import Desk, Job
from clearhead.explore.server import Patient, Place, app, secret_of

MASK = {"expression": "causal() & window(2, 0)", "n": 5}


def test_the_page_and_its_rules(page):
    status, headers, body = page.get()
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["referrer-policy"] == "no-referrer"
    # No inline code, no inline style, and nothing from elsewhere.
    text = body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|https?:", text)
    for name in re.findall(r'(?:src|href)="([^"#]+)"', text):
        assert page.get(name)[0] == 200


def test_scripts_name_nothing_elsewhere():
    folder = Path(__file__).parents[2] / "clearhead" / "explore" / "page"
    for path in folder.iterdir():
        found = re.findall(r"https?://[^\s\"'`]+", path.read_text(encoding="utf-8"))
        assert {address.rstrip(")") for address in found} <= {"http://www.w3.org/2000/svg"}, path.name


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
def test_only_its_own_page_may_ask(page, headers, status):
    filled = {k: v.format(host=page.parts.netloc, port=page.parts.port) for k, v in headers.items()}
    got, given, body = page.get(**filled)
    assert got == status
    if status != 200:
        assert "content-security-policy" in given
        assert json.loads(body)["error"]
        assert page.parts.path.strip("/").encode() not in body  # a refusal gives the secret away to nobody


@pytest.mark.parametrize("path", ["/", "/wrong/", "/../", "//", "/%2e%2e/etc/passwd", "/wrong/api/mask", "/%c3%a9/"])
def test_nothing_without_the_secret(page, path):
    status, _, body = page.send("GET", path)
    assert status == 403
    assert page.parts.path.strip("/").encode() not in body


@pytest.mark.parametrize("name", ["../server.py", "..%2fserver.py", "nothing.js", "main.js%00", "api/mask", "%2e%2e/x"])
def test_files_are_those_of_the_page_alone(page, name):
    assert page.get(name)[0] in (404, 405)


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "application/x-www-form-urlencoded", 415),
        (b"not json", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"n": NaN}', "application/json", 400),
        (b'{"n": ' + b"1" * 5000 + b"}", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b"\xff\xfe", "application/json", 400),
        (b'{"expression": "' + b"x" * 300_000 + b'"}', "application/json", 413),
        (b" " * 3_000_000, "application/json", 413),
    ],
)
def test_bodies_that_are_refused(page, body, kind, status):
    got, _, text = page.send("POST", page.parts.path + "api/mask", body, content_type=kind)
    assert got == status
    assert json.loads(text)["error"]


def test_actions_that_are_not_there(page):
    got, _, text = page.send("POST", page.parts.path + "api/__class__", b"{}", content_type="application/json")
    assert (got, json.loads(text)["error"]) == (404, "there is no action '__class__'")


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({}, "lacks the field 'expression'"),
        ({"expression": 5}, "expected text"),
        ({"expression": "causal()", "n": 0}, "at least 1"),
        ({"expression": "causal()", "n": 1 << 20}, "at most"),
        ({"expression": "causal()", "n": True}, "expected a whole number"),
        ({"expression": "causal()", "path": "/etc/passwd"}, "has no field 'path'"),
        ({"expression": "causal()", "type": "Run", "n": "x"}, "expected a whole number"),
        ({"expression": "causal(", "n": 5}, "causal"),
    ],
)
def test_requests_are_checked_field_by_field(page, ask, says):
    assert says in page.ask("mask", ask)["error"]


def test_a_body_that_never_comes_is_given_up(page):
    """The headers promise more than is sent, and then the connection is cut: the next request is answered."""
    head = f"POST {page.parts.path}api/mask HTTP/1.1\r\nHost: {page.parts.netloc}\r\nContent-Type: application/json\r\n"
    for end in ("Content-Length: 1000\r\n\r\n{", "Transfer-Encoding: chunked\r\n\r\n5\r\n{", "Content-Le"):
        with socket.create_connection((page.parts.hostname, page.parts.port)) as raw:
            raw.sendall((head + end).encode())
    assert page.ask("mask", MASK)["allowed"] == 12


def test_who_never_finishes_a_head_is_left(monkeypatch):
    monkeypatch.setattr(Patient, "seconds", 0.05)

    async def hello(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run():
        server = uvicorn.Server(uvicorn.Config(hello, port=0, log_level="error", lifespan="off", http=Patient))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        where = server.servers[0].sockets[0].getsockname()
        answers = []
        for head in (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"GET / HT", b""):
            reader, writer = await asyncio.open_connection(*where)
            writer.write(head)
            answers.append(await reader.read())
            writer.close()
        server.should_exit = True
        await serving
        return answers

    whole, begun, nothing = asyncio.run(run())
    assert whole.endswith(b"ok")
    assert (begun, nothing) == (b"", b"")


@pytest.mark.parametrize("told", [[], [("progress", b"1")]])
def test_a_client_that_goes_gives_its_job_up(told, monkeypatch):
    job, sent = Job("mask", {}), []
    desk, place = Desk([]), Place(port=80)
    monkeypatch.setattr(desk, "put", lambda action, ask: job)
    scope = {"type": "http", "method": "POST", "path": f"/{place.secret}/api/mask", "asgi": {"spec_version": "2.3"}}
    scope |= {"headers": [(b"host", b"127.0.0.1:80"), (b"content-type", b"application/json")]}

    async def run():
        for event in told:
            job.events.put_nowait(event)
        body = iter([{"type": "http.request", "body": b"{}"}])

        async def receive():
            given = next(body, None)
            while given is None and told and not any(message.get("body") for message in sent):
                await asyncio.sleep(0)
            return given or {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await app(place, desk)(scope, receive, send)
        return job.given_up.is_set()

    assert asyncio.run(run())
    assert b"".join(message.get("body", b"") for message in sent) == b"".join(b'{"progress":1}\n' for _ in told)


def test_the_secret_of_a_file(tmp_path):
    path = tmp_path / "secret"
    kept = secret_of(path)
    assert len(kept) >= 16
    assert secret_of(path) == kept
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("short")
    with pytest.raises(StorageError, match="holds no secret"):
        secret_of(path)
    with pytest.raises(StorageError, match="cannot be kept"):
        secret_of(tmp_path / "none" / "secret")
