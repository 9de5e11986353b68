"""Sparse attention in Triton for masks in which each row sees an interval of columns, or two.

Each program computes one block of rows of one head. It reduces the intervals of its rows (`RowIntervals`) to the
columns that some row sees, and to those that all rows see, and iterates over tiles of consecutive columns. A single
loop covers all tiles, so that loads run ahead of the products; only tiles that not all rows see are tested. In the
forward kernel and the gradient of the queries, rows are queries; in the gradients of keys and values, rows are keys and
columns are queries. There are no atomic additions, so results repeat bit for bit.

Letters: M rows of a block, N columns of a tile, R intervals per row, D and E the widths of keys and values, DP and EP
these widths rounded up to a power of two. A bias by distance has T + S values per head, of which a tile reads those of
its diagonals unless they are on a line; a soft cap is applied before biases are added (`triton_scores`). GROUPS query
heads share a key/value head; it is a constant, because a loop over one head then takes no registers. Strides are in
units of ALIGN elements. Scores are in base-2 units inside the kernels, or in natural units if they are modified. The
stored log-sum-exp is in natural units."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.triton_forward import _matmul_transposed
from clearhead.attention.sparse.triton_interval_tiles import hide, hide_by_query, load_block, plan_tiles, tile_start
from clearhead.attention.sparse.triton_scores import LN2, LOG2E, load_lines, modify_scores, shift_of, softmax_weights

_SIZES = ["T", "S", "H", "query_offset", "n_blocks", "patterns_stride", "ids_stride", "ids2_stride"]
_STRIDES = [
    "sqb", "sqh", "sqt", "skb", "skh", "sks", "svb", "svh", "svs", "sob", "soh", "sot", "sgb", "sgh", "sgt",
    "sdb", "sdh", "sdt", "sxb", "sxh", "sxs", "syb", "syh", "sys", "sbb", "sbh", "sbt", "distance_stride",
]  # fmt: skip


def unspecialized(function):
    """Mark the sizes and strides among the parameters of a kernel, which vary from call to call."""
    constants = function.__annotations__
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    varying = [name for name in parameters if name in {*_SIZES, *_STRIDES, "scale", "cap"} and name not in constants]
    return triton.jit(do_not_specialize=varying)(function)


@triton.jit
def load_rows(base, first, n_rows, stride, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load rows first … first + M − 1 of a matrix of width D as (M, DP); rows beyond the end repeat the last one."""
    r = tl.minimum(tl.arange(0, M), n_rows - 1 - first)
    d = tl.arange(0, DP)
    at = base + first.to(tl.int64) * stride + (r[:, None] * stride + d[None, :])
    if D == DP:
        return tl.load(at)
    else:
        return tl.load(at, mask=(d < D)[None, :] & (r < n_rows)[:, None], other=0.0)


