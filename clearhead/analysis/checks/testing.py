"""Properties as assertions for a test suite.

from clearhead.analysis.checks.testing import assert_causal, assert_cache_consistent

def test_model():
    assert_causal(model)

Each raises an `AssertionError` with the finding: location, difference, usual cause and a minimal example. A property
that cannot be tested on the module fails too, because a test without effect is misleading. The options are those
of `check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.analysis.checks.check_report import CheckReport, Verdict
from clearhead.analysis.checks.runner import check


def assert_property(module: object, name: str, **options: Any) -> None:
    """Raise AssertionError unless the property (see `clearhead.analysis.checks.NAMES`) passes."""
    finding = check(module, only=name, **options)[name]
    if finding.verdict is not Verdict.PASS:
        raise AssertionError(str(finding))


def assert_valid(module: object, **options: Any) -> CheckReport:
    """Raise AssertionError if any property fails, and return the report. Properties that do not apply are ignored."""
    report = check(module, **options)
    if not report.ok:
        raise AssertionError("\n".join([f"{report.name}:", *(str(failure) for failure in report.failures)]))
    return report


def assert_causal(module: object, **options: object) -> None:
    """Raise AssertionError unless each output depends on exactly the tokens that the mask allows."""
    if "mask" not in options:
        options.setdefault("causal", True)
    assert_property(module, "causality", **options)
    assert_property(module, "context use", **options)


def assert_permutation_equivariant(module: object, **options: object) -> None:
    """Raise AssertionError if the order of the tokens matters."""
    options.setdefault("positions", False)
    assert_property(module, "permutation equivariance", **options)


def _assertion(name: str, doc: str) -> Callable[..., None]:
    """Return the assertion of one property, which takes a module and the options of `check`."""

    def assertion(module: object, **options: object) -> None:
        assert_property(module, name, **options)

    assertion.__doc__ = doc
    return assertion


assert_padding_invariant = _assertion(
    "padding invariance",
    "Raise AssertionError if padding, on either side, of any amount and content, changes the output of a real token.",
)
assert_mask_polarity = _assertion(
    "mask polarity", "Raise AssertionError if the padding mask has the opposite polarity."
)
assert_batch_invariant = _assertion(
    "batch invariance", "Raise AssertionError if a row's output depends on other rows or on its index in the batch."
)
assert_cache_consistent = _assertion(
    "cache = no cache", "Raise AssertionError if outputs with a cache differ from those without."
)
assert_deterministic = _assertion(
    "determinism", "Raise AssertionError if the same input gives different outputs in evaluation mode."
)
assert_dtypes_agree = _assertion(
    "dtype agreement", "Raise AssertionError if float32, bfloat16 or float16 differ by more than their rounding."
)
assert_finite = _assertion("finiteness", "Raise AssertionError if finite inputs give NaN or infinities.")
assert_gradient_flow = _assertion("gradient flow", "Raise AssertionError if a parameter gets no gradient.")
assert_train_eval_consistent = _assertion(
    "train/eval consistency", "Raise AssertionError if training mode without dropout computes a different result."
)

__all__ = [
    "assert_batch_invariant", "assert_cache_consistent", "assert_causal", "assert_deterministic", "assert_dtypes_agree",
    "assert_finite", "assert_gradient_flow", "assert_mask_polarity", "assert_padding_invariant",
    "assert_permutation_equivariant", "assert_property", "assert_train_eval_consistent",
    "assert_valid",
]  # fmt: skip
