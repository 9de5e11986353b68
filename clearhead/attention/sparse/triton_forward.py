"""The gathered kernels in Triton: a block of rows against the columns its list names, whatever the mask.

Each program takes one block of rows of one head and walks the block's list (see `planning.lists.Lists`) in tiles of N
places. One loop takes them all, so that loads run ahead of the products from the first tile to the last; where not all
rows see all places of a tile, a row's interval or a row's bit decides. Forward and the gradient of the queries have
queries as rows; the gradients of keys and values have keys as rows and walk the lists of the transposed plan. Nothing
is added atomically, so results repeat bit for bit.

Letters: M rows of a block, N columns of a tile, D and E the widths of keys and values, DP and EP the same rounded up to
a power of two. Scores are in units of log 2 inside the kernels; the log-sum-exp that is stored is natural."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LARGEST = tl.constexpr(1e38)


@triton.jit
def _item(items, patterns, bh, active, PATTERNS: tl.constexpr):
    """Which pattern a head has, and where this program's item is (see `gathered_launch.Schedule`)."""
    pattern = 0
    if PATTERNS:
        pattern = tl.load(patterns + bh)
    return pattern, items + (pattern * active + tl.program_id(0) % active) * 7


@triton.jit
def _columns(
    x, n_full, total, segments, pool, skip_shift, SEGMENTS: tl.constexpr, SKIP: tl.constexpr, POOL: tl.constexpr
):
    """The columns at places x of a list; places beyond the last are given the last one."""
    x = tl.minimum(x, total - 1)
    index = tl.load(segments) + tl.load(segments + 1) * x
    for s in tl.static_range(1, SEGMENTS):
        here = tl.load(segments + 3 * s) + tl.load(segments + 3 * s + 1) * x
        index = tl.where(x >= tl.load(segments + 3 * s + 2), here, index)
    if SKIP > 0:  # partial segments hold numbers of columns from which every SKIP-th is left out
        index = tl.where(x < n_full, index, index + index // (SKIP - 1) + skip_shift)
    if POOL:
        index = tl.load(pool + index)
    return index


@triton.jit
def _hide(s, first, total, low, high, bits, M: tl.constexpr, N: tl.constexpr, MARKS: tl.constexpr):
    """Scores s (M, N) with −inf where a row does not see a column.

    The columns are at places first, first + 1 … among the partial ones; below 0 are those that all rows see. An
    interval is tested by two comparisons: without a sign, places below 0 are beyond any low; beyond the list, they are
    beyond any high."""
    r = tl.arange(0, M)
    x = tl.arange(0, N)
    y = first + x
    seen = (y < total)[None, :]
    if MARKS == 1:
        after = y.to(tl.uint32, bitcast=True)[None, :] >= low.to(tl.uint32, bitcast=True)[:, None]
        seen = after & (y[None, :] < high[:, None])
    if MARKS == 2:  # N bits from the two words in which they lie
        at = first >> 6
        word = tl.where(at < 0, -1, tl.load(bits + tl.maximum(at, 0) * M + r)).to(tl.uint64, bitcast=True)
        more = tl.load(bits + (at + 1) * M + r).to(tl.uint64, bitcast=True)
        word = (word >> (first & 63)) | (more << 1 << (63 - (first & 63)))
        seen = ((word[:, None] >> x[None, :]) & 1) != 0
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _block(n, pattern, n_blocks, n_rows, rows, M: tl.constexpr, ROWS: tl.constexpr):
    """The number of a block among all patterns, and the indices of its rows (−1 or beyond: none)."""
    r = tl.arange(0, M)
    if ROWS:
        row = tl.load(rows + n * M + r)
        there = row >= 0
        row = tl.maximum(row, 0)
    else:
        row = n * M + r
        there = row < n_rows
        row = tl.minimum(row, n_rows - 1)
    return pattern * n_blocks + n, row, there


@triton.jit
def _marks(begin, marks, M: tl.constexpr, MARKS: tl.constexpr):
    """Each row's interval (for bounds), and where the block's bits begin (for bits)."""
    r = tl.arange(0, M)
    low = r * 0
    high = r * 0
    bits = marks
    if MARKS == 1:
        low = tl.load(marks + 2 * (begin + r))
        high = tl.load(marks + 2 * (begin + r) + 1)
    if MARKS == 2:
        bits = marks + begin.to(tl.int64) * M
    return low, high, bits


@triton.jit
def _tile(base, index, stride, width: tl.constexpr, W: tl.constexpr, WIDE: tl.constexpr):
    """Rows `index` of a matrix with `width` columns, as (len(index), W); 0 beyond the width."""
    if WIDE:
        index = index.to(tl.int64)
    d = tl.arange(0, W)
    at = base + index[:, None] * stride + d[None, :]
    if width == W:
        return tl.load(at)
    return tl.load(at, mask=(d < width)[None, :] & (index >= 0)[:, None], other=0.0)


@triton.jit
def _products(a, b, PRECISION: tl.constexpr):
    """a (M, W) times b (N, W) transposed: (M, N).

    In float32 a product adds its W terms one after the other, which for 64 terms loses two bits more than it must.
    It is made of sums of 16 terms, added two by two: as a difference, since a sum of two products would be turned
    into one."""
    if PRECISION == "ieee" and a.shape[1] > 16:
        a_even, a_odd = tl.split(tl.reshape(a, (a.shape[0], a.shape[1] // 2, 2)))
        b_even, b_odd = tl.split(tl.reshape(b, (b.shape[0], b.shape[1] // 2, 2)))
        return _products(a_even, b_even, PRECISION) - _products(-a_odd, b_odd, PRECISION)
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION)


@triton.jit
def _biased(s, at, scale):
    """Scores s (M, N) times their scale, and the bias that lies at these places, in whatever dtype: added in float32.

    Some libraries hide keys by the least number there is: it stays finite in units of log 2, and −inf is what
    it was."""
    bias = tl.load(at).to(tl.float32)
    return s * scale + tl.where(bias == float("-inf"), bias, tl.minimum(tl.maximum(bias, -LARGEST), LARGEST))


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, part_ptr, state_ptr, slots,
    patterns, rows, segments, items, marks, pool,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sob, soh, sot, sbb, sbh, sbt, sbs,
    scale, n_rows, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SEGMENTS: tl.constexpr, PATTERNS: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr, SKIP: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and log-sum-exp of a block of queries; not FIRST: what is there already is merged with."""
    pid = tl.program_id(0)
    bh = pid // active
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    pattern, item = _item(items, patterns, bh, active, PATTERNS)
    n = tl.load(item)
    if n >= 0:
        slot = tl.load(item + 3)
        n_full = tl.load(item + 4)
        total = tl.load(item + 5)
        low, high, bits = _marks(tl.load(item + 6), marks, M, MARKS)
        block, row, there = _block(n, pattern, n_blocks, n_rows, rows, M, ROWS)
        q = _tile(q_ptr + b * sqb + h * sqh, row, sqt, D, DP, WIDE)
        k_base = k_ptr + b * skb + (h // groups) * skh
        v_base = v_ptr + b * svb + (h // groups) * svh
        bias_base = bias_ptr + b * sbb + h * sbh
        o_base = o_ptr + b * sob + h * soh
        if FIRST:
            top = tl.full([M], float("-inf"), tl.float32)
            weight = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, EP], tl.float32)
        else:
            before = tl.load(lse_ptr + bh.to(tl.int64) * n_rows + row)
            before = tl.where(slot < 0, before, float("-inf"))  # a part begins with nothing: joining merges
            top = before if BIAS else before * LOG2E
            weight = tl.where(before > float("-inf"), 1.0, 0.0)
            acc = tl.where(slot < 0, _tile(o_base, row, sot, E, EP, WIDE).to(tl.float32), 0.0)
        c = LOG2E if BIAS else scale * LOG2E
        mine = segments + block * (3 * SEGMENTS)
        for t in range(tl.load(item + 1), tl.load(item + 2)):
            x = t * N + tl.arange(0, N)
            index = _columns(x, n_full, total, mine, pool, skip_shift, SEGMENTS, SKIP, POOL)
            k = _tile(k_base, index, sks, D, DP, WIDE)
            s = _products(q, k, PRECISION)
            if BIAS:
                at = bias_base + row[:, None].to(tl.int64) * sbt + index[None, :].to(tl.int64) * sbs
                s = _biased(s, at, scale)
            if t >= n_full // N:
                s = _hide(s, t * N - n_full, total - n_full, low, high, bits, M, N, MARKS)
            # Beside a bias of 1e38 the rounding of a product is beyond any exponent: the difference first.
            new = tl.maximum(top, tl.max(s, 1) if BIAS else tl.max(s, 1) * c)
            base = tl.where(new == float("-inf"), 0.0, new)  # a row may have seen nothing so far
            p = tl.math.exp2((s - base[:, None]) * c if BIAS else s * c - base[:, None])
            alpha = tl.math.exp2((top - base) * c if BIAS else top - base)
            weight = weight * alpha + tl.sum(p, 1)
            v = _tile(v_base, index, svs, E, EP, WIDE)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            top = new
        if slot < 0:
            _finish(acc, top, weight, o_base, lse_ptr + bh.to(tl.int64) * n_rows, row, there, sot, E, EP, BIAS)
        else:
            r = tl.arange(0, M)
            at = bh.to(tl.int64) * slots + slot
            tl.store(part_ptr + (at * M + r)[:, None] * EP + tl.arange(0, EP)[None, :], acc)
            tl.store(state_ptr + at * (2 * M) + r, top)
            tl.store(state_ptr + at * (2 * M) + M + r, weight)


@triton.jit
def _finish(
    acc, top, weight, o_base, lse_base, row, there, sot, E: tl.constexpr, EP: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """Divides by the sum of weights and stores; a row that saw nothing gets zeros and −inf. `top` is in units of log 2,
    beside a bias in those of e."""
    anything = weight > 0
    out = acc * tl.where(anything, 1.0 / tl.where(anything, weight, 1.0), 0.0)[:, None]
    lse = tl.where(anything, (top if BIAS else top * LN2) + tl.log(tl.where(anything, weight, 1.0)), float("-inf"))
    e = tl.arange(0, EP)
    row = row.to(tl.int64)
    at = o_base + row[:, None] * sot + e[None, :]
    tl.store(at, out.to(o_base.dtype.element_ty), mask=there[:, None] & (e < E)[None, :])
    tl.store(lse_base + row, lse, mask=there)


@triton.jit
def join_kernel(
    o_ptr, lse_ptr, part_ptr, state_ptr, slots, patterns, rows, joins,
    sob, soh, sot, n_rows, H, n_blocks, active,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a block that was split, and what was there before."""
    pid = tl.program_id(0)
    bh = pid // active
    pattern = tl.load(patterns + bh)
    join = joins + (pattern * active + pid % active) * 3
    n = tl.load(join)
    if n >= 0:
        _, row, there = _block(n, pattern, n_blocks, n_rows, rows, M, ROWS)
        o_base = o_ptr + (bh // H).to(tl.int64) * sob + (bh % H).to(tl.int64) * soh
        lse_base = lse_ptr + bh.to(tl.int64) * n_rows
        if FIRST:
            top = tl.full([M], float("-inf"), tl.float32)
            weight = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, EP], tl.float32)
        else:
            before = tl.load(lse_base + row)
            top = before if BIAS else before * LOG2E
            weight = tl.where(before > float("-inf"), 1.0, 0.0)
            acc = _tile(o_base, row, sot, E, EP, WIDE).to(tl.float32)
        r = tl.arange(0, M)
        first = tl.load(join + 1)
        for slot in range(first, first + tl.load(join + 2)):
            at = bh.to(tl.int64) * slots + slot
            part = tl.load(part_ptr + (at * M + r)[:, None] * EP + tl.arange(0, EP)[None, :])
            part_top = tl.load(state_ptr + at * (2 * M) + r)
            part_weight = tl.load(state_ptr + at * (2 * M) + M + r)
            new = tl.maximum(top, part_top)
            base = tl.where(new == float("-inf"), 0.0, new)
            alpha = tl.math.exp2((top - base) * LOG2E if BIAS else top - base)
            beta = tl.math.exp2((part_top - base) * LOG2E if BIAS else part_top - base)
            acc = acc * alpha[:, None] + part * beta[:, None]
            weight = weight * alpha + part_weight * beta
            top = new
        _finish(acc, top, weight, o_base, lse_base, row, there, sot, E, EP, BIAS)


@triton.jit
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, shift_ptr, delta_ptr, sob, soh, sot, sgb, sgh, sgt, n_rows, H,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What both gradients ask of each query.

    shift = lse in units of log 2, so that p = 2^(s − shift), and beside a bias in those of e; +inf for a query that saw
    nothing: its weights are 0.
    delta = Σ out · grad_out: the part of the softmax's gradient that all its columns share.
    """
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    e = tl.arange(0, EP)
    there = (row < n_rows)[:, None] & (e < E)[None, :]
    wide = row.to(tl.int64)[:, None]
    o = tl.load(o_ptr + b * sob + h * soh + wide * sot + e[None, :], mask=there, other=0.0)
    do = tl.load(do_ptr + b * sgb + h * sgh + wide * sgt + e[None, :], mask=there, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    at = bh.to(tl.int64) * n_rows + row
    tl.store(delta_ptr + at, delta, mask=row < n_rows)
    lse = tl.load(lse_ptr + at, mask=row < n_rows, other=0.0)
    shift = lse if BIAS else lse * LOG2E
    tl.store(shift_ptr + at, tl.where(lse == float("-inf"), float("inf"), shift), mask=row < n_rows)
