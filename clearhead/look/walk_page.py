"""The page of a walk: one HTML file with all stations in it, drawn by the script in `assets/walk.js`."""

from __future__ import annotations

from clearhead.look.page import filled
from clearhead.look.walk import Walk


def page(walk: Walk) -> str:
    """The whole page as text."""
    return filled("walk.html", walk.title, walk.to_dict(), styles=("page.css", "walk.css"), scripts=("walk.js",))
