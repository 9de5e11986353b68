"""The gathered kernels in Triton: a block of rows against the columns its list names, whatever the mask.

Each program takes one block of rows of one head. It walks the block's list (see `planning.lists.Lists`): full tiles first,
with no test at all, then the tiles where a row's interval or a row's bit decides. Forward and the gradient of the queries
have queries as rows; the gradients of keys and values have keys as rows and walk the lists of the transposed plan. Nothing
is added atomically, so results repeat bit for bit.

Letters: M rows of a block, N columns of a tile, D and E the widths of keys and values, DP and EP the same rounded up to a
power of two. Scores are in units of log 2 inside the kernels; the log-sum-exp that is stored is natural.
"""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

NO_MARKS, BOUNDS, BITS = 0, 1, 2


@triton.jit
def _full_columns(t, segments, pool, N: tl.constexpr, SEGMENTS: tl.constexpr, POOL: tl.constexpr):
    """The columns of full tile t, which lie within one progression."""
    begin = 0
    start = 0
    step = 0
    for s in tl.static_range(SEGMENTS):
        inside = t >= begin
        here = tl.load(segments + 3 * s + 1)
        start = tl.where(inside, tl.load(segments + 3 * s) + here * N * t, start)
        step = tl.where(inside, here, step)
        begin = tl.load(segments + 3 * s + 2)
    index = start + step * tl.arange(0, N)
    if POOL:
        index = tl.load(pool + index)
    return index


@triton.jit
def _tail_columns(x, last, segments, pool, SEGMENTS: tl.constexpr, POOL: tl.constexpr):
    """The columns at places x of the tail; places beyond the last are given the last one."""
    x = tl.minimum(x, last)
    begin = 0
    index = x * 0
    for s in tl.static_range(SEGMENTS):
        start = tl.load(segments + 3 * s)
        step = tl.load(segments + 3 * s + 1)
        index = tl.where(x >= begin, start + step * x, index)
        begin = tl.load(segments + 3 * s + 2)
    if POOL:
        index = tl.load(pool + index)
    return index


@triton.jit
def _range(item, counts, block, N: tl.constexpr):
    """What a program does of its block: full tiles from … to, tail tiles from … to, and the tail's two counts."""
    first = tl.load(item + 1)
    last = tl.load(item + 2)
    full = tl.load(counts + 3 * block)
    tail_full = tl.load(counts + 3 * block + 1)
    tail = tl.load(counts + 3 * block + 2)
    tail_tiles = (tail + N - 1) // N
    tail_from = tl.maximum(first - full, 0)
    tail_to = tl.minimum(last - full, tail_tiles)
    return tl.minimum(first, full), tl.minimum(last, full), tail_from, tail_to, tail_full, tail


