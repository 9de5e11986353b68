"""On a GPU, biases by distance and soft caps under every kind of mask match the reference, without T × S tensors."""

from __future__ import annotations

import itertools
import multiprocessing
import traceback
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from clearhead.attention import ScaledDot, SoftCapped, attend
from clearhead.attention import biases as b
from clearhead.masks import axis, causal, clamped, dilated, every, scattered, window

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="needs a CUDA GPU; test_triton_intervals.py runs the kernels in the interpreter",
)
DEVICE = "cuda"
GRID = axis(clamped(3, 3), 0, grid=(-1, 16)) & axis(clamped(3, 3), 1, grid=(-1, 16))
MASKS = (
    None,
    causal(),
    causal() & (window(64, 0) | every(32)),
    GRID,
    window(100, 9) & dilated(2),
    scattered(9, seed=1),
)


def run(impl, inputs, table, cap, mask, grad):
    """Return output and gradients of queries, keys, values and the table."""
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, table)]
    scores = ScaledDot() if cap is None else SoftCapped(cap)
    out = attend(*leaves[:3], mask=mask, scores=scores, bias=b.relative(leaves[3], b.buckets(8, 200)), impl=impl)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # float32 compiles longest
CASES = list(itertools.product(DTYPES, MASKS, ((128, None), (64, None), (64, 20.0))))
WORKERS = 8  # each compiles the kernels of some cases


def compare(number):
    """Return, for the output and each gradient, whether it repeats, its error and the largest accepted one."""
    dtype, mask, (width, cap) = CASES[number]
    torch.set_num_threads(1)
    try:
        return compare_with_reference(dtype, mask, width, cap)
    except Exception:
        return traceback.format_exc()


def compare_with_reference(dtype, mask, width, cap):
    generator = torch.Generator().manual_seed(width)
    q, k, v, grad = (
        torch.randn(2, heads, 331, width, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for heads in (4, 2, 2, 4)
    )
    table = torch.randn(8, 4, generator=generator).to(DEVICE)
    fast, plain = (run(impl, (q, k, v), table, cap, mask, grad) for impl in ("sparse", "reference"))
    exact = run("reference", [x.double() for x in (q, k, v)], table.double(), cap, mask, grad)
    again = run("sparse", (q, k, v), table, cap, mask, grad)
    rows = []
    for x, y, z, repeated in zip(fast, plain, exact, again, strict=True):
        tolerance = 8 * torch.finfo(dtype).eps * max(float(z.abs().max()), 1.0)
        limit = 2 * float((y.double() - z).abs().max()) + tolerance
        rows.append((torch.equal(x, repeated), float((x.double() - z).abs().max()), limit))
    return rows


@pytest.fixture(scope="module")
def results():
    """Yield a future per case, all submitted."""
    with ProcessPoolExecutor(WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield [pool.submit(compare, number) for number in range(len(CASES))]
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: " ".join(map(str, CASES[n])))
def test_kernels_err_at_most_twice_the_reference(results, number):
    rows = results[number].result()
    assert not isinstance(rows, str), rows
    for repeats, error, limit in rows:
        assert repeats
        assert error <= limit


@pytest.mark.parametrize("mask", MASKS[1:], ids=str)
def test_auto_allocates_no_tensor_of_all_pairs(mask):
    T = 8192
    q, k, v = (torch.randn(1, 4, T, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    table = torch.randn(8, 4, device=DEVICE, requires_grad=True)
    attend(q, k, v, mask, bias=b.relative(table)).sum().backward()  # plans and compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(q, k, v, mask, bias=b.relative(table), scores=SoftCapped(20.0)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < T * T
