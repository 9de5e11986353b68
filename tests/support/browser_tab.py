"""A tab of Chromium with the explorer, for tests that drive its pages."""

from __future__ import annotations

from pathlib import Path


class Tab:
    """A browser page that records console messages, errors and requests to other servers."""

    def __init__(self, chromium, client, **options):
        self.client = client
        self.problems = []
        self.context = chromium.new_context(viewport={"width": 1360, "height": 900}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", self._on_request)

    def _on_console(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _on_request(self, request):
        if not request.url.startswith((self.client.address, "data:", f"blob:http://{self.client.parts.netloc}/")):
            self.problems.append(f"request to another server: {request.url}")

    def open(self, hash_):
        self.page.goto("about:blank")
        self.page.goto(f"{self.client.address}#{hash_}")
        return self.ready()

    def ready(self, prefix=""):
        """Wait until the panel is drawn and return its state."""
        self.page.wait_for_selector(f'html[data-ready^="{prefix}"]' if prefix else "html[data-ready]")
        return self.page.locator("html").get_attribute("data-ready")

    def wait_for_view(self, prefix):
        self.page.wait_for_selector(f'html[data-shown^="{prefix}"]')

    def download(self, button):
        with self.page.expect_download() as event:
            button.click()
        return Path(event.value.path()).read_bytes()

    @property
    def hash(self):
        return self.page.url.partition("#")[2]
