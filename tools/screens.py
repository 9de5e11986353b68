"""Pictures of the live page: `python tools/screens.py docs/pictures/explore.png` makes the README's, and
`python tools/screens.py FOLDER` all panels, each light, dark and 400 pixels wide, to be looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.explore import browsing, serving

README = "run?model=en-es&text=I+would+like+a+cup+of+coffee%2C+please.&view=attention"
PANELS = {
    "run": README,
    "stations": "run?model=en-es&text=How+are+you%3F&at=25.0",
    "picture": "run?model=digits-vit&view=attention",
    "beams": "run?model=en-es&text=How+are+you%3F&view=beams&width=4",
    "change": "change?model=shakespeare&edits=blocks.0.attention%3A0%2B1%3Aoff%3Bblocks.2%3A%3Ascale%3A0.5",
    "hand": "hand",
    "masks": "masks?n=2048&e=causal%28%29+%26+%28window%28256%2C+0%29+%7C+every%28128%29%29",
    "digit": "digit",
    "cost": "cost?training=yes",
    "claims": "claims",
    "sheets": "sheets",
}
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1360, "height": 900}},
    "dark": {"viewport": {"width": 1360, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 800}},
}


def taken(page: Any, address: str, hash_: str, path: Path, *, whole: bool = True) -> None:
    page.goto("about:blank")
    page.goto(f"{address}#{hash_}")
    page.wait_for_selector("html[data-ready]")
    if hash_.startswith("run"):
        page.wait_for_selector("html[data-shown]")
    if hash_.startswith("claims"):
        page.click("text=Try it now")
        page.wait_for_selector('html[data-ready^="verdict"]')
    page.wait_for_timeout(3000)  # what comes after the first answer: growth, gallery, fonts
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path), full_page=whole)
    print(path)


def main() -> None:
    out = Path(sys.argv[1])
    with serving() as address:
        if out.suffix == ".png":
            with browsing(viewport={"width": 1360, "height": 1360}) as page:
                taken(page, address, README, out, whole=False)
            return
        for mode, how in MODES.items():
            with browsing(**how) as page:
                for name, hash_ in PANELS.items():
                    taken(page, address, hash_, out / f"{name}-{mode}.png")


if __name__ == "__main__":
    main()
