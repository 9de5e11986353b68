"""The server: who may ask, what files there are, and the way from a request to the desk and back.

It listens on this machine, behind a secret that stands in the address. A browser is asked for more: the names by which
it calls this server (`Host`) and the page that asks (`Origin`) must be our own, so that no other page open in the same
browser can reach it. Files are those of the page, listed when the server starts; no path is taken from a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.errors import StorageError
from clearhead.explore.desk import BusyError, Desk, Job
from clearhead.explore.run import ACTIONS
from clearhead.look.page import read_assets, script_module

_PAGE = Path(__file__).parent / "page"
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_HEARD_OUT = 32  # times as much as a body may have is read and dropped, so that the sender hears why it is refused
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Place:
    """Where the page is: an address of this machine, a port, and the secret between it and everybody else."""

    host: str = "127.0.0.1"
    port: int = 0
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)

    @property
    def name(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def names(self) -> frozenset[str]:
        """What a browser may call this server."""
        local = ("127.0.0.1", "localhost", "[::1]") if self.host in ("127.0.0.1", "localhost", "::1") else ()
        return frozenset((self.name, *(f"{name}:{self.port}" for name in local)))

    @property
    def address(self) -> str:
        return f"http://{self.name}/{self.secret}/"


def secret_of(path: Path) -> str:
    """The secret that is kept in a file; a new one, that its owner alone may read, where there is no file yet."""
    try:
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new,
        ):
            new.write(secrets.token_urlsafe(18))
        kept = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the secret cannot be kept in {path}: {getattr(error, 'strerror', error)}") from error
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,128}", kept):
        raise StorageError(
            f"{path} holds no secret: expected 16 to 128 letters, digits, - and _; delete it for a new one"
        )
    return kept


async def _guarded(inside: ASGIApp, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuses who is not the page, before anything is read, and puts the rules of the page on every answer."""
    if scope["type"] == "lifespan":
        return await inside(scope, receive, send)

    async def with_rules(message: Message) -> None:
        if message["type"] == "http.response.start":
            rules = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *rules]}
        await send(message)

    why = _why_not(scope, place) if scope["type"] == "http" else (400, "this server speaks HTTP alone")
    answer = inside if why is None else JSONResponse({"error": why[1]}, why[0])
    with contextlib.suppress(ClientDisconnect):
        await answer(scope, receive, with_rules)


def _why_not(scope: Scope, place: Place) -> tuple[int, str] | None:
    given, names = Headers(scope=scope).getlist, place.names
    if [host.lower() in names for host in given("host")] != [True]:
        return 421, f"this server answers to {place.host}:{place.port} alone"
    ours = all(origin.lower().removeprefix("http://") in names for origin in given("origin"))
    if not ours or any(site not in ("same-origin", "none") for site in given("sec-fetch-site")):
        return 403, "another page asked: open the address that `clearhead explore` printed"
    secret = scope["path"].lstrip("/").partition("/")[0]
    if not secrets.compare_digest(secret.encode(), place.secret.encode()):
        return 403, "the secret is missing or wrong: open the address that `clearhead explore` printed"
    return None


def app(place: Place, desk: Desk) -> ASGIApp:
    """The whole server as an ASGI application."""
    files: dict[str, bytes | str] = {path.name: path.read_bytes() for path in _PAGE.iterdir()}
    files |= {"look.js": script_module(), "walk.js": script_module("walk.js")}
    files["look.css"] = read_assets("page.css", "walk.css")

    async def get(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in files:
            raise HTTPException(404, f"there is no file {name[:80]!r} on this page")
        return Response(files[name], media_type=_TYPES[Path(name).suffix])

    async def bare(request: Request) -> Response:
        return RedirectResponse(f"/{place.secret}/", 307)

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        desk.open()
        yield
        await desk.close()

    routes = [
        Route("/{secret}", bare),
        Route("/{secret}/", get),
        Route("/{secret}/api/{action}", partial(_post, desk), methods=["POST"]),
        Route("/{secret}/{name}", get),
    ]
    made = Starlette(routes=routes, lifespan=life, exception_handlers={HTTPException: _refused, 500: _refused})
    made.router.redirect_slashes = False
    return partial(_guarded, made, place)


async def _refused(_: Request, error: Exception) -> Response:
    own = {"Not Found": "there is nothing here", "Method Not Allowed": "this address does not take that method"}
    if not isinstance(error, HTTPException):
        return JSONResponse({"error": "the server made a mistake; its terminal says where"}, 500)
    return JSONResponse({"error": own.get(error.detail, error.detail)}, error.status_code, error.headers)


# ---------------------------------------------------------------------- one request


async def _post(desk: Desk, request: Request) -> Response:
    action = request.path_params["action"]
    if action not in ACTIONS:
        raise HTTPException(404, f"there is no action {action[:80]!r}")
    try:
        job = desk.put(action, await _body(request, desk))
    except BusyError as error:
        raise HTTPException(503, str(error), {"retry-after": "1"}) from error
    return _Answer(job)


async def _body(request: Request, desk: Desk) -> dict[str, Any]:
    """The JSON object of a request, within its limits."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "expected a request of type application/json")
    most, body, length = desk.limits.body, bytearray(), 0
    try:
        async with asyncio.timeout(desk.limits.body_seconds):
            async for part in request.stream():
                length += len(part)
                body += part if length <= most else b""
                if length > _HEARD_OUT * most:
                    break
    except TimeoutError as error:
        late = f"the request did not come within {desk.limits.body_seconds:g} seconds"
        raise HTTPException(408, late) from error
    if length > most:
        raise HTTPException(413, f"a request has at most {most:,} bytes: shorten the text")
    try:
        ask = json.loads(bytes(body), parse_constant=int)  # NaN and the like are no numbers of JSON, and no int either
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the request is not JSON") from error
    if not isinstance(ask, dict):
        raise HTTPException(400, "expected a JSON object")
    return ask


class _Answer(StreamingResponse):
    """The events of a job as lines of JSON; a client that goes, or has gone before the first of them, gives it up."""

    def __init__(self, job: Job) -> None:
        super().__init__(_lines(job), media_type="application/x-ndjson")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.given_up.set()


async def _lines(job: Job) -> AsyncIterator[bytes]:
    """{"kind": value} for each event, the last "done" or "error"."""
    kind = ""
    while kind not in ("done", "error"):
        kind, value = await job.events.get()
        yield b'{"' + kind.encode() + b'":' + value + b"}\n"


# ---------------------------------------------------------------------- serving


class Patient(H11Protocol):
    """uvicorn's own protocol, which waits for ever for the head of a request; this one does not."""

    seconds = 10.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(self.seconds, lambda: None if self.cycle is not None else transport.close())


def serve(place: Place, desk: Desk, *, on_ready: Callable[[Place], None] = lambda place: None) -> None:
    """Serve until interrupted; `on_ready` is told the place with the port that was taken."""
    with _bound(place) as listening:
        place = Place(place.host, listening.getsockname()[1], place.secret)
        config = uvicorn.Config(
            app(place, desk),
            interface="asgi3",
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=512,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
            http=Patient,
            ws="none",
        )
        server = uvicorn.Server(config)
        on_ready(place)
        with contextlib.suppress(KeyboardInterrupt):
            server.run([listening])


def _bound(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        return socket.create_server((place.host, place.port), family=family, backlog=128)
    except OSError as error:
        why = (error.strerror or "").partition(" (")[0]  # Python adds the address
        raise StorageError(
            f"{place.host}:{place.port} cannot be listened on ({why}); choose another with --port, or --port 0 for any "
            "that is free"
        ) from error