@triton.jit
def _store_rows(base, first, n_rows, stride, value, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Store (M, DP) to rows first … first + M − 1 of a matrix of width D."""
    r = tl.arange(0, M)
    d = tl.arange(0, DP)
    at = base + first.to(tl.int64) * stride + r[:, None] * stride + d[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=(first + r < n_rows)[:, None] & (d < D)[None, :])


@unspecialized
def interval_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, distance_ptr, bounds_ptr, ids_ptr, ids2_ptr,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sob, soh, sot, sbb, sbh, sbt,
    distance_stride, scale, cap, T, S, H, query_offset, n_blocks, patterns_stride, ids_stride, ids2_stride,
    GROUPS: tl.constexpr, BIAS_STEP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and log-sum-exp of a block of queries."""
    pid = tl.program_id(0)
    bh = pid // n_blocks
    first = (n_blocks - 1 - pid % n_blocks) * M  # under a causal mask, the last queries see most
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    row = first + tl.arange(0, M)
    valid = row < T
    ids = ids_ptr + b * ids_stride
    ids2 = ids2_ptr + b * ids2_stride
    low, high, tested, row_ids, low2, high2, tested2, row_ids2 = load_block(
        bounds_ptr + b * patterns_stride, T + S, ids, ids2, row, valid, query_offset, R, HAS_IDS, HAS_IDS2
    )
    start, n_first, start2, n_tiles, first_full, end_full = plan_tiles(
        low, high, tested, low2, high2, tested2, valid, N, R
    )
    q = load_rows(q_ptr + (b * sqb + h * sqh) * ALIGN, first, T, sqt * ALIGN, M, D, DP)
    k_base = k_ptr + (b * skb + h // GROUPS * skh) * ALIGN
    v_base = v_ptr + (b * svb + h // GROUPS * svh) * ALIGN
    bias_row = bias_ptr + b * sbb + h * sbh + row[:, None].to(tl.int64) * sbt
    distance_head = distance_ptr + h * distance_stride
    last, value, slope, first_entry, value2, slope2, origin = load_lines(
        distance_head, T + S, HAS_DISTANCE
    )  # fmt: skip
    row_max = tl.full([M], float("-inf"), tl.float32)
    denominator = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, EP], tl.float32)
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    c = LOG2E if IS_NATURAL else scale * LOG2E
    for t in range(n_tiles):
        at = tile_start(t, start, n_first, start2, N, R)
        column = at + tl.arange(0, N)
        k = load_rows(k_base, at, S, sks * ALIGN, N, D, DP)
        s = _matmul_transposed(q, k, PRECISION)
        s, _ = modify_scores(
            s, bias_row, column.to(tl.int64) * BIAS_STEP, valid[:, None] & (column < S)[None, :], distance_head,
            (T - 1) - tl.minimum(row, T - 1), tl.minimum(column, S - 1), T - first - M, T - 1 - first, at, at + N - 1,
            last, value, slope, first_entry, value2, slope2, origin, scale, cap,
            HAS_BIAS, HAS_DISTANCE, HAS_CAP, PRECISION,
        )  # fmt: skip
        if (t < first_full) | (t >= end_full):
            s = hide(
                s, column, low, high, tested, row_ids, low2, high2, tested2, row_ids2, ids, ids2, S, 0,
                R, HAS_IDS, HAS_IDS2,
            )  # fmt: skip
        # With a bias of 1e38 the rounding error of a product exceeds any exponent, so subtract first.
        new = tl.maximum(row_max, tl.max(s, 1) if IS_NATURAL else tl.max(s, 1) * c)
        base = tl.where(new == float("-inf"), 0.0, new)  # a row may have no visible column so far
        p = tl.math.exp2((s - base[:, None]) * c if IS_NATURAL else s * c - base[:, None])
        alpha = tl.math.exp2((row_max - base) * c if IS_NATURAL else row_max - base)
        denominator = denominator * alpha + tl.sum(p, 1)
        v = load_rows(v_base, at, S, svs * ALIGN, N, E, EP)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        row_max = new
    is_empty = denominator == 0.0
    out = acc / tl.where(is_empty, 1.0, denominator)[:, None]
    _store_rows(o_ptr + (b * sob + h * soh) * ALIGN, first, T, sot * ALIGN, out, M, E, EP)
    lse = row_max * (1.0 if IS_NATURAL else LN2) + tl.log(tl.where(is_empty, 1.0, denominator))
    tl.store(lse_ptr + bh.to(tl.int64) * T + row, tl.where(is_empty, float("-inf"), lse), mask=valid)


@unspecialized
def interval_query_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, distance_ptr,
    bounds_ptr, ids_ptr, ids2_ptr,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sob, soh, sot, sgb, sgh, sgt, sdb, sdh, sdt, sbb, sbh, sbt,
    distance_stride, scale, cap, T, S, H, query_offset, n_blocks, patterns_stride, ids_stride, ids2_stride,
    GROUPS: tl.constexpr, BIAS_STEP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    EXACT_DELTA: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries, and store delta = Σ out · grad for the other kernels.

    EXACT_DELTA: store Σ p · dp instead, which is delta without the rounding of the output. The sums by distance add up
    many gradients of scores, whose errors of delta would not cancel."""
    pid = tl.program_id(0)
    bh = pid // n_blocks
    first = (n_blocks - 1 - pid % n_blocks) * M
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    row = first + tl.arange(0, M)
    valid = row < T
    ids = ids_ptr + b * ids_stride
    ids2 = ids2_ptr + b * ids2_stride
    low, high, tested, row_ids, low2, high2, tested2, row_ids2 = load_block(
        bounds_ptr + b * patterns_stride, T + S, ids, ids2, row, valid, query_offset, R, HAS_IDS, HAS_IDS2
    )
    start, n_first, start2, n_tiles, first_full, end_full = plan_tiles(
        low, high, tested, low2, high2, tested2, valid, N, R
    )
    q = load_rows(q_ptr + (b * sqb + h * sqh) * ALIGN, first, T, sqt * ALIGN, M, D, DP)
    do = load_rows(do_ptr + (b * sgb + h * sgh) * ALIGN, first, T, sgt * ALIGN, M, E, EP)
    o = load_rows(o_ptr + (b * sob + h * soh) * ALIGN, first, T, sot * ALIGN, M, E, EP)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse = tl.load(lse_ptr + bh.to(tl.int64) * T + row, mask=valid, other=float("-inf"))
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    shift = shift_of(lse, IS_NATURAL)
    if not EXACT_DELTA:
        tl.store(delta_ptr + bh.to(tl.int64) * T + row, delta, mask=valid)
    exact_delta = tl.zeros([M], tl.float32)
    k_base = k_ptr + (b * skb + h // GROUPS * skh) * ALIGN
    v_base = v_ptr + (b * svb + h // GROUPS * svh) * ALIGN
    bias_row = bias_ptr + b * sbb + h * sbh + row[:, None].to(tl.int64) * sbt
    distance_head = distance_ptr + h * distance_stride
    last, value, slope, first_entry, value2, slope2, origin = load_lines(
        distance_head, T + S, HAS_DISTANCE
    )  # fmt: skip
    dq = tl.zeros([M, DP], tl.float32)
    c = LOG2E if IS_NATURAL else scale * LOG2E
    for t in range(n_tiles):
        at = tile_start(t, start, n_first, start2, N, R)
        column = at + tl.arange(0, N)
        k = load_rows(k_base, at, S, sks * ALIGN, N, D, DP)
        v = load_rows(v_base, at, S, svs * ALIGN, N, E, EP)
        s = _matmul_transposed(q, k, PRECISION)
        dp = _matmul_transposed(do, v, PRECISION)
        s, tanh = modify_scores(
            s, bias_row, column.to(tl.int64) * BIAS_STEP, valid[:, None] & (column < S)[None, :], distance_head,
            (T - 1) - tl.minimum(row, T - 1), tl.minimum(column, S - 1), T - first - M, T - 1 - first, at, at + N - 1,
            last, value, slope, first_entry, value2, slope2, origin, scale, cap,
            HAS_BIAS, HAS_DISTANCE, HAS_CAP, PRECISION,
        )  # fmt: skip
        if (t < first_full) | (t >= end_full):
            s = hide(
                s, column, low, high, tested, row_ids, low2, high2, tested2, row_ids2, ids, ids2, S, 0,
                R, HAS_IDS, HAS_IDS2,
            )  # fmt: skip
        p = softmax_weights(s, c, shift[:, None], IS_NATURAL)
        ds = p * (dp - delta[:, None])
        if EXACT_DELTA:
            exact_delta += tl.sum(p * dp, 1)
        if HAS_CAP:
            ds = ds * (1.0 - tanh * tanh)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    if EXACT_DELTA:
        tl.store(delta_ptr + bh.to(tl.int64) * T + row, exact_delta, mask=valid)
    _store_rows(dq_ptr + (b * sdb + h * sdh) * ALIGN, first, T, sdt * ALIGN, dq * scale, M, D, DP)


@unspecialized
def interval_key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, distance_ptr,
    bounds_ptr, ids_ptr, ids2_ptr,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sxb, sxh, sxs, syb, syh, sys, sbb, sbh, sbt,
    distance_stride, scale, cap, T, S, H, query_offset, n_blocks, patterns_stride, ids_stride, ids2_stride,
    GROUPS: tl.constexpr, BIAS_STEP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
    BY_QUERY: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over all query heads that share them."""
    pid = tl.program_id(0)
    K = H // GROUPS
    bk = pid // n_blocks
    first = pid % n_blocks * M  # under a causal mask, most queries see the first keys
    b = (bk // K).to(tl.int64)
    h_kv = (bk % K).to(tl.int64)
    row = first + tl.arange(0, M)
    valid = row < S
    ids = ids_ptr + b * ids_stride
    ids2 = ids2_ptr + b * ids2_stride
    low, high, tested, row_ids, low2, high2, tested2, row_ids2 = load_block(
        bounds_ptr + b * patterns_stride + T, T + S, ids, ids2, row, valid, 0, R, HAS_IDS, HAS_IDS2
    )
    start, n_first, start2, n_tiles, first_full, end_full = plan_tiles(
        low, high, tested, low2, high2, tested2, valid, N, R
    )
    k = load_rows(k_ptr + (b * skb + h_kv * skh) * ALIGN, first, S, sks * ALIGN, M, D, DP)
    v = load_rows(v_ptr + (b * svb + h_kv * svh) * ALIGN, first, S, svs * ALIGN, M, E, EP)
    dk = tl.zeros([M, DP], tl.float32)
    dv = tl.zeros([M, EP], tl.float32)
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    c = LOG2E if IS_NATURAL else scale * LOG2E
    for g in range(GROUPS):
        h = h_kv * GROUPS + g
        q_base = q_ptr + (b * sqb + h * sqh) * ALIGN
        do_base = do_ptr + (b * sgb + h * sgh) * ALIGN
        lse_base = lse_ptr + (b * H + h) * T
        delta_base = delta_ptr + (b * H + h) * T
        bias_row = bias_ptr + b * sbb + h * sbh + row[:, None].to(tl.int64) * BIAS_STEP
        distance_head = distance_ptr + h * distance_stride
        last, value, slope, first_entry, value2, slope2, origin = load_lines(
            distance_head, T + S, HAS_DISTANCE
        )  # fmt: skip
        for t in range(n_tiles):
            at = tile_start(t, start, n_first, start2, N, R)
            column = at + tl.arange(0, N)
            q = load_rows(q_base, at, T, sqt * ALIGN, N, D, DP)
            do = load_rows(do_base, at, T, sgt * ALIGN, N, E, EP)
            existing = tl.minimum(column, T - 1)  # not a mask, with which loads would not run ahead
            shift = shift_of(tl.load(lse_base + existing), IS_NATURAL)
            delta = tl.load(delta_base + existing)
            s = _matmul_transposed(k, q, PRECISION)
            s, tanh = modify_scores(
                s, bias_row, column.to(tl.int64) * sbt, valid[:, None] & (column < T)[None, :], distance_head,
                tl.minimum(row, S - 1) + (T - 1), -existing, first + T - 1, first + M + T - 2, 1 - at - N, -at,
                last, value, slope, first_entry, value2, slope2, origin, scale, cap,
                HAS_BIAS, HAS_DISTANCE, HAS_CAP, PRECISION,
            )  # fmt: skip
            if (t < first_full) | (t >= end_full):
                s = hide(
                    s, column, low, high, tested, row_ids, low2, high2, tested2, row_ids2, ids, ids2, T, query_offset,
                    R, HAS_IDS, HAS_IDS2,
                )  # fmt: skip
                if BY_QUERY:
                    s = hide_by_query(s, row, bounds_ptr + b * patterns_stride, T + S, existing, R)
            p = softmax_weights(s, c, shift[None, :], IS_NATURAL)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dp = _matmul_transposed(v, do, PRECISION)
            ds = p * (dp - delta[None, :])
            if HAS_CAP:
                ds = ds * (1.0 - tanh * tanh)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    _store_rows(dk_ptr + (b * sxb + h_kv * sxh) * ALIGN, first, S, sxs * ALIGN, dk * scale, M, D, DP)
    _store_rows(dv_ptr + (b * syb + h_kv * syh) * ALIGN, first, S, sys * ALIGN, dv, M, E, EP)
