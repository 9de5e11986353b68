"""The tests, one folder per package. Jaxtyping's import hook loads `tests.support.typecheck` by name."""

from tests.support import typecheck as typecheck
