"""Save screenshots of the explorer.

`python tools/screenshots.py docs/pictures/explore.png` saves the image of the README and explore-dark.png;
`python tools/screenshots.py FOLDER` saves all panels, each light, dark and 390 pixels wide, for review."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.explore import browsing, serving

README = "model?model=en-es&text=I+would+like+a+cup+of+coffee%2C+please.&view=attention"
PANELS = {
    "model": README,
    "steps": "model?model=en-es&text=How+are+you%3F&view=steps",
    "speech": "model?model=spoken-digits",
    "tour": "tour?model=en-es",
    "interpret": "interpret?model=en-es&text=I+would+like+a+cup+of+coffee%2C+please.&view=why&step=4",
    "image": "model?model=digits-vit&view=attention",
    "beams": "model?model=en-es&text=How+are+you%3F&view=beams&width=4",
    "intervention": "intervention?model=shakespeare&edits=blocks.0.attention%3A0%2B1%3Azero%3Bblocks.2%3A%3Askip",
    "by_hand": "by_hand",
    "mask": "mask?n=2048&e=causal%28%29+%26+%28window%28256%2C+0%29+%7C+every%28128%29%29",
    "attribution": "model?model=digits-vit&view=pixels",
    "cost": "cost?training=yes",
    "claims": "claims",
    "exercises": "exercises",
}
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1440, "height": 900}},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}},
}


def save_screenshot(page: Any, address: str, hash_: str, path: Path, *, full_page: bool = True) -> None:
    """Open a panel, wait until it is drawn, and save it."""
    page.goto("about:blank")
    page.goto(f"{address}#{hash_}")
    page.wait_for_selector("html[data-ready]")
    if hash_.startswith("model"):
        page.wait_for_selector("html[data-shown]")
    if hash_.startswith("claims"):
        page.click(".entry button.main")
        page.wait_for_selector('html[data-ready^="verdict"]')
    page.wait_for_timeout(3000)  # results after the first: growth, catalogue, fonts
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path), full_page=full_page)
    print(path)


def main() -> None:
    """Save one image or all panels."""
    out = Path(sys.argv[1])
    with serving() as address:
        if out.suffix == ".png":
            for scheme, path in (("light", out), ("dark", out.with_stem(f"{out.stem}-dark"))):
                with browsing(viewport={"width": 1440, "height": 1000}, color_scheme=scheme) as page:
                    save_screenshot(page, address, README, path, full_page=False)
            return
        for mode, options in MODES.items():
            with browsing(**options) as page:
                for name, hash_ in PANELS.items():
                    save_screenshot(page, address, hash_, out / f"{name}-{mode}.png")


if __name__ == "__main__":
    main()
