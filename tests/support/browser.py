"""An installed Chromium, and scripts that run in pages within it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))),
    None,
)
"""Path of Chromium or Chrome; None if neither is installed."""

SCRIPTS = Path(__file__).parents[1] / "analysis/views/browser"

# Runs before the page's script and records all errors.
ERROR_RECORDER = """<script>
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective));
</script>"""
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--window-size=1400,1000",
    "--virtual-time-budget=60000",
    "--dump-dom",
)


def run_script_in_page(folder: Path, text: str, script: str) -> dict:
    """Return the results of a script of `analysis/views/browser/` in a page."""
    run = "\n".join((SCRIPTS / name).read_text(encoding="utf-8") for name in ("tools.js", script))
    path = folder / "page.html"
    path.write_text(
        text.replace("<head>", f"<head>{ERROR_RECORDER}", 1).replace("</body>", f"<script>{run}</script></body>"),
        encoding="utf-8",
    )
    process = subprocess.run(
        [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'profile'}", path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
    )
    result = re.search(r'<pre id="results">([^<]*)</pre>', process.stdout)
    assert result, f"the script did not finish:\n{process.stderr[-2000:]}"
    results = json.loads(base64.b64decode(result.group(1)))
    assert results["wrong"] == []
    assert results["fetched"] == 0
    return results
