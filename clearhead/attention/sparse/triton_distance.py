"""The gradient of a bias by distance in Triton: sums of the gradients of scores along diagonals.

Each program sums the tiles on one diagonal of tiles of one head: the tiles (I, J) with J − I constant, each of N × N
scores. The tiles are added up in registers. Their sum is sheared, so that its diagonals become columns, and the columns
are added up. Nothing is added atomically, so results repeat bit for bit, and no T × S tensor is built. The scores are
computed again, which costs two of the seven products of the backward pass; the kernel runs only if the bias needs a
gradient.

A tile has 2N − 1 diagonals. Column c of the sheared tile contains diagonal c in its first N − c rows and diagonal c − N
in the others, so the program returns two sums per column; `sum_diagonals` adds those of neighboring programs."""

# Triton's functions have no Python types: their arguments are pointers and tiles.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton.language as tl

from clearhead.attention.sparse.triton_forward import _matmul_transposed
from clearhead.attention.sparse.triton_interval_tiles import hide, load_block
from clearhead.attention.sparse.triton_intervals import load_rows, unspecialized
from clearhead.attention.sparse.triton_scores import LOG2E, load_lines, modify_scores, shift_of, softmax_weights


@unspecialized
def interval_distance_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, sums_ptr, lse_ptr, delta_ptr, bias_ptr, distance_ptr, bounds_ptr, ids_ptr, ids2_ptr,
    sqb, sqh, sqt, skb, skh, sks, svb, svh, svs, sgb, sgh, sgt, sbb, sbh, sbt,
    distance_stride, scale, cap, T, S, H, query_offset, n_blocks, patterns_stride, ids_stride, ids2_stride,
    GROUPS: tl.constexpr, BIAS_STEP: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, HAS_IDS: tl.constexpr, HAS_IDS2: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DISTANCE: tl.constexpr, HAS_CAP: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the sums of a diagonal of tiles, (2, N)."""
    pid = tl.program_id(0)
    bh = pid // n_blocks
    n_row_blocks = (T + N - 1) // N
    n_column_blocks = (S + N - 1) // N
    diagonal = pid % n_blocks - (n_row_blocks - 1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    ids = ids_ptr + b * ids_stride
    ids2 = ids2_ptr + b * ids2_stride
    q_base = q_ptr + (b * sqb + h * sqh) * ALIGN
    do_base = do_ptr + (b * sgb + h * sgh) * ALIGN
    k_base = k_ptr + (b * skb + h // GROUPS * skh) * ALIGN
    v_base = v_ptr + (b * svb + h // GROUPS * svh) * ALIGN
    distance_head = distance_ptr + h * distance_stride
    last, value, slope, first_entry, value2, slope2, origin = load_lines(
        distance_head, T + S, HAS_DISTANCE
    )  # fmt: skip
    c = LOG2E
    x = tl.arange(0, N)
    total = tl.zeros([N, N], tl.float32)  # all tiles of the diagonal have the same distances
    for block in range(tl.maximum(-diagonal, 0), tl.minimum(n_row_blocks, n_column_blocks - diagonal)):
        first = block * N
        at = (block + diagonal) * N
        row = first + x
        column = at + x
        valid = row < T
        low, high, tested, row_ids, low2, high2, tested2, row_ids2 = load_block(
            bounds_ptr + b * patterns_stride, T + S, ids, ids2, row, valid, query_offset, R, HAS_IDS, HAS_IDS2
        )
        is_seen = tl.max(((low < at + N) & (high > at)).to(tl.int32), 0) > 0
        if R == 2:
            is_seen = is_seen | (tl.max(((low2 < at + N) & (high2 > at)).to(tl.int32), 0) > 0)
        if is_seen:
            q = load_rows(q_base, first, T, sqt * ALIGN, N, D, DP)
            do = load_rows(do_base, first, T, sgt * ALIGN, N, E, EP)
            k = load_rows(k_base, at, S, sks * ALIGN, N, D, DP)
            v = load_rows(v_base, at, S, svs * ALIGN, N, E, EP)
            existing = tl.minimum(row, T - 1)
            lse = tl.load(lse_ptr + bh.to(tl.int64) * T + row, mask=valid, other=float("-inf"))
            delta = tl.load(delta_ptr + bh.to(tl.int64) * T + existing)
            s = _matmul_transposed(q, k, PRECISION)
            s, _ = modify_scores(
                s, bias_ptr + b * sbb + h * sbh + row[:, None].to(tl.int64) * sbt, column.to(tl.int64) * BIAS_STEP,
                valid[:, None] & (column < S)[None, :], distance_head,
                (T - 1) - existing, tl.minimum(column, S - 1), T - first - N, T - 1 - first, at, at + N - 1,
                last, value, slope, first_entry, value2, slope2, origin, scale, cap,
                HAS_BIAS, HAS_DISTANCE, HAS_CAP, PRECISION,
            )  # fmt: skip
            hidden = valid & ((low > at) | (high < at + N) | tested)
            if tl.max(hidden.to(tl.int32), 0) > 0:  # some row does not see all columns by its first interval
                s = hide(
                    s, column, low, high, tested, row_ids, low2, high2, tested2, row_ids2, ids, ids2, S, 0,
                    R, HAS_IDS, HAS_IDS2,
                )  # fmt: skip
            p = softmax_weights(s, c, shift_of(lse, True)[:, None], True)
            total += p * (_matmul_transposed(do, v, PRECISION) - delta[:, None])
    source = x[None, :] + x[:, None]
    sheared = tl.gather(total, source & (N - 1), 1)
    upper = tl.sum(tl.where(source < N, sheared, 0.0), 0)
    lower = tl.sum(tl.where(source < N, 0.0, sheared), 0)
    sums = sums_ptr + pid.to(tl.int64) * (2 * N) + x
    tl.store(sums, upper)
    tl.store(sums + N, lower)
