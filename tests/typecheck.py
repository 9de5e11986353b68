"""The run-time type checker of the tests: beartype, which also takes an int where a float is wanted, as mypy does.

A machine without beartype (a borrowed GPU, say) runs the tests unchecked, as long as nobody asks jaxtyping for them.
"""

from __future__ import annotations

try:
    from beartype import BeartypeConf, beartype
except ModuleNotFoundError:
    pass
else:
    check = beartype(conf=BeartypeConf(is_pep484_tower=True))
