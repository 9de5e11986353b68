"""The HTTP server of the explorer: access control, static files, and the path of a request to the pool and back.

It listens on this machine only, and the address contains a secret token. Requests from browsers must also name this
server (`Host`) and come from its own page (`Origin`), so that no other page in the same browser can reach it. The files
of the page are listed when the server starts, and no path is taken from a request. Clients that send slowly,
or do not read their answers, are disconnected."""

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

from clearhead._core.json_types import JSONObject
from clearhead.analysis.views.page import read_assets, script_module
from clearhead.analysis.walkthrough.walkthrough import WALK_SCRIPTS
from clearhead.errors import StorageError
from clearhead.explorer.request import ACTIONS
from clearhead.explorer.worker_pool import BusyError, Job, ServerLimits, WorkerPool

_PAGE = Path(__file__).parent / "page"
_SOUND = Path(__file__).parent / "examples" / "digits.wav"
_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".wav": "audio/wav",
}
_DRAIN_FACTOR = 32  # a larger body is read up to this multiple of its limit, so that its client can read the error
AUTHORIZED = "clearhead.authorized"  # key of a scope whose request has passed access control
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
class ServerAddress:
    """The address of the page: a host, a port, and a secret token in the path.

    Attributes:
        host: Address of this machine to listen on.
        port: Port to listen on; 0 for any free port.
        token: Secret that every request must contain.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default_factory=lambda: secrets.token_urlsafe(18), repr=False)

    @property
    def netloc(self) -> str:
        """Host and port as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def netlocs(self) -> frozenset[str]:
        """All accepted values of the `Host` header."""
        local = ("127.0.0.1", "localhost", "[::1]") if self.host in ("127.0.0.1", "localhost", "::1") else ()
        return frozenset((self.netloc, *(f"{name}:{self.port}" for name in local)))

    @property
    def url(self) -> str:
        """The address to open in a browser."""
        return f"http://{self.netloc}/{self.token}/"


def read_or_create_token(path: Path) -> str:
    """Return the token in a file; create the file, readable by its owner only, if it does not exist."""
    try:
        with (
            contextlib.suppress(FileExistsError),
            open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
        ):
            file.write(secrets.token_urlsafe(18))
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot store the token in {path}: {getattr(error, 'strerror', error)}") from error
    if not re.fullmatch(r"[A-Za-z0-9_-]{16,128}", token):
        raise StorageError(
            f"{path} does not contain a token; expected 16 to 128 letters, digits, - and _; delete it to get a new one"
        )
    return token


async def _with_access_control(
    application: ASGIApp, address: ServerAddress, scope: Scope, receive: Receive, send: Send
) -> None:
    """Reject requests that do not come from the page, and add the security headers to every response."""
    if scope["type"] == "lifespan":
        return await application(scope, receive, send)

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    rejection = _rejection(scope, address) if scope["type"] == "http" else (400, "only HTTP is supported")
    if rejection is None:
        scope[AUTHORIZED] = True  # read by the protocol: such a connection is not closed to make room for others
        response = application
    else:
        status, message = rejection
        response = JSONResponse({"error": message}, status)
    with contextlib.suppress(ClientDisconnect):
        await response(scope, receive, send_with_headers)


def _rejection(scope: Scope, address: ServerAddress) -> tuple[int, str] | None:
    """Return status and message if a request is rejected."""
    values = Headers(scope=scope).getlist
    netlocs = address.netlocs
    if [host.lower() in netlocs for host in values("host")] != [True]:
        return 421, f"unknown Host; this server is {address.host}:{address.port}"
    is_same_origin = all(origin.lower().removeprefix("http://") in netlocs for origin in values("origin"))
    if not is_same_origin or any(site not in ("same-origin", "none") for site in values("sec-fetch-site")):
        return 403, "cross-origin request rejected; open the address that `clearhead explore` printed"
    token = scope["path"].lstrip("/").partition("/")[0]
    if not secrets.compare_digest(token.encode(), address.token.encode()):
        return 403, "the token is missing or wrong; open the address that `clearhead explore` printed"
    return None


