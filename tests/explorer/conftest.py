"""A server in a separate process for the whole session, and an HTTP client for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest

from tests.support.browser import BROWSER
from tests.support.browser_tab import Tab
from tests.support.training_run import train_letters


@dataclass(frozen=True)
class Client:
    address: str
    process: subprocess.Popen
    greeting: str = ""  # what the terminal shows before the address

    @property
    def parts(self):
        return urlsplit(self.address)

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str):
        """Send one request and return status, headers and body. `path` is sent unchanged."""
        connection = http.client.HTTPConnection(self.parts.hostname, self.parts.port)
        with contextlib.closing(connection):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def get(self, name: str = "", **headers: str):
        return self.send("GET", self.parts.path + name, **headers)

    def events(self, action: str, request: dict) -> list[dict]:
        """Return all events of one request."""
        body = json.dumps(request).encode()
        status, _, text = self.send("POST", f"{self.parts.path}api/{action}", body, content_type="application/json")
        assert status == 200, text
        return [json.loads(line) for line in text.splitlines()]

    def post(self, action: str, request: dict):
        """Return the result of a request, or its error as {"error": …}."""
        last = self.events(action, request)[-1]
        return last["error"] if "error" in last else last["done"]


@contextlib.contextmanager
def serving(*options: str, errors=None, **settings):
    """Run `clearhead explore` in a separate process until the block ends; `errors` receives its standard error."""
    command = (sys.executable, "-m", "clearhead.cli", "explore", *options, "--no-open", "--port", "0")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, **settings)
    greeting = []
    try:
        for line in process.stdout:
            if re.match(r"http://\S+\n", line):
                yield Client(line.strip(), process, " ".join(greeting))
                break
            greeting.append(line.strip())
        else:
            raise AssertionError("the server printed no address")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0  # Ctrl-C is the normal way to stop it
        process.stdout.close()


@pytest.fixture(scope="session")
def page():
    with serving("sort-dedup", "digits-vit", "digits-conv", "en-es", "spoken-digits", "--workers", "1") as client:
        client.post("models", {})  # wait until the worker has loaded its models
        yield client


@pytest.fixture(scope="session")
def run_page(tmp_path_factory):
    """A page that was started with the folder of a training run."""
    folder = train_letters(tmp_path_factory.mktemp("runs") / "letters")
    with serving(str(folder), "--workers", "1") as client:
        client.post("models", {})
        yield client


@pytest.fixture(scope="session")
def chromium():
    """A running browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(chromium, page):
    """A tab that must end without console messages and without requests to other servers."""
    browser_tab = Tab(chromium, page)
    yield browser_tab
    browser_tab.context.close()
    assert browser_tab.problems == []
