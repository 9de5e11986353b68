"""Addresses of the panels and views that browser tests open."""

from __future__ import annotations

PANELS = [
    "model",
    "tour",
    "intervention",
    "interpret",
    "comparison",
    "training",
    "by_hand",
    "mask",
    "cost",
    "claims",
    "exercises",
]
HOUSE = "model=en-es&text=The+house+is+red."
VIEWS = [
    f"model?{HOUSE}&view=steps",
    f"model?{HOUSE}&view=beams",
    "model?model=digits-vit&view=pixels",
    "model?model=spoken-digits",
    f"interpret?{HOUSE}&view=why&step=1",
    f"interpret?{HOUSE}&view=neurons",
    f"interpret?{HOUSE}&view=patching&other=The+car+is+red.",
    f"comparison?{HOUSE}&text2=The+car+is+red.&view=outputs",
    f"intervention?{HOUSE}&edits=decoder.blocks.3.cross_attention:1:zero",
]


def open_completely(tab, panel):
    """Open a panel and wait for its results."""
    tab.open(panel)
    if panel in VIEWS:
        tab.page.wait_for_selector("html[data-map]" if panel.startswith("intervention") else "html[data-shown]")
    tab.page.wait_for_timeout(600)
