"""The properties as assertions, for a suite of one's own.

from clearhead.checks.testing import assert_causal, assert_cache_consistent

def test_model():
    assert_causal(model)

Each raises an `AssertionError` whose text is the finding: where, by how much, the usual cause, the smallest input. A
property that cannot be tested on the module fails too, and says why: a test that tests nothing would be worse than
none. The keywords are those of `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.checks.report import Report, Verdict
from clearhead.checks.runner import check


def assert_property(module: Any, name: str, **how: Any) -> None:
    """Raises unless the property of this name (see `clearhead.checks.NAMES`) was tested and holds."""
    finding = check(module, only=name, **how)[name]
    if finding.verdict is not Verdict.PASS:
        raise AssertionError(str(finding))


def assert_right(module: Any, **how: Any) -> Report:
    """Raises if any property fails; those that are not applicable are passed over. Returns the report."""
    report = check(module, **how)
    if not report.ok:
        raise AssertionError("\n".join([f"{report.name}:", *(str(failure) for failure in report.failures)]))
    return report


def assert_causal(module: Any, **how: Any) -> None:
    """Raises if an output depends on a later token (or one that `sees` hides), or misses one that it should see."""
    if "sees" not in how:
        how.setdefault("causal", True)
    assert_property(module, "future leak", **how)
    assert_property(module, "past reach", **how)


def assert_permutation_equivariant(module: Any, **how: Any) -> None:
    """Raises if the order of the tokens counts; `positions=False` is taken as said."""
    how.setdefault("positions", False)
    assert_property(module, "permutation equivariance", **how)


def _assertion(name: str, says: str) -> Callable[..., None]:
    """The assertion of one property, called with a module and the keywords of `check`."""

    def assertion(module: Any, **how: Any) -> None:
        assert_property(module, name, **how)

    assertion.__doc__ = says
    return assertion


assert_padding_invariant = _assertion(
    "padding invariance", "Raises if padding, on either side, of any amount and content, changes a real output."
)
assert_mask_polarity = _assertion(
    "mask polarity", "Raises if True in the padding mask means the opposite of what is said."
)
assert_batch_invariant = _assertion(
    "batch invariance", "Raises if a row's output depends on its neighbours or its place in the batch."
)
assert_cache_consistent = _assertion("cache = no cache", "Raises if outputs with a cache differ from those without.")
assert_deterministic = _assertion("determinism", "Raises if the same input gives different outputs in evaluation mode.")
assert_dtypes_agree = _assertion(
    "dtype agreement", "Raises if float32, bfloat16 or float16 err by more than their rounding."
)
assert_finite = _assertion("finiteness", "Raises if finite inputs give NaN or infinities.")
assert_gradients_reach = _assertion("gradients reach every parameter", "Raises if a parameter gets no gradient.")
assert_train_is_eval = _assertion(
    "train = eval without dropout", "Raises if training mode without dropout computes something else."
)

__all__ = [
    "assert_batch_invariant", "assert_cache_consistent", "assert_causal", "assert_deterministic", "assert_dtypes_agree",
    "assert_finite", "assert_gradients_reach", "assert_mask_polarity", "assert_padding_invariant",
    "assert_permutation_equivariant", "assert_property", "assert_right", "assert_train_is_eval",
]  # fmt: skip
