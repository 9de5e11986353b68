"""Assertions for users' test suites pass for correct modules and fail for incorrect ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clearhead.analysis.checks import Values, testing
from clearhead.analysis.checks.buggy_modules import CORRECT, GALLERY
from clearhead.models import tiny_decoder

PAIRS = {
    "assert_causal": ("language model", "causal mask off by one", "off by one"),
    "assert_padding_invariant": ("encoder-decoder", "padding ignored in cross-attention", "cross-attention"),
    "assert_mask_polarity": ("language model", "inverted padding mask", "inverted"),
    "assert_batch_invariant": ("reader", "batch taken for time", "batch_first"),
    "assert_cache_consistent": ("language model", "cache positions restart", "positions restart"),
    "assert_permutation_equivariant": ("reader", "heads split by view, both ways", "transpose"),
    "assert_deterministic": ("language model", "dropout in evaluation", "dropout"),
    "assert_dtypes_agree": ("language model", "−1e9 in float16", "float16"),
    "assert_finite": ("reader", "NaN from an empty row", "empty row"),
    "assert_gradient_flow": ("language model", "detached output", "detach"),
    "assert_train_eval_consistent": ("language model", "batch-norm in a decoder", "batch-norm"),
    "assert_valid": ("summary", "mean over the padding", "a mean"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_assertion_passes_and_fails(name):
    right, wrong, words = PAIRS[name]
    check = getattr(testing, name)
    torch.manual_seed(0)
    check(CORRECT[right]())
    with pytest.raises(AssertionError, match=words):
        check(GALLERY[wrong].spec())


def test_assertions_are_all_tested():
    assert set(PAIRS) | {"assert_property"} == set(testing.__all__)


def test_assertion_not_applicable_fails():
    with pytest.raises(AssertionError, match="not applicable: the module does not take a sequence"):
        testing.assert_padding_invariant(nn.Linear(3, 3), inputs=Values((3,)))


def test_assert_valid_accepts_clearhead_model():
    testing.assert_causal(tiny_decoder().build())
