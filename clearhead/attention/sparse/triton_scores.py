"""Functions of Triton kernels that turn products of queries and keys into scores, and scores into weights.

Scores with a bias or a soft cap are in natural units and include the scale; others are products, in base-2 units after
the multiplication by scale · log2(e)."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.triton_forward import LARGEST, LOG2E


@triton.jit
def tanh(x, PRECISION: tl.constexpr):
    """Return the hyperbolic tangent; in half precision, to about 1e-7 absolutely, which rounding hides."""
    if PRECISION == "ieee":
        a = tl.abs(x)
        e = tl.math.exp2(a * (2.0 * LOG2E))
        # Near 0, the difference from 1 has few digits. The continued fraction of tanh is exact to 1e-9 up to 0.6.
        a2 = a * a
        is_small = a < 0.6
        numerator = tl.where(is_small, a * (945.0 + a2 * (105.0 + a2)), 2.0)
        denominator = tl.where(is_small, 945.0 + a2 * (420.0 + 15.0 * a2), e + 1.0)
        ratio = numerator / denominator
        t = tl.where(is_small, ratio, 1.0 - ratio)
        return tl.where(x < 0.0, -t, t)
    else:
        return 1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def modify_scores(
    s, bias_row, bias_columns, in_bias, distance_head, entries, scale, cap,
    HAS_BIAS: tl.constexpr, HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return scores of products s (M, N): scaled, capped and with biases, and the tangents of the cap.

    Without a bias and a cap, both are s. `bias_row` + `bias_columns` are the addresses of the bias, read where
    `in_bias`; `distance_head` + `entries` those of the bias by distance, all of which exist."""
    t = s
    if HAS_CAP:
        t = tanh(s * (scale / cap), PRECISION)
        s = t * cap
    elif HAS_BIAS or HAS_DISTANCE:
        s = s * scale
    if HAS_DISTANCE:
        s = s + tl.load(distance_head + entries)
    if HAS_BIAS:
        bias = tl.load(bias_row + bias_columns[None, :], mask=in_bias, other=0.0).to(tl.float32)
        # Finite values stay finite; see `triton_forward._add_bias`.
        s = s + tl.where(bias == float("-inf"), bias, tl.minimum(tl.maximum(bias, -LARGEST), LARGEST))
    return s, t


@triton.jit
def shift_of(lse, IS_NATURAL: tl.constexpr):
    """Return the log-sum-exp in the units of the scores; +inf for an empty row."""
    return tl.where(lse == float("-inf"), float("inf"), lse if IS_NATURAL else lse * LOG2E)


@triton.jit
def softmax_weights(s, c, shift, IS_NATURAL: tl.constexpr):
    """Return the softmax weights of scores s; see `triton_backward._softmax_weights`."""
    return tl.math.exp2(tl.minimum((s - shift) * c, 0.0)) if IS_NATURAL else tl.math.exp2(s * c - shift)