def create_app(address: ServerAddress, pool: WorkerPool) -> ASGIApp:
    """Return the server as an ASGI application."""
    files: dict[str, bytes | str] = {path.name: path.read_bytes() for path in _PAGE.iterdir()}
    files |= {"report.js": script_module(), "walkthrough.js": script_module(*WALK_SCRIPTS)}
    files[_SOUND.name] = _SOUND.read_bytes()
    files["report.css"] = read_assets("page.css", "walk.css")

    async def get_file(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in files:
            raise HTTPException(404, f"this page has no file {name[:80]!r}")
        return Response(files[name], media_type=_TYPES[Path(name).suffix])

    async def redirect(request: Request) -> Response:
        return RedirectResponse(f"/{address.token}/", 307)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        pool.open()
        yield
        await pool.close()

    routes = [
        Route("/{token}", redirect),
        Route("/{token}/", get_file),
        Route("/{token}/api/{action}", partial(_post, pool), methods=["POST"]),
        Route("/{token}/{name}", get_file),
    ]
    handlers: dict[Any, Any] = {HTTPException: _error_response, 500: _error_response}
    application = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    application.router.redirect_slashes = False
    return partial(_with_access_control, application, address)


async def _error_response(_: Request, error: Exception) -> Response:
    """Return the JSON response of an error."""
    messages = {"Not Found": "there is no such address", "Method Not Allowed": "this address does not allow the method"}
    if not isinstance(error, HTTPException):
        return JSONResponse({"error": "internal error; the server's terminal shows the traceback"}, 500)
    return JSONResponse({"error": messages.get(error.detail, error.detail)}, error.status_code, error.headers)


# ---------------------------------------------------------------------- one request


async def _post(pool: WorkerPool, request: Request) -> Response:
    """Submit a request to the pool and stream its events."""
    action = request.path_params["action"]
    if action not in ACTIONS:
        raise HTTPException(404, f"unknown action {action[:80]!r}")
    try:
        job = pool.submit(action, await _read_body(request, pool.limits))
    except BusyError as error:
        raise HTTPException(503, str(error), {"retry-after": "1"}) from error
    return _JobResponse(job)


async def _read_body(request: Request, limits: ServerLimits) -> JSONObject:
    """Return the JSON object of a request, within the limits of size and time."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "expected a request of type application/json")
    body = bytearray()
    length = 0
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for part in request.stream():
                length += len(part)
                body += part if length <= limits.max_body_bytes else b""
                if length > _DRAIN_FACTOR * limits.max_body_bytes:
                    break
    except TimeoutError as error:
        message = f"the request's body did not arrive within {limits.body_timeout:g} seconds"
        raise HTTPException(408, message) from error
    if length > limits.max_body_bytes:
        raise HTTPException(413, f"the request is larger than {limits.max_body_bytes:,} bytes; shorten the text")
    try:
        fields = json.loads(bytes(body), parse_constant=int)  # NaN and Infinity are not JSON; int() rejects them
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "the request is not valid JSON") from error
    if not isinstance(fields, dict):
        raise HTTPException(400, "expected a JSON object")
    return fields


class _JobResponse(StreamingResponse):
    """Streams the events of a job as lines of JSON, and cancels the job if the client disconnects."""

    def __init__(self, job: Job) -> None:
        super().__init__(_event_lines(job), media_type="application/x-ndjson")
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancelled.set()


async def _event_lines(job: Job) -> AsyncIterator[bytes]:
    """Yield {"kind": value} for each event, up to "done" or "error"."""
    kind = ""
    while kind not in ("done", "error"):
        kind, value = await job.events.get()
        yield b'{"' + kind.encode() + b'":' + value + b"}\n"


# ---------------------------------------------------------------------- connections


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits of the connections of a server.

    Attributes:
        head_timeout: Seconds within which the head of each request of a connection must be complete.
        write_timeout: Seconds within which a client must read what is ready for it.
        per_client: Connections of one client address.
        total: Connections of all clients.
    """

    head_timeout: float = 10.0
    write_timeout: float = 30.0
    per_client: int = 256
    total: int = 448


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with time limits for every request of a connection and a limit of connections.

    uvicorn waits without limit for the head of a request once a byte of it has arrived. Here a connection is closed if
    the next head is not complete in time, counted from the start of the connection or from the end of the response
    before. The rest of a body that was answered without being read counts as part of that time. If a client has too
    many connections, the one that has waited longest without an authorized request is closed.
    """

    limits = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first request."""
        super().connection_made(transport)
        self._stalled: asyncio.TimerHandle | None = None
        self._wait_for_head()
        host = _client_key(self)
        same_client = [other for other in self._other_connections() if _client_key(other) == host]
        if len(same_client) >= self.limits.per_client:
            self._close_one_of(same_client)
        elif len(self.connections) > self.limits.total:
            self._close_one_of(self._other_connections())

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._head_timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start waiting for the next request."""
        self._wait_for_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start waiting for the client to read."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop waiting for the client to read."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    @property
    def is_authorized(self) -> bool:
        """Whether an authorized request is running on this connection."""
        return not self._is_waiting() and AUTHORIZED in self.scope

    def _is_waiting(self) -> bool:
        """Return whether no request is running on this connection."""
        return self.cycle is None or self.cycle.response_complete

    def _wait_for_head(self) -> None:
        """Start or restart the time limit of the next head."""
        timer = getattr(self, "_head_timer", None)
        if timer is not None:
            timer.cancel()
        self.waiting_since = self.loop.time()
        self._head_timer = self.loop.call_later(self.limits.head_timeout, self._end_waiting)

    def _end_waiting(self) -> None:
        """Close the connection if it still waits for a head; abort it if closing does not end it either."""
        if self.transport.is_closing():
            self.transport.abort()
        elif self._is_waiting():
            self.transport.close()
            self._head_timer = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def _other_connections(self) -> list[GuardedProtocol]:
        """Return the other connections that are not being closed."""
        return [
            other
            for other in self.connections
            if isinstance(other, GuardedProtocol) and other is not self and not other.transport.is_closing()
        ]

    def _close_one_of(self, connections: list[GuardedProtocol]) -> None:
        """Close the connection that has waited longest without an authorized request, or else the new one."""
        candidates = [other for other in connections if not other.is_authorized]
        oldest = min(candidates, key=lambda other: other.waiting_since, default=self)
        oldest.transport.abort()


def _client_key(protocol: H11Protocol) -> str:
    """Return the address that connections are counted by; all loopback addresses are the same client."""
    host = protocol.client[0] if protocol.client else ""
    is_loopback = host.startswith("127.") or host in ("::1", "")
    return "loopback" if is_loopback else host


# ---------------------------------------------------------------------- serving


def serve(
    address: ServerAddress, pool: WorkerPool, *, on_ready: Callable[[ServerAddress], None] = lambda address: None
) -> None:
    """Serve the page until interrupted.

    Args:
        address: Address to listen on.
        pool: Pool of workers, which is opened and closed with the server.
        on_ready: Called with the final address, which contains the port, before the server accepts requests.

    Raises:
        StorageError: The address is in use or does not exist.
    """
    with _bind(address) as listening:
        address = ServerAddress(address.host, listening.getsockname()[1], address.token)
        config = uvicorn.Config(
            create_app(address, pool),
            interface="asgi3",
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=512,
            backlog=64,  # accepted per iteration of the loop: a request is read before its connection can be the oldest
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
            http=GuardedProtocol,
            ws="none",
        )
        server = uvicorn.Server(config)
        on_ready(address)
        with contextlib.suppress(KeyboardInterrupt):
            server.run([listening])


def _bind(address: ServerAddress) -> socket.socket:
    """Return a listening socket."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        reason = (error.strerror or "").partition(" (")[0]  # Python adds the address
        raise StorageError(
            f"cannot listen on {address.host}:{address.port} ({reason}); choose another port with --port, or --port 0 "
            "for any free port"
        ) from error
