"""The properties as assertions, for a suite of one's own.

from clearhead.checks.testing import assert_causal, assert_cache_consistent

def test_model():
    assert_causal(model)

Each raises an `AssertionError` whose text is the finding: where, by how much, the usual cause, the smallest input. A
property that cannot be tested on the module fails too, and says why: a test that tests nothing would be worse than
none. The keywords are those of `check`."""

from __future__ import annotations

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


def assert_padding_invariant(module: Any, **how: Any) -> None:
    """Raises if padding, on either side, of any amount and content, changes a real output."""
    assert_property(module, "padding invariance", **how)


def assert_mask_polarity(module: Any, **how: Any) -> None:
    """Raises if True in the padding mask means the opposite of what is said."""
    assert_property(module, "mask polarity", **how)


def assert_batch_invariant(module: Any, **how: Any) -> None:
    """Raises if a row's output depends on its neighbours or its place in the batch."""
    assert_property(module, "batch invariance", **how)


def assert_cache_consistent(module: Any, **how: Any) -> None:
    """Raises if outputs with a cache differ from those without."""
    assert_property(module, "cache = no cache", **how)


def assert_permutation_equivariant(module: Any, **how: Any) -> None:
    """Raises if the order of the tokens counts; `positions=False` is taken as said."""
    how.setdefault("positions", False)
    assert_property(module, "permutation equivariance", **how)


def assert_deterministic(module: Any, **how: Any) -> None:
    """Raises if the same input gives different outputs in evaluation mode."""
    assert_property(module, "determinism", **how)


def assert_dtypes_agree(module: Any, **how: Any) -> None:
    """Raises if float32, bfloat16 or float16 err by more than their rounding."""
    assert_property(module, "dtype agreement", **how)


def assert_finite(module: Any, **how: Any) -> None:
    """Raises if finite inputs give NaN or infinities."""
    assert_property(module, "finiteness", **how)


def assert_gradients_reach(module: Any, **how: Any) -> None:
    """Raises if a parameter gets no gradient."""
    assert_property(module, "gradients reach every parameter", **how)


def assert_train_is_eval(module: Any, **how: Any) -> None:
    """Raises if training mode without dropout computes something else."""
    assert_property(module, "train = eval without dropout", **how)


__all__ = [
    "assert_batch_invariant", "assert_cache_consistent", "assert_causal", "assert_deterministic", "assert_dtypes_agree",
    "assert_finite", "assert_gradients_reach", "assert_mask_polarity", "assert_padding_invariant",
    "assert_permutation_equivariant", "assert_property", "assert_right", "assert_train_is_eval",
]  # fmt: skip
