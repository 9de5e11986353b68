"""The live page: `clearhead explore`. A server on this machine only, and a page of plain ES modules in `page/`.

`server.py` answers the browser and computes nothing. `desk.py` hands each request to one of a few processes
(`process.py`), which are bounded in memory and time and replaced when they die. What a request asks and what it gets is
in one file a panel, a function an action. Nothing is kept between requests: a request says all that its answer
depends on, so that no client sees another's work."""

from __future__ import annotations

from clearhead.explore.desk import Limits
from clearhead.explore.server import Place, serve

__all__ = ["Limits", "Place", "serve"]
