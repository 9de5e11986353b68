"""The sparse attention kernels in Triton: a block of rows against the columns that its list contains.

Each program computes one block of rows of one head and iterates over the block's list (see `BlockIndex`) in tiles of N
positions. A single loop covers all tiles, so that loads run ahead of the products; if not all rows see all positions of
a tile, the interval or the bits of a row decide. In the forward kernel and the gradient of the queries, rows are
queries; in the gradients of keys and values, rows are keys, and the lists are those of the key index. There are no
atomic additions, so results repeat bit for bit.

Letters: M rows of a block, N columns of a tile, D and E the widths of keys and values, DP and EP these widths rounded
up to a power of two. IS_SHORTER: the call has fewer columns than its plan. Scores are in base-2 units inside the
kernels, or in natural units if they are modified (`triton_scores`). A bias by distance has T + S values per head. The
stored log-sum-exp is natural."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.triton_scores import LN2, LOG2E, add_bias, load_lines, scale_scores

VARYING = ("n_rows", "n_columns", "n_queries", "n_blocks", "active", "n_partials", "distance_stride")
"""Sizes that vary from call to call: a value that is 1 or a multiple of 16 selects no other compiled kernel."""


@triton.jit
def _load_work_item(work_items, patterns, bh, active, HAS_PATTERNS: tl.constexpr):
    """Return a head's pattern and the pointer to this program's work item (see `WorkSchedule`)."""
    pattern = 0
    if HAS_PATTERNS:
        pattern = tl.load(patterns + bh)
    return pattern, work_items + (pattern * active + tl.program_id(0) % active) * 7


@triton.jit
def _load_columns(
    x,
    n_full,
    total,
    column_ranges,
    column_ids,
    skip_shift,
    N_RANGES: tl.constexpr,
    SKIP_MODULUS: tl.constexpr,
    HAS_COLUMN_IDS: tl.constexpr,
):
    """Return the columns at positions x of a list; positions beyond the end get the last column."""
    x = tl.minimum(x, total - 1)
    index = tl.load(column_ranges) + tl.load(column_ranges + 1) * x
    for s in tl.static_range(1, N_RANGES):
        range_index = tl.load(column_ranges + 3 * s) + tl.load(column_ranges + 3 * s + 1) * x
        index = tl.where(x >= tl.load(column_ranges + 3 * s + 2), range_index, index)
    if SKIP_MODULUS > 0:  # partial ranges contain numbers of columns, every SKIP_MODULUS-th of which is omitted
        index = tl.where(x < n_full, index, index + index // (SKIP_MODULUS - 1) + skip_shift)
    if HAS_COLUMN_IDS:
        index = tl.load(column_ids + index)
    return index


@triton.jit
def _apply_row_mask(s, first, total, low, high, bits, M: tl.constexpr, N: tl.constexpr, ROW_MASK: tl.constexpr):
    """Return scores s (M, N) with −inf where a row does not see a column.

    `first` is the list position of the first column, relative to the partial ones; full columns are negative. Bounds
    are tested by two comparisons: as unsigned numbers, negative positions are above any low; positions beyond the list
    are above any high."""
    r = tl.arange(0, M)
    x = tl.arange(0, N)
    y = first + x
    visible = (y < total)[None, :]
    if ROW_MASK == 1:
        after = y.to(tl.uint32, bitcast=True)[None, :] >= low.to(tl.uint32, bitcast=True)[:, None]
        visible = after & (y[None, :] < high[:, None])
    if ROW_MASK == 2:  # N bits from the two words that contain them
        word_index = first >> 6
        word = tl.where(word_index < 0, -1, tl.load(bits + tl.maximum(word_index, 0) * M + r)).to(
            tl.uint64, bitcast=True
        )
        next_word = tl.load(bits + (word_index + 1) * M + r).to(tl.uint64, bitcast=True)
        word = (word >> (first & 63)) | (next_word << 1 << (63 - (first & 63)))
        visible = ((word[:, None] >> x[None, :]) & 1) != 0
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _load_rows(n, pattern, n_blocks, n_rows, row_ids, M: tl.constexpr, HAS_ROW_IDS: tl.constexpr):
    """Return the index of a block among all patterns, the indices of its rows, and which of them are not padding."""
    r = tl.arange(0, M)
    if HAS_ROW_IDS:
        row = tl.load(row_ids + n * M + r)
        valid = (row >= 0) & (row < n_rows)
        row = tl.minimum(tl.maximum(row, 0), n_rows - 1)
    else:
        row = n * M + r
        valid = row < n_rows
        row = tl.minimum(row, n_rows - 1)
    return pattern * n_blocks + n, row, valid


@triton.jit
def _load_row_mask(begin, row_mask, M: tl.constexpr, ROW_MASK: tl.constexpr):
    """Return each row's interval (for bounds), and the pointer to the block's bits (for bits)."""
    r = tl.arange(0, M)
    low = r * 0
    high = r * 0
    bits = row_mask
    if ROW_MASK == 1:
        low = tl.load(row_mask + 2 * (begin + r))
        high = tl.load(row_mask + 2 * (begin + r) + 1)
    if ROW_MASK == 2:
        bits = row_mask + begin.to(tl.int64) * M
    return low, high, bits


@triton.jit
def _load_tile(base, index, stride, width: tl.constexpr, W: tl.constexpr, INT64_OFFSETS: tl.constexpr):
    """Load rows `index` of a matrix with `width` columns as (len(index), W); 0 beyond the width."""
    if INT64_OFFSETS:
        index = index.to(tl.int64)
    d = tl.arange(0, W)
    at = base + index[:, None] * stride + d[None, :]
    if width == W:
        return tl.load(at)
    return tl.load(at, mask=(d < width)[None, :] & (index >= 0)[:, None], other=0.0)


@triton.jit
def _matmul_transposed(a, b, PRECISION: tl.constexpr):
    """Return a (M, W) times b (N, W) transposed: (M, N).

    A float32 product adds its W terms sequentially, which for 64 terms loses two more bits than necessary. So sums of
    16 terms are added in pairs: as a difference, because Triton would merge a sum of two products into one product."""
    if PRECISION == "ieee" and a.shape[1] > 16:
        a_even, a_odd = tl.split(tl.reshape(a, (a.shape[0], a.shape[1] // 2, 2)))
        b_even, b_odd = tl.split(tl.reshape(b, (b.shape[0], b.shape[1] // 2, 2)))
        return _matmul_transposed(a_even, b_even, PRECISION) - _matmul_transposed(-a_odd, b_odd, PRECISION)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, distance_ptr, partials_ptr, state_ptr, n_partials,
    patterns, row_ids, column_ranges, work_items, row_mask, column_ids,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sob, soh, sot, sbb, sbh, sbt, sbs,
    distance_stride, scale, cap, n_rows, n_columns, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    N_RANGES: tl.constexpr, HAS_PATTERNS: tl.constexpr, HAS_ROW_IDS: tl.constexpr, ROW_MASK: tl.constexpr,
    SKIP_MODULUS: tl.constexpr, HAS_COLUMN_IDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FIRST: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, PRECISION: tl.constexpr, IS_SHORTER: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Compute out and log-sum-exp of a block of queries; if not IS_FIRST, merge them with the stored ones."""
    IS_NATURAL: tl.constexpr = HAS_BIAS or HAS_DISTANCE or HAS_CAP
    pid = tl.program_id(0)
    bh = pid // active
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    pattern, item = _load_work_item(work_items, patterns, bh, active, HAS_PATTERNS)
    n = tl.load(item)
    if n >= 0:
        partial = tl.load(item + 3)
        n_full = tl.load(item + 4)
        total = tl.load(item + 5)
        low, high, bits = _load_row_mask(tl.load(item + 6), row_mask, M, ROW_MASK)
        block, row, valid = _load_rows(n, pattern, n_blocks, n_rows, row_ids, M, HAS_ROW_IDS)
        q = _load_tile(q_ptr + b * sqb + h * sqh, row, sqt, D, DP, INT64_OFFSETS)
        k_base = k_ptr + b * skb + (h // groups) * skh
        v_base = v_ptr + b * svb + (h // groups) * svh
        bias_base = bias_ptr + b * sbb + h * sbh
        distance_head = distance_ptr + h * distance_stride
        last, value, slope, first_entry, value2, slope2, origin = load_lines(
            distance_head, n_rows + n_columns, HAS_DISTANCE
        )  # fmt: skip
        entries = (n_rows - 1) - row
        entry_min, entry_max = tl.min(entries, 0), tl.max(entries, 0)
        o_base = o_ptr + b * sob + h * soh
        if IS_FIRST:
            row_max = tl.full([M], float("-inf"), tl.float32)
            denominator = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, EP], tl.float32)
        else:
            previous = tl.load(lse_ptr + bh.to(tl.int64) * n_rows + row)
            previous = tl.where(partial < 0, previous, float("-inf"))  # a part starts empty; the reduction merges
            row_max = previous if IS_NATURAL else previous * LOG2E
            denominator = tl.where(previous > float("-inf"), 1.0, 0.0)
            acc = tl.where(partial < 0, _load_tile(o_base, row, sot, E, EP, INT64_OFFSETS).to(tl.float32), 0.0)
        c = LOG2E if IS_NATURAL else scale * LOG2E
        block_ranges = column_ranges + block * (3 * N_RANGES)
        for t in range(tl.load(item + 1), tl.load(item + 2)):
            x = t * N + tl.arange(0, N)
            index = _load_columns(
                x, n_full, total, block_ranges, column_ids, skip_shift, N_RANGES, SKIP_MODULUS, HAS_COLUMN_IDS
            )
            if IS_SHORTER:
                exists = index < n_columns
                index = tl.minimum(index, n_columns - 1)
            k = _load_tile(k_base, index, sks, D, DP, INT64_OFFSETS)
            s = _matmul_transposed(q, k, PRECISION)
            if IS_NATURAL:
                s, _ = scale_scores(
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
            # With a bias of 1e38 the rounding error of a product exceeds any exponent, so subtract first.
            new = tl.maximum(row_max, tl.max(s, 1) if IS_NATURAL else tl.max(s, 1) * c)
            base = tl.where(new == float("-inf"), 0.0, new)  # a row may have no visible column so far
            p = tl.math.exp2((s - base[:, None]) * c if IS_NATURAL else s * c - base[:, None])
            alpha = tl.math.exp2((row_max - base) * c if IS_NATURAL else row_max - base)
            denominator = denominator * alpha + tl.sum(p, 1)
            v = _load_tile(v_base, index, svs, E, EP, INT64_OFFSETS)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            row_max = new
        if partial < 0:
            _store_output(
                acc,
                row_max,
                denominator,
                o_base,
                lse_ptr + bh.to(tl.int64) * n_rows,
                row,
                valid,
                sot,
                E,
                EP,
                IS_NATURAL,
            )
        else:
            r = tl.arange(0, M)
            at = bh.to(tl.int64) * n_partials + partial
            tl.store(partials_ptr + (at * M + r)[:, None] * EP + tl.arange(0, EP)[None, :], acc)
            tl.store(state_ptr + at * (2 * M) + r, row_max)
            tl.store(state_ptr + at * (2 * M) + M + r, denominator)


@triton.jit
def _store_output(
    acc, row_max, denominator, o_base, lse_base, row, valid, sot,
    E: tl.constexpr, EP: tl.constexpr, IS_NATURAL: tl.constexpr,
):  # fmt: skip
    """Divide by the denominator and store; an empty row gets zeros and −inf.

    `row_max` is in base-2 units, or natural ones if IS_NATURAL."""
    is_nonempty = denominator > 0
    out = acc * tl.where(is_nonempty, 1.0 / tl.where(is_nonempty, denominator, 1.0), 0.0)[:, None]
    lse = tl.where(
        is_nonempty,
        (row_max if IS_NATURAL else row_max * LN2) + tl.log(tl.where(is_nonempty, denominator, 1.0)),
        float("-inf"),
    )
    e = tl.arange(0, EP)
    row = row.to(tl.int64)
    at = o_base + row[:, None] * sot + e[None, :]
    tl.store(at, out.to(o_base.dtype.element_ty), mask=valid[:, None] & (e < E)[None, :])
    tl.store(lse_base + row, lse, mask=valid)


@triton.jit(do_not_specialize=VARYING)
def merge_partials_kernel(
    o_ptr, lse_ptr, partials_ptr, state_ptr, n_partials, patterns, row_ids, reductions,
    sob, soh, sot, n_rows, H, n_blocks, active,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, HAS_ROW_IDS: tl.constexpr, IS_FIRST: tl.constexpr,
    INT64_OFFSETS: tl.constexpr, IS_NATURAL: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a split block, and the stored result unless IS_FIRST."""
    pid = tl.program_id(0)
    bh = pid // active
    pattern = tl.load(patterns + bh)
    reduction = reductions + (pattern * active + pid % active) * 3
    n = tl.load(reduction)
    if n >= 0:
        _, row, valid = _load_rows(n, pattern, n_blocks, n_rows, row_ids, M, HAS_ROW_IDS)
        o_base = o_ptr + (bh // H).to(tl.int64) * sob + (bh % H).to(tl.int64) * soh
        lse_base = lse_ptr + bh.to(tl.int64) * n_rows
        if IS_FIRST:
            row_max = tl.full([M], float("-inf"), tl.float32)
            denominator = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, EP], tl.float32)
        else:
            previous = tl.load(lse_base + row)
            row_max = previous if IS_NATURAL else previous * LOG2E
            denominator = tl.where(previous > float("-inf"), 1.0, 0.0)
            acc = _load_tile(o_base, row, sot, E, EP, INT64_OFFSETS).to(tl.float32)
        r = tl.arange(0, M)
        first = tl.load(reduction + 1)
        for partial in range(first, first + tl.load(reduction + 2)):
            at = bh.to(tl.int64) * n_partials + partial
            part = tl.load(partials_ptr + (at * M + r)[:, None] * EP + tl.arange(0, EP)[None, :])
            part_max = tl.load(state_ptr + at * (2 * M) + r)
            part_denominator = tl.load(state_ptr + at * (2 * M) + M + r)
            new = tl.maximum(row_max, part_max)
            base = tl.where(new == float("-inf"), 0.0, new)
            alpha = tl.math.exp2((row_max - base) * LOG2E if IS_NATURAL else row_max - base)
            beta = tl.math.exp2((part_max - base) * LOG2E if IS_NATURAL else part_max - base)
            acc = acc * alpha[:, None] + part * beta[:, None]
            denominator = denominator * alpha + part_denominator * beta
            row_max = new
        _store_output(acc, row_max, denominator, o_base, lse_base, row, valid, sot, E, EP, IS_NATURAL)


@triton.jit(do_not_specialize=VARYING)
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, shift_ptr, delta_ptr, sob, soh, sot, sgb, sgh, sgt, n_rows, H,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, IS_NATURAL: tl.constexpr,
):  # fmt: skip
    """Compute what both gradients need per query.

    shift is the log-sum-exp in base-2 units, so that p = 2^(s − shift), or in natural units if IS_NATURAL; +inf
    for an empty row, whose weights are 0. delta = Σ out · grad_out is the term of the softmax gradient that all
    columns share.
    """
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, EP)
    valid = (row < n_rows)[:, None] & (e < E)[None, :]
    row_offset = row.to(tl.int64)[:, None]
    o = tl.load(o_ptr + b * sob + h * soh + row_offset * sot + e[None, :], mask=valid, other=0.0)
    do = tl.load(do_ptr + b * sgb + h * sgh + row_offset * sgt + e[None, :], mask=valid, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = bh.to(tl.int64) * n_rows + row
    tl.store(delta_ptr + at, delta, mask=row < n_rows)
    lse = tl.load(lse_ptr + at, mask=row < n_rows, other=0.0)
    shift = lse if IS_NATURAL else lse * LOG2E
    tl.store(shift_ptr + at, tl.where(lse == float("-inf"), float("inf"), shift), mask=row < n_rows)
