"""The gradients of the gathered kernel: queries by the forward plan's lists, keys and values by the transposed plan's.

Both recompute the weights from the stored log-sum-exp, p = exp(s − lse), which is that of all pieces together: the
gradient of each piece is then exact. `prepare_kernel` makes a `shift` of it. See `gathered_triton` for the walk and
the letters."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from clearhead.attention.sparse.triton_forward import (
    LOG2E,
    _biased,
    _block,
    _columns,
    _hide,
    _item,
    _marks,
    _products,
    _tile,
)


@triton.jit
def _weights(s, c, shift, BIAS: tl.constexpr):
    """The weights of scores s. Beside a bias of 1e38 the rounding of a product is beyond any exponent: the difference
    comes first, and a weight is never more than 1."""
    return tl.math.exp2(tl.minimum((s - shift) * c, 0.0)) if BIAS else tl.math.exp2(s * c - shift)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, shift_ptr, delta_ptr, bias_ptr, part_ptr, slots,
    patterns, rows, segments, items, marks, pool,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sdb, sdh, sdt, sbb, sbh, sbt, sbs,
    scale, n_rows, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SEGMENTS: tl.constexpr, PATTERNS: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr, SKIP: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of queries; not FIRST: added to what is there."""
    pid = tl.program_id(0)
    bh = pid // active
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    pattern, item = _item(items, patterns, bh, active, PATTERNS)
    n = tl.load(item)
    if n >= 0:
        n_full = tl.load(item + 4)
        total = tl.load(item + 5)
        low, high, bits = _marks(tl.load(item + 6), marks, M, MARKS)
        block, row, there = _block(n, pattern, n_blocks, n_rows, rows, M, ROWS)
        q = _tile(q_ptr + b * sqb + h * sqh, row, sqt, D, DP, WIDE)
        do = _tile(do_ptr + b * sgb + h * sgh, row, sgt, E, EP, WIDE)
        shift = tl.load(shift_ptr + bh.to(tl.int64) * n_rows + row)
        delta = tl.load(delta_ptr + bh.to(tl.int64) * n_rows + row)
        k_base = k_ptr + b * skb + (h // groups) * skh
        v_base = v_ptr + b * svb + (h // groups) * svh
        bias_base = bias_ptr + b * sbb + h * sbh
        mine = segments + block * (3 * SEGMENTS)
        dq = tl.zeros([M, DP], tl.float32)
        c = LOG2E if BIAS else scale * LOG2E
        for t in range(tl.load(item + 1), tl.load(item + 2)):
            x = t * N + tl.arange(0, N)
            index = _columns(x, n_full, total, mine, pool, skip_shift, SEGMENTS, SKIP, POOL)
            k = _tile(k_base, index, sks, D, DP, WIDE)
            v = _tile(v_base, index, svs, E, EP, WIDE)
            s = _products(q, k, PRECISION)
            dp = _products(do, v, PRECISION)
            if BIAS:
                at = bias_base + row[:, None].to(tl.int64) * sbt + index[None, :].to(tl.int64) * sbs
                s = _biased(s, at, scale)
            if t >= n_full // N:
                s = _hide(s, t * N - n_full, total - n_full, low, high, bits, M, N, MARKS)
            p = _weights(s, c, shift[:, None], BIAS)
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        dq = dq * scale
        d = tl.arange(0, DP)
        row = row.to(tl.int64)
        at = dq_ptr + b * sdb + h * sdh + row[:, None] * sdt + d[None, :]
        inside = there[:, None] & (d < D)[None, :]
        slot = tl.load(item + 3)
        if slot < 0:
            if not FIRST:
                dq += tl.load(at, mask=inside, other=0.0).to(tl.float32)
            tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=inside)
        else:
            _put(part_ptr, bh.to(tl.int64) * slots + slot, dq, M, DP)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, shift_ptr, delta_ptr, bias_ptr, dk_part, dv_part, slots,
    patterns, rows, segments, items, marks, pool,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sbb, sbh, sbt, sbs,
    sxb, sxh, sxs, syb, syh, sys,
    scale, n_rows, n_queries, H, groups, n_blocks, active, skip_shift,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SEGMENTS: tl.constexpr, PATTERNS: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr, SKIP: tl.constexpr,
    POOL: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values, over all query heads that share them.

    AHEAD: the product with the values is begun before the weights are computed, which then takes no time of its own. It
    pays where a block has two groups of warps; where it has one, blocks do that for each other and registers are short.
    """
    pid = tl.program_id(0)
    K = H // groups
    bk = pid // active
    b = (bk // K).to(tl.int64)
    h_kv = (bk % K).to(tl.int64)
    first_head = (bk // K) * H + (bk % K) * groups
    _, item = _item(items, patterns, first_head, active, PATTERNS)
    n = tl.load(item)
    if n >= 0:
        _, row, there = _block(n, 0, n_blocks, n_rows, rows, M, ROWS)
        k = _tile(k_ptr + b * skb + h_kv * skh, row, sks, D, DP, WIDE)
        v = _tile(v_ptr + b * svb + h_kv * svh, row, svs, E, EP, WIDE)
        dk = tl.zeros([M, DP], tl.float32)
        dv = tl.zeros([M, EP], tl.float32)
        c = LOG2E if BIAS else scale * LOG2E
        for g in range(groups):
            bh = first_head + g
            h = h_kv * groups + g
            pattern, own = _item(items, patterns, bh, active, PATTERNS)  # of the same block
            n_full = tl.load(own + 4)
            total = tl.load(own + 5)
            low, high, bits = _marks(tl.load(own + 6), marks, M, MARKS)
            mine = segments + (pattern * n_blocks + n) * (3 * SEGMENTS)
            q_base = q_ptr + b * sqb + h * sqh
            do_base = do_ptr + b * sgb + h * sgh
            shift_base = shift_ptr + bh.to(tl.int64) * n_queries
            delta_base = delta_ptr + bh.to(tl.int64) * n_queries
            bias_base = bias_ptr + b * sbb + h * sbh
            for t in range(tl.load(own + 1), tl.load(own + 2)):
                x = t * N + tl.arange(0, N)
                index = _columns(x, n_full, total, mine, pool, skip_shift, SEGMENTS, SKIP, POOL)
                q = _tile(q_base, index, sqt, D, DP, WIDE)
                do = _tile(do_base, index, sgt, E, EP, WIDE)
                shift = tl.load(shift_base + index)
                delta = tl.load(delta_base + index)
                s = _products(k, q, PRECISION)
                if AHEAD:
                    dp = _products(v, do, PRECISION)
                if BIAS:
                    at = bias_base + row[:, None].to(tl.int64) * sbs + index[None, :].to(tl.int64) * sbt
                    s = _biased(s, at, scale)
                if t >= n_full // N:
                    s = _hide(s, t * N - n_full, total - n_full, low, high, bits, M, N, MARKS)
                p = _weights(s, c, shift[None, :], BIAS)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
                if not AHEAD:
                    dp = _products(v, do, PRECISION)
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        dk = dk * scale
        d = tl.arange(0, DP)
        e = tl.arange(0, EP)
        row = row.to(tl.int64)
        at_k = dk_ptr + b * sxb + h_kv * sxh + row[:, None] * sxs + d[None, :]
        at_v = dv_ptr + b * syb + h_kv * syh + row[:, None] * sys + e[None, :]
        in_k = there[:, None] & (d < D)[None, :]
        in_v = there[:, None] & (e < E)[None, :]
        slot = tl.load(item + 3)
        if slot < 0:
            if not FIRST:
                dk += tl.load(at_k, mask=in_k, other=0.0).to(tl.float32)
                dv += tl.load(at_v, mask=in_v, other=0.0).to(tl.float32)
            tl.store(at_k, dk.to(dk_ptr.dtype.element_ty), mask=in_k)
            tl.store(at_v, dv.to(dv_ptr.dtype.element_ty), mask=in_v)
        else:
            number = bk.to(tl.int64) * slots + slot
            _put(dk_part, number, dk, M, DP)
            _put(dv_part, number, dv, M, EP)


@triton.jit
def _put(part, number, value, M: tl.constexpr, W: tl.constexpr):
    """Stores an unfinished result (M, W) in its slot."""
    at = part + (number * M + tl.arange(0, M))[:, None] * W + tl.arange(0, W)[None, :]
    tl.store(at, value)


@triton.jit
def sum_kernel(
    x_ptr, part_ptr, slots, patterns, rows, joins, sxb, sxh, sxs, n_rows, H, groups, n_blocks, active,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Adds up the parts of a block that was split, and what was there before. H / groups heads have results."""
    pid = tl.program_id(0)
    K = H // groups
    bk = pid // active
    pattern = tl.load(patterns + (bk // K) * H + (bk % K) * groups)
    join = joins + (pattern * active + pid % active) * 3
    n = tl.load(join)
    if n >= 0:
        _, row, there = _block(n, pattern, n_blocks, n_rows, rows, M, ROWS)
        r = tl.arange(0, M)
        d = tl.arange(0, DP)
        total = tl.zeros([M, DP], tl.float32)
        first = tl.load(join + 1)
        for slot in range(first, first + tl.load(join + 2)):
            at = bk.to(tl.int64) * slots + slot
            total += tl.load(part_ptr + (at * M + r)[:, None] * DP + d[None, :])
        to = x_ptr + (bk // K).to(tl.int64) * sxb + (bk % K).to(tl.int64) * sxh
        to = to + row.to(tl.int64)[:, None] * sxs + d[None, :]
        inside = there[:, None] & (d < D)[None, :]
        if not FIRST:
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
        tl.store(to, total.to(x_ptr.dtype.element_ty), mask=inside)
