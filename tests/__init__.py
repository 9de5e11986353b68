"""The tests, one folder per package. Jaxtyping's import hook loads `tests.typecheck` by name."""

from tests import typecheck as typecheck
