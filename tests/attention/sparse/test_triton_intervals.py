"""The Triton kernels of row intervals match the reference at tiny sizes, in Triton's interpreter on the CPU.

Triton decides at import whether it interprets, so everything runs in a separate process, which prints the results."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys

import pytest

CASES = [
    # mask, (B, H, K, T, S, D, E), offset, dtype, bias
    ("causal() & documents", (1, 2, 1, 133, 133, 16, 16), 0, "float32", False),
    ("causal() & documents of a batch", (2, 2, 2, 41, 41, 16, 7), 0, "float16", True),
    ("causal() & documents in pieces", (1, 2, 1, 41, 41, 16, 16), 0, "float32", False),
    ("prefix per document", (1, 1, 1, 133, 133, 16, 16), 0, "float32", False),
    ("documents and window", (2, 1, 1, 17, 53, 16, 16), 31, "float16", False),
    ("left padding", (2, 1, 1, 61, 61, 24, 16), 0, "float32", True),
    ("padding of queries and keys", (2, 1, 1, 61, 61, 16, 16), 0, "float16", False),
    ("causal() & (window(30, 0) | prefix(4))", (1, 1, 1, 200, 200, 16, 16), 0, "float32", False),
    ("prefix(9).T | window(3, 3)", (1, 2, 1, 61, 61, 16, 16), 0, "float16", True),
    ("intervals", (2, 2, 1, 133, 133, 16, 16), 0, "float32", False),
    ("causal() & intervals of a batch", (2, 2, 2, 61, 61, 16, 16), 0, "float16", True),
    ("two intervals", (1, 1, 1, 75, 75, 16, 16), 0, "float32", False),
    ("blocks(9) & ~causal()", (1, 1, 1, 61, 61, 128, 128), 0, "float16", False),
]


def mask_of(text, shape):
    import torch

    from clearhead.masks import causal, documents, intervals, padding, parse, selected, window

    B, _, _, _, N, _, _ = shape
    generator = torch.Generator().manual_seed(N)
    ids = torch.randint(0, 9, (N,), generator=generator).eq(0).cumsum(0)
    pieces = torch.randint(-1, 4, (N,), generator=generator)
    lengths, left = torch.arange(B) * 20 + 5, torch.arange(B) * 7 + 3
    start, stop = torch.randint(0, N + 1, (2, N), generator=generator).sort(0).values
    masks = {
        "intervals": lambda: intervals(start, stop),
        "causal() & intervals of a batch": lambda: causal() & intervals(start.expand(B, N) // 2, stop.expand(B, N)),
        "two intervals": lambda: intervals(start, stop) | intervals(stop // 4, stop // 2) & window(20, 20),
        "causal() & documents": lambda: causal() & documents(ids),
        "causal() & documents of a batch": lambda: causal() & documents(torch.stack([ids, ids // 2])),
        "causal() & documents in pieces": lambda: causal() & documents(pieces),
        "prefix per document": lambda: causal() & documents(ids) | documents(torch.where(ids % 2 == 0, ids, -1)),
        "documents and window": lambda: documents(ids) & window(9, 4),
        "left padding": lambda: causal() & padding(lengths, left_pad=left),
        "selected blocks by head": lambda: selected(torch.randint(-1, 4, (2, 4, 4, 2), generator=generator), 16),
        "padding of queries and keys": lambda: padding(lengths) & padding(lengths).T,
    }
    return masks[text]() if text in masks else parse(text)


def run_case(number):
    """Return whether the planning kernels equal the torch operations, and the errors of out, dq, dk and dv."""
    import torch

    from clearhead.attention import attend
    from clearhead.attention.sparse.interval_op import attend_intervals
    from clearhead.attention.sparse.row_intervals import (
        compute_row_intervals,
        encode,
        intervals_of,
        row_intervals_torch,
    )

    text, shape, offset, dtype, has_bias = CASES[number]
    mask, (B, H, K, T, S, D, E) = mask_of(text, shape), shape
    generator = torch.Generator().manual_seed(number)
    q, k, v, g = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, E))
    )
    bias = torch.randn(1, H, T, S, generator=generator) if has_bias else None
    device = torch.device("cpu")
    conditions = encode(intervals_of(mask), device)
    rows = compute_row_intervals(conditions, T, S, offset, device)
    planned = row_intervals_torch(conditions.numbers, conditions.tensors, T, S, offset, device)

    def run(function, *inputs):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, g.to(out.dtype))]

    fast = run(lambda q, k, v: attend_intervals(q, k, v, bias, rows, D**-0.5), q, k, v)
    exact = run(
        lambda q, k, v: attend(q, k, v, mask, bias=None if bias is None else bias.double(), query_offset=offset,
                               impl="reference"),
        *(x.double() for x in (q, k, v)),
    )  # fmt: skip
    errors = [float((a.double() - b).abs().max()) for a, b in zip(fast, exact, strict=True)]
    return bool(torch.equal(planned, rows.bounds)), errors


MODIFIED_CASES = [
    # mask, (B, H, K, T, S, D, E), offset, dtype, bias, cap
    (None, (1, 2, 1, 70, 70, 16, 16), 0, "float32", "relative", None),
    ("causal()", (2, 4, 2, 41, 41, 16, 7), 0, "float32", "slopes", 3.0),
    ("causal()", (1, 2, 2, 130, 130, 16, 16), 0, "float16", "relative", 20.0),
    ("window(20, 3)", (1, 2, 1, 37, 61, 16, 16), 24, "float32", "shared", None),
    ("causal() & (window(30, 0) | prefix(4))", (1, 2, 1, 61, 61, 16, 16), 0, "float32", "relative and tensor", 2.0),
    ("causal() & documents in pieces", (1, 2, 1, 41, 41, 16, 16), 0, "float32", "relative", None),
    ("padding of queries and keys", (2, 2, 1, 61, 61, 16, 16), 0, "float32", None, 0.5),
    ("causal()", (1, 4, 2, 70, 70, 16, 16), 0, "float16", "slopes", 20.0),
    # Masks that are not intervals follow a plan.
    ("causal() & (window(19, 0) | every(12))", (2, 2, 1, 71, 71, 16, 7), 0, "float32", "relative", None),
    ("causal() & every(3)", (1, 4, 2, 70, 70, 16, 16), 0, "float16", "slopes", 20.0),
    ("window(12, 9) | every(8)", (2, 2, 2, 37, 71, 16, 16), 30, "float32", "shared", 3.0),
    ("window(3, 1) | scattered(4, 1)", (1, 2, 1, 61, 61, 16, 16), 0, "float32", "relative and tensor", 2.0),
    ("~(window(3, 3) | every(5))", (1, 2, 1, 67, 53, 16, 16), 8, "float32", None, 0.5),
    ("axis(clamped(2, 2), 0, grid=(8, 9)) & axis(clamped(2, 2), 1, grid=(8, 9))", (1, 2, 2, 72, 72, 16, 16), 0,
     "float32", "relative", None),
    ("selected blocks by head", (2, 4, 2, 64, 64, 16, 16), 0, "float32", "relative", 4.0),
    ("window(100, 100) & dilated(2)", (1, 2, 1, 200, 200, 128, 128), 0, "float16", "relative", None),
]  # fmt: skip


def run_modified_case(number):
    """Return errors of out, dq, dk, dv and the parameters' gradient, those of the reference, and rounding."""
    import torch

    from clearhead.attention import ScaledDot, SoftCapped, attend
    from clearhead.attention.biases import alibi, buckets, relative

    text, shape, offset, dtype, kind, cap = MODIFIED_CASES[number]
    mask, (B, H, K, T, S, D, E) = None if text is None else mask_of(text, shape), shape
    generator = torch.Generator().manual_seed(number)
    q, k, v, g = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, E))
    )
    parameter = torch.randn(8, 1 if kind == "shared" else H, generator=generator, dtype=torch.float64).float()
    tensor = torch.randn(T, S, generator=generator)

    def bias_of(parameter):
        if kind is None:
            return None
        if kind == "slopes":
            return alibi(parameter[0])
        bias = relative(parameter, buckets(8, 20))
        return bias + tensor if kind == "relative and tensor" else bias

    def run(impl, *inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        scores = ScaledDot() if cap is None else SoftCapped(cap)
        options = {"scores": scores, "bias": bias_of(leaves[3]), "query_offset": offset, "impl": impl}
        out = attend(*leaves[:3], mask, **options)
        return [out, *torch.autograd.grad(out, leaves if kind else leaves[:3], g.to(out.dtype))]

    def parameter_rounding():
        """Return the rounding error, in units of eps, of the parameters' gradient Σ dS · ∂bias, where dS = p (dP − δ).

        A score s is rounded, which makes p wrong by |s| eps, and dS takes fewer than 8 more roundings. Roundings are
        independent, so the errors of the terms add up as the root of the sum of their squares.
        """
        scores = ScaledDot() if cap is None else SoftCapped(cap)
        qd, kd, vd, gd = (x.double() for x in (q, k, v, g))
        leaf = parameter.double().requires_grad_()
        dense = {"query_offset": offset, "dtype": torch.float64}
        bias = bias_of(leaf).dense(T, S, **dense)
        derivative = (bias_of(leaf + 1).dense(T, S, **dense) - bias).detach()
        eye = torch.eye(S, dtype=torch.float64).expand(B, K, S, S)
        options = {"scores": scores, "bias": bias_of(leaf.detach()), "query_offset": offset, "impl": "reference"}
        p = attend(qd, kd, eye, mask, **options)  # (B, H, T, S)
        dP = gd @ vd.repeat_interleave(H // K, dim=1).mT
        delta = (p * dP).sum(-1, keepdim=True)
        size = scores(qd, kd.repeat_interleave(H // K, dim=1)).abs() + bias.detach().abs()
        terms = p * (dP.abs() + delta.abs()) * (8 + size)
        (squares,) = torch.autograd.grad((terms.square() * derivative * bias).sum(), leaf)
        return float(squares.max().sqrt())

    fast, plain = (run(impl, q, k, v, parameter) for impl in ("sparse", "reference"))
    exact = run("reference", *(x.double() for x in (q, k, v, parameter)))
    eps = torch.finfo(q.dtype).eps
    errors = []
    for actual, expected, value in zip(fast, plain, exact, strict=True):
        rounding = 8 * eps * max(float(value.detach().abs().max()), 1.0)
        errors.append([*(float((x.double() - value).detach().abs().max()) for x in (actual, expected)), rounding])
    if kind is not None:
        errors[-1][-1] = parameter_rounding() * torch.finfo(torch.float32).eps  # in every dtype of q, k and v
    return errors


def run_in_interpreter(expression):
    """Return the value of an expression over this module, evaluated with Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    script = f"import json, test_triton_intervals as t; print(json.dumps({expression}))"
    process = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, env=environment | {"PYTHONPATH": f"{os.path.dirname(__file__)}:{os.getcwd()}"},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def results():
    return run_in_interpreter("[t.run_case(n) for n in range(len(t.CASES))]")


@pytest.fixture(scope="module")
def modified_results():
    return run_in_interpreter("[t.run_modified_case(n) for n in range(len(t.MODIFIED_CASES))]")


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case[0]) for case in CASES])
def test_kernels_match_reference(results, number):
    is_planned, errors = results[number]
    assert is_planned
    # Two roundings of the largest entries, which are about 5.
    assert max(errors) <= (2e-5 if CASES[number][3] == "float32" else 1e-2)


@pytest.mark.parametrize("number", range(len(MODIFIED_CASES)), ids=[str(case[0]) for case in MODIFIED_CASES])
def test_kernels_with_modified_scores_err_at_most_twice_the_reference(modified_results, number):
    for fast_error, plain_error, rounding in modified_results[number]:
        assert fast_error <= 2 * plain_error + rounding


def lines_of(kind):
    """Return (last, value, slope) and (first, value, slope) of the lines of head 1, and whether the values are kept."""
    import torch

    from clearhead.attention import biases as b
    from clearhead.attention.sparse.triton_distance_lines import with_lines

    T, S = 300, 200
    values = {
        "alibi": b.alibi(torch.tensor([0.3, 0.7])),
        "relative": b.relative(torch.arange(16.0).reshape(8, 2), b.buckets(8, 20)),
        "logarithm": b.distance(b.logarithm(-2.0, torch.tensor([0.3, 0.4]))),
    }
    if kind in values:
        table = values[kind].distance_values(T, S)
    else:
        table = torch.full((2, T + S), float(kind))
    lines = with_lines(table, T - 1)
    is_kept = torch.equal(lines[:, : T + S].nan_to_num(), table.nan_to_num())
    floats = lines[1, T + S :]
    last, first, origin = floats.view(torch.int32)[[0, 3, 6]].tolist()
    return [last, *floats[1:3].tolist()], [first, *floats[4:6].tolist()], origin, is_kept


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("alibi", [299, 0.0, 0.7], [299, 0.0, -0.7]),
        ("logarithm", [0, -2.0 * math.log1p(0.4 * 299), 0.0], [499, -2.0 * math.log1p(0.4 * 200), 0.0]),
        ("-inf", [499, -math.inf, 0.0], [0, -math.inf, 0.0]),
    ],
)
def test_lines_of_a_bias_by_distance(kind, before, after):
    *lines, origin, is_kept = run_in_interpreter(f"t.lines_of({kind!r})")
    assert is_kept
    assert origin == 299
    assert lines == [pytest.approx(before, rel=1e-6), pytest.approx(after, rel=1e-6)]


def test_last_bucket_is_a_line_without_a_slope():
    (last, value, slope), (first, value2, slope2), _, is_kept = run_in_interpreter("t.lines_of('relative')")
    assert is_kept
    assert (slope, slope2) == (0.0, 0.0)
    assert 250 < last < 299 < first < 340
    assert {value, value2} == {7.0, 15.0}  # of head 1, from the last buckets before and after


def test_bias_without_a_number_has_no_line():
    assert run_in_interpreter("[t.lines_of('nan')[0][0], t.lines_of('nan')[1][0]]") == [0, 499]
