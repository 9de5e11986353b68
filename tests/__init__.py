"""The tests, a folder for each room of the house. `tests.typecheck` is loaded by name by jaxtyping's hook."""

from tests import typecheck as typecheck
