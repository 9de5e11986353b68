"""`python -m benchmarks explore`: how long a keystroke takes in the live page, measured in the browser.

The server is started as a user starts it and a Chromium types into its panels. A time runs from the event of a key to
the first frame in which the panel shows what follows from it; the bound is what feels immediate."""

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

BOUND = 150.0
"""Milliseconds within which a keystroke is answered."""

# What is typed where: a panel with its state, the field, and the texts that it holds one after the other.
_LINE = "First Citizen:\nBefore we proceed any further, hear me speak."
TYPED = (
    ("shakespeare", "model?model=shakespeare", "textarea", [_LINE[:n] for n in range(20, len(_LINE))]),
    ("sort-dedup", "model?model=sort-dedup", "textarea", ["D A A C B Q X"[:n] for n in range(3, 14, 2)]),
    ("en-es", "model?model=en-es", "textarea", ["The house over there is red."[:n] for n in range(5, 29)]),
    ("change", "change?model=sort-dedup", "textarea", ["D A A C B Q X"[:n] for n in range(3, 14, 2)]),
    ("mask", "mask", "input.wide", [f"causal() & window({n}, 0)" for n in range(3, 20)]),
    ("by hand", "hand", "input.cell", [f"{n}/7" for n in range(2, 12)]),
)

# Types a text into a field and gives the milliseconds until the panel has drawn what follows.
_KEY = """([selector, text]) => new Promise((take) => {
  const field = document.querySelector(selector), begun = performance.now();
  const seen = new MutationObserver(() => {
    seen.disconnect();
    requestAnimationFrame(() => setTimeout(() => take(performance.now() - begun)));
  });
  seen.observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
  field.value = text;
  field.dispatchEvent(new Event("input", { bubbles: true }));
})"""


@dataclass(frozen=True)
class Typed(Row):
    """The keystrokes of one panel, in milliseconds."""

    panel: str
    keys: int
    median_ms: float
    most_of_them_ms: float  # 19 of 20 took no longer
    worst_ms: float
    bound_ms: float

    @property
    def holds(self) -> bool:
        return self.most_of_them_ms <= self.bound_ms


def measure(out: Path) -> list[Typed]:
    """A row a panel, written to `out` as soon as it is there."""

    def typed(name: str, panel: str, field: str, texts: list[str]) -> Typed:
        page.goto("about:blank")
        page.goto(f"{address}#{panel}")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(2000)  # the first drawing of everything else
        times = sorted(page.evaluate(_KEY, [field, text]) for _ in range(3) for text in texts)
        late = times[min(len(times) - 1, int(0.95 * len(times)))]
        return Typed(name, len(times), statistics.median(times), late, times[-1], BOUND)

    with serving() as address, browsing(viewport={"width": 1360, "height": 900}) as page:
        return gather((typed(*about) for about in TYPED), out)


@contextmanager
def serving() -> Iterator[str]:
    """The address of a server that was started as a user starts it."""
    command = (sys.executable, "-m", "clearhead.cli", "explore", "--no-open", "--port", "0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield next(line.strip() for line in process.stdout or () if re.match("http://", line))
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def browsing(**how: Any) -> Iterator[Any]:
    """A page of a Chromium that is there."""
    with optional_dependency("driving a browser needs playwright: pip install 'clearhead[browser]'"):
        from playwright.sync_api import sync_playwright
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise MissingDependencyError("there is no Chromium or Chrome on this machine: install one")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            page = browser.new_page(**how)
            page.set_default_timeout(120_000)
            yield page
        finally:
            browser.close()
