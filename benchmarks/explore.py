"""Latency of keystrokes in the explorer, measured in a browser: `python -m benchmarks explore`.

The server is started by its command, and Chromium types into the panels of the page. The latency is the time from the
input event to the first frame with the updated panel.
"""

from __future__ import annotations

import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Row, gather
from clearhead.errors import MissingDependencyError, optional_dependency

TARGET_MS = 150.0
"""Latency that feels immediate, in milliseconds."""

# Name, panel with its state, selector of the field, and the successive texts of the field.
_LINE = "First Citizen:\nBefore we proceed any further, hear me speak."
CASES = (
    ("shakespeare", "model?model=shakespeare", "textarea", [_LINE[:n] for n in range(20, len(_LINE))]),
    ("sort-dedup", "model?model=sort-dedup", "textarea", ["D A A C B Q X"[:n] for n in range(3, 14, 2)]),
    ("en-es", "model?model=en-es", "textarea", ["The house over there is red."[:n] for n in range(5, 29)]),
    ("interventions", "intervention?model=sort-dedup", "textarea", ["D A A C B Q X"[:n] for n in range(3, 14, 2)]),
    ("mask", "mask", "input.wide", [f"causal() & window({n}, 0)" for n in range(3, 20)]),
    ("by hand", "by_hand", "input.cell", [f"{n}/7" for n in range(2, 12)]),
)

# Types a text into a field and resolves to the milliseconds until the panel has been redrawn.
_KEY = """([selector, text]) => new Promise((resolve) => {
  const field = document.querySelector(selector), start = performance.now();
  const observer = new MutationObserver(() => {
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
  });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
})"""


@dataclass(frozen=True)
class KeystrokeLatency(Row):
    """Latencies of the keystrokes in one panel: median, 95th percentile and maximum."""

    panel: str
    keys: int
    median_ms: float
    p95_ms: float
    max_ms: float
    target_ms: float

    @property
    def meets_target(self) -> bool:
        """Whether the 95th percentile is at most the target."""
        return self.p95_ms <= self.target_ms


def measure(out: Path) -> list[KeystrokeLatency]:
    """Return one row per panel; write each to `out` as it is measured."""

    def type_into(name: str, panel: str, field: str, texts: list[str]) -> KeystrokeLatency:
        page.goto("about:blank")
        page.goto(f"{address}#{panel}")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(2000)  # until everything else has been drawn
        times = sorted(page.evaluate(_KEY, [field, text]) for _ in range(3) for text in texts)
        p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
        return KeystrokeLatency(name, len(times), statistics.median(times), p95, times[-1], TARGET_MS)

    with serving() as address, browsing(viewport={"width": 1360, "height": 900}) as page:
        return gather((type_into(*case) for case in CASES), out)


@contextmanager
def serving() -> Iterator[str]:
    """Start `clearhead explore` and yield its address."""
    command = (sys.executable, "-m", "clearhead.cli", "explore", "--no-open", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(line.strip() for line in process.stdout or () if re.match("http://", line))
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def browsing(**options: Any) -> Iterator[Any]:
    """Yield a page of the installed Chromium or Chrome; `options` are those of `new_page`."""
    with optional_dependency("driving a browser needs playwright: pip install 'clearhead[browser]'"):
        from playwright.sync_api import sync_playwright
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        raise MissingDependencyError("no Chromium or Chrome was found; install one")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = browser.new_page(**options)
            page.set_default_timeout(120_000)
            yield page
        finally:
            browser.close()