@triton.jit
def _seen(
    x,
    index,
    n_full,
    total,
    low,
    high,
    bits,
    skip_residue,
    M: tl.constexpr,
    MARKS: tl.constexpr,
    SKIP: tl.constexpr,
):
    """(M, N): whether each row sees the columns at places x of the tail; columns ≡ skip_residue (mod SKIP) nobody does."""
    seen = ((x < n_full) & (x < total))[None, :]
    y = x - n_full
    if MARKS == 1:
        inside = (y[None, :] >= low[:, None]) & (y[None, :] < high[:, None])
        if SKIP > 0:
            inside = inside & (index % SKIP != skip_residue)[None, :]
        seen = seen | inside
    if MARKS == 2:
        r = tl.arange(0, M)
        W: tl.constexpr = (M + 31) // 32
        partial = (y >= 0) & (x < total)
        at = bits + y[None, :] * W + (r // 32)[:, None]
        word = tl.load(at, mask=partial[None, :] & (r >= 0)[:, None], other=0)
        seen = seen | (((word >> (r % 32)[:, None]) & 1) == 1)
    return seen


@triton.jit
def _block(
    n,
    pattern,
    n_blocks,
    n_rows,
    rows,
    M: tl.constexpr,
    ROWS: tl.constexpr,
):
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
def _marks(
    block,
    where,
    marks,
    M: tl.constexpr,
    MARKS: tl.constexpr,
):
    """Each row's interval (for bounds), and where the block's bits begin (for bits)."""
    r = tl.arange(0, M)
    low = r * 0
    high = r * 0
    bits = marks
    if MARKS == 1:
        begin = tl.load(where + block)
        low = tl.load(marks + 2 * (begin + r))
        high = tl.load(marks + 2 * (begin + r) + 1)
    if MARKS == 2:
        W: tl.constexpr = (M + 31) // 32
        bits = marks + tl.load(where + block) * W
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
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, part_ptr, state_ptr, slots,
    patterns, rows, tile_segments, tail_segments, counts, items, where, marks, pool,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sob, soh, sot, sbb, sbh, sbt, sbs,
    scale, n_rows, H, groups, n_blocks, active, skip_residue,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    TAIL: tl.constexpr, TILED: tl.constexpr, TAILED: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr,
    SKIP: tl.constexpr, POOL: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out and log-sum-exp of a block of queries; not FIRST: what is there already is merged with."""
    pid = tl.program_id(0)
    bh = pid // active
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    pattern = tl.load(patterns + bh)
    item = items + (pattern * active + pid % active) * 4
    n = tl.load(item)
    if n >= 0:
        block, row, there = _block(n, pattern, n_blocks, n_rows, rows, M, ROWS)
        q = _tile(q_ptr + b * sqb + h * sqh, row, sqt, D, DP, WIDE)
        k_base = k_ptr + b * skb + (h // groups) * skh
        v_base = v_ptr + b * svb + (h // groups) * svh
        bias_base = bias_ptr + b * sbb + h * sbh
        o_base = o_ptr + b * sob + h * soh
        slot = tl.load(item + 3)
        tile_from, tile_to, tail_from, tail_to, tail_full, tail = _range(item, counts, block, TAIL)
        my_tiles = tile_segments + block * (3 * TILED)
        my_tail = tail_segments + block * (3 * TAILED)
        if FIRST:
            top = tl.full([M], float("-inf"), tl.float32)
            weight = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, EP], tl.float32)
        else:
            before = tl.load(lse_ptr + bh.to(tl.int64) * n_rows + row)
            before = tl.where(slot < 0, before, float("-inf"))  # a part begins with nothing: joining merges
            top = before * LOG2E
            weight = tl.where(before > float("-inf"), 1.0, 0.0)
            acc = tl.where(slot < 0, _tile(o_base, row, sot, E, EP, WIDE).to(tl.float32), 0.0)
        c = scale * LOG2E
        for t in range(tile_from, tile_to):
            index = _full_columns(t, my_tiles, pool, N, TILED, POOL)
            k = _tile(k_base, index, sks, D, DP, WIDE)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if BIAS:
                at = bias_base + row[:, None].to(tl.int64) * sbt + index[None, :].to(tl.int64) * sbs
                s = s + tl.load(at).to(tl.float32) / scale
            new = tl.maximum(top, tl.max(s, 1) * c)
            base = new
            if BIAS:  # a bias may be −inf
                base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.math.exp2(s * c - base[:, None])
            alpha = tl.math.exp2(top - base)
            weight = weight * alpha + tl.sum(p, 1)
            v = _tile(v_base, index, svs, E, EP, WIDE)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            top = new
        low, high, bits = _marks(block, where, marks, M, MARKS)
        for t in range(tail_from, tail_to):
            x = t * TAIL + tl.arange(0, TAIL)
            index = _tail_columns(x, tail - 1, my_tail, pool, TAILED, POOL)
            k = _tile(k_base, index, sks, D, DP, WIDE)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if BIAS:
                at = bias_base + row[:, None].to(tl.int64) * sbt + index[None, :].to(tl.int64) * sbs
                s = s + tl.load(at).to(tl.float32) / scale
            seen = _seen(x, index, tail_full, tail, low, high, bits, skip_residue, M, MARKS, SKIP)
            s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1) * c)
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.math.exp2(s * c - base[:, None])
            alpha = tl.math.exp2(top - base)
            weight = weight * alpha + tl.sum(p, 1)
            v = _tile(v_base, index, svs, E, EP, WIDE)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            top = new
        if slot < 0:
            _finish(acc, top, weight, o_base, lse_ptr + bh.to(tl.int64) * n_rows, row, there, sot, E, EP)
        else:
            r = tl.arange(0, M)
            at = bh.to(tl.int64) * slots + slot
            tl.store(part_ptr + (at * M + r)[:, None] * EP + tl.arange(0, EP)[None, :], acc)
            tl.store(state_ptr + at * (2 * M) + r, top)
            tl.store(state_ptr + at * (2 * M) + M + r, weight)


@triton.jit
def _finish(acc, top, weight, o_base, lse_base, row, there, sot, E: tl.constexpr, EP: tl.constexpr):
    """Divides by the sum of weights and stores; a row that saw nothing gets zeros and −inf."""
    anything = weight > 0
    out = acc * tl.where(anything, 1.0 / tl.where(anything, weight, 1.0), 0.0)[:, None]
    lse = tl.where(anything, top * LN2 + tl.log(tl.where(anything, weight, 1.0)), float("-inf"))
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
            top = before * LOG2E
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
            alpha = tl.math.exp2(top - base)
            beta = tl.math.exp2(part_top - base)
            acc = acc * alpha[:, None] + part * beta[:, None]
            weight = weight * alpha + part_weight * beta
            top = new
        _finish(acc, top, weight, o_base, lse_base, row, there, sot, E, EP)


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, sob, soh, sot, sgb, sgh, sgt, n_rows, H,
    E: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """delta = Σ out · grad_out of each query: the part of the softmax's gradient that all its columns share."""
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
    tl.store(delta_ptr + bh.to(tl.int64) * n_rows + row, delta, mask=row < n_rows)
