"""The run-time type checker of the tests: beartype, which accepts an int for a float as mypy does.

Without beartype, for example on a GPU machine, tests run unchecked if jaxtyping's import hook is not enabled.
"""

from __future__ import annotations

try:
    from beartype import BeartypeConf, beartype
except ModuleNotFoundError:
    pass
else:
    check = beartype(conf=BeartypeConf(is_pep484_tower=True))
