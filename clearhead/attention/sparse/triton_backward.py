"""Gradients of the sparse kernel: queries by the query index, keys and values by the key index.

Both recompute the weights p = exp(s − lse) from the stored log-sum-exp of all pieces together, so the gradient of each
piece is exact. `prepare_kernel` derives the `shift` from it. The loop over tiles and the letters are those
of `triton_forward`."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.triton_forward import (
    VARYING,
    _apply_row_mask,
    _load_columns,
    _load_row_mask,
    _load_rows,
    _load_tile,
    _load_work_item,
    _matmul_transposed,
)
from clearhead.attention.sparse.triton_scores import LOG2E, add_bias, load_lines, scale_scores, softmax_weights


@triton.jit
def sum_distances(ds, row, column, sums, units, T, S, M: tl.constexpr, N: tl.constexpr):
    """Add the gradients ds (M, N) of the scores of rows and columns to the sums by distance, (T + S,).

    The sums are integers, in which 1 is `units`, so that their order does not matter and results repeat bit for bit. If
    rows and columns are consecutive, the tile is sheared first: its diagonals become columns, which are added in
    registers. Column c of the sheared tile contains the diagonals c, c − N, …: one for each turn g of its rows."""
    r = tl.arange(0, M)
    x = tl.arange(0, N)
    first = tl.min(column, 0) - tl.min(row, 0) + (T - 1)
    is_row_range = tl.max(row - r, 0) == tl.min(row - r, 0)
    is_column_range = tl.max(column - x, 0) == tl.min(column - x, 0)
    if is_row_range & is_column_range:
        source = x[None, :] + r[:, None]
        sheared = tl.gather(ds, source & (N - 1), 1)
        for g in tl.static_range((N + M - 2) // N + 1):
            total = tl.sum(tl.where(source // N == g, sheared, 0.0), 0)
            entry = first + x - g * N
            in_bounds = (entry >= 0) & (entry < T + S) & (total != 0.0)
            tl.atomic_add(sums + entry, _round(total * units), mask=in_bounds, sem="relaxed")
    else:
        entries = column[None, :] - row[:, None] + (T - 1)
        tl.atomic_add(sums + entries, _round(ds * units), mask=ds != 0.0, sem="relaxed")


@triton.jit
def _round(x):
    """Return the nearest integer."""
    return tl.floor(x + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=VARYING)
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, shift_ptr, delta_ptr, bias_ptr, distance_ptr, sums_ptr, units_ptr,
    row_sums_ptr, partials_ptr, n_partials,
    patterns, row_ids, column_ranges, work_items, row_mask, column_ids,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sdb, sdh, sdt, sbb, sbh, sbt, sbs,
    distance_stride, scale, cap, n_rows, n_columns, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    N_RANGES: tl.constexpr, HAS_PATTERNS: tl.constexpr, HAS_ROW_IDS: tl.constexpr, ROW_MASK: tl.constexpr,
    SKIP_MODULUS: tl.constexpr, HAS_COLUMN_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FIRST: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, IS_SHORTER: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, SUM_ROWS: tl.constexpr, SUM_DISTANCES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of queries; if not IS_FIRST, add it to the stored one.

    SUM_ROWS: Σ p · dp of each query is added to `row_sums_ptr`, which is `delta` without the rounding of the output.
    SUM_DISTANCES: with that delta, the gradients of the scores are added to `sums_ptr` by distance, and no gradient of
    the queries is computed. These sums are integers, in which 1 is the number at `units_ptr`."""
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    pid = tl.program_id(0)
    bh = pid // active
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    pattern, item = _load_work_item(work_items, patterns, bh, active, HAS_PATTERNS)
    n = tl.load(item)
    if n >= 0:
        n_full = tl.load(item + 4)
        total = tl.load(item + 5)
        low, high, bits = _load_row_mask(tl.load(item + 6), row_mask, M, ROW_MASK)
        block, row, valid = _load_rows(n, pattern, n_blocks, n_rows, row_ids, M, HAS_ROW_IDS)
        q = _load_tile(q_ptr + b * sqb + h * sqh, row, sqt, D, DP, INT64_OFFSETS)
        do = _load_tile(do_ptr + b * sgb + h * sgh, row, sgt, E, EP, INT64_OFFSETS)
        shift = tl.load(shift_ptr + bh.to(tl.int64) * n_rows + row)
        delta = tl.load(delta_ptr + bh.to(tl.int64) * n_rows + row)
        k_base = k_ptr + b * skb + (h // groups) * skh
        v_base = v_ptr + b * svb + (h // groups) * svh
        bias_base = bias_ptr + b * sbb + h * sbh
        distance_head = distance_ptr + h * distance_stride
        last, value, slope, first_entry, value2, slope2, origin = load_lines(
            distance_head, n_rows + n_columns, HAS_DISTANCE
        )  # fmt: skip
        entries = (n_rows - 1) - row
        entry_min, entry_max = tl.min(entries, 0), tl.max(entries, 0)
        block_ranges = column_ranges + block * (3 * N_RANGES)
        dq = tl.zeros([M, DP], tl.float32)
        row_sum = tl.zeros([M], tl.float32)
        units = tl.load(units_ptr) if SUM_ROWS or SUM_DISTANCES else 0.0
        c = LOG2E if IS_NATURAL else scale * LOG2E
        for t in range(tl.load(item + 1), tl.load(item + 2)):
            x = t * N + tl.arange(0, N)
            index = _load_columns(
                x, n_full, total, block_ranges, column_ids, skip_shift, N_RANGES, SKIP_MODULUS, HAS_COLUMN_IDS
            )
            if IS_SHORTER:
                exists = index < n_columns
                index = tl.minimum(index, n_columns - 1)
            k = _load_tile(k_base, index, sks, D, DP, INT64_OFFSETS)
            v = _load_tile(v_base, index, svs, E, EP, INT64_OFFSETS)
            s = _matmul_transposed(q, k, PRECISION)
            dp = _matmul_transposed(do, v, PRECISION)
            tanh = s
            if IS_NATURAL:
                s, tanh = scale_scores(
                    s, distance_head, entries, index, entry_min, entry_max, tl.min(index, 0), tl.max(index, 0),
                    last, value, slope, first_entry, value2, slope2, origin, scale, cap,
                    HAS_DISTANCE, HAS_CAP, PRECISION,
                )  # fmt: skip
            if HAS_BIAS:
                at = bias_base + row[:, None].to(tl.int64) * sbt + index[None, :].to(tl.int64) * sbs
                s = add_bias(s, tl.load(at))
            if t >= n_full // N:
                s = _apply_row_mask(s, t * N - n_full, total - n_full, low, high, bits, M, N, ROW_MASK)
            if IS_SHORTER:
                s = tl.where(exists[None, :], s, float("-inf"))
            p = softmax_weights(s, c, shift[:, None], IS_NATURAL)
            ds = p * (dp - delta[:, None])
            if SUM_ROWS:
                row_sum += tl.sum(p * dp, 1)
            if SUM_DISTANCES:
                ds = tl.where(valid[:, None], ds, 0.0)
                sum_distances(ds, row, index, sums_ptr + h * distance_stride, units, n_rows, n_columns, M, N)
            else:
                if HAS_CAP:
                    ds = ds * (1.0 - tanh * tanh)
                dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if not SUM_DISTANCES:
            dq = dq * scale
            d = tl.arange(0, DP)
            row = row.to(tl.int64)
            if SUM_ROWS:
                tl.atomic_add(
                    row_sums_ptr + bh.to(tl.int64) * n_rows + row, _round(row_sum * units), mask=valid, sem="relaxed"
                )
            at = dq_ptr + b * sdb + h * sdh + row[:, None] * sdt + d[None, :]
            in_bounds = valid[:, None] & (d < D)[None, :]
            partial = tl.load(item + 3)
            if partial < 0:
                if not IS_FIRST:
                    dq += tl.load(at, mask=in_bounds, other=0.0).to(tl.float32)
                tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=in_bounds)
            else:
                _store_partial(partials_ptr, bh.to(tl.int64) * n_partials + partial, dq, M, DP)


@triton.jit(do_not_specialize=VARYING)
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, shift_ptr, delta_ptr, bias_ptr, distance_ptr, dk_partials, dv_partials,
    n_partials,
    patterns, row_ids, column_ranges, work_items, row_mask, column_ids,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sbb, sbh, sbt, sbs,
    sxb, sxh, sxs, syb, syh, sys,
    distance_stride, scale, cap, n_rows, n_queries, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    N_RANGES: tl.constexpr, HAS_PATTERNS: tl.constexpr, HAS_ROW_IDS: tl.constexpr, ROW_MASK: tl.constexpr,
    SKIP_MODULUS: tl.constexpr, HAS_COLUMN_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FIRST: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, IS_SHORTER: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, VALUES_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys and values, over all query heads that share them.

    VALUES_FIRST: the product with the values starts before the weights are computed, which hides their time. It pays
    off with two groups of warps per block; with one, other blocks hide it already, and registers are scarce."""
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    pid = tl.program_id(0)
    K = H // groups
    bk = pid // active
    b = (bk // K).to(tl.int64)
    h_kv = (bk % K).to(tl.int64)
    first_head = (bk // K) * H + (bk % K) * groups
    _, item = _load_work_item(work_items, patterns, first_head, active, HAS_PATTERNS)
    n = tl.load(item)
    if n >= 0:
        _, row, valid = _load_rows(n, 0, n_blocks, n_rows, row_ids, M, HAS_ROW_IDS)
        k = _load_tile(k_ptr + b * skb + h_kv * skh, row, sks, D, DP, INT64_OFFSETS)
        v = _load_tile(v_ptr + b * svb + h_kv * svh, row, svs, E, EP, INT64_OFFSETS)
        dk = tl.zeros([M, DP], tl.float32)
        dv = tl.zeros([M, EP], tl.float32)
        c = LOG2E if IS_NATURAL else scale * LOG2E
        for g in range(groups):
            bh = first_head + g
            h = h_kv * groups + g
            pattern, head_item = _load_work_item(work_items, patterns, bh, active, HAS_PATTERNS)  # of the same block
            n_full = tl.load(head_item + 4)
            total = tl.load(head_item + 5)
            low, high, bits = _load_row_mask(tl.load(head_item + 6), row_mask, M, ROW_MASK)
            block_ranges = column_ranges + (pattern * n_blocks + n) * (3 * N_RANGES)
            q_base = q_ptr + b * sqb + h * sqh
            do_base = do_ptr + b * sgb + h * sgh
            shift_base = shift_ptr + bh.to(tl.int64) * n_queries
            delta_base = delta_ptr + bh.to(tl.int64) * n_queries
            bias_base = bias_ptr + b * sbb + h * sbh
            distance_head = distance_ptr + h * distance_stride
            last, value, slope, first_entry, value2, slope2, origin = load_lines(
                distance_head, n_rows + n_queries, HAS_DISTANCE
            )  # fmt: skip
            entries = row + (n_queries - 1)
            entry_min, entry_max = tl.min(entries, 0), tl.max(entries, 0)
            for t in range(tl.load(head_item + 1), tl.load(head_item + 2)):
                x = t * N + tl.arange(0, N)
                index = _load_columns(
                    x, n_full, total, block_ranges, column_ids, skip_shift, N_RANGES, SKIP_MODULUS, HAS_COLUMN_IDS
                )
                if IS_SHORTER:
                    exists = index < n_queries
                    index = tl.minimum(index, n_queries - 1)
                q = _load_tile(q_base, index, sqt, D, DP, INT64_OFFSETS)
                do = _load_tile(do_base, index, sgt, E, EP, INT64_OFFSETS)
                shift = tl.load(shift_base + index)
                delta = tl.load(delta_base + index)
                s = _matmul_transposed(k, q, PRECISION)
                if VALUES_FIRST:
                    dp = _matmul_transposed(v, do, PRECISION)
                tanh = s
                if IS_NATURAL:
                    s, tanh = scale_scores(
                        s, distance_head, entries, -index, entry_min, entry_max, -tl.max(index, 0), -tl.min(index, 0),
                        last, value, slope, first_entry, value2, slope2, origin, scale, cap,
                        HAS_DISTANCE, HAS_CAP, PRECISION,
                    )  # fmt: skip
                if HAS_BIAS:
                    at = bias_base + row[:, None].to(tl.int64) * sbs + index[None, :].to(tl.int64) * sbt
                    s = add_bias(s, tl.load(at))
                if t >= n_full // N:
                    s = _apply_row_mask(s, t * N - n_full, total - n_full, low, high, bits, M, N, ROW_MASK)
                if IS_SHORTER:
                    s = tl.where(exists[None, :], s, float("-inf"))
                p = softmax_weights(s, c, shift[None, :], IS_NATURAL)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                if not VALUES_FIRST:
                    dp = _matmul_transposed(v, do, PRECISION)
                ds = p * (dp - delta[None, :])
                if HAS_CAP:
                    ds = ds * (1.0 - tanh * tanh)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        dk = dk * scale
        d = tl.arange(0, DP)
        e = tl.arange(0, EP)
        row = row.to(tl.int64)
        at_k = dk_ptr + b * sxb + h_kv * sxh + row[:, None] * sxs + d[None, :]
        at_v = dv_ptr + b * syb + h_kv * syh + row[:, None] * sys + e[None, :]
        in_k = valid[:, None] & (d < D)[None, :]
        in_v = valid[:, None] & (e < E)[None, :]
        partial = tl.load(item + 3)
        if partial < 0:
            if not IS_FIRST:
                dk += tl.load(at_k, mask=in_k, other=0.0).to(tl.float32)
                dv += tl.load(at_v, mask=in_v, other=0.0).to(tl.float32)
            tl.store(at_k, dk.to(dk_ptr.dtype.element_ty), mask=in_k)
            tl.store(at_v, dv.to(dv_ptr.dtype.element_ty), mask=in_v)
        else:
            number = bk.to(tl.int64) * n_partials + partial
            _store_partial(dk_partials, number, dk, M, DP)
            _store_partial(dv_partials, number, dv, M, EP)


@triton.jit
def _store_partial(part, number, value, M: tl.constexpr, W: tl.constexpr):
    """Store a partial result (M, W)."""
    at = part + (number * M + tl.arange(0, M))[:, None] * W + tl.arange(0, W)[None, :]
    tl.store(at, value)


@triton.jit(do_not_specialize=VARYING)
def sum_partials_kernel(
    x_ptr, partials_ptr, n_partials, patterns, row_ids, reductions, sxb, sxh, sxs, n_rows, H, groups, n_blocks, active,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, HAS_ROW_IDS: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a split block, and the stored gradient unless IS_FIRST. There are H / groups heads."""
    pid = tl.program_id(0)
    K = H // groups
    bk = pid // active
    pattern = tl.load(patterns + (bk // K) * H + (bk % K) * groups)
    reduction = reductions + (pattern * active + pid % active) * 3
    n = tl.load(reduction)
    if n >= 0:
        _, row, valid = _load_rows(n, pattern, n_blocks, n_rows, row_ids, M, HAS_ROW_IDS)
        r = tl.arange(0, M)
        d = tl.arange(0, DP)
        total = tl.zeros([M, DP], tl.float32)
        first = tl.load(reduction + 1)
        for partial in range(first, first + tl.load(reduction + 2)):
            at = bk.to(tl.int64) * n_partials + partial
            total += tl.load(partials_ptr + (at * M + r)[:, None] * DP + d[None, :])
        pointers = x_ptr + (bk // K).to(tl.int64) * sxb + (bk % K).to(tl.int64) * sxh
        pointers = pointers + row.to(tl.int64)[:, None] * sxs + d[None, :]
        in_bounds = valid[:, None] & (d < D)[None, :]
        if not IS_FIRST:
            total += tl.load(pointers, mask=in_bounds, other=0.0).to(tl.float32)
        tl.store(pointers, total.to(x_ptr.dtype.element_ty), mask=in_bounds)
