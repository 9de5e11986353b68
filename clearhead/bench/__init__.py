"""Side-by-side measurements against peers: both in one run, in turn, and only their ratio is quoted."""

# ruff: noqa: F401 (the package has these names to offer)

from typing import TYPE_CHECKING

from clearhead._lazy import lazy

if TYPE_CHECKING:
    from clearhead.bench import auto, core, cost, engine, explore, generation, look, machine, results, sparse, studies

lazy(__name__)
