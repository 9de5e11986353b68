"""Print the site to one PDF with an installed Chromium: `python docs/pdf.py SINGLE_PAGE OUT`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FOOTER = '<div style="width:100%;text-align:center;font-size:8px"><span class="pageNumber"></span></div>'


def main(page: Path, out: Path) -> None:
    """Print the HTML file `page` to the PDF file `out`."""
    executable = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if executable is None:
        sys.exit(f"no browser found to print the PDF; install one of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        tab = browser.new_page(color_scheme="light")
        tab.goto(page.resolve().as_uri())
        margin = {"top": "18mm", "bottom": "18mm", "left": "17mm", "right": "17mm"}
        tab.pdf(
            path=str(out), format="A4", margin=margin, outline=True, tagged=True, print_background=True,
            display_header_footer=True, header_template="<span></span>", footer_template=FOOTER,
        )  # fmt: skip
        browser.close()
    print(f"{out} written")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
