"""The Triton kernels match the reference at tiny sizes, in Triton's interpreter on the CPU.

Triton decides at import whether it interprets, so everything runs in a separate process, which prints the results. The
interpreter does not support bfloat16; `test_gpu.py` tests it on a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback

import pytest

from tests.support.rounding import kernel_rounding

CASES = [
    # mask, (B, H, K, T, S, D, E), offset, dtype, bias, dense pieces, split long lists
    ("window(2, 2) | every(4)", (1, 2, 1, 67, 67, 16, 16), 0, "float32", None, True, False),
    ("window(12, 9) | every(8)", (1, 1, 1, 37, 71, 16, 16), 30, "float16", None, False, False),
    ("causal() & (window(19, 0) | every(12))", (1, 2, 1, 71, 71, 5, 11), 0, "float32", None, False, True),
    ("causal() | prefix(11)", (1, 1, 1, 67, 67, 16, 16), 0, "float32", None, True, False),
    ("causal() & (window(3, 0) | dilated(2))", (1, 1, 1, 71, 71, 16, 16), 0, "float32", None, False, False),
    ("every(2).T | window(2, 1)", (1, 1, 1, 71, 71, 16, 16), 0, "float32", None, False, True),
    ("~(window(3, 3) | every(5)) & scattered(9, 1)", (1, 1, 1, 41, 41, 16, 16), 0, "float16", None, False, False),
    ("window(3, 1) | scattered(4, 1)", (1, 1, 1, 41, 41, 16, 16), 0, "float32", None, False, False),
    ("window(5, 5)", (1, 2, 2, 37, 37, 7, 7), 0, "float32", "any", False, False),
    ("causal() & window(9, 0)", (1, 2, 1, 37, 37, 16, 16), 0, "float16", "ALiBi", False, False),
    ("causal() & window(9, 0)", (1, 2, 1, 37, 37, 16, 16), 0, "float16", "large", False, False),
    ("full()", (1, 2, 1, 23, 37, 16, 16), 0, "float16", "least", False, False),
    ("window(9, 3) | every(5)", (2, 2, 1, 23, 37, 16, 16), 11, "float32", "RelativeBias", False, False),
    ("~full()", (1, 1, 1, 19, 19, 16, 16), 0, "float32", None, False, False),
    ("window(3, 0) & every(8)", (1, 1, 1, 37, 37, 16, 16), 0, "float32", None, False, False),
    ("causal() & window(9, 0)", (1, 1, 1, 37, 37, 32, 32), 0, "float32", None, False, False),
    ("causal() & window(9, 0)", (1, 1, 1, 37, 37, 64, 64), 0, "float16", None, False, False),
    ("causal() & window(9, 0)", (1, 1, 1, 37, 37, 128, 128), 0, "float32", None, False, False),
    ("causal() & window(9, 0)", (1, 1, 1, 37, 37, 256, 256), 0, "float16", None, False, False),
    ("~window(1, 3)", (1, 2, 1, 67, 53, 16, 16), 8, "float32", None, False, False),  # bits; the last rows see all
    ("documents & causal()", (2, 2, 2, 53, 53, 16, 16), 0, "float32", None, False, False),
    ("allow by head", (1, 2, 1, 37, 37, 16, 16), 0, "float32", None, False, False),
]  # fmt: skip
SHORTER = (0, 2, 4, 5, 8, 9, 13)
"""Cases that also run with a plan for 13 more queries and keys."""
EXAMPLES = 12


def mask_of(text, shape, generator):
    import torch

    from clearhead.masks import allow, causal, documents, parse

    B, H, _, T, S, _, _ = shape
    if text.startswith("documents"):
        return documents(torch.randint(0, 2, (B, T), generator=generator).cumsum(-1) // 9) & causal()
    if text.startswith("allow"):
        return allow(torch.rand(H, T, S, generator=generator) < 0.2)
    return parse(text)


def bias_of(kind, shape, query_offset, generator):
    import torch

    from clearhead.nn.positions import ALiBi, RelativeBias

    _, H, _, T, S, _, _ = shape
    if kind in ("any", "large"):
        return torch.randn(1, H, T, S, generator=generator) * (1 if kind == "any" else 30)
    if kind == "least":  # hides some keys with a finite number that overflows in base-2 units
        bias = torch.zeros(1, 1, T, S)
        bias[..., ::3] = torch.finfo(torch.float32).min
        return bias
    if kind is None:
        return None
    torch.manual_seed(7)  # a learned bias is initialized randomly
    module = (ALiBi() if kind == "ALiBi" else RelativeBias(n_buckets=8)).build(H)
    with torch.no_grad():
        return module(T, S, query_offset, "cpu").dense()[None]


def errors(mask, shape, query_offset, dtype, bias, blocking, generator, longer=0):
    """Return, for out, dq, dk, dv, the errors of the kernels and of the reference, and the rounding tolerance."""
    import torch

    from clearhead.attention import attend
    from clearhead.attention.sparse.op import gathered
    from clearhead.attention.sparse.plan import plan

    B, H, K, T, S, D, E = shape
    q, k, v, g = (
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size in ((B, H, T, D), (B, K, S, D), (B, K, S, E), (B, H, T, E))
    )
    mask_plan = plan(mask, T + longer, S + longer, query_offset=query_offset, blocking=blocking)

    def run(way, inputs, grad):
        inputs = [x.clone().requires_grad_() for x in inputs]
        out = way(*inputs)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs)]

    def reference(q, k, v):
        low = None if bias is None else bias.to(q.dtype if q.dtype == torch.float64 else torch.float32)
        return attend(q, k, v, mask, query_offset=query_offset, bias=low, impl="reference")

    exact = run(reference, [x.double() for x in (q, k, v)], g.double())
    plain = run(reference, [q, k, v], g)
    fast = run(lambda q, k, v: gathered(q, k, v, bias, mask_plan.handle, D**-0.5)[0], [q, k, v], g)
    largest = max(e.abs().max().item() for e in exact)
    exponent = largest_exponent(q.double(), k.double(), mask, query_offset, bias)
    rows = []
    for name, f, p, e in zip(("out", "dq", "dk", "dv"), fast, plain, exact, strict=True):
        terms = {"is_difference": name in ("dq", "dk"), "exponent": exponent if name == "dv" else 0.0}
        row = {
            "finite": bool(f.isfinite().all()),
            "fast": (f.double() - e).abs().max().item(),
            "plain": (p.double() - e).abs().max().item(),
            "rounding": kernel_rounding(e.abs().max().item(), largest, dtype, E, **terms),
        }
        rows.append(row)
    return rows


def largest_exponent(q, k, mask, query_offset, bias):
    """Return the largest |s| + |lse| of the pairs whose weight is not zero in float32."""
    import torch

    T, S = q.shape[-2], k.shape[-2]
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    s = s if bias is None else s + bias
    visible = mask.dense(T, S, query_offset=query_offset)
    s = s.masked_fill(~(visible if visible.dim() < 3 else visible.reshape(-1, *visible.shape[-3:])), -torch.inf)
    lse = s.logsumexp(-1, keepdim=True)
    has_weight = s - lse > -104.0  # exp(−104) is the smallest number in float32
    return (s.abs() + lse.abs())[has_weight].max().item() if has_weight.any() else 0.0


def assert_small(rows):
    for name, row in zip(("out", "dq", "dk", "dv"), rows, strict=True):
        assert row["finite"], name
        assert row["fast"] <= 2 * row["plain"] + row["rounding"], (name, row)


def run_case(number, longer=0):
    """Run a case in the interpreting process, with a plan for some more queries and keys."""
    import torch

    from clearhead.attention.sparse import work_items

    text, shape, query_offset, name, kind, dense, split = CASES[number]
    work_items.MIN_SPLIT_TILES, work_items.CONCURRENT_PROGRAMS = (2, 1) if split else (16, 400)
    generator = torch.Generator().manual_seed(number)
    mask = mask_of(text, shape, generator)
    bias = bias_of(kind, shape, query_offset, generator)
    return errors(mask, shape, query_offset, getattr(torch, name), bias, small_blocking(dense), generator, longer)


def small_blocking(dense):
    from clearhead.attention.sparse.plan import Blocking

    return Blocking(32, 32, 16 if dense else None, dense)


def run_random_expressions():
    """Test random expressions; return None or the traceback of the shrunk failure."""
    import torch
    from hypothesis import assume, given, settings
    from hypothesis import strategies as st

    from clearhead.masks import Full
    from tests.support.mask_strategies import masks

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(
        mask=masks,
        sizes=st.tuples(st.integers(1, 35), st.integers(1, 35), st.integers(0, 9)),
        heads=st.sampled_from([(1, 1), (2, 1)]),
    )
    def check(mask, sizes, heads):
        assume(not isinstance(mask, Full))
        T, S, query_offset = sizes
        generator = torch.Generator().manual_seed(T + S)
        shape = (1, *heads, T, S, 16, 16)
        assert_small(errors(mask, shape, query_offset, torch.float32, None, small_blocking(False), generator))

    try:
        check()
    except Exception:
        return traceback.format_exc()[-3000:]
    return None


@pytest.fixture(scope="module")
def results():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.attention.sparse.test_triton"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")


@needs_triton
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]} {CASES[n][1]}")
def test_kernel_error_is_at_most_twice_the_reference(results, number):
    assert_small(results["cases"][number])


@needs_triton
@pytest.mark.parametrize("number", SHORTER, ids=lambda n: f"{CASES[n][0]} {CASES[n][1]}")
def test_kernel_with_plan_of_longer_sequence_matches_reference(results, number):
    assert_small(results["shorter"][SHORTER.index(number)])


@needs_triton
def test_kernels_with_large_blocks_match_reference(results):
    """Their tiles differ, and the gradient of the keys computes its products in another order."""
    assert results["long"]["block_rows"] == [64, 64]
    assert_small(results["long"]["errors"])


@needs_triton
def test_kernels_match_reference_for_random_expressions(results):
    assert results["expressions"] is None, results["expressions"]


def run_long_lists():
    """Run a mask with blocks of 96 tokens, with a limit at which its lists are long."""
    import torch

    from clearhead.attention.sparse.plan import Blocking, plan
    from clearhead.masks import blocks

    mask, shape = blocks(96), (1, 2, 1, 203, 203, 16, 32)
    blocking = Blocking(32, 32, None, False, 64, long_list_columns=60)
    results = errors(mask, shape, 0, torch.float32, None, blocking, torch.Generator().manual_seed(0))
    mask_plan = plan(mask, 203, blocking=blocking)
    return {"errors": results, "block_rows": [mask_plan.query_pieces[0].M, mask_plan.key_pieces[0].M]}


def main():
    from clearhead.attention.sparse import launch

    tile, large = launch.Tile(32, 16, 4, 1), launch.Tile(64, 16, 8, 1)
    long = launch.Tiles(large, large, large)
    launch.tiles_for = lambda dtype, width, modifies_scores=False: launch.Tiles(tile, tile, tile, long)
    cases = [run_case(number) for number in range(len(CASES))]
    shorter = [run_case(number, longer=13) for number in SHORTER]
    expressions = run_random_expressions()
    print(json.dumps({"cases": cases, "shorter": shorter, "expressions": expressions, "long": run_long_lists()}))


if __name__ == "__main__":
    main()
