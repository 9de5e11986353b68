"""The explorer, an interactive web page: `clearhead explore`.

The server accepts requests and runs no model code itself. A pool of worker processes, which are limited in memory and
time and replaced when they die, runs the requests. Each panel of the page is one module, and each action one function.
The server keeps no state between requests: a request contains everything that its answer depends on."""

from __future__ import annotations

from clearhead.explorer.server import ServerAddress, serve
from clearhead.explorer.worker_pool import ServerLimits

__all__ = ["ServerAddress", "ServerLimits", "serve"]
