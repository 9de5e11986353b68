"""The run-time type checker of the tests: beartype, which also takes an int where a float is wanted, as mypy does."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
