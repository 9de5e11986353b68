"""Types of JSON and TOML documents."""

from __future__ import annotations

from typing import TypeAlias

JSONObject: TypeAlias = dict[str, object]
